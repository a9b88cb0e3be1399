"""The curvature of all blocks: averages of factors, damped inverses, and products with them.

Non-finite numbers never enter an average. If an inverse cannot be computed, the previous one stays in use. Such events
are counted (`kfs.optim.safety`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kfs.distributed import Ranks, all_true, largest
from kfs.errors import KfsError
from kfs.factors.accumulate import BlockSums
from kfs.factors.block import Block
from kfs.factors.blocks import BlockError
from kfs.factors.compute import shared_with
from kfs.factors.layout import BlockMap, Key
from kfs.optim import across_ranks
from kfs.optim.across_ranks import OwnedInverses, ReplicatedInverses
from kfs.optim.averages import Average, Bases, StepSums, add_factors
from kfs.optim.inverses import Groups, Inverses, inverted_together
from kfs.optim.options import Interval, Parameters, interval_at
from kfs.optim.report import Costs
from kfs.optim.safety import DampingPolicy, UsualSizes
from kfs.optim.update_rule import Scalar, total_size
from kfs.runtime import sync

# Factors of a batch are refused if they are more than this many times larger than the largest so far.
_FACTORS_LIMIT = 1e4


class StepNotFiniteError(Exception):
    """Gradients are finite, but products with inverses are not."""


@dataclass(eq=False)
class Curvature:
    """Averages and inverses of all blocks."""

    decay: float  # fraction of an average that is kept when new factors are added
    inverses: Inverses  # how they are computed, and products with them
    every: Interval  # recompute each inverse every this many steps
    patience: int  # raise damping after this many events in a row
    kl_clip: float | None = None  # limit of the change of predictions in a step
    ranks: Ranks = field(default_factory=Ranks)  # processes that each have a summand of every average
    at_owners: bool = False  # whether averages and the inverse of a block are kept on one rank only
    averages: dict[Key, Average] = field(default_factory=dict)
    awaited: set[str] = field(default_factory=set)  # parameters that had a gradient before they had any factors
    damping: DampingPolicy = field(init=False)  # counts events, and raises dampings
    costs: Costs = field(default_factory=Costs)
    sizes: UsualSizes = field(init=False)  # of factors
    _communication: ReplicatedInverses | None = None
    _ahead: dict[Key, across_ranks.Arrival] = field(default_factory=dict)  # inverses that are not due yet
    _credit: float = 0.0  # budget for inverses that earlier steps did not use

    def __post_init__(self) -> None:
        self.damping = DampingPolicy(self.patience, self.averages)
        self.sizes = UsualSizes(_FACTORS_LIMIT, self.patience)

    @property
    def covered(self) -> set[str]:
        """Names of parameters that have an inverse."""
        return {n for a in self.averages.values() if a.inverse is not None for n in a.layout.params}

    @property
    def owners(self) -> dict[str, int]:
        """The rank that holds the inverse for a parameter, if only one rank does."""
        return {n: a.owner for a in self.averages.values() if a.owner is not None for n in a.layout.params}

    def train_with(self, ranks: Ranks) -> None:
        """Train with other processes, which have the same averages. Only rank 0 keeps them: ranks hold summands."""
        self.ranks = ranks
        if ranks.rank:  # pragma: no cover (tested in other processes)
            across_ranks.forget_summands(self.averages.values())

    def bases(self) -> Bases:
        """Return zero-initialized sums of squared gradients for blocks with an eigenbasis."""
        return {
            key: (average.layout, squares)
            for key, average in self.averages.items()
            if (squares := average.new_squares()) is not None
        }

    def knows(self, sums: StepSums) -> bool:
        """Whether the sums of a step change tensor values only: blocks are known, and all of them have inverses."""
        blocks = {key: block for key, block in sums.blocks.items() if block.terms}
        block_map = BlockMap(block.layout for block in blocks.values())
        return all(key in self.averages and self.averages[key].fits(block) for key, block in blocks.items()) and all(
            average.inverse is not None and block_map.fits(average.layout) for average in self.averages.values()
        )

    def add(self, sums: StepSums, without: Iterable[str], finite: Tensor | None = None) -> Tensor | bool:
        """Add the sums of one step to the averages if they are finite and not far larger than before.

        Args:
            sums: Sums from the passes of the step.
            without: Parameters that turned out not to be covered. Their blocks are left out and removed.
            finite: Flag on the device: whether gradients are usable. If given, the device decides, without
                synchronization; blocks must be known.

        Returns:
            Whether the sums were added: a flag on the device if it decides. Give its value to `note_added`.
        """
        without = set(without)
        # An expert without tokens has no statistics, and keeps its average. Blocks are sorted: the order of averages
        # decides which are inverted first, and must not depend on the first rank or the first pass.
        used = {key: block for key, block in sorted(sums.blocks.items()) if block.terms}
        blocks = {key: block for key, block in used.items() if not without & set(block.layout.params)}
        usable = self._are_usable(blocks, sums, finite)
        # On the host, bad sums end this method. On the device, they are replaced when averages are updated.
        good: Tensor | None = None
        if finite is not None:
            good = finite if usable is None else finite & usable
        elif not sums.finite or (usable is not None and not usable):
            self.damping.note_added(False)
            return False
        # A weight that is used in a different way than before, such as by rows, has different blocks now.
        block_map = BlockMap(block.layout for block in blocks.values())
        self._remove([key for key, average in self.averages.items() if not block_map.fits(average.layout)])
        pairs: list[tuple[Average, Block]] = []
        for key, block_sums in blocks.items():
            block = Block(block_sums, 1 / sums.examples)
            average = self.averages.get(key)
            if average is None or not average.fits(block_sums):  # For example, a loaded state has another `max_dim`.
                average = self.averages[key] = Average.zeros_like(block, self.at_owners)
                self.inverses.forget()  # Stacks of inverses may contain the replaced average.
            elif average.eigen is not None and key in sums.squares:
                squares = sums.squares[key] / sums.examples
                if good is not None:
                    squares = torch.where(good, squares, average.eigen.values)
                average.eigen.values.lerp_(squares, 1 - self.decay)
            pairs.append((average, block))
            self.costs.add("factors", block_sums.work)
            self.awaited -= set(block.layout.params)
        if self.at_owners:
            self._choose_owners()
            owned = [(block.sums, average.owner) for average, block in pairs if average.owner is not None]
            self.ranks.gather("sums", None)  # a process that has failed says so
            across_ranks.sum_blocks_at_owners(self.ranks, owned)
        add_factors(pairs, self.decay, good)
        self._ahead.clear()
        self.forget(without)
        if good is None:
            self.damping.note_added(True)
            return True
        return good

    def _choose_owners(self) -> None:
        """Choose the ranks that keep blocks without an owner."""
        new = [key for key, average in self.averages.items() if average.owner is None]
        if new:
            owners = across_ranks.owners_of(self.averages.values(), self.inverses.method == "exact", self.ranks.size)
            for key in new:
                self.averages[key].leave_to(owners[key], owners[key] == self.ranks.rank)

    def _are_usable(self, blocks: Mapping[Key, BlockSums], sums: StepSums, finite: Tensor | None) -> Tensor | None:
        """Return whether all sums are finite and of a usual size on all ranks; `None` if there are no sums."""
        if sums.norms is None:
            places, norms = sums.norms_of(blocks)
            norms = largest(self.ranks, norms) if self.ranks.are_several else norms
        else:
            places = [place for place in sums.norms if place[0] in blocks or place[0] in sums.squares]
            norms = torch.tensor([sums.norms[place] for place in places], dtype=torch.float64)
        if not places:
            return None
        names = tuple(" ".join((kind, *side, "of", key[0], str(key[1]))) for key, side, kind in places)
        return self.sizes.check(names, norms / (sums.examples or 1.0), finite)[1]

    def note_failures(self) -> None:
        """Count failed inverses that were not noticed yet. This synchronizes with the latest inverses."""
        for failed in self.inverses.failures():
            self._note_failure(failed)
            failed.changed = True  # It is tried again, in better precision.

    def update_inverses(self, step: int, groups: Groups, force: bool = False, until: int = 0) -> None:
        """Recompute outdated inverses within the budget of this step, or all of them if `force`.

        Every step does a share of the work, on the oldest inverses, such that each is recomputed once per interval. The
        interval is one step at first and grows up to the requested one, since curvature changes most at the beginning.
        Blocks that are inverted together wait until the budget suffices for all of them.

        Args:
            step: Number of this step.
            groups: Parameter groups, which contain dampings.
            force: Whether to recompute all inverses.
            until: With several processes, inverses that are due before this step may be computed now: averages do not
                change in between. They are stored when they are due, as in a single process.
        """
        steps = self.schedule(step, until, force)
        if self.ranks.are_several:
            self._invert_by_owners(steps, step, groups)
            return
        for together in steps[0]:
            self._invert(together, step, groups)

    def schedule(self, step: int, until: int = 0, force: bool = False) -> list[list[list[Average]]]:
        """Return the blocks to invert in this step, and in further steps before `until`; use this step's budget.

        Each step has a list of blocks that are inverted together. The arguments are those of `update_inverses`.
        """
        due = [a for a in self.averages.values() if a.changed or a.inverse is None or force]
        total = sum(average.cost for average in self.averages.values())
        steps: list[list[list[Average]]] = []
        credit = self._credit
        for now in range(step, max(until, step + 1)):
            every = min(interval_at(self.every, now), 1 + now // 2)
            credit = min(credit + total / every, total)
            chosen = []
            for together in sorted(inverted_together(due), key=lambda same: min(a.updated for a in same)):
                cost = sum(a.cost for a in together)
                too_expensive = credit < (1 - 1e-9) * cost
                # A block without an inverse cannot wait.
                if too_expensive and not force and all(a.inverse is not None for a in together):
                    break
                credit = max(0.0, credit - cost)
                chosen.append(together)
            if now == step:
                self._credit = credit
            steps.append(chosen)
            # Averages do not change before `until`, so what was inverted is not due again.
            gone = set(chain.from_iterable(chosen))
            due = [a for a in due if a not in gone]
        return steps

    def precondition(
        self,
        u: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
        groups: Groups,
        limit: bool,
        taken: Tensor | None = None,
        half: bool = False,
    ) -> dict[str, Tensor]:
        """Multiply vectors by the inverses of all blocks. If `limit`, keep each block's step in its trust region.

        Vectors in `u` are unsharded. A parameter of a block that is in `tensors` but not in `u` counts as zero. The
        flag `taken` becomes false, in place, if steps are not finite. For gradients in `half` precision, the trust
        region is computed less precisely.
        """
        held = {n for a in self.averages.values() if a.has_inverse for n in a.layout.params}
        others = {n: tensors[n] for n in held - u.keys()}
        zeros = {n: torch.zeros(p.shape, dtype=p.dtype, device=p.device) for n, p in others.items()}
        steps = self.inverses.multiply(self.averages.values(), {**u, **zeros}, groups, limit, taken, half)
        return {n: steps[n] for n in u}

    def natural_gradient(
        self,
        parts: Mapping[str, Tensor],
        params: Parameters,
        lrs: Mapping[str, Scalar],
        taken: Tensor,
        half: bool,
    ) -> dict[str, Tensor]:
        """Multiply gradients, or averages of them, by inverses, and keep the products in their trust regions.

        Args:
            parts: Gradients of the average over examples, in float32 or better; for sharded parameters, the parts of
                this process.
            params: All parameters.
            lrs: Learning rates, with which `kl_clip` limits the change of predictions.
            taken: On an accelerator, this flag becomes false, in place, if products are not finite.
            half: Whether gradients were computed in half precision.

        Raises:
            StepNotFiniteError: If products are not finite, on a CPU.
        """
        if not parts:
            return {}
        communication = self.communication(params)
        ahead = communication.gathered(parts)
        # All processes either take the step, or skip it, or raise.
        D, problem = self._multiplied(ahead, params, communication, taken, half)
        on_device = sync.is_asynchronous(taken.device)
        finite = taken if on_device else torch.tensor(problem is None) & total_size(list(D.values())).isfinite()
        if self.kl_clip is not None:
            zero = next(iter(parts.values())).new_zeros(())
            shorter = _shorter(self.kl_clip, lrs, ahead, D, communication, zero)
            # Gradients that are not finite are not clipped: their length is undefined.
            shorter = torch.where(taken, shorter, 1.0)
            D = {n: shorter * d for n, d in D.items()}
        steps, finite = communication.scattered(D, parts, finite)
        if problem is not None:
            raise problem
        if on_device:
            taken.copy_(finite)
        elif not finite:
            raise StepNotFiniteError
        return steps

    def _multiplied(
        self,
        ahead: dict[str, Tensor],
        params: Parameters,
        communication: ReplicatedInverses,
        taken: Tensor,
        half: bool,
    ) -> tuple[dict[str, Tensor], BaseException | None]:
        """Multiply with inverses. An error is returned, not raised, if other processes wait for the products.

        These processes get zeros, and take no step. If the step has new statistics, they raise the error at its end.
        """
        try:
            flag = taken if sync.is_asynchronous(taken.device) else None
            return self.precondition(ahead, params.tensors, params.groups, limit=True, taken=flag, half=half), None
        except BaseException as problem:
            if not isinstance(communication, OwnedInverses):
                raise
            taken.fill_(False)
            return {name: torch.zeros_like(t) for name, t in ahead.items()}, problem

    def communication(self, params: Parameters) -> ReplicatedInverses:
        """Return how gradients are exchanged between processes to multiply them with inverses."""
        like, ranks = params.tensors, self.ranks
        known = self._communication
        if known is None or known.like is not like or known.ranks is not ranks:
            make = OwnedInverses if self.at_owners else ReplicatedInverses
            known = self._communication = make(like, ranks)
        if isinstance(known, OwnedInverses):
            known.owners = self.owners
        return known

    def note_products(self) -> None:
        """Count the products with all inverses."""
        for one in self.inverses.stacks(self.averages.values()):
            K = one.stack.structure
            smaller = min(K.rows, K.columns)
            # Each entry of the result is a sum over a row, and then over a column. The trust region takes two more
            # products: one for a Gram matrix, and one with a function of that matrix.
            sums = K.rows + K.columns + 2 * smaller
            self.costs.add("products", 2.0 * len(K) * K.rows * K.columns * sums)

    def dampings(self) -> dict[str, Tensor]:
        """Return, for each parameter, the damping that was added to the eigenvalues of its block."""
        return {n: a.damping.mean() for a in self.averages.values() if a.damping is not None for n in a.layout.params}

    def forget(self, names: Iterable[str]) -> None:
        """Remove the blocks of some parameters."""
        gone = set(names)
        self._remove([key for key, average in self.averages.items() if gone & set(average.layout.params)])

    def _remove(self, keys: Iterable[Key]) -> None:
        for key in keys:
            del self.averages[key]
            self.inverses.forget()

    def _invert(self, together: Sequence[Average], step: int, groups: Groups) -> None:
        """Compute the inverses of some blocks, or keep the previous ones."""
        try:
            self.inverses.invert(together, self._dampings_of(together, groups))
        except (BlockError, KfsError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            if len(together) > 1:  # Invert them one by one, since not all of them fail.
                for average in together:
                    self._invert([average], step, groups)
                return
            self._note_failure(together[0], f" ({error})")
        else:
            for average in together:
                average.failed = False
        for average in together:
            self._note_attempt(average, step)

    def _invert_by_owners(self, steps: Sequence[Sequence[Sequence[Average]]], step: int, groups: Groups) -> None:
        """Update the inverses of some blocks, each computed on its owner rank, or keep the previous ones.

        Args:
            steps: Blocks of this step, and those of later steps that may be computed now.
            step: Number of this step.
            groups: Parameter groups, which contain dampings.
        """
        missing: list[list[across_ranks.Together]] = []
        for together in steps:
            left = [[a for a in same if not self._is_ahead(a, groups)] for same in together]
            missing.append([(same, self._dampings_of(same, groups)) for same in left if same])
        blocks = [a for together in missing for same, _ in together for a in same]
        if blocks:
            owners = across_ranks.balanced_owners(blocks, self.ranks.size)
            if self.at_owners:
                owners = {a.layout.key: a.owner for a in blocks if a.owner is not None}
            self._ahead |= across_ranks.invert(self.ranks, self.inverses, owners, missing, self.at_owners)
        for average in (average for same in steps[0] for average in same):
            why = self._ahead.pop(average.layout.key).keep(self.inverses)
            average.failed = False
            if why is not None:
                self._note_failure(average, f" ({why})")
            self._note_attempt(average, step)

    def _is_ahead(self, average: Average, groups: Groups) -> bool:
        """Whether the inverse of a block has been computed already."""
        found = self._ahead.get(average.layout.key)
        return found is not None and found.fits(average, *self._dampings_of([average], groups))

    def _dampings_of(self, together: Iterable[Average], groups: Groups) -> list[float]:
        return [float(groups[a.layout.weight]["damping"]) * self.damping.scale for a in together]

    def _note_attempt(self, average: Average, step: int) -> None:
        """Record an attempt to invert, even a failed one.

        Otherwise, a block that fails would use the budget of all other blocks.
        """
        self.costs.add("inverses", average.cost)
        average.updated = step
        average.changed = False

    def _note_failure(self, average: Average, why: str = "") -> None:
        """Count an inverse that could not be computed."""
        average.failed = True
        text = f"the inverse of block {average.layout.name!r} failed{why}, and the last one stays"
        self.damping.note_trouble("failed_inverses", text)

    def state(self, averages: Iterable[Average]) -> dict[str, Any]:
        """Return the state for a checkpoint, given averages over the data of all processes."""
        return {
            "averages": [average.state() for average in averages],
            **self.damping.state(),
            "credit": self._credit,
            "awaited": sorted(self.awaited),
            "sizes": self.sizes.state(),
        }

    def restore(self, state: Any, device: torch.device) -> None:
        """Restore `state`, with copies of tensors on a device. Owners, or rank 0, get the averages."""
        averages = [Average.from_state(s, device) for s in state["averages"]]
        self.averages.clear()  # `damping` has the same mapping.
        self.averages |= {average.layout.key: average for average in averages}
        if self.at_owners:
            self._choose_owners()
        else:
            self.train_with(self.ranks)
        self.damping.restore(state)
        self._credit = float(state["credit"])
        self.awaited = set(state["awaited"])
        self.sizes.restore(state["sizes"])
        self.inverses.forget()
        self.inverses.forget_failures()
        self._ahead.clear()


def _shorter(
    kl_clip: float,
    lrs: Mapping[str, Scalar],
    ahead: Mapping[str, Tensor],
    D: Mapping[str, Tensor],
    communication: ReplicatedInverses,
    zero: Tensor,
) -> Tensor:
    """Return the factor that keeps the change of predictions by a step within the limit."""
    change = torch.stack([zero, *(lrs[n] ** 2 * (v * D[n]).sum() for n, v in ahead.items())])
    result: Tensor = (kl_clip / communication.sum(change.sum()).clamp(min=1e-30)).sqrt().clamp(max=1.0)
    return result


def lost_parameters(
    sums: StepSums, trained: Collection[str], grads: Mapping[str, Tensor], known: Collection[Key], ranks: Ranks
) -> dict[str, str]:
    """Return the parameters that turn out not to be covered by curvature, each with the reason.

    A parameter whose gradient is missing or zero is not reported: this step does not train it, but other steps may.

    Args:
        sums: Sums from the passes of a step.
        trained: Names of parameters that should be covered.
        grads: Gradients by name.
        known: Blocks that already have averages.
        ranks: Processes that train together. Each has a part of the sums, and possibly of the gradients.
    """
    new = [block for key, block in sorted(sums.blocks.items()) if key not in known and block.terms]
    # For example, the blocks of a second head whose output has a separate loss.
    flat = _without_curvature([block for block in new if not block.forward_only], ranks)
    if flat:
        # If no block has any curvature, the loss itself is flat here, such as a Huber loss far from its targets.
        used = [block for _, block in sorted(sums.blocks.items()) if block.terms and not block.forward_only]
        everywhere = _without_curvature(used, ranks)
        if len(everywhere) == sum(len(block.layout.params) for block in used):
            flat = []
    beside = dict.fromkeys(flat, "the loss depends on it, but predictions do not")
    reasons = {n: why for n, why in (beside | sums.uncovered).items() if n in trained and n in grads}
    unused = _all_vanish([[grads[n]] for n in reasons], ranks)
    lost = {n: why for (n, why), is_unused in zip(reasons.items(), unused, strict=True) if not is_unused}
    return lost | shared_with(lost, sums.blocks.values())


def _without_curvature(blocks: Collection[BlockSums], ranks: Ranks) -> list[str]:
    """Return the parameters of blocks whose sums over backpropagated vectors are zero on all ranks."""
    totals = [[role.gradient.total for role in block.roles.values()] for block in blocks]
    vanish = _all_vanish(totals, ranks)
    return [name for block, gone in zip(blocks, vanish, strict=True) if gone for name in block.layout.params]


def _all_vanish(groups: Iterable[Iterable[Tensor]], ranks: Ranks) -> list[bool]:
    """Return, for each group of tensors, whether all entries are zero on all ranks. Synchronizes with the device."""
    flags = [~torch.stack([t.any() for t in tensors]).any() for tensors in groups]
    return all_true(ranks, torch.stack(flags)).tolist() if flags else []
