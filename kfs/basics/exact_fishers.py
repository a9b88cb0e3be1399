r"""The exact Fisher, twice, and why it equals the GGN.

The Fisher information matrix can be written with second or with first derivatives of
the log-likelihood, in expectation over labels that the network itself predicts,

$$
F^{\mathrm{II}} = R \sum_n \mathbb{E}_{r(y \mid f_n)} \big[
  -\mathrm{H}_\theta \log\, r(y \mid f_n) \big],
$$

$$
F^{\mathrm{I}} = R \sum_n \mathbb{E}_{r(y \mid f_n)} \big[
  \nabla_\theta \log\, r(y \mid f_n)\, \nabla_\theta \log\, r(y \mid f_n)^\top \big].
$$

Both are the same matrix. For the square loss and for cross-entropy it is moreover the
GGN. Split the Hessian by the chain rule into the GGN and the term with the network's
second derivatives. The first contains no label: the Hessian of these criteria with
respect to the *prediction* does not depend on the label, so an expectation changes
nothing. The second is linear in $\nabla_f \log\, r(y \mid f)$, whose expectation is
zero. (For probability targets in place of labels, this holds if they sum to one.)

To verify this we evaluate the expectations without sampling. A distribution over
finitely many labels is summed up. For the Gaussian, a rule with $2C$ points
$f \pm \sqrt{C}\, e_i$ of equal weight integrates all polynomials in $y$ of degree up to
three exactly, and here the integrands have degree one and two. No property of the
Hessian is presupposed.

Implements: type-I and type-II Fisher and their connection to the GGN (chapter 2, "The
Fisher" and "Connection between GGN & Fisher").
"""

from collections.abc import Iterator
from itertools import product
from math import sqrt

from torch import Tensor, enable_grad, eye, tensor, tensordot, zeros_like
from torch.nn import Module, MSELoss

from kfs.basics._autograd import depends
from kfs.basics._checks import check_likelihood
from kfs.basics._per_datum import (
    Params,
    check_data,
    empty_block,
    gradients,
    parameter_pair,
)
from kfs.basics.flattening import Vec, check_vec, matricize, rvec
from kfs.basics.hessians import hessian
from kfs.basics.label_sampling import hide_ignored
from kfs.basics.reduction_factors import Loss, criterion, reduction_factor
from kfs.errors import DataError

MAX_LABELS = 10_000


@enable_grad()
def type1_fisher(
    model: Module, loss: Loss, X: Tensor, y: Tensor, params: Params
) -> Tensor:
    """Compute the type-I Fisher tensor: the exact covariance of would-be gradients.

    Args:
        model: The network, a function of one example (no batch normalization or dropout
            in training mode).
        loss: A `MSELoss` or `CrossEntropyLoss`, the latter without class weights and
            label smoothing.
        X: All inputs, stacked along the first axis.
        y: All targets, likewise. They matter only for the reduction factor and for
            labels that are ignored.
        params: A parameter of the model or its name; or two of them, for rows and for
            columns.

    Returns:
        A tensor of shape `[*rows.shape, *columns.shape]`.

    Raises:
        LossError: If the loss is not supported here.
        ModelError: If the model is not a function of one example, or has no such
            parameter.
        GraphError: If the parameter is frozen or not used.
        DataError: If data or targets do not fit.
    """
    rows, columns = parameter_pair(model, params)
    check_data(model, loss, X, y, (rows, columns))
    c, R = criterion(loss), reduction_factor(loss, y)

    F1 = empty_block(rows, columns)
    for x_n, y_n in zip(X, y, strict=True):
        f_n = model(x_n.unsqueeze(0))[0]
        for weight, label in expected_labels(loss, f_n):
            g1, g2 = gradients(c(f_n, hide_ignored(loss, label, y_n)), rows, columns)
            F1 += weight * tensordot(g1, g2, dims=0)
    return R * F1


