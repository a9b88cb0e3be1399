r"""Derivatives of one batch: $J v$ and $J^\top u$ of predictions, and Hessian products, for many columns at once.

Products with $J$ use forward-mode differentiation of all columns together (`vmap`) and record no graph. Products with
$J^\top$ run a second forward pass and send columns back through its graph. This takes no longer than recording the
first pass, which would also record the columns, and needs less memory. Operations without forward mode fall back to two
backward passes. Operations that `vmap` does not support fall back to one column at a time.
"""

import logging
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from functools import partial
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, vjp, vmap
from torch.nn import Module
from torch.nn.attention import SDPBackend, sdpa_kernel

from kfs.errors import ModelError
from kfs.operators.space import Columns
from kfs.problem.data import Batch, can_be_cut, cut
from kfs.problem.parameters import Params
from kfs.problem.risk import EmpiricalRisk
from kfs.problem.torch_fixes import RefuseMissedErrors, StopsForwardMode
from kfs.runtime.precision import Precisions, tolerance_for

log = logging.getLogger("kfs.operators")
# Number of examples on which the modes of differentiation are compared.
_FEW = 4
# Parts of PyTorch's error messages for operations and custom autograd.Functions without forward mode.
_NO_FORWARD_MODE = (
    "forward AD",
    "forward mode AD",
    "forward-mode AD",
    "setup_context",
    "saves no tensors",
    "from the 'Sparse",
    "Sparse CSR",
)
# Parts of PyTorch's error messages if several columns cannot be pushed forward together.
_ONE_BY_ONE = ("vmap", "functorch", "mutate a captured Tensor", "doesn't have storage")
# Functions that return whether an attention kernel is enabled in PyTorch.
_KERNELS = {
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
}


def leaves_and_rest(risk: EmpiricalRisk, names: Iterable[str]) -> tuple[Params, Params]:
    """Return new graph leaves for the named parameters, and detached values of all other parameters.

    The other parameters require gradients if the model's own do. Activation checkpointing runs the module again with
    its own parameters, and must save the same number of tensors as in the first run.
    """
    chosen = set(names)
    values = risk.values()
    leaves = {name: p.requires_grad_() for name, p in values.items() if name in chosen}
    rest = {n: p.requires_grad_(risk.params[n].requires_grad) for n, p in values.items() if n not in chosen}
    return leaves, rest


def push_forward(
    risk: EmpiricalRisk, batch: Batch, leaves: Params, rest: Params, columns: Columns, forward_mode: bool = True
) -> tuple[Tensor, Tensor]:
    """Evaluate the model and multiply columns by its Jacobian.

    Args:
        risk: Provides the model.
        batch: The data.
        leaves: Parameters to differentiate with respect to.
        rest: All other parameters.
        columns: Tensors `[K, *shape]` for some of the leaves. The tangents of all other leaves are zero.
        forward_mode: Whether to try forward mode; see `OneDerivative`.

    Returns:
        Predictions `[N, ...]`, and detached Jacobian products `[K, N, ...]`. Predictions have a graph to the leaves
        only if the product needed one; see `pull_back_through_model`.
    """
    num_columns = len(next(iter(columns.values())))
    if not forward_mode:
        return _double_backward(risk, batch, leaves, rest, columns)
    try:
        f, Jv = _forward_mode(risk, batch, leaves, rest, columns)
    except (NotImplementedError, RuntimeError) as error:
        # PyTorch raises no specific exception types here, so the message decides which fallback applies.
        if any(symptom in str(error) for symptom in _NO_FORWARD_MODE):
            f, Jv = _double_backward(risk, batch, leaves, rest, columns)
        elif any(symptom in str(error) for symptom in _ONE_BY_ONE) and num_columns > 1:
            singles = [{name: t[k : k + 1] for name, t in columns.items()} for k in range(num_columns)]
            results = [push_forward(risk, batch, leaves, rest, single) for single in singles]
            f, Jv = results[-1][0], torch.cat([Jv for _, Jv in results])
        else:
            raise
    risk.finite(f.detach(), batch)
    return f, Jv


