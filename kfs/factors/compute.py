"""The five steps of KFAC over all batches: from a risk, or a file, to the sums of all blocks.

A single forward and backward pass lives in `kfs.factors.capture`, the addition of sums in `kfs.factors.accumulate`.

`kfs.kfac.scaffold` has the five steps in their simplest form, for reading. Here they support all operations, losses and
data: passes are audited, recorded, interrupted and resumed, in one process or in several. The rules for each kind of
operation are in `kfs.factors.rules`.

The vectors that are sent back for a batch determine the curvature matrix. The listing `kfs.kfac.backpropagated_vectors`
has three curvature matrices, example by example. Here, `backpropagated_vectors` generates the vectors of all of them
for whole batches, several vectors at a time:

- `"type-2"`: the columns of a factor of the Fisher matrix in prediction space.
- `"ggn"`: the columns of a factor of the criterion's Hessian (the same for most losses).
- `"mc"`: gradients for labels drawn from the model's likelihood, over the root of their number.
- `"empirical"`: the gradient for the label in the data.
- `"forward-only"`: zeros. The gradient-based factor is then a multiple of the identity.
"""

import logging
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from math import isfinite
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from kfs.distributed import added_up
from kfs.distributed.assignment import subsets_of
from kfs.distributed.distribution import REPLICATED, Owned
from kfs.errors import DataError, KfsWarning, ModelError
from kfs.factors.accumulate.across_ranks import agreed_blocks, choose_owners, keep_own
from kfs.factors.accumulate.block_sums import BlockSums
from kfs.factors.accumulate.factor_sums import FactorSums
from kfs.factors.accumulate.statistic import Statistic, add_up_over_ranks, reset
from kfs.factors.audit import Audits, Counts, predictor
from kfs.factors.block import Factors, LossScale
from kfs.factors.capture import CapturedPass, forward
from kfs.factors.checkpoint import Checkpoint, Journal, Progress, naming
from kfs.factors.layout import Key, Side
from kfs.factors.rules import new_trace
from kfs.factors.settings import Settings
from kfs.losses import Loss
from kfs.losses.draws import Draws
from kfs.operators.derivatives import leaves_and_rest, pull_back
from kfs.operators.space import Space
from kfs.problem.data import Batch, values_digest
from kfs.problem.risk import EmpiricalRisk
from kfs.problem.torch_fixes import RightGradients, explained, has_instance_norms
from kfs.runtime import sync
from kfs.runtime.cuda_graphs import NO_GUARD, Guard, Replayer, has_hooks
from kfs.runtime.memory import SHARE, free_memory
from kfs.runtime.precision import at_least_float32
from kfs.runtime.sync import DeferredChecks, numbers


def not_covered(
    params: Iterable[str],
    blocks: Iterable[BlockSums],
    unexplained: set[tuple[str, str]],
    conflicts: set[tuple[str, str]],
    reached: Collection[str] | None = None,
) -> dict[str, str]:
    """Return the parameters without a complete block, each with the reason.

    A parameter that predictions do not depend on needs no block.

    Args:
        params: All parameters that should be covered.
        blocks: The sums of all blocks.
        unexplained: `(parameter, why)` of uses that no rule explains.
        conflicts: `(parameter, operation)` of uses that are inconsistent with other uses of the parameter.
        reached: Parameters that predictions depend on. If not given, all of them.
    """
    blocks = list(blocks)
    reasons: dict[str, str] = {}
    for name, why in sorted(unexplained):
        reasons.setdefault(name, why)
    for name, operation in sorted(conflicts):
        reasons.setdefault(name, f"its use by {operation!r} does not fit together with its other uses")
    covered = {name for block in blocks for name in block.layout.params}
    for name in params:
        if name not in covered and (reached is None or name in reached):
            reasons.setdefault(name, "no operation with a rule used it, as far as predictions depend on it")
    return reasons


