"""The cache of audits in this process: one for every model, state of its attributes, and shape of inputs."""

import logging
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module

from kfs.factors.audit.audit import FEW, Audited, Run, audit, compare_whole
from kfs.factors.audit.report import Audit
from kfs.factors.audit.row_experiments import Counts
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
        self.uncounted: set[Any] = set()  # attributes that passes change, which are ignored
        self.of_sizes: dict[Any, Audited] = {}  # audits whose row rules hold for inputs of any size
        self._latest: dict[Any, Any] = {}
        self._states: set[int] = set()

    def state(self, model: Any) -> int:
        """Return a hash of the attributes of a model's modules, such as a setting that determines its batch axis.

        Attributes that passes change, such as counters, are ignored; otherwise the model would be audited for every
        batch.
        """
        now = self._attributes(model)
        state = hash(frozenset(now.items()))
        if state not in self._states and len(self._states) >= _MOST_STATES:
            self.leave_out(changes := _changes(self._latest, now))
            log.info(
                "Audits no longer depend on attributes that change all the time: %s.", {name for _, name in changes}
            )
            now = self._attributes(model)
            state = hash(frozenset(now.items()))
        self._states.add(state)
        self._latest = now
        return state

    def leave_out(self, attributes: set[Any]) -> None:
        """Ignore some attributes from now on."""
        self.uncounted |= attributes
        self._states.clear()

    def changed(self, model: Any) -> set[Any]:
        """Return the attributes that have changed since the last call of `state`."""
        return _changes(self._latest, self._attributes(model))

    def _attributes(self, model: Any) -> dict[Any, Any]:
        found = attributes_of(model) if isinstance(model, Module) else {}
        return {name: value for name, value in found.items() if name not in self.uncounted}


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
        self._key = (_described(model, trace), batch_axis, halves, output)
        self._state = self._done.state(model)
        self._seen: list[Audited] = []
        self._predictions: Tensor | None = None
        self._current: Audited | None = None

    def of_batch(self, risk: EmpiricalRisk, batch: Batch) -> AuditResult:
        """Return the audit results that apply to a batch of a risk; see `of`."""
        return self.of(partial(_evaluate, risk, batch), batch.x, len(batch.y))

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
            if found.is_conclusive and found.rules_hold:
                self._done.of_sizes[of_sizes] = found
            if changed := self._done.changed(self._model):
                self._done.leave_out(changed)
                self._state = self._done.state(self._model)
            key, loose = self._keys(x, num_data)
            if len(self._done) >= _MOST_SHAPES:
                self._done.clear()
            # A batch that cannot be cut, such as ragged graphs, usually has a new shape, so it is cached by the loose
            # key.
            cannot_be_cut = found.whole and num_data > FEW
            if found.is_conclusive:
                self._done[loose if cannot_be_cut else key] = found
        self._current = found
        if all(found is not one for one in self._seen):
            self._seen.append(found)
            self.report = found.report if self.report is None else self.report.merged(found.report)
        return found.known

    def close(self, distrust: bool = False) -> Audit | None:
        """Return the merged report, after the last batch.

        Args:
            distrust: Whether batches had padding that the audited examples lacked. Then, which rows count is measured
                in every batch from now on.
        """
        for one in self._seen if distrust else ():
            one.known = replace(one.known, distrusted=True)
        return self.report

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
        """Return the cache key of an audit, with and without sizes of inputs."""
        kind = self.trace.device_type
        context = (self._key, self._state, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None)
        strict, less_strict = _shapes(x, num_data, self._batch_axis)
        return (context, strict), (context, less_strict)

    def follow_up(self, risk: EmpiricalRisk, batch: Batch, operations: int) -> set[tuple[str, str]]:
        """Audit a batch if the model took a new execution path for its shape, as with `if x.sum() > 0: ...`.

        Args:
            risk: Model and parameters.
            batch: The batch, right after its forward pass.
            operations: Hash of the operations in that pass.

        Returns:
            `(parameter, why)` of uses that were missed or misread.

        Raises:
            ModelError: If the audit fails.
        """
        found = self._current
        if found is None or operations in found.ways or len(found.ways) >= _MOST_WAYS:
            return set()
        is_first = not found.ways
        found.ways.add(operations)
        if is_first:  # the pass that the audit was run for
            return set()
        run = partial(_evaluate, risk, batch)
        other, _ = audit(run, batch.x, len(batch.y), self.trace, self._batch_axis, self._halves, whole=True)
        return set(other.known.unexplained)

    def compare(self, f: Tensor) -> None:
        """Compare the predictions for a whole batch with those for its last examples alone, right after an audit.

        Raises:
            ModelError: If they differ.
        """
        few, self._predictions = self._predictions, None
        if few is not None and self._halves:
            compare_whole(f, few, self._seen[-1].report.tolerance)


def distrust(model: Any, known: AuditResult) -> None:
    """Measure which rows count in every batch from now on: there is padding that audited examples lacked."""
    for audited in _done(model).values():
        if audited.known is known:
            audited.known = replace(known, distrusted=True)


def forget_audits() -> None:
    """Clear the cache of audits, so that every model is audited anew."""
    _DONE.clear()


def _evaluate(
    risk: EmpiricalRisk, batch: Batch, x: Any, num_data: int, within: AbstractContextManager[Any] | None
) -> Tensor:
    """Evaluate the model of a risk on a part of a batch, or on two copies of a single example."""
    y = batch.y[:num_data] if num_data <= len(batch.y) else torch.cat([batch.y, batch.y])
    return risk.predict(risk.params, batch._replace(x=x, y=y), within=within)


def _done(model: Any) -> _Done:
    """Return the cached audits of a model; a new cache if the model cannot be identified."""
    try:
        return _DONE.setdefault(model, _Done())
    except TypeError:  # no weak reference, or no hash
        return _Done()


def _changes(one: dict[Any, Any], other: dict[Any, Any]) -> set[Any]:
    """Return the names of attributes that differ."""
    return {name for name, _ in one.items() ^ other.items()}


def _described(model: Any, trace: Trace) -> Any:
    """Return everything but inputs that the audits of a model depend on: its modules, and the tracked parameters."""
    modules = model.modules() if isinstance(model, Module) else ()
    params = trace.tracker.params.items()
    return (
        tuple((id(module), type(module), module.training) for module in modules),
        tuple((name, p.shape, p.dtype, p.device, p.requires_grad) for name, p in params),
        trace.joint_bias,
        trace.mixing,
    )


def _shapes(x: Any, num_data: int, batch_axis: int | None) -> tuple[Any, Any]:
    """Return the shapes of one example's inputs with their dtypes, and dtypes and numbers of axes alone."""
    shapes, ranks = [], []
    for t in tensors_in(x):
        axis = axis_to_cut(t.shape, num_data, batch_axis)
        shapes.append((axis, *(length for place, length in enumerate(t.shape) if place != axis)))
        ranks.append((t.dtype, t.ndim))
    loose = (tuple(ranks), without_tensors(x))
    return (tuple(shapes), loose), loose
