"""The audit: on a few data of the user's own, is what was captured what the model computes?

Once for every model and shape of its inputs, a few data of a batch go through the model, with and without capture:

1. Predictions are the same. If not, a rule runs something else than the user's operation.
2. The prediction for a datum does not depend on other data of its batch. Half of the data alone have the same
   predictions; and every row of every activation influences the prediction for one datum only (see `ownership`).
3. For every parameter, the sum over all uses of gradients times inputs equals the gradient by autograd. If not, a use was
   missed, because it is hidden, or it was misread.

Next to that, the audit finds the order in which rows belong to data, and which results that do not depend on data have a
row for every datum all the same (a table that is repeated over the batch).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kfs.data import cut, mapped
from kfs.errors import ModelError
from kfs.kfac.capture.hidden_uses import hidden_uses
from kfs.kfac.capture.mode import Capture, tensors_of
from kfs.kfac.capture.ownership import Known, Placed, Question, Site, probes
from kfs.kfac.capture.session import Session
from kfs.kfac.capture.tap import backward, measure_rows
from kfs.kfac.sums.gradient_sums import GradientSums

# How many data an audit looks at.
FEW = 8
# Up to which relative difference two results count as the same. Batches of different size are rounded differently.
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
_ON_ACCELERATOR = 1e-2  # products may be rounded to TF32
_IN_HALF_PRECISION = 5e-2
# A gradient may be off by this many roundings of its largest terms.
_ROUNDINGS = 100
# How often decisions about constants may change before one gives up.
_ROUNDS = 5
# Evaluates the model on some inputs, within a context: takes inputs, their number, and the context.
Run = Callable[[Any, int, AbstractContextManager[Any] | None], Tensor]


@dataclass(frozen=True)
class AuditedUse:
    """One use of a parameter.

    Attributes:
        parameter: Its name.
        operation: What used it.
        rows: How rows of the operation's inputs belong to data.
        mixing: How far a row's gradients are from those of a row that belongs to one datum.
    """

    parameter: str
    operation: str
    rows: str
    mixing: float


@dataclass(frozen=True)
class Audit:
    """What was checked, and how closely.

    Attributes:
        num_data: Number of data that were looked at.
        predictions: Relative difference of predictions with and without capture, the latter for a part of the data.
        gradients: By parameter, the relative difference of the sum over its uses from its gradient by autograd.
        uses: All uses, in their order.
        tolerance: Up to which relative difference predictions and gradients count as the same.
        shapes: For how many different shapes of inputs this was done. Numbers are the largest ones.
    """

    num_data: int
    predictions: float
    gradients: Mapping[str, float]
    uses: tuple[AuditedUse, ...]
    tolerance: float
    shapes: int = 1

    def merged(self, other: "Audit") -> "Audit":
        """Return one audit for the shapes of both."""
        names = [*self.gradients, *(name for name in other.gradients if name not in self.gradients)]
        worst = {name: max(self.gradients.get(name, 0.0), other.gradients.get(name, 0.0)) for name in names}
        return replace(
            self,
            predictions=max(self.predictions, other.predictions),
            gradients=worst,
            shapes=self.shapes + other.shapes,
        )

    def __str__(self) -> str:
        """Say it in a few lines."""
        uses: dict[tuple[str, str, str], int] = {}
        for use in self.uses:
            what = (use.parameter, use.operation, use.rows)
            uses[what] = uses.get(what, 0) + 1
        shapes = "shape" if self.shapes == 1 else "shapes"
        lines = [
            f"audit of {len(self.gradients)} parameters on {self.num_data} data, {self.shapes} {shapes} of inputs",
            f"predictions with and without capture differ by {self.predictions:.1e}",
            f"sums over uses and gradients by autograd differ by {max(self.gradients.values(), default=0.0):.1e}",
        ]
        for (parameter, operation, rows), times in uses.items():
            repeated = "" if times == 1 else f", {times} times"
            lines.append(f"  {parameter}: {operation}{repeated}; {rows}")
        return "\n".join(lines)


@dataclass
class Audited:
    """What an audit found."""

    report: Audit
    known: Known
    whole: bool  # whether it is about all data of a batch, because that cannot be cut


def compare_whole(f: Tensor, few: Tensor, tolerance: float) -> None:
    """Compare predictions of a whole batch with those of its first data alone.

    Raises:
        ModelError: If they differ.
    """
    difference = _difference(f[: len(few)], few)
    if difference > tolerance:
        raise _mixing_error(
            f"The predictions for the first {len(few)} data differ by {difference:.0%} if they are computed in a batch "
            f"of {len(f)}."
        )


def audit(
    run: Run, x: Any, num_data: int, session: Session, batch_axis: int | None = None, halves: bool = True
) -> tuple[Audited, Tensor]:
    """Check what is captured on a few data.

    Returns:
        What was found, and predictions for the first data.

    Args:
        run: Evaluates the model.
        x: A batch of inputs.
        num_data: Their number.
        session: Has parameters and rules. It is not changed.
        batch_axis: Where the batch axis is in inputs, if not first.
        halves: Whether predictions are a function of one datum, so that half of the data have the same ones.

    Raises:
        ModelError: If a rule runs something else than the user's operation, or if data mix.
    """
    few = min(FEW, num_data)
    if few < num_data:
        try:
            part = cut(x, num_data, few, batch_axis)
            return _Audit(run, part, few, session, batch_axis, halves).result()
        except Exception:  # noqa: BLE001 (whatever it is: perhaps one cannot cut this batch)
            pass
    return _Audit(run, x, num_data, session, batch_axis, halves, whole=True).result()


class _Audit:
    """One audit, of all data in a batch."""

    def __init__(
        self,
        run: Run,
        x: Any,
        num_data: int,
        session: Session,
        batch_axis: int | None,
        halves: bool,
        whole: bool = False,
    ) -> None:
        self.run = run
        self.x = x
        self.num_data = num_data
        self.session = session.renewed()
        self.batch_axis = batch_axis
        self.halves = halves and num_data > 1
        self.whole = whole
        self.params = session.tracker.params

    def result(self) -> tuple[Audited, Tensor]:
        """Run it."""
        f, capture, sums = self._captured()
        tolerance = _IN_HALF_PRECISION if sums.narrow else _tolerance(f)
        predictions = self._compare_predictions(f.detach(), tolerance)
        with _without_hooks(self.params.values()):
            gradients, unexplained = self._compare_gradients(f, capture, sums, tolerance)
        sites = _waiting(capture)
        uses = [site for site in sites if not site.meeting]
        report = Audit(
            self.num_data,
            predictions,
            gradients,
            tuple(
                AuditedUse(site.what[1], site.what[0], self._rows(site, capture.routes), _misfit(site)) for site in uses
            ),
            tolerance,
        )
        known = replace(
            self.known,
            uses=tuple(self._placed(site, capture.routes) for site in uses),
            meetings=tuple(self._placed(site, capture.routes) for site in sites if site.meeting),
            unexplained=frozenset(unexplained),
        )
        _forget(capture)
        return Audited(report, known, self.whole), f.detach()

    def _captured(self) -> tuple[Tensor, Capture, GradientSums]:
        """Run the model until it is clear which results have a row for every datum, and which inputs are constant."""
        self.known = Known()
        for last in (False,) * (_ROUNDS - 1) + (True,):
            sums = GradientSums()
            capture = Capture(self.session, sums, self.num_data, self.batch_axis, self.known, measuring=True)
            f = self._forward(capture)
            measure_rows(f, capture)
            changed = self._changed_answers(capture)
            if changed and not last:
                self.known = replace(self.known, answers={**self.known.answers, **changed})
                continue
            mixed = [site for site in _waiting(capture) if site.measured is not None and site.measured.mixes]
            if not mixed or self.session.mixing:
                return f, capture, sums
            constants = self._more_constants(capture)
            if constants == self.known.constants or last:
                break
            self.known = Known(constants=constants)
        raise self._mixing(capture)

    def _forward(self, capture: Capture, within: AbstractContextManager[Any] | None = None) -> Tensor:
        """Run the model with taps."""
        marked = mapped(self.x, capture.mark_data)
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            try:
                f = self.run(marked, self.num_data, capture if within is None else within)
            finally:
                capture.leave_nothing_behind()
                capture.running = False
        return f

    def _changed_answers(self, capture: Capture) -> dict[Question, bool]:
        """Return answers that turned out to be wrong."""
        changed: dict[Question, bool] = {}
        for question, answer, waiting, observed in capture.questions:
            assert capture.sites is not None  # noqa: S101 (a question makes them)
            sites = capture.sites.waiting[waiting] if answer else capture.sites.observed[observed]
            found = [site.measured for site in sites if site.measured is not None and site.measured.has_votes]
            if not found:
                continue
            mixes = any(one.mixes for one in found)
            if mixes == answer:
                changed[question] = not answer
        return changed

    def _more_constants(self, capture: Capture) -> frozenset[int]:
        """Return inputs that may be the same for all data: first those without an axis as long as the batch."""
        data = [(place, shape, integers) for place, (shape, integers, is_data) in enumerate(capture.inputs) if is_data]
        without = [place for place, shape, _ in data if self.num_data not in shape]
        vectors = [place for place, shape, integers in data if integers and len(shape) == 1]
        return self.known.constants | frozenset(without or vectors)

    def _compare_predictions(self, f: Tensor, tolerance: float) -> float:
        """Compare predictions with those of the model alone, for half of the data if possible."""
        half = self.num_data // 2 if self.halves else self.num_data
        plain = self._half(half)
        if plain is not None and _difference(plain, f[:half]) <= tolerance:
            return _difference(plain, f[:half])
        # Is it the capture, or the other half of the data?
        difference = _difference(self.run(self.x, self.num_data, None).detach(), f)
        if difference > tolerance:
            raise self._wrong_rule(difference, tolerance)
        if plain is None or (self.whole and not self._inputs_are_in_order()):
            return difference
        raise _mixing_error(
            f"The predictions for {half} data are not the same in a batch with {self.num_data - half} others."
        )

    def _half(self, half: int) -> Tensor | None:
        """Return predictions for the first data; `None` if the batch cannot be cut, as one of ragged graphs."""
        try:
            return self.run(cut(self.x, self.num_data, half, self.batch_axis), half, None).detach()
        except Exception:
            if not self.whole:
                raise
            return None

    def _inputs_are_in_order(self) -> bool:
        """Whether the n-th row of all inputs with numbers belongs to the n-th datum, so that a batch can be cut."""
        capture = Capture(self.session, GradientSums(), self.num_data, self.batch_axis, self.known, measuring=True)
        sites: list[Site] = []

        def observed(t: Tensor) -> Tensor:
            t = capture.mark_data(t)
            if not t.is_floating_point() or t.shape[:1] != (self.num_data,):
                return t
            t = capture.observed(t, ("input", ""))
            assert capture.sites is not None  # noqa: S101 (it has just been made)
            sites.append(capture.sites.observed[-1])
            return capture.as_data(t)

        try:
            f = self.run(mapped(self.x, observed), self.num_data, capture)
        finally:
            capture.leave_nothing_behind()
            capture.running = False
        measure_rows(f, capture)
        _forget(capture)
        return all(site.inner == prod(site.leading[1:]) for site in sites if site.measured is not None)

    def _compare_gradients(
        self, f: Tensor, capture: Capture, sums: GradientSums, tolerance: float
    ) -> tuple[dict[str, float], set[tuple[str, str]]]:
        """Compare sums over uses with gradients by autograd."""
        names = [name for name, p in self.params.items() if p.requires_grad]
        v = next(probes(f, self.num_data))
        exact = backward(f, capture, v.unsqueeze(0), also=[self.params[name] for name in names])
        left_out = {name for name, _ in capture.unexplained | sums.conflicts}
        found, sizes = sums.by_parameter(self.params)
        differences: dict[str, float] = {}
        unexplained: set[tuple[str, str]] = set()
        eps = torch.finfo(f.dtype).eps
        for name, g in zip(names, exact, strict=True):
            if name not in found or name in left_out:
                continue
            expected = torch.zeros_like(found[name]) if g is None else g.to(found[name].dtype)
            distance = float((found[name] - expected).norm())
            size = float(expected.norm())
            differences[name] = distance / size if size > 0 else float(distance > 0)
            noise = _ROUNDINGS * eps * sizes[name]
            if distance > tolerance * size and distance > noise:
                unexplained.add((name, self._missed(name, f, sums, differences[name])))
            elif distance <= noise and differences[name] > tolerance:
                differences[name] = distance / sizes[name]  # terms cancel, up to rounding errors
        return differences, unexplained

    def _missed(self, name: str, f: Tensor, sums: GradientSums, difference: float) -> str:
        """Say which use may have been missed."""
        seen = ", ".join(sorted(sums.operations[name]))
        hidden = sorted({function for parameter, function in hidden_uses(f, self.params) if parameter == name})
        other = f"{', '.join(hidden)}, and" if hidden else "something that is hidden from PyTorch's modes, or misread"
        return f"{other} next to {seen} (without it, the gradient differs by {difference:.0%})"

    def _wrong_rule(self, difference: float, tolerance: float) -> ModelError:
        """Find the first operation whose result is another one under capture."""
        plain, captured = _Results(self.session), _Results(self.session)
        self.run(self.x, self.num_data, plain)
        capture = Capture(self.session, GradientSums(), self.num_data, self.batch_axis, self.known, measuring=True)
        with ExitStack() as stack:
            both = _Both(stack, capture, captured)
            self._forward(capture, both)
        culprit = ""
        for (name, params, one), (_, _, other) in zip(plain.results, captured.results, strict=False):
            if _difference(one, other) > tolerance:
                used = f" (parameter {', '.join(map(repr, params))})" if params else ""
                culprit = f" {name}{used} is the first operation whose result differs: the rule for it is wrong."
                break
        return ModelError(
            f"Predictions under capture differ by {difference:.0%} from those of the model.{culprit}",
            "Leave the parameters of that operation out with params=, and report it as an error of kfs.",
        )

    def _mixing(self, capture: Capture) -> ModelError:
        """Say between which operations data mix."""
        sites = [site for site in _waiting(capture) if site.measured is not None]
        last = max(place for place, site in enumerate(sites) if site.measured.mixes)  # type: ignore[union-attr]
        operation, parameter = sites[last].what
        after = f", and before {sites[last + 1].what[0]} ({sites[last + 1].what[1]!r})" if last + 1 < len(sites) else ""
        return _mixing_error(
            f"Data mix after {operation} ({parameter!r}){after}: a row of its output influences the predictions for "
            f"several data (gradients are off by {_misfit(sites[last]):.0%})."
        )

    def _placed(self, site: Site, routes: bool) -> Placed:
        """Return what later batches need to know about a place."""
        certain = site.certain and not routes and site.measured is not None and site.measured.has_votes
        return Placed(site.what, site.leading, self.num_data, site.inner if certain else None)

    def _rows(self, site: Site, routes: bool) -> str:
        """Say how rows belong to data."""
        inner = self._placed(site, routes).inner
        if site.measured is not None and not site.measured.has_votes:
            return "no gradient"
        if inner is None:
            return "rows are measured in every batch"
        shared = prod(site.leading) // self.num_data
        if inner == shared:
            return "batch first" if shared > 1 else "one row per datum"
        return "batch last" if inner == 1 else f"{inner} of {shared} rows of a datum together"


class _Results(TorchFunctionMode):
    """Keeps results of all operations, in their order, with the parameters that they use."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.tracker = session.tracker
        self.results: list[tuple[str, list[str], Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = [self.tracker.find(t) for t in tensors_of((*args, *kwargs.values()))]
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.is_floating_point():
            names = sorted({tracked.name for tracked in found if tracked is not None})
            self.results.append((getattr(func, "__name__", str(func)), names, result.detach().clone()))
        return result


class _Both(AbstractContextManager[None]):
    """Enters two contexts, the second one inside of the first."""

    def __init__(self, stack: ExitStack, *contexts: AbstractContextManager[Any]) -> None:
        self.stack = stack
        self.contexts = contexts

    def __enter__(self) -> None:
        for context in self.contexts:
            self.stack.enter_context(context)

    def __exit__(self, *_: object) -> None:
        self.stack.close()


@contextmanager
def _without_hooks(params: Any) -> Iterator[None]:
    """Take users' hooks off parameters in this context: they may change gradients."""
    hooks = [p._backward_hooks for p in params if p._backward_hooks]
    kept = [dict(one) for one in hooks]
    for one in hooks:
        one.clear()
    try:
        yield
    finally:
        for one, before in zip(hooks, kept, strict=True):
            one.update(before)


def _mixing_error(cause: str) -> ModelError:
    return ModelError(
        f"{cause} The prediction for one datum depends on the rest of its batch, so that curvature per datum is not "
        "defined.",
        "Change the model such that it treats data one by one, or let a datum be what influences each other (a graph, "
        "a group). If you know better, pass audit=False.",
    )


def _waiting(capture: Capture) -> list[Site]:
    """Return all places that were measured."""
    return [] if capture.sites is None else list(capture.sites.waiting)


def _forget(capture: Capture) -> None:
    """Let a pass go."""
    if capture.sites is not None:
        capture.sites.forget()


def _misfit(site: Site) -> float:
    return 0.0 if site.measured is None else site.measured.worst


def _tolerance(f: Tensor) -> float:
    """Return up to which relative difference results count as the same."""
    if torch.is_autocast_enabled(f.device.type):
        return _IN_HALF_PRECISION
    if f.dtype == torch.float32 and f.device.type != "cpu":
        return _ON_ACCELERATOR
    return _TOLERANCE.get(f.dtype, _IN_HALF_PRECISION)


def _difference(a: Tensor, b: Tensor) -> float:
    """Return the relative difference of two results, where they are finite."""
    if a.shape != b.shape:
        return torch.inf
    finite = a.isfinite() & b.isfinite()
    dtype = torch.promote_types(a.dtype, torch.float32)
    a, b = torch.where(finite, a, 0).to(dtype), torch.where(finite, b, 0).to(dtype)
    size = float(a.abs().max()) if a.numel() else 0.0
    distance = float((a - b).abs().max()) if a.numel() else 0.0
    return distance / size if size > 0 else float(distance > 0)
