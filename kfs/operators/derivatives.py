r"""Derivatives of a batch's predictions: $J v$ and $J^\top u$, for many columns at once.

Columns are pushed forward by forward-mode differentiation, all of them together (`vmap`), and come back through the
graph of one forward pass. Operations without forward mode fall back to two backward passes, operations that `vmap` does
not know to one column after the other.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import jvp, vmap

from kfs.data import Batch
from kfs.errors import ModelError
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
        Predictions `[N, ...]`, connected to the leaves, and Jacobian products `[K, N, ...]`, detached.
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
    """Push columns forward with the predictions. One column needs no `vmap`."""
    num_columns = len(next(iter(columns.values())))
    still = {name: p for name, p in leaves.items() if name not in columns} | rest
    if num_columns == 1:
        # A checkpoint would run again after this level of differentiation has ended.
        with torch.autograd.graph.disable_saved_tensors_hooks("saves no tensors"), forward_ad.dual_level():
            moving = {name: forward_ad.make_dual(leaves[name], t[0]) for name, t in columns.items()}
            f, tangent = forward_ad.unpack_dual(risk.predict(moving | still, batch))
        return f, (torch.zeros_like(f) if tangent is None else tangent).detach().unsqueeze(0)

    def predict(params: Params) -> Tensor:
        return risk.predict(params | still, batch)

    moving = {name: leaves[name].detach() for name in columns}
    still = {name: p.detach() for name, p in still.items()}
    with torch.no_grad():  # recording the columns' graph costs more than a second forward pass for the predictions
        # Where random numbers are drawn, the risk makes sure that predictions do not depend on them.
        Jv: Tensor = vmap(lambda v: jvp(predict, (moving,), (v,))[1], randomness="same")(columns)
    return risk.predict(leaves | rest, batch), Jv


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


def gradients_of_columns(
    outputs: list[Tensor], inputs: list[Tensor], columns: list[Tensor], keep_graph: bool = False
) -> list[Tensor | None]:
    """Send columns back through a graph, together if PyTorch can: `[K, *input.shape]`, or `None` where not used."""
    num_columns = len(columns[0])
    if num_columns > 1:
        try:
            return list(
                torch.autograd.grad(
                    outputs, inputs, columns, allow_unused=True, is_grads_batched=True, retain_graph=True
                )
            )
        except RuntimeError:
            pass  # some operations cannot be batched; if something else is wrong, it shows again below
    singles = [
        torch.autograd.grad(
            outputs, inputs, [c[k] for c in columns], allow_unused=True, retain_graph=keep_graph or k + 1 < num_columns
        )
        for k in range(num_columns)
    ]
    return [None if parts[0] is None else torch.stack(parts) for parts in zip(*singles, strict=True)]
