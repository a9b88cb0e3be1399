r"""Curvature operators of an empirical risk: Hessian, GGN, Fisher and Jacobian.

The derivatives of one batch live in `kfs.operators.derivatives`.

Hessian, GGN and Fisher are sums over data, $R \sum_n (\dots)$. They are accumulated batch by batch, so that results do
not depend on how the data are split. GGN and Fisher have the form $R \sum_n J_n^\top M_n J_n$ (`Sandwich`). They differ
only in the small matrix $M_n$ in prediction space, which the loss provides. Products with the Hessian differentiate the
loss twice.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode

from kfs.distributed import Ranks, added_up
from kfs.errors import LossError, ModelError, ShapeError
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
from kfs.problem.risk import EmpiricalRisk, check_risk
from kfs.problem.torch_fixes import explained
from kfs.runtime.nested import tensors_in


def choose_chunk_size(risk: EmpiricalRisk, chunk_size: int | None, memory: int | None, reuse: bool = False) -> int:
    """Return how many columns to multiply at once.

    Args:
        risk: Model, loss and data.
        chunk_size: The user's choice. If not given, it is chosen by the kinds of layers in the model.
        memory: Upper bound on the bytes that the columns take, if given.
        reuse: Whether computation graphs are reused.

    Raises:
        ModelError: If `chunk_size` or `memory` is not a positive integer.
    """
    for name, value in {"chunk_size": chunk_size, "memory": memory}.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ModelError(f"{name} is {value!r}.", "Multiply at least one column at once.")
    if chunk_size is None:
        # On a CPU, several columns of a convolution do not fit into the cache.
        modules = risk.model.modules() if isinstance(risk.model, Module) and risk.device.type == "cpu" else ()
        groups = [module.groups for module in modules if isinstance(module, _ConvNd)]
        with_convolutions = 1 if reuse or any(number > 1 for number in groups) else 4
        chunk_size = with_convolutions if groups else 16
    return chunk_size if memory is None else max(1, min(chunk_size, memory // bytes_per_column(risk)))


def bytes_per_column(risk: EmpiricalRisk) -> int:
    """Estimate the bytes per column: all tensors of a forward pass on the largest batch, and two parameter copies."""
    counter = CountBytes()
    with risk.ranks.agreed("counting bytes"), risk.untouched(), torch.no_grad():
        largest = max(risk.batches("counting bytes"), key=lambda batch: batch.y.numel(), default=None)
        if largest is not None:
            with counter:
                risk.evaluate(largest)
    # All ranks must multiply the same number of columns at once, so the rank with the largest batch decides.
    activations = max(risk.ranks.gather("counting bytes", sum(counter.bytes.values())))
    return activations + 2 * sum(p.numel() * p.element_size() for p in risk.params.values())


class CountBytes(TorchDispatchMode):
    """Records the storage size of every tensor that an operation returns.

    Sizes are stored by memory address, so that views of one storage count once.
    """

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
    """Group parameter names into diagonal blocks; derivatives between different groups are dropped.

    Raises:
        ModelError: If `block_diagonal` is none of the options.
    """
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


# Upper bound on the numbers multiplied at once in prediction space. Losses make several temporary copies of them.
_NUMBERS_AT_ONCE = 2**24


class Curvature(LinearOperator):
    """A symmetric operator on a risk's parameters that is a sum over data.

    Args:
        risk: Model, loss, data and parameters.
        block_diagonal: Keep only the diagonal blocks: `"parameter"` (or `True`) for one block per parameter, `"layer"`
            for one block per module with parameters.
        chunk_size: Number of columns to multiply at once. More columns take more memory. The default is 16. For models
            with convolutions on a CPU the default is 4, because more columns do not fit into the cache. It is 1 if
            graphs are reused, or if a convolution has groups of channels: PyTorch computes grouped convolutions faster
            for one column at a time.
        memory: Approximate number of bytes that the columns may take. If it does not suffice, fewer columns are
            multiplied at once. A column takes at most the size of all tensors of a forward pass on the largest batch,
            plus twice the size of the parameters.

    Advanced:
        replay: Whether to record products as CUDA graphs if the model is on a GPU and products with the same number of
            columns are repeated; see `kfs.operators.recorded_products`. Products that cannot be recorded run eagerly,
            and the logger `kfs.operators` gives the reason.
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
        """Multiply the block of one batch's curvature with the columns and rows of the given parameters."""

    @abstractmethod
    def check_derivatives(self, batch: Batch, names: Collection[str]) -> None:
        """Check that all modes of differentiation give the same derivatives with respect to the given parameters.

        Raises:
            ModelError: If the derivatives contradict each other.
        """

    @property
    def _ranks(self) -> Ranks:
        return self.risk.ranks

    def multiply(self, columns: Columns) -> Columns:
        """Multiply columns by the operator, batch by batch and block by block."""
        return self.block(columns, list(self.codomain.shapes))

    def multiply_transposed(self, columns: Columns) -> Columns:
        """Multiply columns by the operator, which is symmetric."""
        return self.multiply(columns)

    def block(self, columns: Columns, rows: list[str]) -> Columns:
        """Multiply by the block with the columns of all parameters in `columns` and the rows of all names in `rows`."""
        wide, dtype = self.risk.sum_dtype, self.codomain.dtype
        task = type(self).__name__
        with self.risk.together(task, {**self._settings(), "rows": rows}, columns):
            self.risk.count()
            total = self._recorded.multiply(self, columns, rows, task)
            # Without a recording, run the product eagerly.
            if total is None:
                total = {}
                with self.running():
                    for batch in self.risk.batches(task):
                        self.check_derivatives(batch, {*columns, *rows})
                        for name, t in self.products(batch, columns, rows):
                            total[name] = total[name] + t if name in total else t.to(wide)  # not +=: may be shared
                self._recorded.note(columns, rows)
            # Rows that no block produced are zero. All ranks must have the same names before the sum over ranks.
            some = next(iter(columns.values()))
            for name in rows:
                if name not in total:
                    total[name] = some.new_zeros(len(some), *self.codomain.shapes[name], dtype=wide)
            total = added_up(self.risk.ranks, task, {name: total[name] for name in rows})
        return {name: t.to(dtype) for name, t in total.items()}

    def _settings(self) -> dict[str, object]:
        """Return the settings that must be the same on all ranks. `chunk_size` and `reuse` only affect memory."""
        return {name: getattr(self, name) for name in self.shown if name not in {"chunk_size", "reuse"}}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return a context in which the model runs with gradients enabled and its state is restored afterwards."""
        with self.risk.untouched(), torch.enable_grad(), explained():
            yield

    def products(self, batch: Batch, columns: Columns, rows: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Multiply by the curvature of one batch, block by block, and yield `(row name, product)` pairs."""
        for names in self.blocks:
            # A sharded model may compute in another dtype than the dtype of its parameters.
            inside = {name: columns[name].to(self.risk.dtype) for name in names if name in columns}
            wanted = [name for name in names if name in rows]
            if inside and wanted:
                yield from self.product(batch, inside, wanted).items()

    def _block_of(self, rows: Collection[str], columns: Collection[str]) -> LinearOperator:
        """Return the block with the given rows and columns; its products compute nothing else."""
        return CurvatureBlock(self, rows, columns)