def _forward_mode(
    risk: EmpiricalRisk, batch: Batch, leaves: Params, rest: Params, columns: Columns
) -> tuple[Tensor, Tensor]:
    """Return predictions and Jacobian products by forward mode, without a graph if possible."""
    # Gradient mode stays on, to detect where the model disables it. No tensor requires gradients, so no graph is
    # recorded.
    model_params = risk.model.named_parameters() if isinstance(risk.model, Module) else ()
    values = {name: p.detach() for name, p in model_params if p.requires_grad and name not in risk.params}
    values |= {name: p.detach() for name, p in (leaves | rest).items()}
    moving = {name: values[name] for name in columns}
    # One column needs no `vmap`.
    if len(next(iter(columns.values()))) == 1:
        try:
            f, Jv = _one_column(risk, batch, values, columns)
            return f.detach(), Jv
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
        # The model itself calls autograd, so it needs leaves. Checkpoints must not be used, because they would run the
        # module again after this level of forward-mode differentiation has ended.
        with torch.autograd.graph.disable_saved_tensors_hooks("saves no tensors"):
            return _one_column(risk, batch, leaves | rest, columns)

    def predict(params: Params) -> Tensor:
        return risk.predict(values | params, batch, within=StopsForwardMode())

    # If random numbers are drawn, the risk makes sure that predictions do not depend on them.
    together = vmap(lambda v: jvp(predict, (moving,), (v,))[:2], randomness="same")
    copies, Jv = together(columns)
    return copies[0].detach(), Jv.detach()


def _one_column(risk: EmpiricalRisk, batch: Batch, params: Params, columns: Columns) -> tuple[Tensor, Tensor]:
    """Return predictions and the Jacobian product of a single column by forward mode."""
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(params[name], t[0]) for name, t in columns.items()}
        f, tangent = forward_ad.unpack_dual(risk.predict(params | duals, batch, within=StopsForwardMode()))
    return f, (torch.zeros_like(f) if tangent is None else tangent).detach().unsqueeze(0)


def _double_backward(
    risk: EmpiricalRisk, batch: Batch, leaves: Params, rest: Params, columns: Columns
) -> tuple[Tensor, Tensor]:
    """Return predictions and Jacobian products by differentiating the backward pass.

    Raises:
        ModelError: If the backward pass has no finite derivative.
    """
    linearization = Linearization(risk, batch, leaves, rest)
    Jv = linearization.push_forward(columns)
    if has_pole(Jv, columns):
        raise ModelError(
            "The model's backward pass has no finite derivative at these parameters and data (a second derivative has "
            "a pole, such as in a standard deviation of equal values), and forward mode cannot be used instead.",
            "Give custom autograd.Functions a jvp, remove hooks that change gradients, or avoid the operation with the "
            "pole.",
        )
    return linearization.f, Jv


def has_pole(Jv: Tensor, columns: Columns) -> bool:
    """Return whether products are not finite although all columns are."""
    return not bool(Jv.isfinite().all()) and all(bool(t.isfinite().all()) for t in columns.values())


class Linearization:
    """Predictions for a batch, with graphs for repeated products with their Jacobian and its transpose.

    The backward pass from predictions to parameters is linear in the gradient with respect to predictions.
    Differentiating it gives products with the Jacobian (Townsend, 2017), so that no further forward pass is needed.
    Both graphs stay in memory.

    Args:
        risk: Provides the model.
        batch: The data.
        leaves: Parameters to differentiate with respect to.
        rest: All other parameters.

    Raises:
        ModelError: If a parameter's gradient is not zero and has no graph to the gradient with respect to predictions.
    """

    def __init__(self, risk: EmpiricalRisk, batch: Batch, leaves: Params, rest: Params) -> None:
        self.leaves = leaves
        self.f = risk.predict(leaves | rest, batch)
        risk.finite(self.f.detach(), batch)
        self._arrived: dict[str, Tensor | None] = {}
        if not self.f.requires_grad:
            return
        # Run one differentiable backward pass. Start with ones, because some backward passes have a pole at zero.
        self._sent_back = torch.ones_like(self.f, requires_grad=True)
        arrived = torch.autograd.grad(
            self.f, list(leaves.values()), self._sent_back, create_graph=True, allow_unused=True
        )
        self._arrived = dict(zip(leaves, arrived, strict=True))
        for name, g in self._arrived.items():
            if g is not None and not g.requires_grad and g.any():
                raise ModelError(
                    f"The gradient with respect to {name!r} cannot be differentiated: the backward pass of an "
                    "operation (a custom autograd.Function?) leaves the computation graph.",
                    "Write the operation's backward pass with differentiable operations, or give it forward mode.",
                )

    def push_forward(self, columns: Columns) -> Tensor:
        """Multiply columns for some of the leaves by the Jacobian, and return `[K, N, ...]`."""
        used = [(g, columns[name]) for name, g in self._arrived.items() if name in columns and g is not None]
        used = [(g, t) for g, t in used if g.requires_grad]
        if not used:
            num_columns = len(next(iter(columns.values())))
            return torch.zeros(num_columns, *self.f.shape, dtype=self.f.dtype, device=self.f.device)
        (Jv,) = gradients_of_columns([g for g, _ in used], [self._sent_back], [t for _, t in used], keep_graph=True)
        assert Jv is not None  # noqa: S101 (all used gradients depend on `_sent_back`)
        return Jv

    def pull_back(self, u: Tensor, names: Iterable[str]) -> Columns:
        """Multiply columns `[K, N, ...]` by the transposed Jacobian with respect to some of the leaves."""
        return pull_back(self.f, {name: self.leaves[name] for name in names}, u, keep_graph=True)


