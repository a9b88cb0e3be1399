"""What a recorded pass of an optimizer takes for granted of a model, and whether that still holds."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from kfs import recording
from kfs.optim.hooks import has_other_hooks


class ModelState(recording.ModelState):
    """The attributes of a model's modules. Hooks of others than optimizers of this library are a difference, too."""

    def difference(self, model: nn.Module, settings: Mapping[str, Any] | None = None) -> str:
        """Return what is different now; an empty text if nothing is."""
        return "the model has hooks" if has_other_hooks(model) else super().difference(model, settings)
