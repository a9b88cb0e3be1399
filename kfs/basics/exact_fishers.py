r"""The exact Fisher, twice, and why it equals the GGN.

The Fisher information matrix can be written with second or with first derivatives of the log-likelihood, in
expectation over labels that the network itself predicts,

$$
F^{\mathrm{II}} = R \sum_n \mathbb{E}_{r(y \mid f_n)} \big[ -\mathrm{H}_\theta \log\, r(y \mid f_n) \big],
$$

$$
F^{\mathrm{I}} = R \sum_n \mathbb{E}_{r(y \mid f_n)} \big[
  \nabla_\theta \log\, r(y \mid f_n)\, \nabla_\theta \log\, r(y \mid f_n)^\top \big].
$$

Both are the same matrix. For the square loss and for cross-entropy it is moreover the GGN. Split the Hessian by the
chain rule into the GGN and the term with the network's second derivatives. The first contains no label: the Hessian
of these criteria with respect to the *prediction* does not depend on the label, so an expectation changes nothing.
The second is linear in $\nabla_f \log\, r(y \mid f)$, whose expectation is zero. (For probability targets in place of
labels, this holds if they sum to one.)

To verify this we evaluate the expectations without sampling. A distribution over finitely many labels is summed up.
For the Gaussian, a rule with $2C$ points $f \pm \sqrt{C}\, e_i$ of equal weight integrates all polynomials in $y$
of degree up to three exactly, and here the integrands have degree one and two. No property of the Hessian is
presupposed.

Implements: type-I and type-II Fisher and their connection to the GGN (chapter 2, "The Fisher" and "Connection
between GGN & Fisher").
"""

from collections.abc import Iterator
from itertools import product
from math import sqrt

from torch import Tensor, enable_grad, eye, ones_like, stack, tensor, tensordot
from torch.nn import Module, MSELoss

from kfs.basics._per_datum import Params, empty_block, gradients, parameter_pair, predictions
from kfs.basics.flattening import Vec, check_vec, matricize, rvec
from kfs.basics.hessians import hessian
from kfs.basics.jacobian_products import pull_back
from kfs.basics.label_sampling import check_likelihood, hide_ignored
from kfs.basics.reduction_factors import Loss, criterion, reduction_factor
from kfs.errors import DataError

MAX_LABELS = 10_000


@enable_grad()
def type1_fisher(model: Module, loss: Loss, X: Tensor, y: Tensor, params: Params) -> Tensor:
    """Compute the type-I Fisher tensor: the exact covariance of would-be gradients.

    Args:
        model: The network, a function of one example (no batch normalization or dropout in training mode).
        loss: A `MSELoss` or `CrossEntropyLoss`, the latter without class weights and label smoothing.
        X: All inputs, stacked along the first axis.
        y: All targets, likewise. They matter only for the reduction factor and for labels that are ignored.
        params: A parameter of the model or its name; or two of them, for rows and for columns.

    Returns:
        A tensor of shape `[*rows.shape, *columns.shape]`.

    Raises:
        LossError: If the loss is not supported here.
        ModelError: If the model is not a function of one example, or has no such parameter.
        GraphError: If the parameter is frozen or not used.
        DataError: If data or targets do not fit.
    """
    pair, c = parameter_pair(model, params), criterion(loss)
    F = empty_block(pair)
    for f_n, y_n in predictions(model, loss, X, y, pair):
        for weight, label in expected_labels(loss, f_n):
            g1, g2 = gradients(c(f_n, hide_ignored(loss, label, y_n)), pair)
            F += weight * tensordot(g1, g2, dims=0)
    return reduction_factor(loss, y) * F


@enable_grad()
def type2_fisher(model: Module, loss: Loss, X: Tensor, y: Tensor, params: Params) -> Tensor:
    """Compute the type-II Fisher tensor: the exact expectation of the negative log-likelihood's Hessian.

    Args:
        model: The network, a function of one example (no batch normalization or dropout in training mode).
        loss: A `MSELoss` or `CrossEntropyLoss`, the latter without class weights and label smoothing.
        X: All inputs, stacked along the first axis.
        y: All targets, likewise. They matter only for the reduction factor and for labels that are ignored.
        params: A parameter of the model or its name; or two of them, for rows and for columns.

    Returns:
        A tensor of shape `[*rows.shape, *columns.shape]`.

    Raises:
        LossError: If the loss is not supported here.
        ModelError: If the model is not a function of one example, or has no such parameter.
        GraphError: If the parameter is frozen or not used.
        DataError: If data or targets do not fit.
    """
    pair, c = parameter_pair(model, params), criterion(loss)
    F = empty_block(pair)
    for f_n, y_n in predictions(model, loss, X, y, pair):
        labels = expected_labels(loss, f_n)
        expected_c = stack([weight * c(f_n, hide_ignored(loss, label, y_n)) for weight, label in labels]).sum()
        if all(pull_back(expected_c, p, ones_like(expected_c), create_graph=False) is not None for p in pair):
            F += hessian(expected_c, *pair)  # zero for an example that does not use a parameter
    return reduction_factor(loss, y) * F


