"""Curvature operators of an empirical risk: Hessian, GGN, Fisher and Jacobian.

The derivatives of one batch live in `kfs.operators.derivatives`.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode

from kfs.distributed import Ranks, added_up
from kfs.errors import DtypeError, LossError, ModelError, ShapeError
from kfs.losses.draws import Draws
from kfs.operators.derivatives import (
    Linearization,
    OneDerivative,
    enabled_kernels,
    has_pole,
    leaves_and_rest,
    pull_back,
    pull_back_through_model,
    push_forward,
    second_derivatives,
)
from kfs.operators.linear_operator import LinearOperator, Submatrix
from kfs.operators.recorded_products import RecordedProducts
from kfs.operators.space import Columns, Space
from kfs.problem.data import Batch
from kfs.problem.risk import EmpiricalRisk
from kfs.problem.torch_fixes import explained
from kfs.runtime.nested import tensors_in


def check_risk(risk: object) -> None:
    """Refuse what is no risk.

    Raises:
        DtypeError: If it is something else, such as a model.
    """
    if isinstance(risk, EmpiricalRisk):
        return
    way_out = "Pass kfs.EmpiricalRisk(model, loss, data)."
    if isinstance(risk, nn.Module):
        way_out += " The optimizer, which takes a model and its loss, is kfs.optim.KFAC."
    raise DtypeError(f"The risk is a {type(risk).__name__}.", way_out)


def choose_chunk_size(risk: EmpiricalRisk, chunk_size: int | None, memory: int | None, reuse: bool = False) -> int:
    """Return how many columns to multiply at once: what the user says, or what is fast for the model and fits."""
    for name, value in {"chunk_size": chunk_size, "memory": memory}.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ModelError(f"{name} is {value!r}.", "Multiply at least one column at once.")
    if chunk_size is None:
        modules = risk.model.modules() if isinstance(risk.model, Module) and risk.device.type == "cpu" else ()
        groups = [module.groups for module in modules if isinstance(module, _ConvNd)]
        with_convolutions = 1 if reuse or any(number > 1 for number in groups) else 4
        chunk_size = with_convolutions if groups else 16
    return chunk_size if memory is None else max(1, min(chunk_size, memory // bytes_per_column(risk)))


def bytes_per_column(risk: EmpiricalRisk) -> int:
    """Estimate what a column takes: all that a forward pass makes for the largest batch, and the parameters twice."""
    made = CountBytes()
    with risk.ranks.agreed("counting bytes"), risk.untouched(), torch.no_grad():
        largest = max(risk.batches("counting bytes"), key=lambda batch: batch.y.numel(), default=None)
        if largest is not None:
            with made:
                risk.evaluate(largest)
    # All processes multiply as many columns at once.
    activations = max(risk.ranks.gather("counting bytes", sum(made.bytes.values())))
    return activations + 2 * sum(p.numel() * p.element_size() for p in risk.params.values())


class CountBytes(TorchDispatchMode):
    """Collects the sizes of all tensors that are made, by their addresses: views do not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in tensors_in(result):
            self.bytes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return result


Blocks = bool | Literal["parameter", "layer"]


def diagonal_blocks(names: list[str], block_diagonal: Blocks) -> list[list[str]]:
    """Group the parameters whose mutual derivatives are kept."""
    if block_diagonal is False:
        return [names]
    if block_diagonal is True or block_diagonal == "parameter":
        return [[name] for name in names]
    if block_diagonal == "layer":
        layers: dict[str, list[str]] = {}
        for name in names:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
        return list(layers.values())
    raise ModelError(
        f"block_diagonal is {block_diagonal!r}.", "Choose False, 'parameter' (the same as True) or 'layer'."
    )


# In prediction space, so many numbers are multiplied at once: losses make several copies of them.
_NUMBERS_AT_ONCE = 2**24


