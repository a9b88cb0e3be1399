"""Converts loss modules and functions of the user into descriptions (`Loss`)."""

from collections.abc import Callable
from copy import copy
from inspect import isfunction

from torch import nn

from kfs.errors import LossError
from kfs.losses.binary import BinaryCrossEntropy
from kfs.losses.cross_entropy import CrossEntropy
from kfs.losses.custom import Custom
from kfs.losses.divergence import KLDivergence
from kfs.losses.gaussian import Gaussian
from kfs.losses.huber import Huber
from kfs.losses.interface import Loss
from kfs.losses.poisson import Poisson
from kfs.losses.square import Square

DESCRIPTIONS: dict[type[nn.Module], Callable[..., Loss]] = {
    nn.MSELoss: Square,
    nn.CrossEntropyLoss: CrossEntropy,
    nn.KLDivLoss: KLDivergence,
    nn.BCEWithLogitsLoss: BinaryCrossEntropy,
    nn.PoissonNLLLoss: Poisson,
    nn.GaussianNLLLoss: Gaussian,
    nn.HuberLoss: Huber,
    nn.SmoothL1Loss: Huber,
}
# Functions of PyTorch, and the modules that are equal to them with default arguments.
_MODULES: dict[object, type[nn.Module]] = {
    nn.functional.mse_loss: nn.MSELoss,
    nn.functional.cross_entropy: nn.CrossEntropyLoss,
    nn.functional.kl_div: nn.KLDivLoss,
    nn.functional.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    nn.functional.poisson_nll_loss: nn.PoissonNLLLoss,
    nn.functional.huber_loss: nn.HuberLoss,
    nn.functional.smooth_l1_loss: nn.SmoothL1Loss,
}


def describe(loss: object, output: str | int | None = None) -> Loss:
    """Return the description of a loss.

    Args:
        loss: A supported loss module of `torch.nn` (not a subclass, which could change the loss), its function in
            `torch.nn.functional`, a `Loss`, or a function `(f, y) -> scalar` of one example, which is averaged over the
            data.
        output: For a model with several outputs: which one is the prediction. A key of a mapping, an attribute of an
            object, or the index of an item of a tuple. Parameters that only other outputs use have no curvature.

    Returns:
        The description.

    Raises:
        LossError: If the loss is not supported.

    Example:
        >>> describe(nn.MSELoss()).reduction_factor(10)
        0.2
    """
    if output is not None:
        loss = copy(describe(loss))
        loss.output = output
    if isinstance(loss, Loss):
        return loss
    if isfunction(loss) and loss in _MODULES:
        loss = _MODULES[loss]()
    if type(loss) in DESCRIPTIONS:
        return DESCRIPTIONS[type(loss)](loss)  # type: ignore[index]
    if isinstance(loss, nn.Module) or not callable(loss):
        raise LossError(
            f"The loss {loss!r} is not supported.",
            f"Use one of {[t.__name__ for t in DESCRIPTIONS]}, or a function (f, y) -> scalar of one example's "
            "prediction and target (kfs.losses.Custom, which also takes a reduction and a likelihood).",
        )
    return Custom(loss)