def pull_back(f: Tensor, leaves: Params, u: Tensor, keep_graph: bool = False) -> Columns:
    """Multiply columns `[K, *f.shape]` by the transposed Jacobian, and return a tensor `[K, *shape]` for each leaf."""
    if not f.requires_grad:
        return {name: p.new_zeros(len(u), *p.shape) for name, p in leaves.items()}
    gradients = gradients_of_columns([f], list(leaves.values()), [u], keep_graph)
    return {
        name: p.new_zeros(len(u), *p.shape) if g is None else g
        for (name, p), g in zip(leaves.items(), gradients, strict=True)
    }


def pull_back_through_model(
    risk: EmpiricalRisk,
    batch: Batch,
    leaves: Params,
    rest: Params,
    rows: list[str],
    u: Tensor,
    kernels: list[SDPBackend],
) -> Columns:
    """Multiply columns by the transposed Jacobian, through the graph of a new forward pass.

    Args:
        risk: Provides the model.
        batch: The data.
        leaves: Parameters that may be differentiated with respect to.
        rest: All other parameters.
        rows: Names of the leaves to differentiate with respect to.
        u: The columns, `[K, N, ...]`.
        kernels: Attention kernels that may be used for one column. The fast kernels do not store the matrix of all
            pairs of positions. They support neither second derivatives nor several columns together, and one column
            needs neither.
    """
    if len(u) > 1:
        try:
            return _pull_back_together(risk, batch, leaves, rest, rows, u)
        except RuntimeError:
            pass  # torch.func may not support the model (checkpoints, for example); other errors are raised again below
    # With checkpoints, the model runs again in the backward pass, and must use the same kernels.
    with sdpa_kernel(kernels) if len(u) == 1 else nullcontext():
        return pull_back(risk.predict(leaves | rest, batch), {name: leaves[name] for name in rows}, u)


def _pull_back_together(
    risk: EmpiricalRisk, batch: Batch, leaves: Params, rest: Params, rows: list[str], u: Tensor
) -> Columns:
    """Multiply columns by the transposed Jacobian, through a graph of `torch.func`.

    Activations in such a graph do not require gradients themselves. If they did, PyTorch would copy all columns of the
    gradient of an activation in order to multiply them together.
    """
    values = {name: p.detach() for name, p in (leaves | rest).items()}

    def predict(moving: Params) -> Tensor:
        return risk.predict(values | moving, batch)

    with torch.no_grad():
        send_back = vjp(predict, {name: values[name] for name in rows})[1]
        gradients: tuple[Columns] = vmap(send_back, randomness="same")(u)
    return gradients[0]