def shared_with(bad: Iterable[str], blocks: Iterable[BlockSums]) -> dict[str, str]:
    """Return the other parameters in blocks of uncovered parameters, each with this reason."""
    bad = set(bad)
    broken = [block.layout.params for block in blocks if bad & set(block.layout.params)]
    names = [name for params in broken for name in params if name not in bad]
    return dict.fromkeys(names, "it shares a block with one that is not covered")


def listed(uncovered: Mapping[str, str]) -> str:
    """Format some uncovered parameters with reasons, for a message."""
    some = "; ".join(f"{name!r}: {why}" for name, why in list(uncovered.items())[:5])
    return some + (f"; and {len(uncovered) - 5} more" if len(uncovered) > 5 else "")


def coverage_error(uncovered: Mapping[str, str]) -> ModelError:
    """Return the error for uncovered parameters."""
    hint = ""
    if any("before it meets the batch" in why for why in uncovered.values()):
        hint = (
            " A weight that is computed from parameters has no Kronecker factors for them. To cover it, make the "
            "weight itself the parameter: for weight normalization and other parametrizations, with "
            "torch.nn.utils.parametrize.remove_parametrizations or torch.nn.utils.remove_weight_norm."
        )
    if any("sparse" in why for why in uncovered.values()):
        hint += " Products with sparse tensors have no rule; convert them first: x.to_dense()."
    if any("does not fit together" in why for why in uncovered.values()):
        hint += (
            " Weights that are used in several ways may be covered if biases have separate blocks: joint_bias=False."
        )
    return ModelError(
        f"KFAC does not cover all parameters ({listed(uncovered)}).",
        "Choose others with params=, or pass uncovered='skip' to leave these out, or uncovered='diagonal' for their "
        f"exact diagonal.{hint} kfs.inspect(model, sample) shows what is covered.",
    )


def warn_of_wide(blocks: Iterable[BlockSums], settings: Settings, stacklevel: int) -> None:
    """Warn about factors that keep only their diagonal because they are wider than `max_dim`."""
    wide = []
    sides: tuple[Side, ...] = ("A", "B")
    for block in blocks:
        for side in sides:
            size = block.on_side(side)[0].size
            if settings.is_diagonal(size) and block.is_diagonal(side):
                wide.append(f"{block.layout.name}.{side} ({size})")
    if wide:
        text = f"Factors wider than max_dim={settings.max_dim} keep their diagonal only: {', '.join(wide)}."
        warnings.warn(text, KfsWarning, stacklevel=stacklevel)


def exact_diagonals(risk: EmpiricalRisk, names: Iterable[str], settings: Settings) -> dict[str, Tensor]:
    """Sum squares of every example's backpropagated gradients, without the reduction factor; exact, but slow.

    Args:
        risk: Model, loss, data and parameters.
        names: Names of the parameters.
        settings: Which curvature matrix. `"forward-only"` has no gradients; its diagonal is zero.

    Returns:
        By name, tensors shaped like the parameters.
    """
    names = list(names)
    dtype = at_least_float32(risk.dtype)
    with risk.together("diagonal"):
        with risk.untouched(), torch.enable_grad():
            total = {name: torch.zeros_like(risk.params[name], dtype=dtype) for name in names}
            for batch in risk.batches("diagonal"):
                leaves, rest = leaves_and_rest(risk, names)
                f = risk.predict(leaves | rest, batch)
                first = settings.first_datum + batch.first
                for vectors in backpropagated_vectors(risk.loss, f.detach(), batch.y, settings, first, 1):
                    for n in range(len(f)):
                        one = torch.zeros_like(vectors)
                        one[:, n] = vectors[:, n]
                        for name, g in pull_back(f, leaves, one, keep_graph=True).items():
                            total[name] += g.to(dtype).square().sum(0)
        return added_up(risk.ranks, "diagonal", total)


# Number of entries of the columns that are computed together.
_NUMBERS = 2**22