@enable_grad()
def type2_fisher(
    model: Module, loss: Loss, X: Tensor, y: Tensor, params: Params
) -> Tensor:
    """Compute the type-II Fisher tensor: the exact expectation of Hessians.

    Args:
        model: The network, a function of one example (no batch normalization or dropout
            in training mode).
        loss: A `MSELoss` or `CrossEntropyLoss`, the latter without class weights and
            label smoothing.
        X: All inputs, stacked along the first axis.
        y: All targets, likewise. They matter only for the reduction factor and for
            labels that are ignored.
        params: A parameter of the model or its name; or two of them, for rows and for
            columns.

    Returns:
        A tensor of shape `[*rows.shape, *columns.shape]`.

    Raises:
        LossError: If the loss is not supported here.
        ModelError: If the model is not a function of one example, or has no such
            parameter.
        GraphError: If the parameter is frozen or not used.
        DataError: If data or targets do not fit.
    """
    rows, columns = parameter_pair(model, params)
    check_data(model, loss, X, y, (rows, columns))
    c, R = criterion(loss), reduction_factor(loss, y)

    F2 = empty_block(rows, columns)
    for x_n, y_n in zip(X, y, strict=True):
        f_n = model(x_n.unsqueeze(0))[0]
        expected_c = zeros_like(f_n).sum()
        for weight, label in expected_labels(loss, f_n):
            expected_c = expected_c + weight * c(f_n, hide_ignored(loss, label, y_n))
        if depends(expected_c, rows) and depends(expected_c, columns):
            F2 += hessian(expected_c, rows, columns)
    return R * F2


def vec_type1_fisher(
    model: Module, loss: Loss, X: Tensor, y: Tensor, params: Params, vec: Vec = rvec
) -> Tensor:
    """Compute the type-I Fisher matrix with respect to flattened parameters.

    Args:
        model: The network.
        loss: A `MSELoss` or `CrossEntropyLoss`.
        X: All inputs, stacked along the first axis.
        y: All targets, likewise.
        params: A parameter of the model or its name; or two of them, for rows and for
            columns.
        vec: The flattening of both parameters, `cvec` or `rvec`.

    Returns:
        A matrix of shape `[rows.numel(), columns.numel()]`.
    """
    check_vec(vec)
    rows, _ = parameter_pair(model, params)
    F1 = type1_fisher(model, loss, X, y, params)
    return matricize(F1, rows.ndim, vec)


def vec_type2_fisher(
    model: Module, loss: Loss, X: Tensor, y: Tensor, params: Params, vec: Vec = rvec
) -> Tensor:
    """Compute the type-II Fisher matrix with respect to flattened parameters.

    Args:
        model: The network.
        loss: A `MSELoss` or `CrossEntropyLoss`.
        X: All inputs, stacked along the first axis.
        y: All targets, likewise.
        params: A parameter of the model or its name; or two of them, for rows and for
            columns.
        vec: The flattening of both parameters, `cvec` or `rvec`.

    Returns:
        A matrix of shape `[rows.numel(), columns.numel()]`.
    """
    check_vec(vec)
    rows, _ = parameter_pair(model, params)
    F2 = type2_fisher(model, loss, X, y, params)
    return matricize(F2, rows.ndim, vec)


