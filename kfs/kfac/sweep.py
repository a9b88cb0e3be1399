"""All batches, once: the engine's way through the five steps of KFAC.

`scaffold` has the steps in their simplest form, for reading. Here they are for all operations, losses and data: passes
that are audited, recorded, interrupted and resumed, in one process or in many. What is specific lives elsewhere:
`vectors` for the curvature matrix, `rules` for each kind of operation, `capture` for how operations are seen, `sums`
for how their inputs and gradients are added up.
"""

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kfs import waiting
from kfs.data import Batch
from kfs.distributed.placement import passes as subsets_of
from kfs.exact_derivatives import RightGradients, explained, has_instance_norms
from kfs.flags import Flags
from kfs.kfac.capture import Audits, Counts, forward, recorder_for, send_back
from kfs.kfac.layout import Key
from kfs.kfac.rules import new_session
from kfs.kfac.settings import Settings
from kfs.kfac.storage.checkpoint import Progress
from kfs.kfac.storage.journal import Journal
from kfs.kfac.sums.across_ranks import agreed_blocks
from kfs.kfac.sums.factor_sums import FactorSums
from kfs.kfac.sums.interface import Sums
from kfs.kfac.sums.owned import choose_owners
from kfs.kfac.vectors import backpropagated_vectors, columns_at_once
from kfs.recording import Replays
from kfs.risk import EmpiricalRisk

log = logging.getLogger("kfs.kfac")

# From predictions and targets to what is sent back: vectors of all data, some columns at a time, [columns, *f.shape].
Vectors = Callable[[Tensor, Tensor], Iterable[Tensor]]