def backpropagated_vectors(
    loss: Loss,
    f: Tensor,
    y: Tensor,
    settings: Settings,
    first_datum: int | Tensor,
    at_once: int,
) -> Iterator[Tensor]:
    """Generate the vectors that are sent back for a batch.

    Args:
        loss: The loss.
        f: Predictions, `[N, ...]`, detached.
        y: Targets, `[N, ...]`.
        settings: Which curvature matrix is approximated.
        first_datum: Index of the first example within all data, as in `Draws`.
        at_once: Number of columns to yield together.

    Yields:
        Chunks of columns, `[columns, *f.shape]`: the same number of vectors for every example.
    """
    if settings.fisher in {"type-2", "ggn"}:
        factor = loss.fisher_factor if settings.fisher == "type-2" else loss.hessian_factor
        # Many columns are computed together, as far as they fit into memory, and yielded a few at a time.
        many = at_once * max(1, _NUMBERS // (at_once * max(f.numel(), 1)))
        start = 0
        while len(columns := factor(f, y, start, start + many)):
            # Use chunks of equal size: a small last one would take nearly as long as the others.
            yield from columns.to(f.dtype).chunk(max(1, -(-len(columns) // at_once)))
            if len(columns) < many:
                return
            start += many
    elif settings.fisher == "mc":
        for start in range(0, settings.mc_samples, at_once):
            samples = range(start, min(start + at_once, settings.mc_samples))
            draws = [Draws(settings.seed, first_datum, settings.first_sample + sample) for sample in samples]
            gradients = [loss.sampled_gradient(f, y, d).to(f.dtype) for d in draws]
            # These may be large, so a single one is not copied.
            together = gradients[0].unsqueeze(0) if len(gradients) == 1 else torch.stack(gradients)
            yield together if settings.mc_samples == 1 else together / settings.mc_samples**0.5
    elif settings.fisher == "empirical":
        yield loss.gradient(f, y).unsqueeze(0).to(f.dtype)
    else:
        # A backward pass is needed only to find out which uses predictions depend on.
        yield torch.zeros_like(f).unsqueeze(0)


def columns_at_once(settings: Settings, device: torch.device) -> int:
    """Return the number of columns to send back together: the setting or, if not given, enough to keep a GPU busy."""
    if settings.fisher in {"empirical", "forward-only"} or (settings.fisher == "mc" and settings.mc_samples == 1):
        return 1
    return settings.columns_at_once or (8 if device.type == "cuda" else 1)


# Number of passes until the first recording.
_EAGER = 3
# What PyTorch raises if an operation does not support `vmap`, and other errors.
WITHOUT_VMAP = (RuntimeError, NotImplementedError)


def one_by_one(settings: Settings, error: Exception) -> Settings:
    """Return settings that send columns back one by one, because an operation does not support `vmap`.

    Raises:
        ModelError: If the user has set the number of columns.
        Exception: The error, if it has another cause.
    """
    if "vmap" not in str(error):
        raise error
    if settings.columns_at_once is not None:
        raise ModelError(
            "An operation's backward pass does not work for several vectors together (vmap).",
            "Leave columns_at_once out, or set it to one.",
        ) from error
    return replace(settings, columns_at_once=1)


log = logging.getLogger("kfs.factors")

# Maps predictions and targets to the vectors that are sent back, some columns at a time, [columns, *f.shape].
Vectors = Callable[[Tensor, Tensor], Iterable[Tensor]]


class JournalOf(Protocol):
    """Creates the journal of a pass, for some blocks or all of them."""

    def __call__(self, stage: str, *, blocks: Sequence[str] | None = None) -> Journal:
        """Create the journal."""


def kfac(
    risk: EmpiricalRisk,
    settings: Settings,
    journal: JournalOf | None = None,
    owners: Mapping[str, int] | None = None,
) -> tuple[FactorSums, Progress]:
    """Compute the sums behind the Kronecker factors of all parametric operations.

    Args:
        risk: Model, loss, data and parameters.
        settings: Which curvature matrix, and how.
        journal: Creates journals, which keep intermediate results in files.
        owners: The ranks that own blocks, as far as known.

    Returns:
        The sums of all blocks, and the counts of the pass. Blocks are scaled by `R` on access, so that more data can be
        added.
    """
    memory = settings.factor_memory if settings.factor_device is None else memory_of_pass(risk, settings)
    if memory is not None:
        return _in_several_passes(risk, settings, memory, journal, owners)
    sums = FactorSums(settings, owners=owners)
    progress = sweep(risk, sums, settings, "KFAC", None if journal is None else journal("factors"))
    sums.complete(settings.factor_dtype, settings.factor_device)
    # Step 5: return the factors.
    return sums, progress


def memory_of_pass(risk: EmpiricalRisk, settings: Settings) -> int | None:
    """Return the bytes that sums of one pass over the data may have; `None` for one pass with all of them.

    During a pass, sums are on the model's device. If factors are then moved elsewhere, because they do not fit, half of
    the free memory there is for sums, unless the user has set a limit.
    """
    if settings.factor_memory is not None or settings.factor_device is None:
        return settings.factor_memory
    free = None if torch.device(settings.factor_device).type == risk.device.type else free_memory(risk.device)
    found = [nbytes for nbytes in risk.ranks.gather("free memory", free) if nbytes is not None]
    return min(found) // SHARE if found else None


def _in_several_passes(
    risk: EmpiricalRisk,
    settings: Settings,
    memory: int,
    journal: JournalOf | None,
    owners: Mapping[str, int] | None,
) -> tuple[FactorSums, Progress]:
    """Compute the sums of some blocks at a time, with one pass over the data for each subset."""
    ranks = risk.ranks
    total = FactorSums(settings, owners=owners)
    progress = Progress()
    # Find the blocks from the first batch. Further ones, such as those of experts that it does not use, are found
    # later.
    found = FactorSums(settings, chosen=())
    with ranks.agreed("first batch"), closing(Passes(risk, found, settings, Progress()).over(risk.batches())) as run:
        if next(run, None) is not None and risk.whole.layers is not None:
            risk.whole.layers.finish()
    left = found.left_out
    known: set[Key] = set()
    number = 0
    while blocks := agreed_blocks(ranks, left, "meta", settings.products)[0]:
        known |= blocks.keys()
        if settings.placement == "owner":
            total.owners = choose_owners(blocks.values(), ranks.size, total.owners)
        sizes = {block.layout.name: block.nbytes for block in blocks.values()}
        left = {}
        with ranks.agreed("subsets of blocks"):
            subsets = subsets_of(sizes, memory)
        for subset in subsets:
            number += 1
            stage = "factors" if number == 1 else f"factors.{number}"
            sums = FactorSums(settings, chosen=subset, owners=total.owners)
            progress = sweep(risk, sums, settings, "KFAC", None if journal is None else journal(stage, blocks=subset))
            sums.complete(settings.factor_dtype, settings.factor_device)
            total.take(sums)
            left |= sums.left_out
        left = {key: block for key, block in left.items() if key not in known}
    return total, progress


def explain_vectors(risk: EmpiricalRisk, settings: Settings) -> None:
    """Compute all vectors on the CPU, where a loss checks values at once; see `kfs.losses.interface`.

    Raises:
        KfsError: If a value is invalid.
    """
    with risk.ranks.agreed("explaining"), risk.untouched():
        for batch in risk.batches():
            f = risk.evaluate(batch).cpu()
            for _ in backpropagated_vectors(risk.loss, f, batch.y.cpu(), settings, batch.first, at_once=1):
                pass


def sweep(
    risk: EmpiricalRisk,
    sums: Statistic,
    settings: Settings,
    task: str,
    journal: Journal | None = None,
) -> Progress:
    """Accumulate the inputs and gradients of all parametric operations over all batches in some sums.

    Around the passes, this handles what is rare: checkpoints, assumptions that turn out to be wrong, and ranks.

    Args:
        risk: Model, loss, data and parameters.
        sums: The sums in which to accumulate.
        settings: Which curvature matrix, and how.
        task: Name in the progress bar.
        journal: Keeps intermediate results in a file, and may have some already.

    Returns:
        The counts of the pass.
    """
    ranks = risk.ranks
    # Whether all targets count is not synchronized for every batch, because they nearly always do. Padding is detected
    # by missing gradients.
    checks = sums.counts_rows and journal is None
    on_device = sync.is_asynchronous(risk.device)
    ignored = DeferredChecks(risk.device) if checks and on_device else None
    padding = DeferredChecks(risk.device) if checks and settings.fisher != "forward-only" else None
    with risk.together(task, settings.all()):
        progress = Progress() if journal is None else journal.resume(sums)
        passes = Passes(risk, sums, settings, progress, ignored=ignored, padding=padding)
        batches = risk.batches(task)
        for part in passes.over(batches if journal is None else chain.from_iterable(map(journal.rest_of, batches))):
            if journal is not None and journal.notes(part, progress):
                passes.check_values()
                journal.write(progress, sums)
        assumed = ignored is not None or padding is not None
        if assumed and any(ranks.gather("rows that count", _wrong(ignored) or _wrong(padding))):
            # Some targets do not count, or there is padding that no row rule explains. Repeat the pass without
            # assumptions.
            reset(sums)
            progress = Progress()
            for _ in Passes(risk, sums, settings, progress).over(risk.batches(task)):
                pass
        progress.read_counts()
        if journal is not None:
            journal.close(progress, sums)
        if ranks.are_several:
            risk.count()  # refuses data that are empty on all ranks
            progress.add_up(ranks)
            add_up_over_ranks(ranks, sums, risk.device)
        if journal is not None:
            journal.unite(progress, sums)
    return progress


class Passes:
    """Passes over batches, in the five steps of `kfs.kfac.scaffold`.

    Args:
        risk: Model, loss, data and parameters.
        sums: The sums in which to accumulate.
        settings: Which curvature matrix, and how.
        progress: Accumulates counts and uncovered uses.
        vectors: Maps predictions and targets to the columns that are sent back. By default, those of the curvature
            matrix.
        seen: Called with the predictions of each batch. Recorded passes (`Settings.replay`) do not call it.
        ignored: If given, all targets are assumed to count if those of the first batch do, and examples with ignored
            targets are recorded there.
        padding: If given, records padding that no row rule explains. Which rows count is then measured in later passes.

    Attributes:
        check_values: Checks the values of the passes so far that were not checked yet.
    """

    def __init__(
        self,
        risk: EmpiricalRisk,
        sums: Statistic,
        settings: Settings,
        progress: Progress,
        vectors: Vectors | None = None,
        seen: Callable[[Tensor], None] | None = None,
        ignored: DeferredChecks | None = None,
        padding: DeferredChecks | None = None,
    ) -> None:
        self._risk = risk
        self._sums = sums
        self._settings = settings
        self._progress = progress
        self._vectors = vectors
        self._seen = seen
        self._ignored = ignored
        self._padding = padding
        self._at_once = 1 if vectors is not None else columns_at_once(settings, risk.device)
        self.check_values: Callable[[], None] = lambda: None

    def over(self, batches: Iterable[Batch], pausing: bool = False) -> Generator[Batch, None, None]:
        """Run the passes over batches, and yield each batch after its pass.

        Args:
            batches: Batches of the risk.
            pausing: Whether the caller's code runs between passes. Then modes of PyTorch, parameters and random state
                are restored whenever a batch is yielded, and values are checked after every pass.
        """
        risk, sums, settings, progress = self._risk, self._sums, self._settings, self._progress

        def run(batch: Batch) -> None:
            # For a single example, PyTorch computes some gradients wrongly; likewise with instance norms.
            with RightGradients() if instances or len(batch.y) == 1 else nullcontext():
                known = audits.of(predictor(risk, batch), batch.x, len(batch.y)) if settings.audit else None
                # Step 1: forward pass, in which all operations with parameters are found.
                # Step 2: input-based factors; the pass adds inputs to their sums while the model runs.
                f, one = forward(risk, batch, trace, [sums], settings.batch_axis, known, self._ignored, self._padding)
                missed = self._check(f.detach(), batch, one, audits)
                # Step 3: generate vectors, send each back to all outputs; gradient-based factors.
                one.send_back(f, self._vectors_of(f.detach(), batch))
            progress.unexplained |= one.unexplained | missed
            progress.reached |= one.reached

        instances = has_instance_norms(risk.model)
        with ExitStack() as around:
            around.enter_context(self._surroundings())  # all parameters require gradients in this context
            trace = new_trace(risk.params, settings.joint_bias, block_map=sums.block_map)
            counts = Counts(risk.mask_source, risk.loss.class_axis)
            audits = Audits(risk.model, trace, settings.batch_axis, counts=counts, output=risk.loss.output)
            if pausing:
                around.close()
            limits: dict[str, Any] = {"expected": risk.num_batches, "memory": settings.memory}
            with closing(Replayer("Passes over batches", log, risk.device, settings.replay, **limits)) as replayer:
                guard = NO_GUARD
                for place, batch in enumerate(batches):
                    if place == 0 and self._ignored is not None and not _all_count(risk, batch):
                        self._ignored = None
                    if pausing:
                        around.enter_context(self._surroundings())
                    if not replayer.is_enabled:
                        run(batch)
                    else:
                        if place < _EAGER:  # the first pass may register hooks
                            why = _why_not_replayed(risk)
                            guard = Guard(risk.model, why=why) if guard is NO_GUARD or why != guard.why else guard
                        replayer.run_batch(batch, run, guard, host=sums)
                    # Step 4: the loss's reduction.
                    progress.batches += 1
                    progress.num_data += len(batch.y)
                    progress.counted = progress.counted + batch.counted
                    if pausing:
                        around.close()
                    yield batch
        if _wrong(self._padding):
            audits.distrust()
        progress.audit = audits.report
        # Step 5: return the factors. They are the sums, which `kfs.factors.block` scales.

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Context in which passes run: modes of PyTorch, protection of the model, deferred checks of values."""
        # `vmap` does not support the faster attention kernels.
        kernel = sdpa_kernel(SDPBackend.MATH) if self._at_once > 1 else nullcontext()
        with (
            self._risk.untouched(first_order=True),
            kernel,
            torch.enable_grad(),
            explained(),
            self._risk.checking_later() as self.check_values,
        ):
            yield
            self.check_values()

    def _vectors_of(self, f: Tensor, batch: Batch) -> Iterable[Tensor]:
        """Return the vectors that are sent back for a batch."""
        if self._vectors is not None:
            return (column.to(f.dtype) for some in self._vectors(f, batch.y) for column in some.split(1))
        first = self._settings.first_datum + batch.start
        return backpropagated_vectors(self._risk.loss, f, batch.y, self._settings, first, self._at_once)

    def _check(self, f: Tensor, batch: Batch, one: CapturedPass, audits: Audits) -> set[tuple[str, str]]:
        """Check the predictions of a batch, and return `(parameter, why)` of uses that were missed or misread."""
        if not self._progress.batches and audits.report is not None and audits.report.unused:
            self._risk.check_outputs(batch, audits.report.unused)
        self._risk.finite(f, batch)
        if self._seen is not None:
            self._seen(f)
        return audits.follow_up(self._risk, batch, f, one.operations)


def _why_not_replayed(risk: EmpiricalRisk) -> str:
    """Return the reason why passes on a GPU cannot be replayed, or an empty string."""
    if has_hooks(risk.model):
        return "the model has hooks"
    model = risk.model.parameters() if isinstance(risk.model, nn.Module) else ()
    devices = {t.device for t in (*risk.params.values(), *model)}
    if risk.whole.layers is not None:
        return "parameters are gathered layer by layer"
    return "the model is on several devices" if len(devices) > 1 else ""


def _wrong(assumption: DeferredChecks | None) -> bool:
    """Whether an assumption turned out to be wrong."""
    return assumption is not None and assumption.first_failure() is not None


def _all_count(risk: EmpiricalRisk, batch: Batch) -> bool:
    """Whether all targets of a batch count."""
    targets = risk.loss.counted(batch.y)
    with sync.allow_sync():
        return targets is None or bool(targets.all())


def compute_factors(
    risk: EmpiricalRisk, settings: Settings, checkpoint: Checkpoint | None = None, known: Factors | None = None
) -> Factors:
    """Compute the factors of all parameters, check them, and handle uncovered parameters.

    Args:
        risk: Model, loss, data and parameters.
        settings: Which curvature matrix, and how.
        checkpoint: Where and how often to write intermediate results.
        known: Factors that the result will be added to: blocks keep their owners.
    """
    journal = None if checkpoint is None else partial(Journal, checkpoint, risk, settings)
    owners = {} if known is None else known.distribution.owners
    with naming(checkpoint):
        try:
            sums, progress = kfac(risk, settings, journal, owners)
        except WITHOUT_VMAP as error:
            sums, progress = kfac(risk, one_by_one(settings, error), journal, owners)
    blocks = _covered_blocks(risk, settings, sums, progress)
    # Parameters without a block are not used and have zeros, unless uncovered parameters were skipped.
    covered = {name for block in blocks for name in block.layout.params}
    all_count = settings.uncovered != "skip"
    params = {name: p for name, p in risk.params.items() if all_count or name in covered}
    own = {name: (p.dtype, p.device) for name, p in params.items()}
    return Factors(
        Space({name: p.shape for name, p in params.items()}, risk.dtype, risk.device, own),
        blocks,
        settings,
        LossScale.of(risk),
        progress.count,
        progress.num_data,
        Owned(risk.ranks, sums.owners) if sums.owners and risk.ranks.are_several else REPLICATED,
        risk.about,
        values_digest(params.values()) if known is None else known.computed_at,
        progress.audit,
        risk.with_model,
    )


def _covered_blocks(risk: EmpiricalRisk, settings: Settings, sums: FactorSums, progress: Progress) -> list[BlockSums]:
    """Return the blocks of covered parameters, whose sums are finite, and exact diagonals of others if wanted."""
    # Which parameters are not covered?
    found = list(sums.blocks.values())
    bad = not_covered(risk.params, found, progress.unexplained, sums.conflicts, progress.reached)
    blocks = [block for block in found if not bad.keys() & set(block.layout.params)]
    uncovered = bad | shared_with(bad, found)
    if uncovered and settings.uncovered == "error":
        raise coverage_error(uncovered)
    # Are all sums finite?
    if not all(risk.ranks.gather("finite", _is_finite(blocks))):
        if sync.is_asynchronous(risk.device):
            explain_vectors(risk, settings)
        with risk.ranks.agreed("factors"):
            _refuse_not_finite(blocks)
    # Add exact diagonals, with owners if blocks have owners.
    if uncovered and settings.uncovered == "diagonal":
        diagonals = exact_diagonals(risk, uncovered, settings)
        exact = [BlockSums.of_diagonal(name, entries) for name, entries in diagonals.items()]
        if sums.owners:
            sums.owners = choose_owners(exact, risk.ranks.size, sums.owners)
            keep_own(exact, sums.owners, risk.ranks.rank)
        blocks += exact
    if not blocks:
        raise coverage_error(uncovered or not_covered(risk.params, [], set(), set()))
    return blocks


def _is_finite(blocks: list[BlockSums]) -> bool:
    """Whether all sums are finite; synchronizes once if they are."""
    totals = [s.total for block in blocks if block.is_local for s in block.sums]
    if not totals or all(map(isfinite, numbers([torch.nn.utils.get_total_norm(totals)]))):
        return True
    # The norm may overflow for large finite values, so check each tensor.
    return all(numbers([total.isfinite().all() for total in totals]))


def _refuse_not_finite(blocks: list[BlockSums]) -> None:
    """Raise for the first block whose sums are not finite, if this process has it."""
    for block in blocks:
        for role in block.roles.values():
            for what, s in (("inputs", role.input), ("gradients", role.gradient)):
                if block.is_local and not s.total.isfinite().all():
                    raise DataError(
                        f"The {what} of block {block.layout.name!r} are not finite.",
                        "Look for NaN or infinity in the data, the parameters or the loss.",
                    )
