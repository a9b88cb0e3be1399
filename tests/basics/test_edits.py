"""Every definition notices mistakes: if any one of these lines is changed, the definition's own check must fail."""

from types import ModuleType

import pytest

from kfs import basics
from kfs.basics import (
    emp_fisher_product,
    emp_fishers,
    exact_fishers,
    fisher_kl_metric,
    flattening,
    forward_pass,
    ggn_product,
    ggn_rosenbrock,
    ggns,
    ggns_linear_regression,
    hessian_ce_loss,
    hessian_factorizations,
    hessian_mse_loss,
    hessian_product,
    hessians,
    jacobian_products,
    jacobians,
    jacobians_linear_layer,
    jacobians_shared_linear_layer,
    kronecker_algebra,
    label_sampling,
    linearization,
    mc_fisher_convergence,
    mc_fisher_product,
    mc_fishers,
    reduction_factors,
    would_be_gradients,
)
from tests.edits import Edit, check_edit, failure

# For each definition: text to replace, and its replacement.
WRONG: dict[ModuleType, list[tuple[str, str]]] = {
    reduction_factors: [
        ("return 2.0 if", "return 1.0 if"),
        ("else 2.0 / target.numel()", "else 2.0 / len(target)"),
        ("else 2.0 / target.numel()", "else 1.0 / target.numel()"),
        ("else 1.0 / _num_labels(loss, target)", "else 1.0 / len(target)"),
        ("target.numel() / target.shape[1]", "target.numel()"),
        ("target.numel() / target.shape[1]", "target.shape[0]"),
        ("target[target != loss.ignore_index]", "target.clamp(min=0).flatten()"),
        ("counted.numel() if loss.weight is None else", "counted.numel() if True else"),
        ("return 0.5 * ((f - y)", "return ((f - y)"),
        ("** 2).sum()", "** 2).mean()"),
        ("** 2).sum()", "** 2)[0].sum()"),
        ("weight=loss.weight", "weight=None"),
        ("label_smoothing=loss.label_smoothing", "label_smoothing=0.0"),
        ('reduction="sum",', 'reduction="mean",'),
    ],
    forward_pass: [
        ("Intermediates(*x, y)", "Intermediates(y, *x)"),
        ("Intermediates(*x, y)", "Intermediates(*x, x[0])"),
        ("Intermediates(*x, y)", "Intermediates(2 * x[0], y)"),
        ("name: str = name", "name: str = min(layers)"),
        ("hooks.callback(layer.register_forward_hook(keep).remove)", "layer.register_forward_hook(keep)"),
        ("return output, seen", "return 2 * output, seen"),
    ],
    label_sampling: [
        ("return f + noise", "return noise"),
        ("return f + noise", "return f + 2 * noise"),
        ("return f + noise", "return f + noise.abs()"),
        ("return f + noise", "return f - f.mean() + noise"),
        ("f.softmax(0).reshape", "f.sigmoid().reshape"),
        ("f.softmax(0).reshape", "(-f).softmax(0).reshape"),
        ("labels.reshape(f.shape[1:])", "torch.zeros_like(labels).reshape(f.shape[1:])"),
        ("torch.where(target == loss.ignore_index, target, label)", "label"),
        ("torch.where(target == loss.ignore_index, target, label)", "target"),
    ],
    flattening: [
        ("reversed(axes[start : end + 1])", "axes[start : end + 1]"),
        ("return t.flatten(start, end)", "return t.mT.flatten(start, end)"),
        ("*reversed(shape)", "*shape"),
        ("reversed(axes[dim : dim + len(shape)])", "axes[dim : dim + len(shape)]"),
        ("return v.reshape((*v.shape[:dim], *shape", "return v.reshape((*v.shape[:dim], *reversed(shape)"),
        ("vec(vec(t, 0, row_ndim - 1), 1, -1)", "rvec(vec(t, 0, row_ndim - 1), 1, -1)"),
        ("vec(vec(t, 0, row_ndim - 1), 1, -1)", "vec(rvec(t, 0, row_ndim - 1), 1, -1)"),
        ("vec(vec(t, 0, row_ndim - 1), 1, -1)", "vec(vec(t, 0, row_ndim - 1), 1, -1).mT"),
    ],
    kronecker_algebra: [
        ("[a_ij * B for", "[a_ij + B for"),
        ("for a_ij in a_i], dim=1) for a_i in A]", "for a_ij in a_i], dim=1) for a_i in A.T]"),
        ("[a_ij * B for", "[a_ij * B.flip(0) for"),
        ("cvec(B @ unflatten_cvec(v, (m2, n2)) @ A.T)", "rvec(B @ unflatten_cvec(v, (m2, n2)) @ A.T)"),
        ("cvec(B @ unflatten_cvec(v, (m2, n2))", "cvec(B @ unflatten_rvec(v, (m2, n2))"),
        ("rvec(A @ unflatten_rvec(v, (n2, m2))", "rvec(A @ unflatten_cvec(v, (n2, m2))"),
        ("return A.T, B.T", "return A.T, -B.T"),
        ("return A.T, B.T", "return B.T, A.T"),
        ("return linalg.inv(A), linalg.inv(B)", "return linalg.inv(A), B"),
        ("return linalg.inv(A), linalg.inv(B)", "return linalg.inv(B), linalg.inv(A)"),
        ("return A @ C, B @ D", "return B @ D, A @ C"),
        ("return A @ C, B @ D", "return A @ C, 2 * B @ D"),
    ],
    jacobian_products: [
        ("grad(b, a, v, create_graph)", "grad(b, a, 2 * v, create_graph)"),
        ("grad(b, a, v, create_graph)", "grad(b, a, ones_like(v), create_graph)"),
        ("grad(b, a, v, create_graph)", "grad(b, a, v.flip(0), create_graph)"),
        ("grad(u, w, v, create_graph", "grad(u, w, -v, create_graph"),
        ("grad(u, w, v, create_graph", "grad(u * w.sum(), w, v, create_graph"),
        ("grad(u, w, v, create_graph", "grad(u**2, w, v, create_graph"),
    ],
    jacobians: [
        ("one_hot[index] = 1", "one_hot[index] = 2"),
        ("one_hot[index] = 1", "one_hot[0] = 1"),
        ("J[index] = vjp(b, a, one_hot)", "J[index] = -vjp(b, a, one_hot)"),
        ("one_hot = zeros_like(b)", "one_hot = zeros_like(b) + 1e-6"),
        ("matricize(jacobian(b, a), b.ndim, vec)", "matricize(jacobian(b, a), b.ndim, rvec)"),
        ("matricize(jacobian(b, a), b.ndim, vec)", "matricize(jacobian(b, a), b.ndim, vec).mT"),
    ],
    jacobians_linear_layer: [
        ("ones(1, *x.shape[1:]", "2 * ones(1, *x.shape[1:]"),
        ("ones(1, *x.shape[1:]", "0 * ones(1, *x.shape[1:]"),
        ("cat([x, ones(1, *x.shape[1:], dtype=x.dtype, device=x.device)])", "cat([ones(1).to(x), x])"),
        ("kron(row, identity) if", "kron(identity, row) if"),
        ("else kron(identity, row)", "else kron(row, identity)"),
        ("vec is cvec else", "vec is not cvec else"),
        ("row = x.unsqueeze(0)", "row = x.flip(0).unsqueeze(0)"),
    ],
    jacobians_shared_linear_layer: [
        ("kron(rows, identity) if", "kron(identity, rows) if"),
        ("else kron(identity, rows)", "else kron(rows, identity)"),
        ("vec is cvec else", "vec is not cvec else"),
        ("rows = X.T", "rows = X.T.flip(0)"),
        ("identity = eye(d_out", "identity = 2 * eye(d_out"),
    ],
    hessian_product: [
        ("gradient = connected(grad(c, a2,", "gradient = connected(grad(2 * c, a2,"),
        ("product = grad(gradient, a1, v)", "product = grad(gradient, a1, -v)"),
        ("product = grad(gradient, a1, v)", "product = grad(gradient, a1, gradient)"),
        ("product = grad(gradient, a1, v)", "product = grad(gradient**2, a1, v)"),
        ("product = grad(gradient, a1, v)", "product = grad(gradient, a2, v)"),
        ("return mixed_hvp(c, a, a, v)", "return mixed_hvp(c, a, a, 2 * v)"),
    ],
    hessians: [
        ("mixed_hvp(c, a2, a1, one_hot)", "mixed_hvp(c, a2, a1, one_hot).flip(0)"),
        ("one_hot[index] = 1", "one_hot[index] = 0.5"),
        ("one_hot[index] = 1", "one_hot[index[0]] = 1"),
        ("matricize(hessian(c, a1, a2), a1.ndim, vec)", "matricize(hessian(c, a1, a2), a1.ndim, rvec)"),
        ("matricize(hessian(c, a1, a2), a1.ndim, vec)", "matricize(hessian(c, a1, a2).mT, a1.ndim, vec)"),
    ],
    hessian_ce_loss: [
        ("diag(s) - outer(s, s)", "diag(s) + outer(s, s)"),
        ("diag(s) - outer(s, s)", "diag(s)"),
        ("diag(s) - outer(s, s)", "diag(s) - outer(s, s.sqrt())"),
        ("H[:, position, :, position] =", "H[:, position, :, 0] ="),
        ("softmax(0)", "sigmoid()"),
    ],
    hessian_mse_loss: [
        ("identity = eye(", "identity = 2 * eye("),
        ("identity = eye(", "identity = -eye("),
        ("return identity.reshape", "return identity.flip(0).reshape"),
    ],
    linearization: [
        ("b0.detach() + jvp", "jvp"),
        ("b0.detach() + jvp", "b0.detach() - jvp"),
        ("a - a0.detach())", "a)"),
        ("jvp(b0, a0, a - a0.detach())", "2 * jvp(b0, a0, a - a0.detach())"),
        ("anchor.detach().clone()", "(anchor + 0.1).detach().clone()"),
        ("a - a0.detach())", "a - a0.detach()) ** 2"),
    ],
    ggn_rosenbrock: [
        ("return stack([1 - x1, sqrt(alpha)", "return stack([1 + x1, sqrt(alpha)"),
        ("return stack([1 - x1, sqrt(alpha)", "return stack([1 - x1, alpha"),
        ("return h @ h", "return 0.5 * h @ h"),
        ("a1**4", "2 * a1**4"),
        ("+ 2 * a1**2 * x2", "- 2 * a1**2 * x2"),
        ("return 1 - 2 * x1 + x1**2", "return 1 + 2 * x1 + x1**2"),
        ("1 + 4 * alpha * x1**2", "1 + 6 * alpha * x1**2"),
        ("1 + 6 * alpha * x1**2 - 2", "1 + 6 * alpha * x1**2 + 2"),
        ("1 + 6 * alpha * x1**2 - 2 * alpha * x2", "1 + 6 * alpha * x1**2"),
    ],
    ggn_product: [
        ("mixed_ggnvp(c, b, a, a, v)", "mixed_ggnvp(c, b, a, a, -v)"),
        ("vjp(b, a1, hvp(c, b, jvp(b, a2, v)))", "vjp(b, a1, jvp(b, a2, v))"),
        ("vjp(b, a1, hvp(c, b, jvp(b, a2, v)))", "vjp(b, a1, 2 * hvp(c, b, jvp(b, a2, v)))"),
        ("vjp(b, a1, hvp(c, b, jvp(b, a2, v)))", "hvp(c, a1, v) if a1 is a2 else vjp(b, a1, hvp(c, b, jvp(b, a2, v)))"),
        ("vjp(b, a1, hvp(c, b, jvp(b, a2, v)))", "vjp(b, a1, hvp(c, b, jvp(b, a2, v).flip(0)))"),
    ],
    ggns: [
        ("(J1.T @ H @ J2)", "(J1.T @ J2)"),
        ("(J1.T @ H @ J2)", "(J1.T @ H @ H @ J2)"),
        ("(J1.T @ H @ J2)", "(J1.T @ H.flip(0) @ J2)"),
        ("H = vec_hessian(c, b)", "H = 2 * vec_hessian(c, b)"),
        ("H = vec_hessian(c, b)", "H = vec_hessian(c, b).diag().diag()"),
        ("matricize(ggn(c, b, a1, a2), a1.ndim, vec)", "matricize(ggn(c, b, a1, a2), a1.ndim, rvec)"),
        ("matricize(ggn(c, b, a1, a2), a1.ndim, vec)", "vec(vec(ggn(c, b, a1, a2).mT, 0, 1), 1, 2)"),
    ],
    ggns_linear_regression: [
        ("A, B = X.T @ X", "A, B = X.T @ X / len(X)"),
        ("A, B = X.T @ X", "A, B = X[:1].T @ X[:1]"),
        ("A, B = X.T @ X", "A, B = 2 * X.T @ X"),
        ("vec is cvec else", "vec is not cvec else"),
    ],
    hessian_factorizations: [
        ("diag(s.sqrt()) - outer(s, s.sqrt())", "diag(s.sqrt()) - outer(s.sqrt(), s)"),
        ("diag(s.sqrt()) - outer(s, s.sqrt())", "diag(s.sqrt()) + outer(s, s.sqrt())"),
        ("diag(s.sqrt()) - outer(s, s.sqrt())", "diag(s) - outer(s, s)"),
        ("m.sqrt() *", "m *"),
        ("mse_hessian(f)", "2 * mse_hessian(f)"),
        ("S[:, position, :, position] =", "S[:, position, :, 0] ="),
        ("loss.label_smoothing / f.shape[0]", "loss.label_smoothing"),
        ("counts * tensordot(w, p, dims=1)", "tensordot(w, p, dims=1)"),
        ("counts * tensordot(w, p, dims=1)", "counts * p.sum(0)"),
    ],
    mc_fishers: [
        ("reduction_factor(loss, y)", "1 / len(y)"),
        ("return R / mc_samples * F", "return R * F"),
        ("return R / mc_samples * F", "return F / mc_samples"),
        ("F += tensordot", "F = tensordot"),
        ("F += tensordot", "F -= tensordot"),
        ("tensordot(g1, g2, dims=0)", "tensordot(g1, g2.flip(0), dims=0)"),
        ("c(f_n, label)", "c(f_n, y_n)"),
        ("hide_ignored(loss, sample_label(loss, f_n, generator), y_n)", "sample_label(loss, f_n, generator)"),
        ("sample_label(loss, f_n, generator)", "sample_label(loss, -f_n, generator)"),
        ("manual_seed(seed)", "manual_seed(0)"),
        ("rows.ndim, vec)", "rows.ndim, rvec)"),
        ("for _ in range(mc_samples)", "for _ in range(1)"),
    ],
    mc_fisher_product: [
        ("reduction_factor(loss, y)", "1 / len(y)"),
        ("return R / mc_samples * u", "return R * u"),
        ("(g2 * v.detach()).sum()", "(g2 * v.detach()).mean()"),
        ("u += g1 *", "u = g1 *"),
        ("c(f_n, label)", "c(f_n, y_n)"),
        ("manual_seed(seed)", "manual_seed(0)"),
        ("hide_ignored(loss, sample_label(loss, f_n, generator), y_n)", "sample_label(loss, f_n, generator)"),
    ],
    would_be_gradients: [
        ("return f - y", "return y - f"),
        ("return f - y", "return 2 * (f - y)"),
        ("* f.softmax(0) - onehot", "* f.softmax(0) + onehot"),
        ("* f.softmax(0) - onehot", "* f.softmax(0)"),
        ("* f.softmax(0) - onehot", "* f.log_softmax(0) - onehot"),
        ("* f.softmax(0) - onehot", "* f.flatten().softmax(0).reshape(f.shape) - onehot"),
        ("onehot.sum(0) *", "1 *"),
        ("y == k for k", "y == (k + 1) % len(f) for k"),
        ("[sample_label(loss, prediction, generator) for", "[sample_label(loss, prediction) for"),
        ("prediction, y) for y in labels", "prediction, labels[0]) for y in labels"),
    ],
    exact_fishers: [
        ("F1 += weight * tensordot", "F1 += tensordot"),
        ("* sqrt(dim):", "* dim:"),
        ("1 / (2 * dim)", "1 / dim"),
        ("for sign in (1, -1)", "for sign in (1, 1)"),
        ("F2 += hessian(", "F2 = hessian("),
        ("expected_c + weight * c", "expected_c + c"),
        ("return R * F1", "return F1 / len(y)"),
        ("return R * F2", "return F2 / len(y)"),
        ("c(f_n, hide_ignored(loss, label, y_n)), rows", "c(f_n, label), rows"),
        ("weight * c(f_n, hide_ignored(loss, label, y_n))", "weight * c(f_n, label)"),
        ("matricize(F1, rows.ndim, vec)", "matricize(F1, rows.ndim, rvec)"),
        ("matricize(F2, rows.ndim, vec)", "matricize(F2, rows.ndim, rvec)"),
    ],
    fisher_kl_metric: [
        ("return 0.5 * ((prediction", "return ((prediction"),
        ("(log_p - log_q)).sum()", "(log_q - log_p)).sum()"),
        ("(log_p.exp() * (log_p - log_q)).sum()", "(log_q.exp() * (log_q - log_p)).sum()"),
        ("(log_p.exp() * (log_p - log_q)).sum()", "(log_p.exp() * (log_p - log_q)).mean()"),
        ("(log_p.exp() * (log_p - log_q)).sum()", "(log_p - log_q).sum()"),
        ("prediction - other) ** 2", "prediction - other).abs() ** 2.1"),
    ],
    mc_fisher_convergence: [
        ("R**2 * V", "R * V"),
        ("reduction_factor(loss, y)", "1 / len(y)"),
        ("outer - w @ outer", "outer"),
        ("(outer - w @ outer) ** 2", "(outer - w @ outer).abs()"),
        ("V += (", "V = ("),
        ("(w @ (outer - w @ outer) ** 2).sum()", "((outer - w @ outer) ** 2).sum()"),
        ("hide_ignored(loss, label, y_n)", "label"),
    ],
    emp_fishers: [
        ("reduction_factor(loss, y)", "1 / len(y)"),
        ("return R * E", "return E"),
        ("E += tensordot", "E = tensordot"),
        ("tensordot(g1, g2, dims=0)", "tensordot(g1, g2.abs(), dims=0)"),
        ("tensordot(g1, g2, dims=0)", "tensordot(g1, g2.flip(0), dims=0)"),
        ("rows.ndim, vec)", "rows.ndim, rvec)"),
        ("gradients(c(f_n, y_n)", "gradients(c(f_n, 0 * y_n)"),
    ],
    emp_fisher_product: [
        ("reduction_factor(loss, y)", "1 / len(y)"),
        ("return R * u", "return R**2 * u"),
        ("(g2 * v.detach()).sum()", "(g2 * v.detach())"),
        ("u += g1 *", "u -= g1 *"),
        ("u += g1 *", "u = g1 *"),
    ],
}  # fmt: skip
EDITS = [Edit(module, right, wrong) for module, changes in WRONG.items() for right, wrong in changes]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.name)
def test_an_edit_is_noticed(edit: Edit) -> None:
    check_edit(edit)


def test_every_definition_is_edited() -> None:
    names = [name for names in basics.CONTENTS.values() for name in names]
    assert sorted(module.__name__ for module in WRONG) == sorted(f"kfs.basics.{name}" for name in names)


def test_without_an_edit_nothing_is_noticed() -> None:
    assert failure(mc_fishers) is None


def test_invalid_edits() -> None:
    with pytest.raises(AssertionError, match="occurs 0 times"):
        failure(mc_fishers, "no such text", "")
    with pytest.raises(AssertionError, match=r"occurs \d+ times"):
        failure(mc_fishers, "loss", "lost")
    with pytest.raises(AssertionError, match="one line"):
        failure(mc_fishers, "\n\n", "\n")
    with pytest.raises(NameError):  # a copy that crashes has not noticed anything
        failure(mc_fishers, "vec: Vec = rvec", "vec: Vec = undefined")
