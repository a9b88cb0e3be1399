r"""Derivatives of a batch: $J v$ and $J^\top u$ of its predictions, second ones of its risk, for many columns at once.

Columns are pushed forward by forward-mode differentiation, all of them together (`vmap`), without recording a graph.
They come back through the graph of another forward pass. That takes no longer than recording the first one, where
columns would be recorded, too, and less memory. Operations without forward mode fall back to two backward passes,
operations that `vmap` does not know to one column after the other.
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
from torch.overrides import TorchFunctionMode

from kfs.errors import ModelError
from kfs.operators.space import Columns
from kfs.problem.data import Batch, can_be_cut, cut
from kfs.problem.parameters import Params
from kfs.problem.risk import EmpiricalRisk
from kfs.problem.torch_fixes import RefuseMissedErrors, StopsForwardMode
from kfs.runtime.nested import tensors_in
from kfs.runtime.precision import tolerance_for

log = logging.getLogger("kfs.operators")
# On how many examples modes of differentiation are compared.
_FEW = 4
# What PyTorch's messages contain where an operation, or a custom autograd.Function, has no forward mode.
_NO_FORWARD_MODE = (
    "forward AD",
    "forward mode AD",
    "forward-mode AD",
    "setup_context",
    "saves no tensors",
    "from the 'Sparse",
    "Sparse CSR",
)
# What they contain where several columns cannot be pushed forward together.
_ONE_BY_ONE = ("vmap", "functorch", "mutate a captured Tensor", "doesn't have storage")
# How to ask PyTorch which kernels for attention may be used.
_KERNELS = {
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
}


def leaves_and_rest(risk: EmpiricalRisk, names: Iterable[str]) -> tuple[Params, Params]:
    """Return leaves of a new graph for some parameters, and the values of the others.

    The others require gradients if the model's own do: a checkpoint runs the module again with its own parameters, and
    must save as many tensors as before.
    """
    chosen = set(names)
    leaves = {name: p.detach().requires_grad_() for name, p in risk.params.items() if name in chosen}
    rest = {n: p.detach().requires_grad_(p.requires_grad) for n, p in risk.params.items() if n not in chosen}
    return leaves, rest


def push_forward(
    risk: EmpiricalRisk, batch: Batch, leaves: Params, rest: Params, columns: Columns, forward_mode: bool = True
) -> tuple[Tensor, Tensor]:
    """Evaluate the model and multiply columns with its Jacobian.

    Args:
        risk: Says what the model is.
        batch: The data.
        leaves: Parameters to differentiate with respect to.
        rest: The other parameters.
        columns: Tensors `[K, *shape]` for some of the leaves; the others do not move.
        forward_mode: Whether to try forward mode; see `OneDerivative`.

    Returns:
        Predictions `[N, ...]`, and Jacobian products `[K, N, ...]`, detached. Predictions are connected to the leaves
        only if that was needed; see `pull_back_through_model`.
    """
    num_columns = len(next(iter(columns.values())))
    if not forward_mode:
        return _double_backward(risk, batch, leaves, rest, columns)
    try:
        f, Jv = _forward_mode(risk, batch, leaves, rest, columns)
    except (NotImplementedError, RuntimeError) as error:
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
    """Push columns forward with the predictions, without a graph if possible. One column needs no `vmap`."""
    # Gradients are on, so that one sees where the model switches them off. Nothing requires any: no graph is recorded.
    others = risk.model.named_parameters() if isinstance(risk.model, Module) else ()
    values = {name: p.detach() for name, p in others if p.requires_grad and name not in risk.params}
    values |= {name: p.detach() for name, p in (leaves | rest).items()}
    moving = {name: values[name] for name in columns}
    if len(next(iter(columns.values()))) == 1:
        try:
            f, Jv = _one_column(risk, batch, values, columns)
            return f.detach(), Jv
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
        # The model itself differentiates. A checkpoint would run again after this level of differentiation has ended.
        with torch.autograd.graph.disable_saved_tensors_hooks("saves no tensors"):
            return _one_column(risk, batch, leaves | rest, columns)

    def predict(params: Params) -> Tensor:
        return risk.predict(values | params, batch, within=StopsForwardMode())

    # Where random numbers are drawn, the risk makes sure that predictions do not depend on them.
    together = vmap(lambda v: jvp(predict, (moving,), (v,))[:2], randomness="same")
    copies, Jv = together(columns)
    return copies[0].detach(), Jv.detach()


def _one_column(risk: EmpiricalRisk, batch: Batch, params: Params, columns: Columns) -> tuple[Tensor, Tensor]:
    """Push a single column forward with the predictions."""
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(params[name], t[0]) for name, t in columns.items()}
        f, tangent = forward_ad.unpack_dual(risk.predict(params | duals, batch, within=StopsForwardMode()))
    return f, (torch.zeros_like(f) if tangent is None else tangent).detach().unsqueeze(0)


def _double_backward(
    risk: EmpiricalRisk, batch: Batch, leaves: Params, rest: Params, columns: Columns
) -> tuple[Tensor, Tensor]:
    """Multiply by differentiating the backward pass.

    Raises:
        ModelError: If the backward pass has no finite derivative.
    """
    linearization = Linearization(risk, batch, leaves, rest)
    Jv = linearization.push_forward(columns)
    if has_pole(Jv, columns):
        raise ModelError(
            "The model's backward pass has no finite derivative at these parameters and data (a second derivative has "
            "a pole, as that of a standard deviation of equal values), and forward mode cannot be used instead.",
            "Give custom autograd.Functions a jvp, remove hooks that change gradients, or change what has the pole.",
        )
    return linearization.f, Jv


def has_pole(Jv: Tensor, columns: Columns) -> bool:
    """Whether products of finite columns are not finite."""
    return not bool(Jv.isfinite().all()) and all(bool(t.isfinite().all()) for t in columns.values())


class Linearization:
    """A batch's predictions with the graphs to multiply with their Jacobian and its transpose, as often as wanted.

    The backward pass from predictions to parameters is linear in what is sent back. Differentiating it multiplies with
    the Jacobian (Townsend, 2017), so that no further forward pass is needed. Both graphs stay in memory.

    Args:
        risk: Says what the model is.
        batch: The data.
        leaves: Parameters to differentiate with respect to.
        rest: The other parameters.

    Raises:
        ModelError: If a backward pass does not depend on what is sent back, as far as PyTorch knows.
    """

    def __init__(self, risk: EmpiricalRisk, batch: Batch, leaves: Params, rest: Params) -> None:
        """Run one forward pass, and one backward pass that can be differentiated."""
        self.leaves = leaves
        self.f = risk.predict(leaves | rest, batch)
        risk.finite(self.f.detach(), batch)
        self._arrived: dict[str, Tensor | None] = {}
        if not self.f.requires_grad:
            return
        self._sent_back = torch.ones_like(self.f, requires_grad=True)  # some backward passes have a pole at zero
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
        """Multiply columns for some of the leaves with the Jacobian: `[K, N, ...]`."""
        used = [(g, columns[name]) for name, g in self._arrived.items() if name in columns and g is not None]
        used = [(g, t) for g, t in used if g.requires_grad]
        if not used:
            num_columns = len(next(iter(columns.values())))
            return torch.zeros(num_columns, *self.f.shape, dtype=self.f.dtype, device=self.f.device)
        (Jv,) = gradients_of_columns([g for g, _ in used], [self._sent_back], [t for _, t in used], keep_graph=True)
        assert Jv is not None  # noqa: S101 (what arrived was sent back)
        return Jv

    def pull_back(self, u: Tensor, names: Iterable[str]) -> Columns:
        """Multiply columns `[K, N, ...]` with the transposed Jacobian, for some of the leaves."""
        return pull_back(self.f, {name: self.leaves[name] for name in names}, u, keep_graph=True)


def pull_back(f: Tensor, leaves: Params, u: Tensor, keep_graph: bool = False) -> Columns:
    """Multiply columns `[K, *f.shape]` with the transposed Jacobian, for all leaves: `[K, *shape]` each."""
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
    """Multiply columns with the transposed Jacobian, through the graph of a new forward pass.

    Args:
        risk: Says what the model is.
        batch: The data.
        leaves: Parameters that may be differentiated with respect to.
        rest: The other parameters.
        rows: Names of the leaves to differentiate with respect to.
        u: The columns, `[K, N, ...]`.
        kernels: Kernels for attention that may be used. The faster ones keep no matrix of all pairs of positions. They
            cannot be differentiated twice, nor for several columns together; for one column, that is not needed.
    """
    if len(u) > 1:
        try:
            return _pull_back_together(risk, batch, leaves, rest, rows, u)
        except RuntimeError:
            pass  # not for torch.func, such as a checkpoint; if something else is wrong, it shows again below
    # A checkpoint runs the model again in the backward pass, with the same kernels.
    with sdpa_kernel(kernels) if len(u) == 1 else nullcontext():
        return pull_back(risk.predict(leaves | rest, batch), {name: leaves[name] for name in rows}, u)


def _pull_back_together(
    risk: EmpiricalRisk, batch: Batch, leaves: Params, rest: Params, rows: list[str], u: Tensor
) -> Columns:
    """Multiply columns with the transposed Jacobian, through a graph of `torch.func`.

    Activations in such a graph do not require gradients by themselves. If they do, PyTorch multiplies all columns of an
    activation's gradient together, and copies them for that.
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
    """Multiply columns with second derivatives of a batch's risk, by differentiating its gradient.

    Args:
        risk: Says what model and loss are.
        batch: The data.
        leaves: Parameters that may be differentiated with respect to.
        rest: The other parameters.
        rows: Names of the leaves that a result is wanted for.
        columns: Tensors `[K, *shape]` for some of the leaves.
        by_func: Whether to try `torch.func` for several columns; see `OneDerivative`.
        criterion: What of predictions to differentiate, if not the batch's part of the risk.

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
    used = [(g, t) for g, t in zip(gradient, columns.values(), strict=True) if g is not None and g.requires_grad]
    if not used:
        return zeros
    second = gradients_of_columns([g for g, _ in used], [leaves[name] for name in rows], [t for _, t in used])
    _refuse_error_nodes([g for g, _ in used])  # those that were reached have raised an error of their own
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
    """Differentiate the gradient by `torch.func`, for the reason that `_pull_back_together` gives."""
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
    """Refuse a graph in which PyTorch has put an error instead of a derivative.

    Such a node has no way back to the parameters, so that nothing would be sent through it, and no error raised.
    """
    waiting = [g.grad_fn for g in gradients]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith("Error"):
            raise ModelError(
                "The backward pass of an operation cannot be differentiated (a custom autograd.Function that is marked "
                "as once_differentiable?).",
                "Write its backward pass with differentiable operations, and without the mark.",
            )
        waiting += [before for before, _ in node.next_functions]


def _criterion(risk: EmpiricalRisk, batch: Batch, f: Tensor) -> Tensor:
    """Return a batch's part of the risk."""
    c: Tensor = risk.reduction_factor * risk.loss.criterion(f, batch.y).sum()
    return c