def second_derivatives(
    risk: EmpiricalRisk,
    batch: Batch,
    leaves: Params,
    rest: Params,
    rows: list[str],
    columns: Columns,
    by_func: bool = True,
    criterion: Callable[[Tensor], Tensor] | None = None,
) -> Columns:
    """Multiply columns by the second derivatives of a batch's risk, by differentiating its gradient.

    Args:
        risk: Provides model and loss.
        batch: The data.
        leaves: Parameters that may be differentiated with respect to.
        rest: All other parameters.
        rows: Names of the leaves to return products for.
        columns: Tensors `[K, *shape]` for some of the leaves.
        by_func: Whether to try `torch.func` for several columns; see `OneDerivative`.
        criterion: Function of predictions to differentiate. If not given, it is the batch's term of the risk.

    Returns:
        Tensors `[K, *shape]` for all rows.
    """
    criterion = criterion or partial(_criterion, risk, batch)
    num_columns = len(next(iter(columns.values())))
    if num_columns > 1 and by_func:
        try:
            return _second_derivatives_together(risk, batch, leaves, rest, rows, columns, criterion)
        except RuntimeError:
            pass  # as in `pull_back_through_model`
    f = risk.predict(leaves | rest, batch)
    risk.finite(f.detach(), batch)
    c = criterion(f)
    zeros = {name: leaves[name].new_zeros(num_columns, *leaves[name].shape) for name in rows}
    if not c.requires_grad:
        return zeros
    gradient = torch.autograd.grad(c, [leaves[name] for name in columns], create_graph=True, allow_unused=True)
    # Gradients without a graph are constant, so their derivatives are zero.
    used = [(g, t) for g, t in zip(gradient, columns.values(), strict=True) if g is not None and g.requires_grad]
    if not used:
        return zeros
    second = gradients_of_columns([g for g, _ in used], [leaves[name] for name in rows], [t for _, t in used])
    _refuse_error_nodes([g for g, _ in used])  # error nodes that were reached have already raised
    return {name: zeros[name] if t is None else t for name, t in zip(rows, second, strict=True)}


def _second_derivatives_together(
    risk: EmpiricalRisk,
    batch: Batch,
    leaves: Params,
    rest: Params,
    rows: list[str],
    columns: Columns,
    criterion: Callable[[Tensor], Tensor],
) -> Columns:
    """Differentiate the gradient with `torch.func`; see `_pull_back_together` for the reason."""
    values = {name: p.detach() for name, p in (leaves | rest).items()}

    def gradient(at_rows: Params) -> tuple[Params, Tensor]:
        point = values | at_rows

        def value(at_columns: Params) -> tuple[Tensor, Tensor]:
            with RefuseMissedErrors():
                f = risk.predict(point | at_columns, batch)
                return criterion(f), f

        return grad(value, has_aux=True)({name: point[name] for name in columns})  # type: ignore[no-any-return]

    with torch.no_grad():
        found: Any = vjp(gradient, {name: values[name] for name in rows}, has_aux=True)
        _, send_back, f = found
        risk.finite(f, batch)
        second: tuple[Columns] = vmap(send_back, randomness="same")(columns)
    return second[0]


def _refuse_error_nodes(gradients: list[Tensor]) -> None:
    """Raise `ModelError` if the graph has a node that PyTorch inserts in place of a missing derivative.

    Such a node has no path to the parameters. Therefore the backward pass does not reach it, and raises no error.
    """
    pending = [g.grad_fn for g in gradients]
    seen = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith("Error"):
            raise ModelError(
                "The backward pass of an operation cannot be differentiated (a custom autograd.Function that is marked "
                "as once_differentiable?).",
                "Write its backward pass with differentiable operations, and without the mark.",
            )
        pending += [before for before, _ in node.next_functions]


def _criterion(risk: EmpiricalRisk, batch: Batch, f: Tensor) -> Tensor:
    """Return the term of the risk that belongs to a batch."""
    c: Tensor = risk.reduction_factor * risk.loss.criterion(f, batch.y).sum()
    return c


