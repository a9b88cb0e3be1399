"""The audit: checks, on a few of the user's own examples, that capture reproduces what the model computes.

The cache of audits lives in `kfs.factors.audit.audits`, the report in `kfs.factors.audit.report`.

The audit runs once for every model and shape of its inputs. It evaluates the model on a few examples of a batch, with
and without capture, and checks the following:

1. Predictions are the same. If not, a rule runs something else than the user's operation.
2. The prediction for an example does not depend on other examples of its batch. Half of the examples alone have the
   same predictions, and every row of every activation influences the prediction for one example only (see
   `kfs.factors.rows.measure`).
3. For every parameter, the sum over all uses of gradients times inputs equals the gradient by autograd. If not, a use
   was missed, because it is hidden, or it was misread.

The audit also determines the order in which rows belong to examples, and which rows count (see
`kfs.factors.audit.row_experiments`). Finally, it finds results that do not depend on data but have a row for every
example, such as a table that is repeated over the batch.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite, nan, prod
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kfs.errors import ModelError
from kfs.factors.accumulate.inputs import Use
from kfs.factors.accumulate.statistic import Adder, PlannedUse, Statistic, in_block
from kfs.factors.audit.report import Audit, AuditedUse, percent
from kfs.factors.audit.row_experiments import Counts, RowExperiments, Run, hold_for
from kfs.factors.capture import CapturedPass, hidden_uses
from kfs.factors.layout import Key, Layout
from kfs.factors.rows.counted import ALL, RowRule
from kfs.factors.rows.measure import probes
from kfs.factors.rows.row_map import (
    AuditResult,
    KnownUse,
    PendingQuery,
    Question,
    Receiver,
    RowMap,
    RowQuery,
    StridedRows,
    What,
)
from kfs.factors.trace.trace import Trace
from kfs.factors.trace.tracking import Tracker, tensors_of
from kfs.problem.data import can_be_cut, cut
from kfs.problem.isolation import uncompiled
from kfs.runtime.precision import IN_HALF_PRECISION, Precisions, at_least_float32, tolerance_for
from kfs.runtime.sync import numbers

log = logging.getLogger("kfs.factors")
# Number of audited examples. Two show whether examples mix; with four, row orders are seldom regular by chance.
FEW = 4
# A gradient may be off by this many rounding errors of its terms: those of k terms add up to about the root of k, here
# of 10,000. In half precision, two: one for the sum, and one for the factors of the products.
_ROUNDINGS = 100
_ROUNDINGS_IN_HALF_PRECISION = 2
# Maximum number of passes in which answers to questions may change. Most answers are right at once: models have only a
# few tables that are repeated over the batch.
_ROUNDS = 10
# With this many positions of each example, all row rules make different predictions.
_ENOUGH = 4
_MEASURED = "rows are measured in every batch"
_HALF = {torch.float16, torch.bfloat16}


class GradientSums(Statistic):
    """Sums gradients times inputs over all uses, for one column.

    Attributes:
        operations: The operations that used each parameter, by name.
        conflicts: `(parameter, operation)` of uses that are inconsistent with other uses of the parameter.
        narrow: Names of parameters that are used in half precision.
    """

    needs_rows = True

    def __init__(self) -> None:
        super().__init__()
        self.operations: dict[str, set[str]] = {}
        self.conflicts: set[tuple[str, str]] = set()
        self.totals: dict[Key, tuple[Layout, Tensor]] = {}
        self.sizes: dict[Key, Tensor] = {}
        self.narrow: set[str] = set()

    def adder_of(self, plan: PlannedUse) -> Adder:
        """Return the adder for the uses of a plan."""
        for name in plan.layout.params:
            self.operations.setdefault(name, set()).add(plan.operation)
            if plan.narrow is not None or plan.dtype in _HALF:
                self.narrow.add(name)
        key = plan.layout.key

        def add(x: Any, _: RowMap | None) -> Receiver:
            one_datum = StridedRows.batch_first(1, prod(plan.inputs.leading(x)))
            has_numbers = isinstance(x, Tensor) and x.is_floating_point()

            def receive(g: Tensor) -> None:
                g = g[0].to(at_least_float32(g.dtype))
                inputs = x.to(g.dtype) if has_numbers else x
                use = Use(plan.inputs, inputs, one_datum, plan.ones)
                (total,) = in_block(plan, torch.cat(list(use.gradients(g))))
                layout, before = self.totals.get(key, (plan.layout, None))
                self.totals[key] = (layout, total if before is None else before.add_(total))
                # Terms may cancel, but rounding errors are proportional to the size of the terms.
                length = inputs.norm() * plan.inputs.overlap**0.5 if has_numbers else one_datum.inner**0.5
                self.sizes[key] = length * g.norm() + self.sizes.get(key, 0.0)

            return receive

        return add

    def note_conflict(self, plan: PlannedUse) -> None:
        """Record a use that is inconsistent with other uses of its parameter."""
        self.conflicts.add((plan.layout.weight, plan.operation))

    def differences(self, exact: Mapping[str, Tensor]) -> dict[str, tuple[float, float, float]]:
        """Compare sums with gradients by autograd.

        Args:
            exact: The gradients of all parameters that have blocks.

        Returns:
            By name of each parameter with a block: the distance of both, the norm of the gradient by autograd, and the
            size of the terms that it is a sum of.
        """
        names = [name for name in exact if name in self.operations]
        blocks: dict[str, list[tuple[Layout, Tensor]]] = {name: [] for name in names}
        for layout, total in self.totals.values():
            for name in layout.params:
                blocks[name].append((layout, total))
        norms = []
        for name in names:
            # Subtract the sums of all blocks; entries without block should have no gradient. One copy at a time.
            left = exact[name].to(at_least_float32(exact[name].dtype), copy=True)
            for layout, total in blocks[name]:
                W, b = layout.views({n: (left if n == name else exact[n]).unsqueeze(0) for n in layout.params})
                if b is None or name == layout.weight:
                    W -= total[..., : layout.column_size].reshape(W.shape)
                else:
                    b -= total[..., layout.column_size :].reshape(b.shape)
            norms += [left.norm(), exact[name].norm()]
        values = iter(numbers([*norms, *self.sizes.values()]))  # one synchronization
        distances = {name: (next(values), next(values)) for name in names}
        terms = dict.fromkeys(names, 0.0)
        for (layout, _), size in zip(self.totals.values(), values, strict=True):
            for name in layout.params:
                terms[name] += size
        return {name: (*distances[name], terms[name]) for name in names}


class Results(TorchFunctionMode):
    """A mode that records the results of all operations, in order, with the parameters that they use."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self.tracker = tracker
        self.results: list[tuple[str, list[str], Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = [self.tracker.find(t) for t in tensors_of((*args, *kwargs.values()))]
        result = func(*args, **kwargs)
        names = sorted({tracked.name for tracked in found if tracked is not None})
        for t in tensors_of([result]):  # attention and recurrent networks have several
            if t.is_floating_point():
                self.results.append((getattr(func, "__name__", str(func)), names, t.detach().clone()))
        return result


@contextmanager
def both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter two contexts, the second inside the first."""
    with first, second:
        yield


def wrong_rule(plain: Results, captured: Results, difference: float, tolerance: float) -> ModelError:
    """Return the error for predictions that differ under capture; it names the first operation whose result differs."""
    culprit = ""
    for (name, params, one), (_, _, other) in zip(plain.results, captured.results, strict=False):
        if difference_of(one, other) > tolerance:
            used = f" (parameter {', '.join(map(repr, params))})" if params else ""
            culprit = f" {name}{used} is the first operation whose result differs: the rule for it is wrong."
            break
    return ModelError(
        f"Predictions under capture differ by {percent(difference)} from those of the model.{culprit}",
        "Leave the parameters of that operation out with params=, and report this as a bug in kfs. audit=False would "
        "continue with predictions that are not the model's.",
    )


def mixing_error(cause: str) -> ModelError:
    """Return the error for a model that mixes examples, given the evidence."""
    return ModelError(
        f"{cause} The prediction for one example depends on the rest of its batch, so curvature per example is not "
        "defined.",
        "Change the model so that it treats examples independently, or make everything that interacts one example (a "
        "graph, a group). If you are sure that examples do not mix, pass audit=False.",
    )


def difference_of(a: Tensor, b: Tensor) -> float:
    """Return the relative difference of two results, at entries where both are finite."""
    if a.shape != b.shape:
        return torch.inf
    finite = a.isfinite() & b.isfinite()
    dtype = at_least_float32(a.dtype)
    a, b = torch.where(finite, a, 0).to(dtype), torch.where(finite, b, 0).to(dtype)
    size = float(a.abs().max()) if a.numel() else 0.0
    distance = float((a - b).abs().max()) if a.numel() else 0.0
    return distance / size if size > 0 else float(distance > 0)


@dataclass
class Audited:
    """The results of an audit, and what they apply to."""

    report: Audit
    known: AuditResult
    whole: bool  # whether all examples were audited, because the batch cannot be cut
    counts: Counts | None = None  # the source of masks and ignored targets
    rules_hold: bool = False  # whether row rules hold for inputs of other sizes
    ways: set[int] = field(default_factory=set)  # hashes of the operation sequences of the passes that it covers


class NotRepeatableError(ModelError):
    """Raised if the model is not the same function in every call."""


def audit(
    run: Run,
    x: Any,
    num_data: int,
    trace: Trace,
    batch_axis: int | None = None,
    halves: bool = True,
    whole: bool = False,
    counts: Counts | None = None,
    earlier: AuditResult | None = None,
) -> tuple[Audited, Tensor]:
    """Audit capture on a few examples of a batch.

    Args:
        run: Evaluates the model.
        x: A batch of inputs.
        num_data: Number of examples.
        trace: Has parameters and rules. It is not modified.
        batch_axis: Position of the batch axis in inputs, if not the first.
        halves: Whether each prediction depends on one example alone, so that half of the examples have the same ones.
        whole: Whether to audit all examples in any case.
        counts: The source of masks and ignored targets. By default, all rows count.
        earlier: Results for inputs of other sizes, whose row rules hold for all sizes.

    Returns:
        The results, and predictions for the audited examples: the last ones, or all.

    Raises:
        ModelError: If a rule runs a different operation than the user's, or if examples mix.
    """
    examples = partial(_Audit, run, trace=trace, batch_axis=batch_axis, halves=halves, counts=counts, earlier=earlier)
    with uncompiled():
        if num_data > FEW and not whole and can_be_cut(x, num_data, FEW, batch_axis):
            try:
                return examples(cut(x, num_data, range(num_data - FEW, num_data), batch_axis), FEW).result()
            except Exception:
                log.debug("The audit of %d examples did not go through; now all %d.", FEW, num_data, exc_info=True)
        if num_data == 1 and can_be_cut(x, 1, 1, batch_axis):
            # One example does not show which rows belong to it, and which are shared by all examples. Two copies of it
            # do, but they do not show whether examples mix.
            try:
                audited, f = examples(cut(x, 1, [0, 0], batch_axis), 2).result()
                return replace(audited, report=replace(audited.report, num_data=1)), f[:1]
            except Exception:
                log.debug("The audit of two copies of an example did not go through; now one.", exc_info=True)
        return examples(x, num_data, whole=True).result()


@dataclass
class _Audit:
    """One audit, of all examples in `x`. Arguments are those of `audit`."""

    run: Run
    x: Any
    num_data: int
    trace: Trace
    batch_axis: int | None
    halves: bool
    counts: Counts | None
    earlier: AuditResult | None
    whole: bool = False  # whether these are all examples of a batch

    def __post_init__(self) -> None:
        self.trace = self.trace.renewed()
        self.params = self.trace.tracker.params
        self.halves = self.halves and self.num_data > 1
        self.rules_hold = False

    def result(self) -> tuple[Audited, Tensor]:
        """Run the audit."""
        with ExitStack() as self.passes:
            # Run under capture, and compare predictions and gradients with those of the model alone.
            names = list(self.params)
            with _without_hooks(self.params.values()):
                f, one, sums, exact = self._captured([self.params[name] for name in names])
            tolerance = IN_HALF_PRECISION if sums.narrow else tolerance_for(f.dtype, f.device)
            predictions, tolerance = self._compare_predictions(f.detach(), tolerance)
            gradients, unexplained = self._compare_gradients(
                f, one, sums, dict(zip(names, exact, strict=True)), tolerance
            )
            # Store what later batches need: row maps, answers, uses that are not covered.
            opened, asked = list(one.rows.opened), list(one.rows.asked)
            known_uses: dict[bool, list[KnownUse]] = {False: [], True: []}
            for pending in opened:
                query, found = pending.query, pending.measured
                certain = pending.certain and not one.routes and found is not None and found.has_votes
                inner = pending.inner if certain else None
                known_uses[query.meeting].append(KnownUse(query.what, query.leading, self.num_data, inner))
            known = replace(
                self.known,
                answers={question: answer for question, answer, _ in one.rows.questions},
                uses=tuple(known_uses[False]),
                meetings=tuple(known_uses[True]),
                unexplained=frozenset(unexplained),
                inputs=tuple(is_data for _, is_data in one.marks.inputs),
                both_ways=frozenset(self.trace.both_ways),
            )
            # Find out which rows count, by further passes.
            mixes = any(pending.measured is not None and pending.measured.mixes for pending in opened)
            one.forget()
            known = self._with_row_rules(known, asked, one.routes, mixes)
            source = self.counts.source if self.counts is not None and known.has_mask else None
            report = Audit(
                self.num_data,
                predictions,
                gradients,
                tuple(self._audited_uses([pending for pending in opened if not pending.query.meeting], known)),
                tolerance,
                missed=tuple(name for name in gradients if name in dict(unexplained)),
                unused=tuple(name for name, g in zip(names, exact, strict=True) if g is None),
                mask=source.name if source is not None and source.find(self.x, self.num_data) is not None else "",
            )
            return Audited(report, known, self.whole, self.counts, self.rules_hold), f.detach()

    def _audited_uses(self, queries: Sequence[PendingQuery], known: AuditResult) -> Iterator[AuditedUse]:
        """Generate the report of all measured uses."""
        rules: dict[What, list[RowRule]] = {}
        for what, rule in known.rows:
            rules.setdefault(what, []).append(rule)
        for pending, use in zip(queries, known.uses, strict=True):
            query, found = pending.query, pending.measured
            shared = query.rows // self.num_data
            if found is not None and not found.has_votes:
                order = "no gradient"
            elif use.inner is None:
                order = _MEASURED
            elif use.inner == shared:
                order = "batch first" if shared > 1 else "one row per example"
            else:
                order = "batch last" if use.inner == 1 else f"{use.inner} of {shared} rows of an example together"
            rules_left = rules.get(query.what)
            counted = str(rules_left.pop(0)) if rules_left else ""
            rows = order if order == _MEASURED or not counted else f"{order}, {counted}"
            operation, parameter = query.what
            yield AuditedUse(parameter, operation, rows, 0.0 if found is None else found.worst)

    def _with_row_rules(self, known: AuditResult, asked: Sequence[RowQuery], routes: bool, mixes: bool) -> AuditResult:
        """Add the row rule of every use."""
        counts = self.counts
        if counts is None:
            return known
        # An example without any target that counts has no row that does, unless predictions depend on other examples.
        otherwise = ALL if counts.class_axis is None or mixes else RowRule("data")
        known = replace(known, otherwise=otherwise)
        most_positions = max((query.rows * query.positions for query in asked), default=0)
        if most_positions <= self.num_data and not routes:  # one row of every example
            return known
        before = self.earlier
        whats = [query.what for query in asked]
        if before is not None and hold_for(before.rows, whats):
            return replace(
                known,
                rows=before.rows,
                has_mask=before.has_mask,
                checked=before.checked,
                distrusted=before.distrusted,
            )
        axis = self.batch_axis
        known = RowExperiments(self.run, self.x, self.num_data, self.trace, axis, known, counts, routes).result()
        # A few short sequences do not distinguish row rules.
        are_many = self.num_data == FEW and most_positions >= _ENOUGH * self.num_data
        self.rules_hold = are_many and hold_for(known.rows, whats)
        return known

    def _captured(self, params: Sequence[Tensor]) -> tuple[Tensor, CapturedPass, GradientSums, Sequence[Tensor | None]]:
        """Run the model until answers are stable: which results have a row per example, and which inputs are constant.

        Returns:
            Predictions, the pass, sums over uses, and gradients of `params` by autograd.
        """
        self.known = AuditResult()
        first: list[PendingQuery] = []  # those of the first pass in which examples mixed
        rounds = 0
        while True:
            rounds += 1
            sums = GradientSums()
            one = self._new_pass(sums)
            f = self.run(one.mark(self.x), self.num_data, one)
            if one.rows.opened or one.rows.observed:
                exact = one.measure_rows(f, also=params)
            else:
                exact = one.backward(f, next(probes(f, self.num_data)).unsqueeze(0), also=params)
            # Repeat the pass if weights are used both ways, or if answers to questions were wrong.
            both_ways = self.trace.block_map.both_ways
            if not self.trace.both_ways >= both_ways:
                self.trace.learn(both_ways)
                continue
            changed = self._changed_answers(one)
            if changed and rounds < _ROUNDS:
                self.known = replace(self.known, answers={**self.known.answers, **changed})
                continue
            # If examples mix, an input may be the same for all examples: try other inputs as constants.
            mixed = [query for query in one.rows.opened if query.measured is not None and query.measured.mixes]
            if not mixed or self.trace.mixing:
                return f, one, sums, exact
            first = first or list(one.rows.opened)
            constants = self._more_constants(one)
            if constants is None:
                raise self._mixing(first)
            self.known = AuditResult(constants=constants)

    def _new_pass(self, sums: GradientSums) -> CapturedPass:
        """Return a pass that measures all row maps. Blocks are placed anew in every pass."""
        self.trace.restart_blocks()
        one = CapturedPass(self.trace, [sums], self.num_data, self.batch_axis, self.known, auditing=True)
        self.passes.callback(one.forget)
        return one

    def _changed_answers(self, one: CapturedPass) -> dict[Question, bool]:
        """Return corrections of wrong answers."""
        changed: dict[Question, bool] = {}
        for question, answer, queries in one.rows.questions:
            found = [query.measured for query in queries if query.measured is not None and query.measured.has_votes]
            if not found:
                continue
            mixes = any(measured.mixes for measured in found)
            # In half precision, a single number often seems to belong to one example by chance, but then other examples
            # have none.
            has_rows = any(measured.is_precise or 2 * measured.number_of_owners > self.num_data for measured in found)
            if mixes if answer else has_rows and not mixes:
                changed[question] = not answer
        return changed

    def _more_constants(self, one: CapturedPass) -> frozenset[int] | None:
        """Return the next set of inputs to try as constants; `None` if all were tried.

        The first set has all inputs without an axis as long as the batch; then come single inputs.
        """
        data = [place for place, (_, is_data) in enumerate(one.marks.inputs) if is_data]
        if not self.known.constants:
            without = [place for place in data if self.num_data not in one.marks.inputs[place][0]]
            self.candidates = [frozenset(without)] if without else []
            self.candidates += [frozenset([place]) for place in reversed(data)] if len(one.marks.inputs) > 1 else []
        return self.candidates.pop(0) if self.candidates else None

    def _compare_predictions(self, f: Tensor, tolerance: float) -> tuple[float, float]:
        """Compare predictions with those of the model without capture, for half of the examples if possible.

        Returns:
            The relative difference, and the tolerance: a larger one if it is needed, because other parts of the model
            compute in lower precision than predictions and uses of parameters.
        """
        # Choose the last examples: a model may favor early ones, for example if experts have limited capacity.
        every = range(self.num_data)
        chosen = list(every[: -(self.num_data // 2) - 1 : -1] if self.halves else every)
        plain: Tensor | None = None  # if the batch cannot be cut, such as ragged graphs
        if not self.halves or can_be_cut(self.x, self.num_data, len(chosen), self.batch_axis):
            try:
                x = cut(self.x, self.num_data, chosen, self.batch_axis) if self.halves else self.x
                plain = self.run(x, len(chosen), None).detach()
            except Exception:
                if not self.whole:
                    raise
        if plain is not None and (difference := difference_of(plain, f[chosen])) <= tolerance:
            return difference, tolerance
        # Find the cause: the precision of other parts of the model, a rule, or the other half of the examples.
        precisions = Precisions()
        all_plain = self.run(self.x, self.num_data, precisions).detach()
        tolerance = max(tolerance, precisions.tolerance(f.dtype, f.device))
        if plain is not None and difference <= tolerance:
            return difference, tolerance
        difference = difference_of(all_plain, f)
        if difference > tolerance:
            raise self._wrong_rule(difference, tolerance)
        if plain is None:
            return difference, tolerance
        raise mixing_error(
            f"The predictions for {len(chosen)} examples are not the same in a batch with "
            f"{self.num_data - len(chosen)} others."
        )

    def _compare_gradients(
        self, f: Tensor, one: CapturedPass, sums: GradientSums, exact: Mapping[str, Tensor | None], tolerance: float
    ) -> tuple[dict[str, float], set[tuple[str, str]]]:
        """Compare sums over uses with gradients by autograd.

        Returns:
            Relative differences by parameter, and `(parameter, why)` of uses that were missed or misread.
        """
        left_out = {name for name, _ in one.unexplained | sums.conflicts}
        zeros = torch.zeros_like
        gradients = {name: zeros(self.params[name]) if g is None else g.to_dense() for name, g in exact.items()}
        differences: dict[str, float] = {}
        unexplained: set[tuple[str, str]] = set()
        for name, (distance, size, terms) in sums.differences(gradients).items():
            if name in left_out:
                continue
            if not isfinite(distance + size + terms):
                differences[name] = nan
                continue
            precision = torch.bfloat16 if name in sums.narrow else one.precisions.get(name, f.dtype)
            roundings = _ROUNDINGS_IN_HALF_PRECISION if torch.finfo(precision).bits == 16 else _ROUNDINGS
            noise = roundings * torch.finfo(precision).eps * terms
            if distance <= noise:  # terms may cancel, so that only rounding errors are left
                differences[name] = distance / terms if terms > 0 else 0.0
                continue
            differences[name] = distance / size if size > 0 else torch.inf
            if differences[name] > max(tolerance, tolerance_for(precision, f.device)):
                seen = ", ".join(sorted(sums.operations[name]))
                hidden = sorted(
                    {function for parameter, function in hidden_uses(f, self.params)[0] if parameter == name}
                )
                other = ", ".join(hidden) or "something that PyTorch hides"
                why = f"the gradient differs by {percent(differences[name])} from the sum over all uses that were seen"
                unexplained.add((name, f"it is used by {seen} and by {other}, or {seen} was misread ({why})"))
        # A parameter without a use here may still have a block, because inputs of other shapes may take another path.
        unseen = [name for name, g in gradients.items() if name not in sums.operations and bool(g.any())]
        missed = "it is used by something that was not seen: PyTorch hides it, or it does not depend on data"
        unexplained.update((name, missed) for name in unseen if name not in left_out)
        return differences, unexplained

    def _wrong_rule(self, difference: float, tolerance: float) -> ModelError:
        """Return the error that names the first operation whose result differs under capture."""
        plain, captured = Results(self.trace.tracker), Results(self.trace.tracker)
        once = self.run(self.x, self.num_data, plain).detach()
        if difference_of(self.run(self.x, self.num_data, None).detach(), once) > tolerance:
            return NotRepeatableError(
                "The model is not the same function in every call: its predictions for the same data differ.",
                "Remove random draws and counters outside of PyTorch. If you know the cause, pass audit=False.",
            )
        one = self._new_pass(GradientSums())
        self.run(one.mark(self.x), self.num_data, both(one, captured))
        return wrong_rule(plain, captured, difference, tolerance)

    def _mixing(self, opened: Sequence[PendingQuery]) -> ModelError:
        """Return the error that names the operations between which examples mix."""
        queries = [(pending.query.what, pending.measured) for pending in opened if pending.measured is not None]
        last = max(place for place, (_, found) in enumerate(queries) if found.mixes)
        (operation, parameter), found = queries[last]
        after = ""
        if last + 1 < len(queries):
            (following, of_parameter), _ = queries[last + 1]
            after = f", and before {following} ({of_parameter!r})"
        return mixing_error(
            f"Examples mix after {operation} ({parameter!r}){after}: a row of its output influences the predictions "
            f"for several examples (gradients are off by {percent(found.worst)})."
        )


@contextmanager
def _without_hooks(params: Any) -> Iterator[None]:
    """Remove the user's hooks from parameters in this context, because they may change gradients."""
    hooks = [p._backward_hooks for p in params if p._backward_hooks]
    kept = [dict(one) for one in hooks]
    for one in hooks:
        one.clear()
    try:
        yield
    finally:
        for one, before in zip(hooks, kept, strict=True):
            one.update(before)