class OneDerivative:
    r"""Makes sure that a model has one derivative in every mode of differentiation, before an operator multiplies.

    For random signs $u$ and $v$, and a few examples, $u^\top (J v)$ has to equal $v^\top (J^\top u)$. Otherwise forward
    mode is wrong, or a hook changes gradients on their way back. Then columns are pushed forward by differentiating the
    backward pass, so that $J$ is the transpose of what the backward pass computes, as it is for custom functions
    without forward mode. Second derivatives have no other mode, and must be symmetric.

    Attributes:
        forward_mode: Whether forward mode may be used.
        by_func: Whether `torch.func` may differentiate twice.
    """

    def __init__(self) -> None:
        """Take it for granted until the first product."""
        self.forward_mode = self.by_func = True
        self._checked: list[frozenset[str]] = []  # choices of parameters

    def check_first(self, risk: EmpiricalRisk, batch: Batch, names: Collection[str]) -> None:
        """Compare `J v` with `J^T u` for some parameters, unless that was done before.

        Raises:
            ModelError: If they do not fit together in any mode.
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
        backward = _on_a_few_data(partial(compare, False), batch)
        if backward is None or _differs(backward, risk, batch):
            raise ModelError(
                "The model's derivative is not the same in all modes of differentiation: u^T (J v) and v^T (J^T u) "
                f"differ by {forward:.1e} of their size in forward mode, and "
                + ("two backward passes are not possible." if backward is None else f"by {backward:.1e} without it."),
                "Look for hooks that change gradients, and for custom autograd.Functions whose backward pass is not "
                "linear in the gradient, or does not fit to jvp.",
            )
        log.info("Forward mode is not used: it differs from the model's backward pass by %.1e.", forward)
        self.forward_mode = False
        self._checked.append(frozenset(names))

    def check_second(self, risk: EmpiricalRisk, batch: Batch, names: Collection[str]) -> None:
        """Compare `u^T (H v)` with `v^T (H u)` for some parameters, unless that was done before.

        Of predictions, a quadratic function is differentiated: second derivatives of a loss may vanish.

        Raises:
            ModelError: If they differ.
        """
        if self._is_checked(names):
            return
        rows = list(names)

        def quadratic(f: Tensor) -> Tensor:
            return (f * _signs({"f": f.detach()}, seed=2)["f"]).sum() + f.square().sum() / 2

        def compare(by_func: bool, part: Batch) -> float:
            leaves, rest = leaves_and_rest(risk, names)
            v, u = (_signs({name: p.unsqueeze(0) for name, p in leaves.items()}, seed) for seed in (0, 1))
            Hv = second_derivatives(risk, part, leaves, rest, rows, v, criterion=quadratic)
            if not by_func:
                return _difference(u, Hv, v, second_derivatives(risk, part, leaves, rest, rows, u, criterion=quadratic))
            both = {name: torch.cat([v[name], u[name]]) for name in v}
            HV = second_derivatives(risk, part, leaves, rest, rows, both, criterion=quadratic)
            return _difference(u, Hv, u, {name: t[:1] for name, t in HV.items()})

        symmetric = _on_a_few_data(partial(compare, False), batch)
        if _differs(symmetric, risk, batch):
            raise ModelError(
                f"Second derivatives are not symmetric: u^T H v and v^T H u differ by {symmetric:.1e} of their size.",
                "Look for hooks that change gradients, and for custom autograd.Functions whose backward pass is not "
                "the derivative of the forward pass.",
            )
        self.by_func = self.by_func and not _differs(_on_a_few_data(partial(compare, True), batch), risk, batch)
        self._checked.append(frozenset(names))

    def _is_checked(self, names: Collection[str]) -> bool:
        """Whether derivatives with respect to some parameters, and perhaps others, have passed the check."""
        return any(checked.issuperset(names) for checked in self._checked)


def _on_a_few_data(compare: Callable[[Batch], float], batch: Batch) -> float | None:
    """Compare results for the last data of a batch, or all if that fails; `None` if there are no results to compare.

    Whoever needs what cannot be differentiated gets an error of its own.
    """
    num_data = len(batch.y)
    if num_data > _FEW and can_be_cut(batch.x, num_data, _FEW):
        last = range(num_data - _FEW, num_data)
        few = batch._replace(x=cut(batch.x, num_data, last), y=batch.y[-_FEW:], first=batch.first + last[0])
        try:
            return compare(few)
        except Exception:
            log.debug("Derivatives for %d data cannot be compared; now for %d.", _FEW, num_data, exc_info=True)
    try:
        return compare(batch)
    except (NotImplementedError, RuntimeError, ModelError):
        log.debug("Derivatives cannot be compared.", exc_info=True)
        return None


def _signs(like: Columns, seed: int) -> Columns:
    """Return independent random signs in the shapes of tensors. The global random state is not touched."""
    device = next(iter(like.values())).device
    generator = torch.Generator(device).manual_seed(seed)
    draws = {name: torch.randint(2, t.shape, generator=generator, device=device) for name, t in like.items()}
    return {name: draws[name].mul_(2).sub_(1).to(t.dtype) for name, t in like.items()}


def _difference(u: Columns, Av: Columns, v: Columns, Bu: Columns) -> float:
    """Return how much `u^T (A v)` and `v^T (B u)` differ, for signs, relative to what they are by chance."""
    (uAv, size_Av), (vBu, size_Bu) = _inner_and_size(u, Av), _inner_and_size(v, Bu)
    if not isfinite(size_Av + size_Bu):  # at a pole of the derivative, neither is finite
        return inf if isfinite(size_Av) or isfinite(size_Bu) else 0.0
    size = max(size_Av, size_Bu)
    return abs(uAv - vBu) / size if size > 0 else 0.0


def _inner_and_size(signs: Columns, products: Columns) -> tuple[float, float]:
    """Return the inner product of signs with products, and the norm of the latter: the size of a random inner one."""
    inner = [float((signs[name] * products[name]).sum(dtype=torch.float64)) for name in signs]
    squares = [float(products[name].square().sum(dtype=torch.float64)) for name in signs]
    return sum(inner), sum(squares) ** 0.5


class _Precisions(TorchFunctionMode):
    """Collects dtypes of results."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self.found |= {t.dtype for t in tensors_in(result) if t.is_floating_point()}
        return result


