"""Checks that data are the same in every pass over them.

Each process counts its own data. `count_all` adds up the counts of all processes.
"""

from math import isclose
from typing import cast

from torch import Tensor

from kfs.distributed import Ranks
from kfs.errors import DataError
from kfs.problem.data import Fingerprint
from kfs.runtime.sync import number


class RepeatabilityCheck:
    """Records the first complete pass over the data, and raises an error if a later pass differs.

    Args:
        declared: Number of examples, if the user declares it.
        ranks: The processes that share the data.
        start: Index of this process's first example among all data; `None` if all processes have to count first.

    Attributes:
        counted: Number of examples, and the divisor of a mean over them; `None` before the first complete pass.
        counted_by_all: The same for all processes together; `None` before `count_all`.
        start: See the argument `start`.

    Raises:
        DataError: If `declared` is not a positive integer.
    """

    def __init__(self, declared: int | None = None, ranks: Ranks | None = None, start: int | None = 0) -> None:
        if declared is not None and (type(declared) is not int or declared < 1):
            raise DataError(f"num_data is {declared!r}.", "Pass a positive integer, or leave it out.")
        self._declared = declared
        self.counted: tuple[int, float] | None = None
        self.counted_by_all: tuple[int, float] | None = None
        self.start = start
        self._ranks = Ranks() if ranks is None else ranks
        self._first_batch: Fingerprint | None = None

    @property
    def known_number(self) -> int | None:
        """Number of examples, counted or declared; `None` if it is unknown."""
        if self.counted_by_all is not None:
            return self.counted_by_all[0]
        if self._ranks.are_several:
            return None
        return self._declared if self.counted is None else self.counted[0]

    def count_all(self, mean: bool) -> tuple[int, float]:
        """Add up the counts of all processes, and set `start` to the index of this process's first example.

        Args:
            mean: Whether the loss is a mean over the data.

        Returns:
            Number of examples of all processes, and the divisor of a mean over them.

        Raises:
            DataError: If there are no data, all targets have weight zero in a mean, or a shard starts at the wrong
                example.
        """
        every = self._ranks.gather("counting", (*cast("tuple[int, float]", self.counted), self.start))
        start = 0
        for rank, (num_data, _, declared) in enumerate(every):
            if declared not in {None, start}:
                raise DataError(
                    f"The ranks before rank {rank} have {start} examples, but its shard starts at example {declared}.",
                    "Pass data to kfs.shard that give the same batches every time.",
                )
            if rank == self._ranks.rank:
                self.start = start
            start += num_data
        count = float(sum(count for _, count, _ in every))
        _refuse_empty(start, count, mean)
        self.counted_by_all = start, count
        return self.counted_by_all

    def extrapolate(self, first: int, num_data: int, count: float | Tensor) -> bool:
        """Extrapolate the divisor of the mean from the first batch, if the number of examples was declared.

        Complete passes check the extrapolation later.

        Args:
            first: Index of the batch's first example.
            num_data: Number of examples in the batch.
            count: Divisor of a mean over the batch.

        Returns:
            Whether `counted` was set. If all targets of the batch have weight zero, they cannot be extrapolated.
        """
        if self._declared is None or first > 0:
            return False
        per_example = number(count) / num_data
        if per_example == 0:
            return False
        self.counted = self._declared, self._declared * per_example
        return True

    def check_first_batch(self, seen: Fingerprint) -> None:
        """Raise an error if the first batch differs from the first batch of the last complete pass.

        Raises:
            DataError: If it differs.
        """
        before = self._first_batch
        if before is None or seen == before:
            return
        if seen.tensors != before.tensors:
            cause = (
                f"The first batch had the tensors {', '.join(before.tensors)}, and has {', '.join(seen.tensors)} now."
            )
        else:
            cause = "The first batch has different values than in the first pass over the data."
        raise DataError(
            cause,
            "Pass data that give the same batches in the same order every time: draw random numbers for them with "
            "PyTorch, not NumPy, or pass list(data). After changing data on purpose, make a new EmpiricalRisk.",
        )

    def check_count(self, num_data: int, count: float | Tensor, mean: bool, first_batch: Fingerprint | None) -> None:
        """Record the counts of a complete pass over the data; raise an error if data are empty or have changed.

        Args:
            num_data: Number of examples.
            count: Divisor of a mean over them.
            mean: Whether the loss is a mean over the data.
            first_batch: Fingerprint of the first batch.

        Raises:
            DataError: If there are no data, or if the counts differ from the declared or earlier ones.
        """
        count = number(count)
        # With several processes, the shard of one rank may be empty; `count_all` checks the total.
        if not self._ranks.are_several:
            _refuse_empty(num_data, count, mean)

        # The number of examples must match the declared number and the earlier passes.
        if self._declared not in {None, num_data}:
            raise DataError(
                f"num_data is {self._declared}, but the data have {num_data} targets.",
                "Pass the number of examples in all batches together, or leave it out.",
            )
        if self.counted is None:
            self.counted = (num_data, count)
        if num_data != self.counted[0]:
            raise DataError(
                f"The data had {self.counted[0]} targets at first, and {num_data} now.",
                "Pass data that can be iterated repeatedly with the same result.",
            )

        # The divisor of the mean must match, too. Weights are summed in floating point: the order of the data changes
        # the last digits.
        if mean and self._declared and not isclose(count, self.counted[1], rel_tol=1e-6):
            raise DataError(
                f"A mean over all data divides by {count:g}, but by {self.counted[1]:g} when extrapolated from the "
                "first batch: some targets are ignored, or weighted, or longer.",
                "Leave num_data out, so that all targets are counted first.",
            )
        if mean and not isclose(count, self.counted[1], rel_tol=1e-6):
            raise DataError(
                f"The mean was over {self.counted[1]:g} targets at first, and is over {count:g} now: targets or "
                "weights have changed.",
                "Make a new EmpiricalRisk after such a change.",
            )
        self._first_batch = first_batch


def _refuse_empty(num_data: int, count: float, mean: bool) -> None:
    """Raise an error if there are no data, or if all targets have weight zero in a mean."""
    if num_data == 0:
        raise DataError("The data set is empty.", "Pass at least one batch with at least one example.")
    if mean and count == 0:
        raise DataError(
            "No target counts: all of them are ignored or have weight zero, so that their mean is 0/0.",
            "Pass data with targets that count, or use reduction='sum'.",
        )