class OneDerivative:
    r"""Checks that all modes of differentiation give the same derivative, before an operator multiplies.

    For random signs $u$ and $v$, and a few examples, $u^\top (J v)$ must equal $v^\top (J^\top u)$. Otherwise forward
    mode is wrong, or a hook changes gradients in the backward pass. In this case, products with $J$ are computed by
    differentiating the backward pass, so that $J$ is the transpose of the map that the backward pass computes. Custom
    functions without forward mode are handled in the same way. Second derivatives have no other mode, and must be
    symmetric.

    Attributes:
        forward_mode: Whether forward mode may be used.
        by_func: Whether `torch.func` may differentiate twice.
    """

    def __init__(self) -> None:
        self.forward_mode = self.by_func = True
        self._checked: list[frozenset[str]] = []  # sets of parameters that have passed a check

    def check_first(self, risk: EmpiricalRisk, batch: Batch, names: Collection[str]) -> None:
        """Compare `J v` with `J^T u` for some parameters, unless they were checked before.

        Raises:
            ModelError: If the two are inconsistent in every mode.
        """
        if self._is_checked(names):
            return

        def compare(forward_mode: bool, part: Batch) -> float:
            leaves, rest = leaves_and_rest(risk, names)
            v = _signs({name: p.unsqueeze(0) for name, p in leaves.items()}, seed=0)
            _, Jv = push_forward(risk, part, leaves, rest, v, forward_mode)
            u = _signs({"f": Jv}, seed=1)
            return _difference(u, {"f": Jv}, v, pull_back(risk.predict(leaves | rest, part), leaves, u["f"]))

        forward = _on_a_few_data(partial(compare, True), batch)
        if not _differs(forward, risk, batch):
            self._checked.append(frozenset(names))
            return
        # Forward mode is inconsistent with the backward pass. Try two backward passes before giving up.
        backward = _on_a_few_data(partial(compare, False), batch)
        if backward is None or _differs(backward, risk, batch):
            raise ModelError(
                "The model's derivative is not the same in all modes of differentiation: u^T (J v) and v^T (J^T u) "
                f"differ by {forward:.1e} (relative) in forward mode, and "
                + ("two backward passes are not possible." if backward is None else f"by {backward:.1e} without it."),
                "Look for hooks that change gradients, and for custom autograd.Functions with a backward pass that is "
                "not linear in the gradient, or does not match jvp.",
            )
        log.info("Forward mode is not used: it differs from the model's backward pass by %.1e.", forward)
        self.forward_mode = False
        self._checked.append(frozenset(names))

    def check_second(self, risk: EmpiricalRisk, batch: Batch, names: Collection[str]) -> None:
        """Compare `u^T (H v)` with `v^T (H u)` for some parameters, unless they were checked before.

        The check differentiates a quadratic function of predictions in place of the loss, because the second
        derivatives of a loss may vanish.

        Raises:
            ModelError: If the two differ.
        """
        if self._is_checked(names):
            return
        rows = list(names)

        def quadratic(f: Tensor) -> Tensor:
            return (f * _signs({"f": f.detach()}, seed=2)["f"]).sum() + f.square().sum() / 2

        def compare(by_func: bool, part: Batch) -> float:
            leaves, rest = leaves_and_rest(risk, names)
            v, u = (_signs({name: p.unsqueeze(0) for name, p in leaves.items()}, seed) for seed in (0, 1))
            # A product with one column never uses `torch.func`.
            Hv = second_derivatives(risk, part, leaves, rest, rows, v, criterion=quadratic)
            if not by_func:
                return _difference(u, Hv, v, second_derivatives(risk, part, leaves, rest, rows, u, criterion=quadratic))
            # Compare with a product with two columns, which uses `torch.func`.
            both = {name: torch.cat([v[name], u[name]]) for name in v}
            HV = second_derivatives(risk, part, leaves, rest, rows, both, criterion=quadratic)
            return _difference(u, Hv, u, {name: t[:1] for name, t in HV.items()})

        symmetric = _on_a_few_data(partial(compare, False), batch)
        if _differs(symmetric, risk, batch):
            raise ModelError(
                f"Second derivatives are not symmetric: u^T H v and v^T H u differ by {symmetric:.1e} (relative).",
                "Look for hooks that change gradients, and for custom autograd.Functions with a backward pass that is "
                "not the derivative of the forward pass.",
            )
        # If `torch.func` gives another result, do not use it.
        self.by_func = self.by_func and not _differs(_on_a_few_data(partial(compare, True), batch), risk, batch)
        self._checked.append(frozenset(names))

    def _is_checked(self, names: Collection[str]) -> bool:
        """Return whether a set of parameters that contains all of these has passed the check."""
        return any(checked.issuperset(names) for checked in self._checked)


