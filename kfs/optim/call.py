"""The call that makes an optimizer: mistakes of those who know other optimizers, each answered with the right call."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from kfs.errors import LossError, ModelError

_CALL = "KFAC(model, nn.CrossEntropyLoss(), lr=1.0)"


def check_call(model: Any, loss: Any) -> None:
    """Check that a model and a loss were passed, in this order.

    Raises:
        ModelError: If the first argument is no model.
        LossError: If the second one is none, or parameters, or something else that cannot be a loss.
    """
    if not isinstance(model, nn.Module):
        given = "parameters" if _may_be_parameters(model) else f"a {type(model).__name__}"
        raise ModelError(
            f"KFAC needs the model (a torch.nn.Module), but the first argument is {given}: factors come from the "
            "inputs and gradients of its layers, which parameters alone do not show.",
            f"Pass model and loss: {_CALL}. Parameters or groups, if they are not all of the model's, are params=.",
        )
    if loss is None:
        raise LossError(
            "KFAC needs the loss. Curvature is that of the loss as a function of the model's predictions (its Hessian, "
            "or the likelihood that labels are drawn from), which gradients do not show.",
            "Pass the loss that you minimize: KFAC(model, nn.CrossEntropyLoss()), or nn.MSELoss(), or one of "
            "kfs.losses. The training loop stays as it is.",
        )
    if _may_be_parameters(loss):
        raise LossError(
            "The second argument of KFAC is the loss, but parameters came.",
            "Pass them as the third one: KFAC(model, nn.CrossEntropyLoss(), model.parameters()).",
        )
    if isinstance(loss, int | float):
        raise LossError(
            f"The second argument of KFAC is the loss, but {loss!r} came.",
            f"Pass settings by name: KFAC(model, nn.CrossEntropyLoss(), lr={loss!r}).",
        )
    if isinstance(loss, type):
        raise LossError(
            f"The loss is the class {loss.__name__}, not an instance of it.",
            "Call it: KFAC(model, nn.CrossEntropyLoss()).",
        )


def _may_be_parameters(given: Any) -> bool:
    """Whether something is a parameter, a group, or several of these."""
    if isinstance(given, Tensor | dict):
        return True
    return isinstance(given, Iterable) and not isinstance(given, nn.Module | str)