def vec_type1_fisher(model: Module, loss: Loss, X: Tensor, y: Tensor, params: Params, vec: Vec = rvec) -> Tensor:
    """Compute the type-I Fisher matrix with respect to flattened parameters.

    Args:
        model: The network.
        loss: A `MSELoss` or `CrossEntropyLoss`.
        X: All inputs, stacked along the first axis.
        y: All targets, likewise.
        params: A parameter of the model or its name; or two of them, for rows and for columns.
        vec: The flattening of both parameters, `cvec` or `rvec`.

    Returns:
        A matrix of shape `[rows.numel(), columns.numel()]`.
    """
    check_vec(vec)
    rows, _ = parameter_pair(model, params)
    return matricize(type1_fisher(model, loss, X, y, params), rows.ndim, vec)


def vec_type2_fisher(model: Module, loss: Loss, X: Tensor, y: Tensor, params: Params, vec: Vec = rvec) -> Tensor:
    """Compute the type-II Fisher matrix with respect to flattened parameters.

    Args:
        model: The network.
        loss: A `MSELoss` or `CrossEntropyLoss`.
        X: All inputs, stacked along the first axis.
        y: All targets, likewise.
        params: A parameter of the model or its name; or two of them, for rows and for columns.
        vec: The flattening of both parameters, `cvec` or `rvec`.

    Returns:
        A matrix of shape `[rows.numel(), columns.numel()]`.
    """
    check_vec(vec)
    rows, _ = parameter_pair(model, params)
    return matricize(type2_fisher(model, loss, X, y, params), rows.ndim, vec)


def expected_labels(loss: Loss, prediction: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield weights and labels that turn an expectation over the likelihood into a finite sum.

    Args:
        loss: A `MSELoss` or `CrossEntropyLoss`, the latter without class weights and label smoothing.
        prediction: One example's prediction, shape `[...]` (square loss) or `[C, ...]` (cross-entropy).

    Yields:
        Pairs `(weight, label)`, detached. The sum of `weight * h(label)` is the expectation of `h(y)`: for all
        functions `h` (cross-entropy), or for all polynomials of degree three (square loss).

    Raises:
        DataError: If an example has too many positions to enumerate all of its label combinations.
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
            f"{classes} classes at {positions} positions have {classes**positions} combinations of labels; "
            f"more than {MAX_LABELS} are not enumerated.",
            "Use fewer positions, the GGN (an equal matrix) or the Monte Carlo Fisher.",
        )
    log_probs = f.log_softmax(0).reshape(classes, positions)
    for combination in product(range(classes), repeat=positions):
        label = tensor(combination, device=f.device).long()
        yield log_probs.gather(0, label.unsqueeze(0)).sum().exp(), label.reshape(f.shape[1:])


if __name__ == "__main__":
    import torch
    from torch.nn import CrossEntropyLoss, Linear, Sequential, Tanh

    from kfs.basics.flattening import cvec
    from kfs.basics.ggns import vec_ggn
    from kfs.basics.hessians import vec_hessian
    from kfs.verification import verify, verify_differs

    torch.manual_seed(0)
    N = 3
    first, last = Linear(3, 2), Linear(2, 3)
    model = Sequential(first, Tanh(), last).double()
    X = torch.randn(N, 3, dtype=torch.float64)
    W = first.weight
    for loss, y in ((MSELoss(), torch.randn(N, 3, dtype=torch.float64)), (CrossEntropyLoss(), torch.randint(3, (N,)))):
        prediction = model(X)
        risk = loss(prediction, y)
        for vec in (cvec, rvec):
            G = vec_ggn(risk, prediction, W, vec=vec)
            one, two = (fisher(model, loss, X, y, W, vec) for fisher in (vec_type1_fisher, vec_type2_fisher))
            verify("the type-II Fisher is the GGN", two, G, case=f"{loss}, {vec.__name__}")
            verify("the type-I Fisher is the GGN", one, G, case=f"{loss}, {vec.__name__}")
        verify_differs(
            "the Hessian is another matrix", vec_hessian(risk, W), vec_ggn(risk, prediction, W), case=str(loss)
        )
    mixed = (first.weight, last.bias)
    one, two = (fisher(model, loss, X, y, mixed) for fisher in (vec_type1_fisher, vec_type2_fisher))
    verify("off-diagonal blocks agree, too", one, two)
