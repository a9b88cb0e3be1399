"""A curvature backend for laplace-torch: `Laplace(model, "classification", backend=kfs.laplace.Backend)`.

This library's own Laplace approximation lives in `kfs.laplace.posterior`. The backend alone needs laplace-torch.

laplace-torch requests the curvature of one batch after the other, and adds the results. Its `Kron` holds one Kronecker
product for each parameter: one factor for rows, one for all other axes.

A pass over data needs a trace with plans, and an audit, which are valid for more than one batch. So `ByBatch` runs a
single pass. It gets a batch from `SingleBatchSource` on each request, and leaves the sums of this batch. Between two
batches, nothing in the model is changed.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from kfs.errors import ModelError
from kfs.factors.accumulate import FactorSums, reset
from kfs.factors.block import Block
from kfs.factors.checkpoint import Progress
from kfs.factors.compute import Passes, backpropagated_vectors, coverage_error, not_covered
from kfs.factors.per_example import BlockGradients, GradientBatch, per_datum_columns
from kfs.factors.settings import Fisher, Settings
from kfs.problem.risk import EmpiricalRisk


class SingleBatchSource:
    """Iterable data with a single batch, which the owner replaces before every `next`."""

    def __init__(self) -> None:
        self.batch: tuple[Any, Tensor] | None = None

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        """Yield the current batch, without end."""
        while True:
            assert self.batch is not None  # noqa: S101 (set before the first `next`)
            yield self.batch


class ByBatch(ABC):
    """Base class for quantities that are computed batch by batch within one pass over the data.

    Args:
        model: The model.
        loss: A loss module.
        names: Names of the parameters to consider.
        settings: Settings of the curvature.

    Attributes:
        names: Names of the considered parameters.
        settings: Settings of the curvature.
    """

    def __init__(self, model: nn.Module, loss: nn.Module, names: Sequence[str], settings: Settings) -> None:
        self._source = SingleBatchSource()
        self._risk = EmpiricalRisk(model, loss, self._source, names, progress=False)
        self.settings = settings
        self.names = names
        self._pass: Iterator[Any] | None = None
        self._predictions: Tensor | None = None  # predictions for the last batch, until `loss` is called

    def __getstate__(self) -> dict[str, Any]:
        """Copy without the pass, which is a generator. A copy starts a new pass."""
        return self.__dict__ | {"_pass": None, "_predictions": None}

    def loss(self, loss: nn.Module, y: Tensor) -> Tensor:
        """Return the loss of the last batch from the predictions of its pass. Call this once per batch."""
        f, self._predictions = self._predictions, None
        with torch.no_grad():
            value: Tensor = loss(f, y)
        return value

    def _keep_predictions(self, f: Tensor) -> None:
        self._predictions = f

    @abstractmethod
    def _begin(self) -> Iterator[Any]:
        """Return a new pass over the batches of the source."""

    def _next(self, x: Any, y: Tensor) -> Any:
        """Run the pass for one batch, and return the item that it yields."""
        if self._pass is None:
            self._pass = self._begin()
        # A tuple of inputs is the tuple of the model's arguments, so that `x` may have any type.
        self._source.batch = ((x,), y)
        try:
            with torch.enable_grad():
                return next(self._pass)
        except BaseException:
            self._pass = None  # an exception ends a generator
            raise

    def reduction_factor(self, y: Tensor) -> float:
        """Return the factor of the loss in front of the sum over a batch."""
        return self._risk.loss.reduction_factor(len(y))


class FactorsByBatch(ByBatch):
    """Computes the sums of Kronecker factors for each batch."""

    def __getstate__(self) -> dict[str, Any]:
        """Copy without the pass, its sums and its progress."""
        return {name: value for name, value in super().__getstate__().items() if name not in {"_sums", "_progress"}}

    def _begin(self) -> Iterator[Any]:
        """Return a pass that accumulates sums."""
        self._sums = FactorSums(self.settings)
        self._progress = Progress()
        passes = Passes(self._risk, self._sums, self.settings, self._progress, seen=self._keep_predictions)
        return passes.over(self._risk.batches("factors"), pausing=True)

    def blocks(self, x: Any, y: Tensor) -> dict[str, Block]:
        """Return the blocks of one batch by name, after a check of coverage. The next call overwrites their sums."""
        if self._pass is not None:
            reset(self._sums)
        self._next(x, y)
        found = list(self._sums.blocks.values())
        bad = not_covered(self.names, found, self._progress.unexplained, self._sums.conflicts)
        if bad:
            raise coverage_error(bad)
        self._sums.complete()
        return {sums.layout.name: Block(sums, self.reduction_factor(y)) for sums in found}


class ColumnsByBatch(ByBatch):
    """Computes per-example gradients of each batch. The sum of their outer products is the curvature."""

    _num_seen = 0  # number of examples so far, so that every example has its own random labels

    def _begin(self) -> Iterator[Any]:
        """Return a pass that yields gradients."""

        def vectors(f: Tensor, y: Tensor) -> Iterable[Tensor]:
            self._keep_predictions(f)
            return backpropagated_vectors(self._risk.loss, f, y, self.settings, self._num_seen, 1)

        return per_datum_columns(self._risk, vectors, uncovered="autograd")

    def columns(self, x: Any, y: Tensor) -> list[GradientBatch]:
        """Return the gradients of one batch, as a list over columns of the factor in prediction space."""
        found: list[GradientBatch] = self._next(x, y)
        self._num_seen += len(y)
        return found


_WAY_OUT = "Use kfs.laplace.posterior(kfs.KFAC(risk), risk, prior_precision), which needs no laplace-torch."


class BackendMethods:
    """The interface of a laplace-torch backend, with this library's curvature.

    The class is combined with `laplace.curvature.GGNInterface`, which provides Jacobians and the constructor. Factors
    are computed from the exact Fisher, or from sampled labels with
    `backend_kwargs={"stochastic": True, "num_samples": 1}`.
    """

    # Attributes that GGNInterface sets.
    model: nn.Module
    lossfunc: nn.Module
    factor: float
    params: list[nn.Parameter]
    params_dict: dict[str, nn.Parameter]
    last_layer: bool
    subnetwork_indices: Tensor | None
    stochastic: bool
    num_samples: int
    _factors: FactorsByBatch | None = None
    _gradients: ColumnsByBatch | None = None

    def kron(self, x: Any, y: Tensor, N: int, **settings: Any) -> tuple[Tensor, Any]:
        """Return the loss of a batch, and its Kronecker factors.

        Args:
            x: Inputs.
            y: Targets.
            N: Number of examples in all batches.
            **settings: Settings of `kfs.KFAC`, such as `sharing`, from `asdl_fisher_kwargs` of laplace-torch.

        Raises:
            ModelError: If a parameter is not covered, or its curvature is not one Kronecker product.
        """
        fisher: Fisher = "mc" if self.stochastic else "type-2"
        chosen = Settings(fisher=fisher, mc_samples=self.num_samples, joint_bias=False, replay=False, **settings)
        if self._factors is None or self._factors.settings != chosen:
            self._factors = FactorsByBatch(self.model, self.lossfunc, self._names(), chosen)
        blocks = self._factors.blocks(x, y)
        factors = [_kron_factors(name, blocks, len(y), self.factor, N) for name in self._factors.names]
        return self._loss(self._factors, y), import_module("laplace.utils").Kron(factors)

    def diag(self, x: Any, y: Tensor, **ignored: Any) -> tuple[Tensor, Tensor]:
        """Return the loss of a batch, and the diagonal of its GGN, exact or estimated with sampled labels."""
        gradients, columns, scale = self._columns(x, y)
        first = next(iter(columns[0].blocks.values()))
        total = {
            name: torch.zeros(1, *shape, dtype=first.dtype, device=first.device)
            for name, shape in columns[0].shapes.items()
        }
        for name, block in columns[0].blocks.items():
            block.layout.write(_sum_of_squares([column.blocks[name] for column in columns]), total)
        flat = torch.cat([t.flatten() for t in total.values()])
        return self._loss(gradients, y), self._chosen(scale * flat).to(self.params[0].dtype)

    def full(self, x: Any, y: Tensor, **ignored: Any) -> tuple[Tensor, Tensor]:
        """Return the loss of a batch, and its dense GGN, exact or estimated with sampled labels."""
        gradients, columns, scale = self._columns(x, y)
        total: Tensor | None = None
        for column in columns:
            J = self._chosen(torch.cat([t.flatten(1) for t in column.tensors().values()], 1))
            total = J.T @ J if total is None else total.addmm_(J.T, J)
        assert total is not None  # noqa: S101 (predictions have at least one number)
        return self._loss(gradients, y), (scale * total).to(self.params[0].dtype)

    def _names(self) -> list[str]:
        """Return the names of the requested parameters, in the order of `params`."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        return [names[id(p)] for p in self.params]

    def _columns(self, x: Any, y: Tensor) -> tuple[ColumnsByBatch, list[GradientBatch], float]:
        """Return the cached pass, the gradients of a batch by column, and the factor of their outer products."""
        settings = Settings(fisher="mc" if self.stochastic else "type-2", mc_samples=self.num_samples)
        if self._gradients is None or self._gradients.settings != settings:
            self._gradients = ColumnsByBatch(self.model, self.lossfunc, self._names(), settings)
        # `factor` is one half for the square loss, which laplace-torch divides by two.
        scale = self.factor * self._gradients.reduction_factor(y)
        return self._gradients, self._gradients.columns(x, y), scale

    def _chosen(self, t: Tensor) -> Tensor:
        """Select the parameters of the subnetwork on the last axis; without a subnetwork, return `t`."""
        return t if self.subnetwork_indices is None else t[..., self.subnetwork_indices]

    def _loss(self, seen: ByBatch, y: Tensor) -> Tensor:
        """Return the negative log-likelihood of the last batch, for noise with unit variance."""
        return self.factor * seen.loss(self.lossfunc, y)


