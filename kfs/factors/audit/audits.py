"""The cache of audits in this process: one for every model, state of its attributes, and shape of inputs."""

import logging
from contextlib import AbstractContextManager
from dataclasses import replace
from math import isnan
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module

from kfs.factors.audit.audit import FEW, Audited, audit, difference_of, mixing_error
from kfs.factors.audit.report import Audit, percent
from kfs.factors.audit.row_experiments import Counts, Run
from kfs.factors.rows.row_map import AuditResult
from kfs.factors.trace.trace import Trace
from kfs.problem.data import Batch, axis_to_cut
from kfs.problem.risk import EmpiricalRisk
from kfs.runtime.cuda_graphs import attributes_of
from kfs.runtime.nested import tensors_in, without_tensors

log = logging.getLogger("kfs.factors")
# Maximum number of audited execution paths for one shape of inputs. A model that branches at every layer has very many.
_MOST_WAYS = 16
# Maximum number of cached shapes of inputs for a model, so that sequences of all lengths do not fill the memory.
_MOST_SHAPES = 256
# Maximum number of audited attribute states of a model. If there are more, some attributes are counters, not settings.
_MOST_STATES = 16


class _Done(dict[Any, Audited]):
    """The cached audits of one model, by everything that they depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.of_sizes: dict[Any, Audited] = {}  # audits whose row rules hold for inputs of any size
        self._ignored: set[Any] = set()  # attributes that passes change
        self._latest: frozenset[Any] = frozenset()  # attributes, with their values
        self._states: set[int] = set()

    def state(self, model: Any) -> int:
        """Return a hash of the attributes of a model's modules, such as a setting that determines its batch axis.

        Attributes that passes change, such as counters, are ignored; otherwise the model would be audited for every
        batch.
        """
        now = self._attributes(model)
        if hash(now) not in self._states and len(self._states) >= _MOST_STATES:
            names = {name for _, name in self.ignore_changes(model)}
            log.info("Audits no longer depend on attributes that change all the time: %s.", names)
            now = self._attributes(model)
        self._states.add(hash(now))
        self._latest = now
        return hash(now)

    def ignore_changes(self, model: Any) -> set[Any]:
        """Ignore the attributes that have changed since the last call of `state` from now on, and return them."""
        changes = {attribute for attribute, _ in self._latest ^ self._attributes(model)}
        if changes:
            self._ignored |= changes
            self._states.clear()
        return changes

    def _attributes(self, model: Any) -> frozenset[Any]:
        found = attributes_of(model) if isinstance(model, Module) else {}
        return frozenset((attribute, value) for attribute, value in found.items() if attribute not in self._ignored)


# All audits of this process, by model.
_DONE: "WeakKeyDictionary[Any, _Done]" = WeakKeyDictionary()


class Audits:
    """The audits of one model and one choice of parameters.

    Args:
        model: A module, or a function.
        trace: Has parameters and rules.
        batch_axis: Position of the batch axis in inputs, if not the first.
        halves: Whether each prediction depends on one example alone; not so in training.
        counts: The source of masks and ignored targets. By default, all rows count.
        output: The name of the output that is the prediction, as in `Loss.output`.

    Attributes:
        report: The merged report of all batches so far; `None` if there was no batch.
        trace: The trace that audits use. It may be replaced by one with other tensors for the same parameters.
    """

    def __init__(
        self,
        model: Any,
        trace: Trace,
        batch_axis: int | None = None,
        halves: bool = True,
        counts: Counts | None = None,
        output: str | int | None = None,
    ) -> None:
        self._counts = counts
        self.report: Audit | None = None
        self.trace = trace
        self._batch_axis = batch_axis
        self._halves = halves
        self._done = _done(model)
        self._model = model
        modules = model.modules() if isinstance(model, Module) else ()
        self._key = (  # everything but inputs that audits depend on
            tuple((id(module), type(module), module.training) for module in modules),
            tuple((name, p.shape, p.dtype, p.device, p.requires_grad) for name, p in trace.tracker.params.items()),
            trace.joint_bias,
            trace.mixing,
            batch_axis,
            halves,
            output,
        )
        self._state = self._done.state(model)
        self._seen: list[Audited] = []
        self._predictions: Tensor | None = None
        self._current: Audited | None = None

    def of(self, run: Run, x: Any, num_data: int) -> AuditResult:
        """Return the audit results that apply to a batch; run an audit if there are none.

        Args:
            run: Evaluates the model.
            x: A batch of inputs.
            num_data: Number of examples.

        Raises:
            ModelError: If the audit fails.
        """
        # Look in the cache, and run an audit if nothing was found.
        found = self._find(x, num_data)
        if found is None:
            of_sizes = (self._keys(x, num_data)[1], self._counts)
            earlier = self._done.of_sizes.get(of_sizes)
            found, self._predictions = audit(
                run,
                x,
                num_data,
                self.trace,
                self._batch_axis,
                self._halves,
                counts=self._counts,
                earlier=None if earlier is None else earlier.known,
            )
            # Store the results in the cache. Attributes that the audit itself changed do not count from now on.
            # If a number is not finite, other examples have to be audited.
            is_conclusive = not any(map(isnan, (found.report.predictions, *found.report.gradients.values())))
            if is_conclusive and found.rules_hold:
                self._done.of_sizes[of_sizes] = found
            if self._done.ignore_changes(self._model):
                self._state = self._done.state(self._model)
            key, loose = self._keys(x, num_data)
            if len(self._done) >= _MOST_SHAPES:
                self._done.clear()
            # A batch that cannot be cut, such as ragged graphs, usually has a new shape, so it is cached by the loose
            # key.
            cannot_be_cut = found.whole and num_data > FEW
            if is_conclusive:
                self._done[loose if cannot_be_cut else key] = found
        self._current = found
        if all(found is not one for one in self._seen):
            self._seen.append(found)
            self.report = found.report if self.report is None else self.report.merged(found.report)
        return found.known

    def distrust(self) -> None:
        """Measure which rows count in every batch from now on: there is padding that audited examples lacked."""
        for one in self._seen:
            one.known = replace(one.known, distrusted=True)

    def are_done(self, x: Any, num_data: int) -> bool:
        """Whether `of` finds results for such a batch in the cache."""
        return self._find(x, num_data) is not None

    def _find(self, x: Any, num_data: int) -> Audited | None:
        """Return the cached audit for such a batch, if any."""
        key, loose = self._keys(x, num_data)
        found = self._done.get(key) or self._done.get(loose)
        # The audit of one example does not show whether examples mix.
        if found is None or (found.report.num_data == 1 and num_data > 1):
            return None
        # The cached audit may be for another loss or mask. This does not matter if no rows are to be left out.
        return found if self._counts is None or found.counts == self._counts else None

    def _keys(self, x: Any, num_data: int) -> tuple[Any, Any]:
        """Return the cache key of an audit, with and without the shape of one example's inputs."""
        kind = self.trace.device_type
        context = (self._key, self._state, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None)
        shapes, ranks = [], []
        for t in tensors_in(x):
            axis = axis_to_cut(t.shape, num_data, self._batch_axis)
            shapes.append((axis, *(length for place, length in enumerate(t.shape) if place != axis)))
            ranks.append((t.dtype, t.ndim))
        loose = (context, tuple(ranks), without_tensors(x))
        return (tuple(shapes), loose), loose

    def follow_up(self, risk: EmpiricalRisk, batch: Batch, f: Tensor, operations: int) -> set[tuple[str, str]]:
        """Follow up an audit, right after the forward pass of a batch.

        The predictions are compared with those of the audit, for its examples alone. If the model took a new execution
        path for this shape of inputs, as with `if x.sum() > 0: ...`, this path is audited.

        Args:
            risk: Model and parameters.
            batch: The batch.
            f: Predictions.
            operations: Hash of the operations in that pass.

        Returns:
            `(parameter, why)` of uses that were missed or misread.

        Raises:
            ModelError: If the audit fails, or if the predictions differ.
        """
        few, self._predictions = self._predictions, None
        if few is not None and self._halves:
            difference = difference_of(f[len(f) - len(few) :], few)
            if difference > self._seen[-1].report.tolerance:
                raise mixing_error(
                    f"The predictions for the last {len(few)} examples differ by {percent(difference)} if computed in "
                    f"a batch of {len(f)}."
                )
        found = self._current
        if found is None or operations in found.ways or len(found.ways) >= _MOST_WAYS:
            return set()
        is_first = not found.ways
        found.ways.add(operations)
        if is_first:  # the pass that the audit was run for
            return set()
        run = predictor(risk, batch)
        other, _ = audit(run, batch.x, len(batch.y), self.trace, self._batch_axis, self._halves, whole=True)
        return set(other.known.unexplained)


def distrust(model: Any, known: AuditResult) -> None:
    """Measure which rows count in every batch from now on: there is padding that audited examples lacked."""
    for audited in _done(model).values():
        if audited.known is known:
            audited.known = replace(known, distrusted=True)


def forget_audits() -> None:
    """Clear the cache of audits, so that every model is audited anew."""
    _DONE.clear()


def predictor(risk: EmpiricalRisk, batch: Batch) -> Run:
    """Return the function that evaluates the model of a risk on a part of a batch, or on two copies of one example."""

    def run(x: Any, num_data: int, within: AbstractContextManager[Any] | None) -> Tensor:
        y = batch.y[:num_data] if num_data <= len(batch.y) else torch.cat([batch.y, batch.y])
        return risk.predict(risk.params, batch._replace(x=x, y=y), within=within)

    return run


def _done(model: Any) -> _Done:
    """Return the cached audits of a model; a new cache if the model cannot be identified."""
    try:
        return _DONE.setdefault(model, _Done())
    except TypeError:  # no weak reference, or no hash
        return _Done()