class Curvature(LinearOperator):
    """A symmetric operator on a risk's parameters that is a sum over data.

    Args:
        risk: Model, loss, data and parameters.
        block_diagonal: Keep only the diagonal blocks: `"parameter"` (or `True`) for one block per parameter, `"layer"`
            for one block per module with parameters.
        chunk_size: How many columns are multiplied at once; more take more memory. By default 16. For models with
            convolutions on a CPU it is 4, since more do not fit into the cache, and 1 if graphs are reused, or if there
            are groups of channels, which PyTorch runs slower together than one after the other.
        memory: About how many bytes the columns may take; fewer columns are multiplied at once where it does not
            suffice. A column takes at most as much as all that a forward pass makes for the largest batch, and the
            parameters twice.

    Advanced:
        replay: Whether products are recorded as CUDA graphs, if the model is on a GPU and products with as many columns
            come again; see `kfs.operators.recorded_products`. Those that cannot be recorded run as they are; the logger
            `kfs.operators` says so.
    """

    symmetric = True
    shown: ClassVar[tuple[str, ...]] = ("block_diagonal", "chunk_size")

    def __init__(
        self,
        risk: EmpiricalRisk,
        *,
        block_diagonal: Blocks = False,
        chunk_size: int | None = None,
        memory: int | None = None,
        replay: bool = True,
    ) -> None:
        space = parameter_space(risk)
        super().__init__(space, space)
        with risk.ranks.agreed(type(self).__name__):
            self.risk, self.chunk_size = risk, choose_chunk_size(risk, chunk_size, memory)
            self.blocks = diagonal_blocks(list(risk.params), block_diagonal)
            self.block_diagonal = block_diagonal
            self._recorded = RecordedProducts(replay)
            self._one_derivative = OneDerivative()

    @abstractmethod
    def product(self, batch: Batch, columns: Columns, rows: list[str]) -> Columns:
        """Multiply a batch's block with some parameters' columns and rows."""

    @abstractmethod
    def check_derivatives(self, batch: Batch, names: Collection[str]) -> None:
        """Refuse a model whose derivatives with respect to some parameters contradict each other."""

    @property
    def _ranks(self) -> Ranks:
        return self.risk.ranks

    def multiply(self, columns: Columns) -> Columns:
        """Multiply, batch by batch and block by block."""
        return self.block(columns, list(self.codomain.shapes))

    def multiply_transposed(self, columns: Columns) -> Columns:
        """Multiply: the operator is symmetric."""
        return self.multiply(columns)

    def block(self, columns: Columns, rows: list[str]) -> Columns:
        """Multiply the block that has some parameters' columns (those given) and some parameters' rows."""
        wide, dtype = self.risk.sum_dtype, self.codomain.dtype
        task = type(self).__name__
        with self.risk.together(task, {**self._settings(), "rows": rows}, columns):
            self.risk.count()
            total = self._recorded.multiply(self, columns, rows, task)
            if total is None:
                total = {}
                with self.running():
                    for batch in self.risk.batches(task):
                        self.check_derivatives(batch, {*columns, *rows})
                        for name, t in self.products(batch, columns, rows):
                            total[name] = total[name] + t if name in total else t.to(wide)  # may be shared: not +=
                self._recorded.note(columns, rows)
            some = next(iter(columns.values()))
            for name in rows:
                if name not in total:
                    total[name] = some.new_zeros(len(some), *self.codomain.shapes[name], dtype=wide)
            total = added_up(self.risk.ranks, task, {name: total[name] for name in rows})
        return {name: t.to(dtype) for name, t in total.items()}

    def _settings(self) -> dict[str, object]:
        """Return what must be the same in all processes. They may take the memory that they have."""
        return {name: getattr(self, name) for name in self.shown if name not in {"chunk_size", "reuse"}}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the model run in this context, and leave nothing behind."""
        with self.risk.untouched(), torch.enable_grad(), explained():
            yield

    def products(self, batch: Batch, columns: Columns, rows: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Multiply a batch's matrix, block by block, and yield names of rows with their products."""
        for names in self.blocks:
            # A sharded model may compute in another precision than its parameters have.
            inside = {name: columns[name].to(self.risk.dtype) for name in names if name in columns}
            wanted = [name for name in names if name in rows]
            if inside and wanted:
                yield from self.product(batch, inside, wanted).items()

    def _block_of(self, rows: Collection[str], columns: Collection[str]) -> LinearOperator:
        """Return the block with some parameters' rows and columns; nothing else is computed."""
        return CurvatureBlock(self, rows, columns)