class CurvatureBlock(Submatrix):
    """A block of a curvature operator. Its products do not compute any other block."""

    base: Curvature

    def multiply(self, columns: Columns) -> Columns:
        """Multiply columns by the block."""
        return self.base.block(columns, list(self.codomain.shapes))

    def multiply_transposed(self, columns: Columns) -> Columns:
        """Multiply columns by the transposed block, the mirrored block of the symmetric operator."""
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
        """Multiply by the Hessian of one batch by differentiating its gradient."""
        leaves, rest = leaves_and_rest(self.risk, {*columns, *rows})
        return second_derivatives(self.risk, batch, leaves, rest, rows, columns, self._one_derivative.by_func)

    def check_derivatives(self, batch: Batch, names: Collection[str]) -> None:
        """Check that second derivatives are symmetric.

        Raises:
            ModelError: If they are not.
        """
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
        # Reused autograd graphs keep tensors from one product to the next, so such products are not recorded.
        super().__init__(risk, block_diagonal=block_diagonal, chunk_size=chunk_size, replay=replay and not reuse)
        self.reuse = reuse
        self._kept: dict[int, tuple[Linearization, list[Tensor]]] = {}
        self._kernels = enabled_kernels()

    @abstractmethod
    def middle(self, f: Tensor, batch: Batch, u: Tensor) -> Tensor:
        """Multiply vectors `[K, *f.shape]` by every example's matrix in prediction space."""

    @abstractmethod
    def factor(self, f: Tensor, batch: Batch) -> Tensor:
        """Return a factor `[K, *f.shape]`: the sum of outer products over `K` is every example's matrix."""

    def product(self, batch: Batch, columns: Columns, rows: list[str]) -> Columns:
        """Multiply by `J`, then by the matrix in prediction space, then by `J^T`."""
        if self.reuse and len(next(iter(columns.values()))) == 1:  # several columns are faster in forward mode
            linearization = self._linearization(batch)
            Jv = linearization.push_forward(columns)
            # Reverse-over-reverse mode can hit a pole of a second derivative where forward mode has none.
            if has_pole(Jv, columns):
                leaves, rest = leaves_and_rest(self.risk, columns)
                _, Jv = push_forward(self.risk, batch, leaves, rest, columns, self._one_derivative.forward_mode)
            return linearization.pull_back(self._in_prediction_space(linearization.f, batch, Jv), rows)
        leaves, rest = leaves_and_rest(self.risk, {*columns, *rows})
        f, Jv = push_forward(self.risk, batch, leaves, rest, columns, self._one_derivative.forward_mode)
        u = self._in_prediction_space(f, batch, Jv)
        del Jv  # predictions for many classes may be larger than all other tensors
        if f.requires_grad:
            return pull_back(f, {name: leaves[name] for name in rows}, u)
        del f
        return pull_back_through_model(self.risk, batch, leaves, rest, rows, u, self._kernels)

    def check_derivatives(self, batch: Batch, names: Collection[str]) -> None:
        """Check first derivatives, and decide whether forward mode may be used.

        Raises:
            ModelError: If first derivatives are inconsistent even without forward mode.
        """
        self._one_derivative.check_first(self.risk, batch, names)

    def block(self, columns: Columns, rows: list[str]) -> Columns:
        """Multiply columns by a block; see `Curvature.block`."""
        self._kernels = enabled_kernels()  # read the user's choice now: the risk enables other kernels below
        return super().block(columns, rows)

    def _in_prediction_space(self, f: Tensor, batch: Batch, Jv: Tensor) -> Tensor:
        """Multiply `[K, *f.shape]` by every example's matrix and the reduction factor, a few examples at a time."""
        f = f.detach()
        R = self.risk.reduction_factor  # cheapest to scale in prediction space
        # Split along the example axis if one product would need too much memory.
        at_once = max(_NUMBERS_AT_ONCE * len(f) // max(Jv.numel(), 1), 1)
        if at_once >= len(f):
            return R * self.middle(f, batch, Jv)
        u: Tensor | None = None
        for start in range(0, len(f), at_once):
            some = slice(start, start + at_once)
            part = R * self.middle(f[some], _with_targets(batch, some), Jv[:, some])
            u = part.new_empty(Jv.shape) if u is None else u
            u[:, some] = part
        assert u is not None  # noqa: S101 (there is an example)
        return u

    def _linearization(self, batch: Batch) -> Linearization:
        """Return the cached computation graph of a batch; rebuild it if data, parameters or buffers have changed."""
        now = _inputs_of(self.risk, batch)
        if batch.first in self._kept:
            linearization, before = self._kept[batch.first]
            if len(now) == len(before) and all(map(torch.equal, now, before)):
                return linearization
        linearization = Linearization(self.risk, batch, self.risk.leaves(), {})
        self._kept[batch.first] = linearization, [t.clone() for t in now]
        return linearization

    def diagonal(self) -> Tensor:
        """Return the exact diagonal as a flat vector, the sum of squared per-example gradients."""
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
                    # Send back one example at a time: squares must be taken before the sum over examples.
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
        reuse: Keep the computation graph of every batch after the first product with one column. Later products, as in
            `solve` and `eigenvalues`, then need no forward pass, but all activations stay in memory. Changes of
            parameters, buffers and data tensors are detected. If anything else that the model reads changes (an
            attribute, a closure, an object in the data), create a new operator.
        block_diagonal: As in `Curvature`.
        chunk_size: As in `Curvature`.
        memory: As in `Curvature`.

    Advanced:
        replay: As in `Curvature`. It has no effect with `reuse`.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(10, 3), torch.rand(10, 2)))
        >>> torch.allclose(GGN(risk).to_dense(), Hessian(risk).to_dense())  # the model is linear
        True
    """

    def middle(self, f: Tensor, batch: Batch, u: Tensor) -> Tensor:
        """Multiply by the Hessian of the criterion with respect to predictions."""
        return self.risk.loss.hessian_product(f, batch.y, u)

    def factor(self, f: Tensor, batch: Batch) -> Tensor:
        """Return a factor of the Hessian of the criterion with respect to predictions."""
        return self.risk.loss.hessian_factor(f, batch.y)


class Fisher(Sandwich):
    """The Fisher information matrix, times the number of examples and the reduction factor.

    Args:
        risk: Model, loss, data and parameters.
        kind: `"type-2"` for the exact matrix, `"mc"` (also called `"type-1"`) for a Monte Carlo estimate with labels
            drawn from the model's likelihood, `"empirical"` for the labels in the data. With `"mc"`, the labels are the
            same as in `kfs.KFAC(risk, fisher="mc")` with the same seed.
        mc_samples: Number of labels drawn per example for `"mc"`.
        seed: Seed for drawing labels. Equal seeds give equal labels, however the data are split into batches.
        reuse: As in `GGN`.
        block_diagonal: As in `Curvature`.
        chunk_size: As in `Curvature`.
        memory: As in `Curvature`.

    Advanced:
        replay: As in `Curvature`. It has no effect with `reuse`.
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
        """Multiply by the Fisher in prediction space, or by the sum of outer products of gradients."""
        if self.kind == "type-2":
            return self.risk.loss.fisher_product(f, batch.y, u)
        result = torch.zeros_like(u)
        for g in self.factor(f, batch):
            inner = (g * u).reshape(len(u), len(f), -1).sum(2)
            result += inner.reshape(*inner.shape, *[1] * (f.ndim - 1)) * g
        return result

    def factor(self, f: Tensor, batch: Batch) -> Tensor:
        """Return a factor of the matrix: gradients for given or sampled labels, or an exact factor for `"type-2"`."""
        loss = self.risk.loss
        if self.kind == "type-2":
            return loss.fisher_factor(f, batch.y)
        if self.kind == "empirical":
            return loss.gradient(f, batch.y).unsqueeze(0)
        draws = [Draws(self.seed, batch.start, sample) for sample in range(self.mc_samples)]
        gradients = torch.stack([loss.sampled_gradient(f, batch.y, d) for d in draws])
        return gradients.div(self.mc_samples**0.5)