def _sum_of_squares(columns: Sequence[BlockGradients]) -> Tensor:
    """Sum squared gradients over columns and examples, `[1, groups, d_B, d_A]`."""
    first = columns[0]
    if len(first.uses) == 1 and first.whole is None and first.shared == 1:
        # The square of an outer product is the outer product of squares, and all columns have the same inputs.
        x = first.parts[0].x.dense().squeeze(2).square()
        g = sum(column.parts[0].g.dense().squeeze(2).square() for column in columns)
        assert isinstance(g, Tensor)  # noqa: S101 (there are columns)
        return (g.transpose(1, 2) @ x).unsqueeze(0)
    total = first.dense().square().sum(0, keepdim=True)
    for column in columns[1:]:
        total += column.dense().square().sum(0, keepdim=True)
    return total


def _kron_factors(
    name: str, blocks: Mapping[str, Block], num_data: int, factor: float, num_all_data: int
) -> list[Tensor]:
    """Return the factors of a parameter in the format of laplace-torch's `Kron`: for rows, and for all other axes.

    `Kron` adds the factors of all batches. Therefore the first factor is a sum over examples, and the second factor is
    divided by the number of examples in all batches. laplace-torch multiplies the loss by `factor`.

    Raises:
        ModelError: If the curvature of the parameter is not a single Kronecker product of this kind.
    """
    block = blocks.get(name)
    if block is None:
        raise ModelError(f"Rows of {name!r} have Kronecker products of their own, but Kron stores only one.", _WAY_OUT)
    layout = block.layout
    if layout.groups > 1:
        raise ModelError(
            f"{name!r} has {layout.groups} groups of channels, each with a Kronecker product of its own, but Kron "
            "stores only one.",
            _WAY_OUT,
        )
    # `A` is a sum over examples, and `B` an average. Multiply scalars first, because the factors may be large.
    A, B = (_dense(block.sums.side_total("A")), _dense(block.sums.side_total("B")))
    scale_A = block.scale("A")
    scale_B = factor * block.scale("B")
    axes = len(layout.shape)
    # A bias or another vector has a single factor.
    if axes == 1:
        return [A * (scale_A * scale_B * B)]
    if layout.split == 1 and layout.order == tuple(range(axes)):
        return [num_data * scale_B * B, scale_A / num_all_data * A]
    if axes == 2:  # a transposed weight, as in embeddings and in Conv1D of transformers
        return [scale_A * A, num_data * scale_B / num_all_data * B]
    raise ModelError(
        f"{name!r} has a Kronecker product with sides that are not its rows and its other axes, as Kron needs.",
        _WAY_OUT,
    )


def _dense(total: Tensor) -> Tensor:
    """Return a factor with a single group as a matrix."""
    return torch.diag(total[0]) if total.ndim == 2 else total[0]


def make_backend() -> type:
    """Create the class for the argument `backend=` of laplace-torch, which must be installed."""
    try:
        interface = import_module("laplace.curvature").GGNInterface
    except ModuleNotFoundError as error:
        raise ModelError(
            f"kfs.laplace.Backend is for laplace-torch, which cannot be imported: {error}.",
            f"Install it with `pip install laplace-torch`. {_WAY_OUT}",
        ) from error
    return type(
        "Backend", (BackendMethods, interface), {"__module__": "kfs.laplace", "__doc__": BackendMethods.__doc__}
    )