def expected_labels(loss: Loss, prediction: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield weights and labels that turn an expectation over labels into a sum.

    Args:
        loss: A `MSELoss` or `CrossEntropyLoss`, the latter without class weights and
            label smoothing.
        prediction: One example's prediction, shape `[...]` (square loss) or `[C, ...]`
            (cross-entropy).

    Yields:
        Pairs `(weight, label)`, detached. The sum of `weight * h(label)` is the
        expectation of `h(y)`: for all functions `h` (cross-entropy), or for all
        polynomials of degree three (square loss).

    Raises:
        DataError: If an example has too many positions to enumerate all of its label
            combinations.
    """
    check_likelihood(loss, prediction)
    f = prediction.detach()
    if isinstance(loss, MSELoss):
        dim = f.numel()
        for direction in eye(dim, dtype=f.dtype, device=f.device) * sqrt(dim):
            for sign in (1, -1):
                yield f.new_tensor(1 / (2 * dim)), f + sign * direction.reshape(f.shape)
        return
    classes, positions = f.shape[0], f.shape[1:].numel()
    if classes**positions > MAX_LABELS:
        raise DataError(
            f"{classes} classes at {positions} positions have {classes**positions} "
            f"combinations of labels; more than {MAX_LABELS} are not enumerated.",
            "Use fewer positions, the GGN (an equal matrix) or the Monte Carlo Fisher.",
        )
    log_probs = f.log_softmax(0).reshape(classes, positions)
    for combination in product(range(classes), repeat=positions):
        label = tensor(combination, device=f.device).long()
        yield (
            log_probs.gather(0, label.unsqueeze(0)).sum().exp(),
            label.reshape(f.shape[1:]),
        )


if __name__ == "__main__":
    import torch
    from torch.nn import CrossEntropyLoss, Linear, Sequential, Tanh

    from kfs.basics.flattening import cvec
    from kfs.basics.ggns import ggn, vec_ggn
    from kfs.basics.hessians import vec_hessian
    from kfs.basics.jacobians import vec_jacobian
    from kfs.basics.would_be_gradients import criterion_gradient
    from kfs.verification import verify, verify_differs

    def expectations(loss: Loss, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return Hessian, GGN and type-I Fisher as in the cheatsheet: E_x of terms."""
        c, terms = criterion(loss), []
        for x_n, y_n in zip(X, y, strict=True):
            f_n = model(x_n)
            J, covariance = vec_jacobian(f_n, W), torch.zeros(3, 3).double()
            for weight, label in expected_labels(loss, f_n):
                g = criterion_gradient(loss, f_n, hide_ignored(loss, label, y_n))
                covariance += weight * torch.outer(g, g)
            H, H_f = (vec_hessian(c(f_n, y_n), t) for t in (W, f_n))
            terms.append(torch.stack([H, J.T @ H_f @ J, J.T @ covariance @ J]))
        H, G, F1 = torch.stack(terms).mean(0)
        return H, G, F1

    torch.manual_seed(0)
    N = 3
    first, last = Linear(3, 2), Linear(2, 3)
    model = Sequential(first, Tanh(), last).double()
    X, values = torch.randn(N, 3, dtype=torch.float64), torch.randn(N, 3).double()
    labels, missing = torch.randint(3, (N,)), torch.tensor([0, 2, -100])
    W, b = first.weight, last.bias
    for name, loss, y in (
        ("MSELoss()", MSELoss(), values),
        ("CrossEntropyLoss()", CrossEntropyLoss(), labels),
        ("summed, a label is missing", CrossEntropyLoss(reduction="sum"), missing),
    ):
        prediction = model(X)
        risk = loss(prediction, y)
        for vec in (cvec, rvec):
            case = f"{name}, {vec.__name__}"
            G = vec_ggn(risk, prediction, W, vec=vec)
            F = vec_type2_fisher(model, loss, X, y, W, vec)
            verify("the type-II Fisher is the GGN", F, G, case=case)
            F = vec_type1_fisher(model, loss, X, y, W, vec)
            verify("the type-I Fisher is the GGN", F, G, case=case)
        G = ggn(risk, prediction, W, b)
        for fisher in (type1_fisher, type2_fisher):
            F = fisher(model, loss, X, y, (W, b))
            verify("off-diagonal blocks agree, too", F, G, case=name)
        H, G = vec_hessian(risk, W), vec_ggn(risk, prediction, W)
        verify_differs("the Hessian is another matrix", H, G, case=name)

        F1, NR = vec_type1_fisher(model, loss, X, y, W), N * reduction_factor(loss, y)
        pairs = zip((H, G, F1), expectations(loss, y), strict=True)
        names = ("the Hessian", "the GGN", "the type-I Fisher")
        for matrix, (exact, expected) in zip(names, pairs, strict=True):
            claim = f"cheatsheet: divided by N R, {matrix} is an expectation"
            verify(claim, exact / NR, expected, case=name)
