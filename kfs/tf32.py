"""TF32: whether a GPU multiplies float32 on its tensor cores, which round numbers to eleven significant bits."""

from typing import Any

import torch

_matmul: Any = torch.backends.cuda.matmul
# PyTorch 2.9 has a new name for the switch. Its old name is an error after somebody has used the new one.
_SWITCH = "fp32_precision" if hasattr(_matmul, "fp32_precision") else "allow_tf32"
_VALUES = {True: "tf32", False: "ieee"} if _SWITCH == "fp32_precision" else {True: True, False: False}


def uses_tf32() -> bool:
    """Whether a GPU multiplies float32 in TF32 now."""
    return bool(getattr(_matmul, _SWITCH) == _VALUES[True])


class tf32:  # noqa: N801 (used like a function)
    """Switch TF32 on or off in this context; `None` leaves it as it is."""

    def __init__(self, wanted: bool | None) -> None:
        self.wanted = wanted

    def __enter__(self) -> None:
        """Switch only if that changes something."""
        self.changes = self.wanted is not None and uses_tf32() != self.wanted
        if self.changes:
            self.before = getattr(_matmul, _SWITCH)
            setattr(_matmul, _SWITCH, _VALUES[bool(self.wanted)])

    def __exit__(self, *_: object) -> None:
        if self.changes:
            setattr(_matmul, _SWITCH, self.before)
