"""Every listing notices mistakes: if any one of these lines is changed, the listing's own check must fail."""

import pytest

from kfs.kfac import (
    backpropagated_vectors,
    ekfac_Linear,
    expand_Conv,
    expand_Linear,
    expectation_approximation,
    reduce_Conv,
    reduce_Linear,
    scaffold,
    sum_of_kronecker_products,
)
from tests.edits import Edit, check_edit, failure

MODULES = (
    scaffold,
    sum_of_kronecker_products,
    backpropagated_vectors,
    expectation_approximation,
    expand_Linear,
    reduce_Linear,
    expand_Conv,
    reduce_Conv,
    ekfac_Linear,
)
# A zero is appended in place of the one, or the input is used without it.
NO_BIAS = "append_one(x[n, s]) - append_one(0 * x[n, s]) if"
EDITS = [
    # Scales
    Edit(scaffold, "R = reduction_factor(loss, y)", "R = 1 / len(y)", "equals the GGN's block"),
    Edit(scaffold, "(R * A[name], B[name])", "(A[name], B[name])", "equals the GGN's block"),
    Edit(scaffold, "(R * A[name], B[name])", "(R * A[name], R * B[name])", "equals the GGN's block"),
    Edit(backpropagated_vectors, " / sqrt(mc_samples)", "", "drawn labels converge"),
    Edit(backpropagated_vectors, " / sqrt(mc_samples)", " / mc_samples", "drawn labels converge"),
    Edit(expectation_approximation, "/ N", "", "gradient is zero at the mean"),
    Edit(expand_Linear, "return reduction_factor * A", "return A", "the same input-based factor"),
    Edit(expand_Linear, "B / (N * S)", "B / S", "the same gradient-based factor"),
    Edit(expand_Linear, "B / (N * S)", "B / N", "the same gradient-based factor"),
    Edit(reduce_Linear, "return reduction_factor * A", "return A", "the same input-based factor"),
    Edit(reduce_Linear, "B / (N * S**2)", "B / (N * S)", "the same gradient-based factor"),
    Edit(reduce_Linear, "B / (N * S**2)", "B / S**2", "the same gradient-based factor"),
    Edit(reduce_Linear, "outer(x_n, x_n)", "outer(x_n / S, x_n / S)", "the same input-based factor"),
    Edit(reduce_Conv, "return reduction_factor * A", "return A", "the same input-based factor"),
    Edit(reduce_Conv, "(len(x), 1), S)", "(len(x), 1), 1)", "the same input-based factor"),
    Edit(sum_of_kronecker_products, "reduction_factor * total", "total", "is a sum of Kronecker products"),
    Edit(ekfac_Linear, "reduction_factor * eigenvalues", "eigenvalues", "diagonal of the GGN"),
    Edit(ekfac_Linear, "(Q_B.T @ G_nc @ Q_A) ** 2", "(Q_B.T @ G_nc @ Q_A) ** 2 / N", "diagonal of the GGN"),
    # Sums that are missing, or misplaced
    Edit(expand_Linear, "for c in range(C)", "for c in range(1)", "the same gradient-based factor"),
    Edit(expand_Linear, "A += outer", "A = outer", "the same input-based factor"),
    Edit(reduce_Linear, "g_nc += g[c, n, s]", "g_nc = g[c, n, s]", "the same gradient-based factor"),
    Edit(reduce_Linear, "B += outer", "B = outer", "the same gradient-based factor"),
    Edit(reduce_Conv, "x[:, :, i, j] += pixel", "x[:, :, i, j] = pixel", "sums of patches"),
    Edit(reduce_Conv, "A += outer", "A = outer", "the same input-based factor"),
    Edit(sum_of_kronecker_products, "total += kron", "total = kron", "is a sum of Kronecker products"),
    Edit(expectation_approximation, "A += outer(x[n], x[n])", "A = outer(x[n], x[n])", "it is a Kronecker product"),
    Edit(expectation_approximation, "M[n] += outer", "M[n] = outer", "middle"),
    Edit(ekfac_Linear, "eigenvalues += (", "eigenvalues = (", "diagonal of the GGN"),
    Edit(ekfac_Linear, "G_nc += g[c", "G_nc = g[c", "diagonal of the GGN"),
    # Biases
    Edit(scaffold, "bias=layer.bias is not None", "bias=False", "equals the GGN's block"),
    Edit(scaffold, "bias=layer.bias is not None", "bias=True", "equals the GGN's block"),
    Edit(expand_Linear, "append_one(x[n, s]) if", NO_BIAS, "the same input-based factor"),
    Edit(reduce_Linear, "append_one(x[n, s]) if", NO_BIAS, "the same input-based factor"),
    Edit(reduce_Conv, "cat([x, x.new", "cat([x, 0 * x.new", "the same input-based factor"),
    Edit(ekfac_Linear, "append_one(x[n, s]) if", NO_BIAS, "diagonal of the GGN"),
    Edit(sum_of_kronecker_products, "append_one(x[n]) if", "append_one(x[n]) * 2 if", "is a sum of Kronecker products"),
    # Orders, transposes, indices
    Edit(scaffold, "RULES[sharing]", 'RULES["expand"]', "if positions are summed"),
    Edit(scaffold, "x.reshape(len(x), -1, x.shape[-1])", "x.reshape(len(x), x.shape[-1], -1).mT * 1", "if positions"),
    Edit(backpropagated_vectors, ".movedim(-1, 0)", "", "factor of the criterion's Hessian"),
    Edit(backpropagated_vectors, "(loss, f_n, label)[0]", "(loss, f_n, y_n)[0]", "drawn labels converge"),
    Edit(
        backpropagated_vectors, "sample_label(loss, f_n, generator)", "sample_label(loss, 0 * f_n, generator)", "drawn"
    ),
    Edit(backpropagated_vectors, "stack(g) for g in zip(*passes", "stack(g[::-1]) for g in zip(*passes", "transposed"),
    Edit(expand_Linear, "vec is cvec else", "vec is not cvec else", "equals the GGN"),
    Edit(expand_Linear, "outer(g[c, n, s], g[c, n, s])", "outer(g[c, n, s], g[c, n, 0])", "gradient-based factor"),
    Edit(expand_Conv, "x[:, s, :, i, j]", "x[:, s, :, -1 - i, j]", "multiplies patches"),
    Edit(expand_Conv, "top + i * dilation[0]", "top + i", "multiplies patches"),
    Edit(expand_Conv, "left + j * dilation[1]", "left + j", "multiplies patches"),
    Edit(expand_Conv, "top + i * dilation[0]", "top + i * dilation[1]", "multiplies patches"),
    Edit(expand_Conv, "range(-p, size + p - ", "range(0, size - ", "multiplies patches"),
    Edit(expand_Conv, "d * (k - 1), stride)", "d * (k - 1), 1)", "multiplies patches"),
    Edit(expand_Conv, "g.flatten(3).movedim(2, 3)", "g.flatten(3)", "the same gradient-based factor"),
    Edit(reduce_Conv, "top + i * dilation[0]", "top + i", "sums of patches"),
    Edit(reduce_Conv, "left + j * dilation[1]", "left + j", "sums of patches"),
    Edit(reduce_Conv, "x[:, :, i, j] +=", "x[:, :, -1 - i, j] +=", "sums of patches"),
    Edit(reduce_Conv, "g.flatten(3).movedim(2, 3)", "g.flatten(3)", "the same gradient-based factor"),
    Edit(sum_of_kronecker_products, "if vec is cvec else", "if vec is not cvec else", "is a sum of Kronecker products"),
    Edit(sum_of_kronecker_products, "outer(g[c, n], g[c, n])", "outer(g[c, n], g[0, n])", "is a sum of Kronecker"),
    Edit(sum_of_kronecker_products, "entries.transpose(1, 2)", "entries.transpose(0, 1)", "has rank one"),
    Edit(expectation_approximation, "kron(identity, B)", "kron(B, identity)", "gradient is zero"),
    Edit(expectation_approximation, "(middle - kron", "(middle + kron", "gradient is zero"),
    Edit(ekfac_Linear, "Q_B.T @ G_nc @ Q_A", "Q_B @ G_nc @ Q_A", "diagonal of the GGN"),
    Edit(ekfac_Linear, "Q_B.T @ G_nc @ Q_A", "Q_B.T @ G_nc @ Q_A.T", "diagonal of the GGN"),
    Edit(ekfac_Linear, "Q @ diag(vec(eigenvalues)) @ Q.T", "Q.T @ diag(vec(eigenvalues)) @ Q", "squared error grows"),
    Edit(ekfac_Linear, "diag(vec(eigenvalues))", "diag(eigenvalues.flatten())", "squared error grows"),
    Edit(ekfac_Linear, "kfac_block(Q_A, Q_B, vec)", "kfac_block(Q_A, -Q_B.flip(0), vec)", "squared error grows"),
    # Signs
    Edit(backpropagated_vectors, "return gradient.unsqueeze(0)", "return gradient.abs().unsqueeze(0)", ""),
    Edit(expand_Linear, "A += outer(x_ns, x_ns)", "A -= outer(x_ns, x_ns)", "the same input-based factor"),
    Edit(reduce_Linear, "A += outer(x_n, x_n)", "A -= outer(x_n, x_n)", "the same input-based factor"),
]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.name)
def test_an_edit_is_noticed(edit: Edit) -> None:
    check_edit(edit)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_listing_is_edited_and_runs_as_it_is(module: object) -> None:
    assert sum(edit.module is module for edit in EDITS) >= 4
    assert failure(module) is None  # type: ignore[arg-type]