class CurvatureBlock(Submatrix):
    """A block of a curvature operator, computed without the rest."""

    base: Curvature

    def multiply(self, columns: Columns) -> Columns:
        """Multiply the block."""
        return self.base.block(columns, list(self.codomain.shapes))

    def multiply_transposed(self, columns: Columns) -> Columns:
        """Multiply the block on the other side of the diagonal."""
        return self.base.block(columns, list(self.domain.shapes))


class Hessian(Curvature):
    """The Hessian of the risk: all second derivatives.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(10, 3), torch.rand(10, 2)))
        >>> H = Hessian(risk)
        >>> H.shape, (H @ torch.ones(8)).shape, (H @ risk.gradient())["bias"].shape
        ((8, 8), torch.Size([8]), torch.Size([2]))
    """

    def product(self, batch: Batch, columns: Columns, rows: list[str]) -> Columns:
        """Differentiate the gradient."""
        leaves, rest = leaves_and_rest(self.risk, {*columns, *rows})
        return second_derivatives(self.risk, batch, leaves, rest, rows, columns, self._one_derivative.by_func)

    def check_derivatives(self, batch: Batch, names: Collection[str]) -> None:
        """Refuse second derivatives that are not symmetric."""
        self._one_derivative.check_second(self.risk, batch, names)