def _differs(difference: float | None, risk: EmpiricalRisk, batch: Batch) -> bool:
    """Whether a difference is larger than what rounding explains, in the coarsest precision within the model."""
    if difference is None or difference <= tolerance_for(risk.dtype, risk.device):
        return False
    precisions = _Precisions()
    risk.predict(risk.params, batch, within=precisions)
    return difference > max(tolerance_for(dtype, risk.device) for dtype in precisions.found | {risk.dtype})


def enabled_kernels() -> list[SDPBackend]:
    """Return the kernels for attention that the user allows."""
    return [kernel for kernel, is_enabled in _KERNELS.items() if is_enabled()]  # type: ignore[no-untyped-call]


def gradients_of_columns(
    outputs: list[Tensor], inputs: list[Tensor], columns: list[Tensor], keep_graph: bool = False
) -> list[Tensor | None]:
    """Send columns back through a graph, together if PyTorch can: `[K, *input.shape]`, or `None` where not used."""
    num_columns = len(columns[0])
    if num_columns > 1:
        try:
            return _gradients_together(outputs, inputs, columns)
        except RuntimeError:
            pass  # some operations cannot be batched; if something else is wrong, it shows again below
    singles = [
        torch.autograd.grad(
            outputs, inputs, [c[k] for c in columns], allow_unused=True, retain_graph=keep_graph or k + 1 < num_columns
        )
        for k in range(num_columns)
    ]
    return [None if parts[0] is None else torch.stack(parts) for parts in zip(*singles, strict=True)]


def _gradients_together(outputs: list[Tensor], inputs: list[Tensor], columns: list[Tensor]) -> list[Tensor | None]:
    """Send all columns back at once, and keep the graph.

    `is_grads_batched=True` would do so, too, but runs operations such as the backward passes of GELU and LayerNorm once
    for every column.
    """
    used: list[bool] = []

    def send_back(sent: list[Tensor]) -> list[Tensor]:
        gradients = torch.autograd.grad(outputs, inputs, sent, allow_unused=True, retain_graph=True)
        used[:] = [g is not None for g in gradients]
        return [g for g in gradients if g is not None]

    arrived = iter(vmap(send_back, randomness="same")(columns))
    return [next(arrived) if is_used else None for is_used in used]
