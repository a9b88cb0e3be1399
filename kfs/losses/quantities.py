"""Quantities of an example: its loss, the log-probability of its label, its margin, or a user-defined function.

All quantities are functions of a prediction and a target. Only their gradients with respect to the prediction are
needed.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.func import grad, vmap

from kfs.display.suggestions import suggest
from kfs.errors import LossError
from kfs.losses.interface import Loss

Name = Literal["loss", "log-probability", "margin"]
# The name of a quantity, or a function of one example's prediction and target that returns a number.
Quantity = Name | Callable[[Tensor, Tensor], Tensor]
NAMES: tuple[str, ...] = get_args(Name)


def gradient_of(quantity: Quantity, loss: Loss) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that computes the gradient of a quantity with respect to predictions.

    Args:
        quantity: `"loss"` is the criterion `c(f, y)` of the example, without the reduction factor. `"log-probability"`
            is the log-probability of the target, without class weights and label smoothing. `"margin"` is
            `log p / (1 - p)`, where `p` is the probability of the label: its logit minus the log-sum-exp of all other
            logits. For an example with several labels, log-probability and margin are summed over the labels. A
            function takes one example's prediction and target.
        loss: The loss that defines the likelihood of predictions.

    Returns:
        A function of predictions and targets `[N, ...]` that returns a tensor with the shape of predictions.

    Raises:
        LossError: If the name of the quantity is unknown.

    Example:
        >>> from kfs.losses import describe
        >>> gradient = gradient_of("margin", describe(torch.nn.CrossEntropyLoss()))
        >>> gradient(torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([0]))
        tensor([[ 1.0000, -0.5000, -0.5000]])
    """
    if callable(quantity):
        return _Function(quantity)
    if quantity == "loss":
        return loss.gradient
    if quantity == "log-probability":
        return loss.log_probability_gradient
    if quantity == "margin":
        return loss.margin_gradient
    way_out = f"{suggest([quantity], NAMES)} A function of one example's prediction and target is possible, too."
    raise LossError(f"There is no quantity {quantity!r}.", way_out)


def sign_of(quantity: Quantity) -> int:
    """Return 1 if smaller values of a quantity are better (the loss and, by convention, a function); otherwise -1."""
    return -1 if quantity in {"log-probability", "margin"} else 1


class _Function:
    """Differentiates a function of one example: for all examples at once if `vmap` supports it, else one by one."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.function = function
        self.together = True

    def __call__(self, f: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            if self.together:
                try:
                    gradients: Tensor = vmap(grad(self._value))(f, y)
                except (RuntimeError, NotImplementedError):
                    self.together = False  # an error of the function itself is raised again below
                else:
                    return gradients
            return torch.stack([self._one(f_n, y_n) for f_n, y_n in zip(f.detach(), y, strict=True)])

    def _value(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the value of the function; raise an error if it is not a single number."""
        value = self.function(f, y)
        if not isinstance(value, Tensor) or value.numel() != 1:
            found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            name = getattr(self.function, "__name__", type(self.function).__name__)
            raise LossError(
                f"The function {name} returned {found} for one example, expected a number in a tensor.",
                "The function must take the prediction and the target of a single example, and sum over their entries.",
            )
        return value.reshape(())

    def _one(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the gradient for one example; zero if the function does not depend on the prediction."""
        leaf = f.requires_grad_()
        value = self._value(leaf, y)
        if not value.requires_grad:
            return torch.zeros_like(f)
        (gradient,) = torch.autograd.grad(value, leaf, allow_unused=True, materialize_grads=True)
        return gradient