class JournalOf(Protocol):
    """Makes the journal of a pass, for some blocks or all of them."""

    def __call__(self, stage: str, *, blocks: Sequence[str] | None = None) -> Journal:
        """Make it."""


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
        journal: Makes what keeps intermediate results in a file.
        owners: The ranks that own blocks, as far as they are known.

    Returns:
        The sums of all blocks, and what was counted on the way. Scaling by `R` is left to the blocks, so that more
        data can be added.
    """
    if settings.factor_memory is None:
        sums = FactorSums(settings, owners=owners)
        progress = sweep(risk, sums, settings, "KFAC", None if journal is None else journal("factors"))
    else:
        sums, progress = _in_several_passes(risk, settings, settings.factor_memory, journal, owners)
    sums.complete(settings.factor_dtype)
    # Step 5: return the factors.
    return sums, progress


def _in_several_passes(
    risk: EmpiricalRisk,
    settings: Settings,
    memory: int,
    journal: JournalOf | None,
    owners: Mapping[str, int] | None,
) -> tuple[FactorSums, Progress]:
    """Compute the sums of a few blocks at a time, in one pass over the data for each few."""
    ranks = risk.ranks
    total = FactorSums(settings, owners=owners)
    progress = Progress()
    # The first batch says which blocks there are. Others, of experts that it does not use, come later.
    found = FactorSums(settings, chosen=())
    with ranks.agreed("first batch"), closing(passes(risk, found, settings, "", Progress())) as run:
        next(run, None)
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
            total.take(sums)
            left |= sums.left_out
        left = {key: block for key, block in left.items() if key not in known}
    return total, progress


def explain_vectors(risk: EmpiricalRisk, settings: Settings) -> None:
    """Compute all vectors on the CPU, where a loss says at once what is wrong with values; see `kfs.losses.interface`.

    Raises:
        KfsError: If something is.
    """
    with risk.ranks.agreed("explaining"), risk.untouched():
        for batch in risk.batches():
            f = risk.evaluate(batch).cpu()
            for _ in backpropagated_vectors(risk.loss, f, batch.y.cpu(), settings, batch.first, at_once=1):
                pass


def sweep(
    risk: EmpiricalRisk,
    sums: Sums,
    settings: Settings,
    task: str,
    journal: Journal | None = None,
) -> Progress:
    """Show all inputs and gradients of all parametric operations to some sums.

    Args:
        risk: Model, loss, data and parameters.
        sums: What to add to.
        settings: Which curvature matrix, and how.
        task: What to call it in a progress bar.
        journal: Keeps intermediate results in a file, and may have some already.

    Returns:
        What was counted on the way.
    """
    ranks = risk.ranks
    # An accelerator is not asked for every batch whether all targets count: they nearly always do.
    ignored = Flags(risk.device) if waiting.runs_behind(risk.device) and sums.counts_rows and journal is None else None
    # Padding shows where gradients are missing.
    looks = sums.counts_rows and journal is None and settings.fisher != "forward-only"
    padding = Flags(risk.device) if looks else None
    with risk.together(task, settings.all()):
        progress = Progress() if journal is None else journal.resume(sums)
        for _ in passes(risk, sums, settings, task, progress, journal, ignored=ignored, padding=padding):
            pass
        assumed = ignored is not None or padding is not None
        if assumed and any(ranks.gather("rows that count", _wrong(ignored) or _wrong(padding))):
            # Some targets do not count, or there is padding that no rule explains. So do all of it again.
            sums.restart()
            progress = Progress()
            for _ in passes(risk, sums, settings, task, progress):
                pass
        if journal is not None:
            journal.close(progress, sums)
        if ranks.are_several:
            risk.count()  # refuses data that are empty on all ranks
            progress.add_up(ranks)
            sums.add_up(ranks, risk.device)
        if journal is not None:
            journal.unite(progress, sums)
    return progress


def passes(
    risk: EmpiricalRisk,
    sums: Sums,
    settings: Settings,
    task: str,
    progress: Progress,
    journal: Journal | None = None,
    vectors: Vectors | None = None,
    pausing: bool = False,
    skip: Callable[[int, Batch], bool] | None = None,
    seen: Callable[[Tensor], None] | None = None,
    ignored: Flags | None = None,
    padding: Flags | None = None,
) -> Generator[Batch, None, None]:
    """Run the passes over all batches, and yield each batch after its pass.

    Args:
        risk: Model, loss, data and parameters.
        sums: What to add to.
        settings: Which curvature matrix, and how.
        task: What to call it in a progress bar.
        progress: Counts data, targets and unexplained uses.
        journal: Keeps intermediate results in a file, and may have some already.
        vectors: From predictions and targets to the columns that are sent back. By default, those of the curvature
            matrix are.
        pausing: Whether code of somebody else runs between two passes. Then modes of PyTorch, parameters and random
            state are as they were before whenever a batch is yielded, and values are checked after every pass.
        skip: Says of a batch, by its place, whether its pass is left out.
        seen: Is shown the predictions of each batch. A pass that is recorded (`Settings.replay`) would not show them.
        ignored: If given, all targets are taken to count if those of the first batch do, and data with others are noted
            there.
        padding: If given, takes note of padding that no rule about rows explains; it is measured from then on.

    Yields:
        The batches whose passes are complete.
    """
    at_once = 1 if vectors is not None else columns_at_once(settings, risk.device)
    instances = has_instance_norms(risk.model)  # PyTorch takes them for channels of a single datum

    def vectors_of(f: Tensor, batch: Batch) -> Iterable[Tensor]:
        """Return what is sent back for a batch."""
        if vectors is not None:
            return (column.to(f.dtype) for some in vectors(f, batch.y) for column in some.split(1))
        first = settings.first_datum + batch.start
        return backpropagated_vectors(risk.loss, f, batch.y, settings, first, at_once)

    def run(batch: Batch) -> None:
        """Run the pass over a batch."""
        # For a single datum, PyTorch misreads some gradients.
        with RightGradients() if instances or len(batch.y) == 1 else nullcontext():
            known = audits.of_batch(risk, batch) if settings.audit else None
            # Step 1: forward pass. Step 2: inputs are added to the input-based factors on the way.
            f, capture = forward(risk, batch, session, sums, settings.batch_axis, known, assumed, padding)
            risk.finite(f.detach(), batch)
            if seen is not None:
                seen(f.detach())
            audits.compare(f.detach())
            missed = audits.follow_up(risk, batch, capture.operations)
            # Step 3: generate vectors and send them back; gradients are added to the gradient-based factors.
            send_back(f, capture, vectors_of(f.detach(), batch))
        progress.unexplained |= capture.unexplained | missed
        progress.reached |= capture.reached

    assumed: Flags | None = None
    # Surroundings are entered around all batches, or around each of them if the caller does other things in between.
    with _surroundings(risk, at_once, entered=not pausing) as check_values:
        with _surroundings(risk, at_once, entered=pausing):  # all parameters require gradients in there
            session = new_session(risk.params, settings.joint_bias)
            audits = Audits(
                risk.model, session, settings.batch_axis, counts=Counts(risk.mask_source, risk.loss.class_axis)
            )
        with Replays(run, sums, recorder_for(risk, settings), risk.num_batches, risk.model, log) as replays:
            for place, batch in enumerate(risk.batches(task)):
                if place == 0:
                    assumed = _assumed(ignored, risk, batch)
                if skip is not None and skip(place, batch):
                    continue
                for part in [batch] if journal is None else journal.rest_of(batch):
                    with _surroundings(risk, at_once, entered=pausing) as check_this:
                        replays.run(part)
                        check_this()
                    # Step 4: what the loss's reduction divides by.
                    progress.batches += 1
                    progress.num_data += len(part.y)
                    progress.counted = progress.counted + part.counted
                    if journal is not None and journal.notes(part, progress):
                        check_values()
                        journal.write(progress, sums)
                    yield part
        check_values()
    progress.settle()
    progress.audit = audits.close(distrust=_wrong(padding))


def _wrong(assumption: Flags | None) -> bool:
    """Whether something turned out to be wrong that was taken for granted."""
    return assumption is not None and assumption.first_bad() is not None


def _assumed(ignored: Flags | None, risk: EmpiricalRisk, batch: Batch) -> Flags | None:
    """Return where data with ignored targets are noted; `None` if some of a batch are, or if nobody wants to know."""
    targets = None if ignored is None else risk.loss.counted(batch.y)
    with waiting.waiting_allowed():
        return ignored if targets is None or bool(targets.all()) else None


def _surroundings(risk: EmpiricalRisk, at_once: int, entered: bool) -> AbstractContextManager[Callable[[], None]]:
    """Return everything that passes need; where it is entered elsewhere, there is nothing to enter, nor to check."""
    return _needed_by_passes(risk, at_once) if entered else nullcontext(lambda: None)


@contextmanager
def _needed_by_passes(risk: EmpiricalRisk, at_once: int) -> Iterator[Callable[[], None]]:
    """Enter everything that passes need, and leave it again. What is yielded checks values that were not looked at."""
    # vmap does not know the faster attention kernels.
    attention = nullcontext() if at_once == 1 else sdpa_kernel(SDPBackend.MATH)
    with (
        risk.untouched(first_order=True),
        attention,
        torch.enable_grad(),
        explained(),
        risk.checking_later() as check_values,
    ):
        yield check_values
