"""Curvature of one batch at a time, for a loop that is not ours: what is found out about a model is found out once.

A pass over data needs a session with plans, and an audit. Both outlast batches. So there is one pass, which takes a
batch when it is given one, and leaves the sums of this batch. Between two batches nothing of the model is changed.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kfs.kfac.block import Block
from kfs.kfac.coverage import coverage_error, not_covered
from kfs.kfac.datum_gradients import GradientBatch, per_datum_columns
from kfs.kfac.settings import Settings
from kfs.kfac.storage.checkpoint import Progress
from kfs.kfac.sums import FactorSums
from kfs.kfac.sweep import passes
from kfs.kfac.vectors import backpropagated_vectors
from kfs.risk import EmpiricalRisk


class Handed:
    """Data that are handed over one batch at a time, each right before it is asked for."""

    def __init__(self) -> None:
        self.batch: tuple[Any, Tensor] | None = None

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        """Yield the batch that was handed over last, for as long as somebody asks."""
        while True:
            assert self.batch is not None  # noqa: S101 (nobody asks before it is there)
            yield self.batch


class ByBatch(ABC):
    """Computes something for each batch that it is given, by one pass.

    Args:
        model: The model.
        loss: A loss module.
        names: The parameters to consider.
        settings: Which curvature matrix, and how.

    Attributes:
        names: The parameters that are considered.
        settings: Which curvature matrix, and how.
    """

    def __init__(self, model: nn.Module, loss: nn.Module, names: Sequence[str], settings: Settings) -> None:
        self._handed = Handed()
        self._risk = EmpiricalRisk(model, loss, self._handed, names, progress=False)
        self.settings = settings
        self.names = names
        self._pass: Iterator[Any] | None = None
        self._predictions: Tensor | None = None  # of the last batch, until somebody asks for its loss

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the pass, which cannot be copied; a copy begins another one."""
        return self.__dict__ | {"_pass": None, "_predictions": None}

    def loss(self, loss: nn.Module, y: Tensor) -> Tensor:
        """Return the loss of the batch that was given last, once: predictions are those of its pass."""
        f, self._predictions = self._predictions, None
        with torch.no_grad():
            value: Tensor = loss(f, y)
        return value

    def _see(self, f: Tensor) -> None:
        """Keep the predictions of a batch."""
        self._predictions = f

    @abstractmethod
    def _begin(self) -> Iterator[Any]:
        """Return a pass over data that are handed over."""

    def _next(self, x: Any, y: Tensor) -> Any:
        """Run the pass for one batch, and return what it yields."""
        if self._pass is None:
            self._pass = self._begin()
        # Inputs in a tuple are the arguments of the model, whatever they are.
        self._handed.batch = ((x,), y)
        try:
            with torch.enable_grad():
                return next(self._pass)
        except BaseException:
            self._pass = None  # it has ended
            raise

    def _reduction_factor(self, y: Tensor) -> float:
        """Return what the loss multiplies the sum over a batch with."""
        return self._risk.loss.reduction_factor(len(y))


class FactorsByBatch(ByBatch):
    """Computes the sums behind Kronecker factors for each batch."""

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the pass and what belongs to it."""
        return {name: value for name, value in super().__getstate__().items() if name not in {"_sums", "_progress"}}

    def _begin(self) -> Iterator[Any]:
        """Return a pass that adds to sums."""
        self._sums = ResetSums(self.settings)
        self._progress = Progress()
        return passes(self._risk, self._sums, self.settings, "factors", self._progress, pausing=True, seen=self._see)

    def blocks(self, x: Any, y: Tensor) -> dict[str, Block]:
        """Return the blocks of one batch, by name. Their sums are those of the next batch as soon as there is one.

        Raises:
            ModelError: If a parameter is not covered.
        """
        if self._pass is not None:
            self._sums.reset()
        self._next(x, y)
        found = list(self._sums.blocks.values())
        bad = not_covered(self.names, found, self._progress.unexplained, self._sums.conflicts)
        if bad:
            raise coverage_error(bad)
        self._sums.complete()
        R = self._reduction_factor(y)
        return {sums.layout.name: Block(sums, R) for sums in found}


class ColumnsByBatch(ByBatch):
    """Computes gradients of vectors whose outer products sum up to the curvature, for each batch."""

    _num_seen = 0  # data that labels were drawn for: further data have draws of their own

    def _begin(self) -> Iterator[Any]:
        """Return a pass that yields gradients."""

        def vectors(f: Tensor, y: Tensor) -> Iterable[Tensor]:
            self._see(f)
            return backpropagated_vectors(self._risk.loss, f, y, self.settings, self._num_seen, 1)

        return per_datum_columns(self._risk, vectors, uncovered="autograd")

    def columns(self, x: Any, y: Tensor) -> list[GradientBatch]:
        """Return the gradients of one batch, for one column after the other."""
        found: list[GradientBatch] = self._next(x, y)
        self._num_seen += len(y)
        return found

    def scale(self, y: Tensor) -> float:
        """Return what the sum of outer products is multiplied with."""
        return self._reduction_factor(y)


class ResetSums(FactorSums):
    """Sums for Kronecker factors that start anew with every batch, in the same memory."""

    def reset(self) -> None:
        """Forget all data."""
        for block in self.blocks.values():
            for role in block.roles.values():
                role.counted = role.positions = 0.0
                for count in role.on_device:
                    count.zero_()
                for one in (role.input, role.gradient):
                    one.total.zero_()
                    one.ones = 0.0