class Sandwich(Curvature):
    """A curvature operator of the form `R sum_n J_n^T M_n J_n`; arguments as in `GGN`."""

    shown: ClassVar[tuple[str, ...]] = ("block_diagonal", "chunk_size", "reuse")

    def __init__(
        self,
        risk: EmpiricalRisk,
        *,
        reuse: bool = False,
        block_diagonal: Blocks = False,
        chunk_size: int | None = None,
        memory: int | None = None,
        replay: bool = True,
    ) -> None:
        check_risk(risk)
        with risk.ranks.agreed(type(self).__name__):
            chunk_size = choose_chunk_size(risk, chunk_size, memory, reuse)
        # Whoever reuses graphs of autograd keeps tensors of one product for the next one.
        super().__init__(risk, block_diagonal=block_diagonal, chunk_size=chunk_size, replay=replay and not reuse)
        self.reuse = reuse
        self._kept: dict[int, tuple[Linearization, list[Tensor]]] = {}
        self._kernels = enabled_kernels()

    @abstractmethod
    def middle(self, f: Tensor, batch: Batch, u: Tensor) -> Tensor:
        """Multiply `[K, *f.shape]` with every example's matrix in prediction space."""

    @abstractmethod
    def factor(self, f: Tensor, batch: Batch) -> Tensor:
        """Return columns `[K, *f.shape]` whose outer products sum up to every example's matrix in prediction space."""

    def product(self, batch: Batch, columns: Columns, rows: list[str]) -> Columns:
        """Push forward, multiply in prediction space, pull back."""
        if self.reuse and len(next(iter(columns.values()))) == 1:  # several columns are faster in forward mode
            linearization = self._linearization(batch)
            Jv = linearization.push_forward(columns)
            if has_pole(Jv, columns):  # of a second derivative, which the backward pass that is differentiated has
                leaves, rest = leaves_and_rest(self.risk, columns)
                _, Jv = push_forward(self.risk, batch, leaves, rest, columns, self._one_derivative.forward_mode)
            return linearization.pull_back(self._in_prediction_space(linearization.f, batch, Jv), rows)
        leaves, rest = leaves_and_rest(self.risk, {*columns, *rows})
        f, Jv = push_forward(self.risk, batch, leaves, rest, columns, self._one_derivative.forward_mode)
        u = self._in_prediction_space(f, batch, Jv)
        del Jv  # predictions for many classes may be larger than all else
        if f.requires_grad:
            return pull_back(f, {name: leaves[name] for name in rows}, u)
        del f
        return pull_back_through_model(self.risk, batch, leaves, rest, rows, u, self._kernels)

    def check_derivatives(self, batch: Batch, names: Collection[str]) -> None:
        """Find out whether forward mode may be used, and refuse first derivatives that are wrong without it, too."""
        self._one_derivative.check_first(self.risk, batch, names)

    def block(self, columns: Columns, rows: list[str]) -> Columns:
        """Multiply a block; see `Curvature`."""
        self._kernels = enabled_kernels()  # the risk is about to choose others
        return super().block(columns, rows)

    def _in_prediction_space(self, f: Tensor, batch: Batch, Jv: Tensor) -> Tensor:
        """Multiply `[K, *f.shape]` with every example's matrix and the reduction factor, a few examples at a time."""
        f = f.detach()
        R = self.risk.reduction_factor  # cheapest to scale in prediction space
        at_once = max(_NUMBERS_AT_ONCE * len(f) // max(Jv.numel(), 1), 1)
        if at_once >= len(f):
            return R * self.middle(f, batch, Jv)
        u: Tensor | None = None
        for start in range(0, len(f), at_once):
            some = slice(start, start + at_once)
            part = R * self.middle(f[some], _part_of(batch, some), Jv[:, some])
            u = part.new_empty(Jv.shape) if u is None else u
            u[:, some] = part
        assert u is not None  # noqa: S101 (there is an example)
        return u

    def _linearization(self, batch: Batch) -> Linearization:
        """Return the batch's graphs; new ones if the data, or any parameter or buffer, have changed in the meantime."""
        now = _inputs_of(self.risk, batch)
        if batch.first in self._kept:
            linearization, before = self._kept[batch.first]
            if len(now) == len(before) and all(map(torch.equal, now, before)):
                return linearization
        linearization = Linearization(self.risk, batch, self.risk.leaves(), {})
        self._kept[batch.first] = linearization, [t.clone() for t in now]
        return linearization

    def diagonal(self) -> Tensor:
        """Compute the diagonal exactly, as a flat vector: sums of squared gradients, one example at a time."""
        wide = self.risk.sum_dtype
        task = f"{type(self).__name__} diagonal"
        with self.risk.together(task, self._settings()):
            with self.running():
                leaves = self.risk.leaves()
                total = {name: torch.zeros_like(p, dtype=wide) for name, p in leaves.items()}
                for batch in self.risk.batches(task):
                    f = self.risk.predict(leaves, batch)
                    self.risk.finite(f.detach(), batch)
                    S = self.factor(f.detach(), batch)
                    for n in range(len(f)):
                        for start in range(0, len(S), self.chunk_size):
                            u = torch.zeros_like(S[start : start + self.chunk_size])
                            u[:, n] = S[start : start + self.chunk_size, n]
                            for name, g in pull_back(f, leaves, u, keep_graph=True).items():
                                total[name] += (g.to(wide) ** 2).sum(0)
            total = added_up(self.risk.ranks, task, total)
        flat = self.domain.flatten({name: t.unsqueeze(0) for name, t in total.items()})
        return (self.risk.reduction_factor * flat.squeeze(0)).to(self.domain.dtype)


class GGN(Sandwich):
    """The generalized Gauss-Newton matrix: the Hessian of the risk of the linearized model.

    Args:
        risk: Model, loss, data and parameters.
        reuse: Keep every batch's computation graph after the first product with one column. Later ones, as in `solve`
            and `eigenvalues`, then need no forward pass, at the price of the memory for all activations. Changed
            parameters, buffers and data tensors are noticed; if anything else that the model looks at changes (an
            attribute, a closure, an object in the data), make a new operator.
        block_diagonal: As in `Curvature`.
        chunk_size: As in `Curvature`.
        memory: As in `Curvature`.

    Advanced:
        replay: As in `Curvature`; without `reuse`.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(10, 3), torch.rand(10, 2)))
        >>> torch.allclose(GGN(risk).to_dense(), Hessian(risk).to_dense())  # the model is linear
        True
    """

    def middle(self, f: Tensor, batch: Batch, u: Tensor) -> Tensor:
        """Multiply with the criterion's Hessian."""
        return self.risk.loss.hessian_product(f, batch.y, u)

    def factor(self, f: Tensor, batch: Batch) -> Tensor:
        """Return the factor of the criterion's Hessian."""
        return self.risk.loss.hessian_factor(f, batch.y)


class Fisher(Sandwich):
    """The Fisher information matrix, times the number of examples and the reduction factor.

    Args:
        risk: Model, loss, data and parameters.
        kind: `"type-2"` for the exact matrix, `"mc"` (also called `"type-1"`) for a Monte Carlo estimate with labels
            drawn from the model's likelihood, `"empirical"` for the labels at hand. With `"mc"`, labels are those that
            `kfs.KFAC(risk, fisher="mc")` draws for the same seed.
        mc_samples: Draws per example for `"mc"`.
        seed: Equal seeds give equal draws, however the data are split into batches.
        reuse: As in `GGN`.
        block_diagonal: As in `Curvature`.
        chunk_size: As in `Curvature`.
        memory: As in `Curvature`.

    Advanced:
        replay: As in `Curvature`; without `reuse`.
    """

    shown = ("kind", "mc_samples", "seed", "block_diagonal", "chunk_size", "reuse")

    def __init__(
        self,
        risk: EmpiricalRisk,
        kind: Literal["type-2", "mc", "type-1", "empirical"] = "type-2",
        *,
        mc_samples: int = 1,
        seed: int = 0,
        reuse: bool = False,
        block_diagonal: Blocks = False,
        chunk_size: int | None = None,
        memory: int | None = None,
        replay: bool = True,
    ) -> None:
        check_risk(risk)
        with risk.ranks.agreed("Fisher"):
            super().__init__(
                risk, reuse=reuse, block_diagonal=block_diagonal, chunk_size=chunk_size, memory=memory, replay=replay
            )
            if kind not in {"type-2", "mc", "type-1", "empirical"}:
                raise LossError(
                    f"kind is {kind!r}.",
                    "Choose 'type-2' (exact), 'mc' (Monte Carlo; also called 'type-1') or 'empirical'; for 'ggn', use "
                    "GGN, and for 'forward-only', KFAC.",
                )
            if not isinstance(mc_samples, int) or mc_samples < 1 or not isinstance(seed, int) or not 0 <= seed < 2**64:
                raise LossError(
                    f"mc_samples is {mc_samples!r} and seed is {seed!r}.",
                    "Use integers: at least one sample, and a seed from 0 to 2**64 - 1.",
                )
            self.kind, self.mc_samples, self.seed = kind, mc_samples, seed

    def middle(self, f: Tensor, batch: Batch, u: Tensor) -> Tensor:
        """Multiply with the prediction-space Fisher, or with an outer product of gradients."""
        if self.kind == "type-2":
            return self.risk.loss.fisher_product(f, batch.y, u)
        result = torch.zeros_like(u)
        for g in self.factor(f, batch):
            inner = (g * u).reshape(len(u), len(f), -1).sum(2)
            result += inner.reshape(*inner.shape, *[1] * (f.ndim - 1)) * g
        return result

    def factor(self, f: Tensor, batch: Batch) -> Tensor:
        """Return the gradients whose outer products make the matrix, or an exact factor."""
        loss = self.risk.loss
        if self.kind == "type-2":
            return loss.fisher_factor(f, batch.y)
        if self.kind == "empirical":
            return loss.gradient(f, batch.y).unsqueeze(0)
        draws = [Draws(self.seed, batch.start, sample) for sample in range(self.mc_samples)]
        gradients = torch.stack([loss.sampled_gradient(f, batch.y, d) for d in draws])
        return gradients.div(self.mc_samples**0.5)


def _part_of(batch: Batch, some: slice) -> Batch:
    """Return the targets of some data of a batch."""
    recorded = None if batch.recorded is None else batch.recorded + some.start
    return Batch(None, batch.y[some], batch.first + some.start, recorded=recorded)


def parameter_space(risk: EmpiricalRisk) -> Space:
    """Return the space of a risk's parameters."""
    check_risk(risk)
    return Space({name: p.shape for name, p in risk.params.items()}, risk.dtype, risk.device)


def _inputs_of(risk: EmpiricalRisk, batch: Batch) -> list[Tensor]:
    """Return everything that the predictions for a batch depend on: parameters, buffers and data."""
    model = [*risk.model.parameters(), *risk.model.buffers()] if isinstance(risk.model, Module) else []
    return [*risk.params.values(), *model, *tensors_in(batch.x), batch.y]


PREDICTION = "prediction"


class Jacobian(LinearOperator):
    """The Jacobian of the predictions for all data, `[N, ...]` flattened by rows, with respect to the parameters.

    Args:
        risk: Model, data and parameters; of the loss nothing is used.
        chunk_size: How many columns are multiplied at once; by default as in `Curvature`.
        memory: About how many bytes the columns may take, as in `Curvature`.

    Example:
        >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(10, 3), torch.rand(10, 2)))
        >>> J = Jacobian(risk)
        >>> J.shape, (J.T @ torch.ones(20)).shape
        ((20, 8), torch.Size([8]))
    """

    shown = ("chunk_size",)

    def __init__(self, risk: EmpiricalRisk, *, chunk_size: int | None = None, memory: int | None = None) -> None:
        """Evaluate the model on one batch, to learn the predictions' shape."""
        domain = parameter_space(risk)
        with risk.together("Jacobian"):
            chunk_size = choose_chunk_size(risk, chunk_size, memory)
            risk.count()
            with risk.untouched(), torch.no_grad():
                batch = next(iter(risk.batches()), None)
                own = None if batch is None else risk.evaluate(batch).shape[1:]
            shape = next(one for one in risk.ranks.gather("shapes", own) if one is not None)
        super().__init__(domain, Space({PREDICTION: (risk.num_data, *shape)}, risk.dtype, risk.device))
        self.risk, self.chunk_size = risk, chunk_size
        self._one_derivative = OneDerivative()

    @property
    def _ranks(self) -> Ranks:
        return self.risk.ranks

    def multiply(self, columns: Columns) -> Columns:
        """Push columns forward, batch by batch."""
        some = next(iter(columns.values()))
        all_data = some.new_zeros(len(some), *self.codomain.shapes[PREDICTION])
        with self.risk.together("Jacobian", vectors=columns):
            with self.risk.untouched(), torch.enable_grad(), explained():
                leaves, rest = leaves_and_rest(self.risk, columns)
                # A sharded model may compute in another precision than its parameters have.
                columns = {name: t.to(self.risk.dtype) for name, t in columns.items()}
                for batch in self.risk.batches("Jacobian"):
                    self._one_derivative.check_first(self.risk, batch, leaves)
                    f, Jv = push_forward(self.risk, batch, leaves, rest, columns, self._one_derivative.forward_mode)
                    self._check_shape(f)
                    all_data[:, batch.first : batch.first + len(f)] = Jv
            # Each process has zeros where others have data.
            return added_up(self.risk.ranks, "Jacobian", {PREDICTION: all_data})

    def multiply_transposed(self, columns: Columns) -> Columns:
        """Pull columns back, batch by batch."""
        u = columns[PREDICTION]
        wide = self.risk.sum_dtype
        total = {name: u.new_zeros(len(u), *shape, dtype=wide) for name, shape in self.domain.shapes.items()}
        with self.risk.together("Jacobian.T", vectors=columns):
            with self.risk.untouched(), torch.enable_grad(), explained():
                leaves, rest = leaves_and_rest(self.risk, total)
                for batch in self.risk.batches("Jacobian.T"):
                    self._one_derivative.check_first(self.risk, batch, leaves)
                    f = self.risk.predict(leaves | rest, batch)
                    self.risk.finite(f.detach(), batch)
                    self._check_shape(f)
                    part = u[:, batch.first : batch.first + len(f)].to(f.dtype)
                    for name, t in pull_back(f, leaves, part).items():
                        total[name] += t
            total = added_up(self.risk.ranks, "Jacobian.T", total)
        return {name: t.to(self.domain.dtype) for name, t in total.items()}

    def _check_shape(self, f: Tensor) -> None:
        """Refuse batches whose predictions have another shape than those of the first batch."""
        expected = self.codomain.shapes[PREDICTION][1:]
        if f.shape[1:] != expected:
            raise ShapeError(
                f"Predictions have shape {list(f.shape[1:])} per example in one batch, {list(expected)} in the first.",
                "Pad the data such that all predictions have one shape.",
            )