def _on_a_few_data(compare: Callable[[Batch], float], batch: Batch) -> float | None:
    """Compare results on the last examples of a batch, or on all of them if that fails.

    Returns:
        The relative difference; `None` if the results cannot be computed. A product that needs an impossible derivative
        raises its own error later.
    """
    num_data = len(batch.y)
    if num_data > _FEW and can_be_cut(batch.x, num_data, _FEW):
        last = range(num_data - _FEW, num_data)
        few = batch._replace(x=cut(batch.x, num_data, last), y=batch.y[-_FEW:], first=batch.first + last[0])
        try:
            return compare(few)
        except Exception:
            log.debug("Derivatives cannot be compared on %d examples; trying %d.", _FEW, num_data, exc_info=True)
    try:
        return compare(batch)
    except (NotImplementedError, RuntimeError, ModelError):
        log.debug("Derivatives cannot be compared.", exc_info=True)
        return None


def _signs(like: Columns, seed: int) -> Columns:
    """Return independent random signs with the shapes of the given tensors. The global random state is not changed."""
    device = next(iter(like.values())).device
    generator = torch.Generator(device).manual_seed(seed)
    draws = {name: torch.randint(2, t.shape, generator=generator, device=device) for name, t in like.items()}
    return {name: draws[name].mul_(2).sub_(1).to(t.dtype) for name, t in like.items()}


def _difference(u: Columns, Av: Columns, v: Columns, Bu: Columns) -> float:
    """Return the difference of `u^T (A v)` and `v^T (B u)` for random signs, relative to its size by chance."""
    (uAv, size_Av), (vBu, size_Bu) = _inner_and_size(u, Av), _inner_and_size(v, Bu)
    if not isfinite(size_Av + size_Bu):  # at a pole of the derivative, neither is finite
        return inf if isfinite(size_Av) or isfinite(size_Bu) else 0.0
    size = max(size_Av, size_Bu)
    return abs(uAv - vBu) / size if size > 0 else 0.0


def _inner_and_size(signs: Columns, products: Columns) -> tuple[float, float]:
    """Return the inner product of signs with products, and the norm of the products, its typical size by chance."""
    inner = [float((signs[name] * products[name]).sum(dtype=torch.float64)) for name in signs]
    squares = [float(products[name].square().sum(dtype=torch.float64)) for name in signs]
    return sum(inner), sum(squares) ** 0.5


def _differs(difference: float | None, risk: EmpiricalRisk, batch: Batch) -> bool:
    """Return whether a difference is too large to be round-off in the lowest precision that the model uses."""
    if difference is None or difference <= tolerance_for(risk.dtype, risk.device):
        return False
    # Run the model to collect its precisions only now, because most differences are small.
    precisions = Precisions()
    risk.predict(risk.params, batch, within=precisions)
    return difference > precisions.tolerance(risk.dtype, risk.device)


def enabled_kernels() -> list[SDPBackend]:
    """Return the attention kernels that are enabled in PyTorch."""
    return [kernel for kernel, is_enabled in _KERNELS.items() if is_enabled()]  # type: ignore[no-untyped-call]


def gradients_of_columns(
    outputs: list[Tensor], inputs: list[Tensor], columns: list[Tensor], keep_graph: bool = False
) -> list[Tensor | None]:
    """Compute vector-Jacobian products of several columns, batched if PyTorch can batch all operations of the graph.

    Returns:
        A tensor `[K, *input.shape]` for each input; `None` for inputs that the outputs do not depend on.
    """
    num_columns = len(columns[0])
    if num_columns > 1:
        try:
            return _gradients_together(outputs, inputs, columns)
        except RuntimeError:
            pass  # some operations cannot be batched; other errors are raised again below
    singles = [
        torch.autograd.grad(
            outputs, inputs, [c[k] for c in columns], allow_unused=True, retain_graph=keep_graph or k + 1 < num_columns
        )
        for k in range(num_columns)
    ]
    return [None if parts[0] is None else torch.stack(parts) for parts in zip(*singles, strict=True)]


def _gradients_together(outputs: list[Tensor], inputs: list[Tensor], columns: list[Tensor]) -> list[Tensor | None]:
    """Compute batched vector-Jacobian products, and keep the graph.

    `is_grads_batched=True` would give the same result, but runs some operations once per column, such as the backward
    passes of GELU and LayerNorm.
    """
    used: list[bool] = []

    def send_back(sent: list[Tensor]) -> list[Tensor]:
        gradients = torch.autograd.grad(outputs, inputs, sent, allow_unused=True, retain_graph=True)
        used[:] = [g is not None for g in gradients]
        return [g for g in gradients if g is not None]

    arrived = iter(vmap(send_back, randomness="same")(columns))
    return [next(arrived) if is_used else None for is_used in used]
