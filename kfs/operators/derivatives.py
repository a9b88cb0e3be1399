r"""Derivatives of a batch: $J v$ and $J^\top u$ of its predictions, second ones of its risk, for many columns at once.

Columns are pushed forward by forward-mode differentiation, all of them together (`vmap`), without recording a graph.
They come back through the graph of another forward pass. That takes no longer than recording the first one, where
columns would be recorded, too, and less memory. Operations without forward mode fall back to two backward passes,
operations that `vmap` does not know to one column after the other.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from kfs.data import Batch
from kfs.errors import ModelError
from kfs.exact_derivatives import RefuseMissedErrors
from kfs.operators.space import Columns
from kfs.parameters import Params
from kfs.risk import EmpiricalRisk

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
_ONE_BY_ONE = ("vmap", "functorch", "mutate a captured Tensor")
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
    risk: EmpiricalRisk, batch: Batch, leaves: Params, rest: Params, columns: Columns
) -> tuple[Tensor, Tensor]:
    """Evaluate the model and multiply columns with its Jacobian.

    Args:
        risk: Says what the model is.
        batch: The data.
        leaves: Parameters to differentiate with respect to.
        rest: The other parameters.
        columns: Tensors `[K, *shape]` for some of the leaves; the others do not move.

    Returns:
        Predictions `[N, ...]`, and Jacobian products `[K, N, ...]`, detached. Predictions are connected to the leaves
        only if that was needed; see `pull_back_through_model`.
    """
    num_columns = len(next(iter(columns.values())))
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
    values = {name: p.detach() for name, p in (leaves | rest).items()}
    moving = {name: values[name] for name in columns}
    if len(next(iter(columns.values()))) == 1:
        try:
            with torch.no_grad():
                f, Jv = _one_column(risk, batch, values, columns)
                return f.detach(), Jv
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
        # The model itself differentiates. A checkpoint would run again after this level of differentiation has ended.
        with torch.autograd.graph.disable_saved_tensors_hooks("saves no tensors"):
            return _one_column(risk, batch, leaves | rest, columns)

    def predict(params: Params) -> Tensor:
        return risk.predict(values | params, batch)

    with torch.no_grad():
        # Where random numbers are drawn, the risk makes sure that predictions do not depend on them.
        together = vmap(lambda v: jvp(predict, (moving,), (v,))[:2], randomness="same")
        copies, Jv = together(columns)
    return copies[0].detach(), Jv


def _one_column(risk: EmpiricalRisk, batch: Batch, params: Params, columns: Columns) -> tuple[Tensor, Tensor]:
    """Push a single column forward with the predictions."""
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(params[name], t[0]) for name, t in columns.items()}
        f, tangent = forward_ad.unpack_dual(risk.predict(params | duals, batch))
    return f, (torch.zeros_like(f) if tangent is None else tangent).detach().unsqueeze(0)


def _double_backward(
    risk: EmpiricalRisk, batch: Batch, leaves: Params, rest: Params, columns: Columns
) -> tuple[Tensor, Tensor]:
    """Multiply by differentiating the backward pass."""
    linearization = Linearization(risk, batch, leaves, rest)
    return linearization.f, linearization.push_forward(columns)


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
    risk: EmpiricalRisk, batch: Batch, leaves: Params, rest: Params, rows: list[str], columns: Columns
) -> Columns:
    """Multiply columns with second derivatives of a batch's risk, by differentiating its gradient.

    Args:
        risk: Says what model and loss are.
        batch: The data.
        leaves: Parameters that may be differentiated with respect to.
        rest: The other parameters.
        rows: Names of the leaves that a result is wanted for.
        columns: Tensors `[K, *shape]` for some of the leaves.

    Returns:
        Tensors `[K, *shape]` for all rows.
    """
    num_columns = len(next(iter(columns.values())))
    if num_columns > 1:
        try:
            return _second_derivatives_together(risk, batch, leaves, rest, rows, columns)
        except RuntimeError:
            pass  # as in `pull_back_through_model`
    f = risk.predict(leaves | rest, batch)
    risk.finite(f.detach(), batch)
    c = _criterion(risk, batch, f)
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
    risk: EmpiricalRisk, batch: Batch, leaves: Params, rest: Params, rows: list[str], columns: Columns
) -> Columns:
    """Differentiate the gradient by `torch.func`, for the reason that `_pull_back_together` gives."""
    values = {name: p.detach() for name, p in (leaves | rest).items()}

    def gradient(at_rows: Params) -> tuple[Params, Tensor]:
        point = values | at_rows

        def value(at_columns: Params) -> tuple[Tensor, Tensor]:
            with RefuseMissedErrors():
                f = risk.predict(point | at_columns, batch)
                return _criterion(risk, batch, f), f

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
