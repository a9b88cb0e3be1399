"""Where the batch axis is in activations, and how to bring them into the form `[batch, shared, features]`.

This is the axis convention of the whole engine: activations arrive with any leading axes, `[*leading, features]`, and
gradients with one more axis for columns, `[columns, *leading, features]`. Where it matters which datum a vector
belongs to, the leading axes are brought into the form `[batch, shared]`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kfs.errors import DataError


@dataclass(frozen=True)
class BatchAxis:
    """Knows the batch axis by its length, or because somebody said where it is.

    Attributes:
        num_data: Its length.
        axis: Where it is, if somebody knows. Otherwise it is the first one, or the only one of that length, or the
            slowest part of a first axis that it shares with others.
    """

    num_data: int
    axis: int | None = None

    def by_datum(self, t: Tensor, trailing: int = 1) -> Tensor:
        """Bring a tensor `[*leading, *trailing]` into the form `[batch, shared, *trailing]`.

        Args:
            t: The tensor.
            trailing: How many axes are not leading ones: one for features.

        Raises:
            DataError: If the batch axis is not found among the leading axes.
        """
        leading = t.ndim - trailing
        shape = t.shape[:leading]
        if 0 in shape:  # no vector at all, as for an expert that no token was sent to
            return t.new_zeros(self.num_data, 0, *t.shape[leading:])
        if self.axis == 1 and leading == 1 and shape[0] % self.num_data == 0:  # sequence and batch share an axis
            return t.reshape(-1, self.num_data, *t.shape[1:]).transpose(0, 1)
        found = self._find(shape)
        if found is None:
            raise DataError(
                f"A parameter is used with an input of leading axes {list(shape)}, in which the batch of "
                f"{self.num_data} data is not found.",
                "Say where it is with batch_axis=, or put it first. KFAC with sharing='expand' needs no batch axis.",
            )
        return t.movedim(found, 0).reshape(self.num_data, -1, *t.shape[leading:])

    def _find(self, leading: Sequence[int]) -> int | None:
        """Return which of the leading axes has the batch in it."""
        if self.axis is not None and self.axis < len(leading):
            return self.axis if leading[self.axis] == self.num_data else None
        matches = [axis for axis, length in enumerate(leading) if length == self.num_data]
        if matches:
            return matches[0] if 0 in matches or len(matches) == 1 else None
        return 0 if leading and leading[0] and leading[0] % self.num_data == 0 else None