def _with_targets(batch: Batch, some: slice) -> Batch:
    """Return a batch with a slice of the targets, and no inputs."""
    recorded = None if batch.recorded is None else batch.recorded + some.start
    return Batch(None, batch.y[some], batch.first + some.start, recorded=recorded)


def parameter_space(risk: EmpiricalRisk) -> Space:
    """Return the space of a risk's parameters."""
    check_risk(risk)
    own = {name: (p.dtype, p.device) for name, p in risk.params.items()}
    return Space({name: p.shape for name, p in risk.params.items()}, risk.dtype, risk.device, own)


def _inputs_of(risk: EmpiricalRisk, batch: Batch) -> list[Tensor]:
    """Return the tensors that the predictions for a batch depend on: parameters, buffers, inputs and targets."""
    model = [*risk.model.parameters(), *risk.model.buffers()] if isinstance(risk.model, Module) else []
    return [*risk.params.values(), *(t for t in model if not t.is_meta), *tensors_in(batch.x), batch.y]


PREDICTION = "prediction"


class Jacobian(LinearOperator):
    """The Jacobian of the predictions for all data, `[N, ...]` flattened by rows, with respect to the parameters.

    Args:
        risk: Model, data and parameters. The loss is not used.
        chunk_size: Number of columns to multiply at once, with the same default as in `Curvature`.
        memory: Approximate number of bytes that the columns may take, as in `Curvature`.

    Example:
        >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(10, 3), torch.rand(10, 2)))
        >>> J = Jacobian(risk)
        >>> J.shape, (J.T @ torch.ones(20)).shape
        ((20, 8), torch.Size([8]))
    """

    shown = ("chunk_size",)

    def __init__(self, risk: EmpiricalRisk, *, chunk_size: int | None = None, memory: int | None = None) -> None:
        """Evaluate the model on one batch to determine the shape of predictions."""
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
        """Multiply columns by the Jacobian, batch by batch."""
        some = next(iter(columns.values()))
        all_data = some.new_zeros(len(some), *self.codomain.shapes[PREDICTION])
        with self.risk.together("Jacobian", vectors=columns):
            with self.risk.untouched(), torch.enable_grad(), explained():
                leaves, rest = leaves_and_rest(self.risk, columns)
                # A sharded model may compute in another dtype than the dtype of its parameters.
                columns = {name: t.to(self.risk.dtype) for name, t in columns.items()}
                for batch in self.risk.batches("Jacobian"):
                    self._one_derivative.check_first(self.risk, batch, leaves)
                    f, Jv = push_forward(self.risk, batch, leaves, rest, columns, self._one_derivative.forward_mode)
                    self._check_shape(f)
                    all_data[:, batch.first : batch.first + len(f)] = Jv
            # Each rank fills in the rows of its own examples; all other rows are zero.
            return added_up(self.risk.ranks, "Jacobian", {PREDICTION: all_data})

    def multiply_transposed(self, columns: Columns) -> Columns:
        """Multiply columns by the transposed Jacobian, batch by batch."""
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
        """Raise `ShapeError` if the shape of predictions differs from that of the first batch."""
        expected = self.codomain.shapes[PREDICTION][1:]
        if f.shape[1:] != expected:
            raise ShapeError(
                f"Predictions have shape {list(f.shape[1:])} per example in one batch, {list(expected)} in the first.",
                "Pad the data such that all predictions have one shape.",
            )
