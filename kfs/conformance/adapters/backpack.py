"""Factors of BackPACK: `KFLR` for type 2, `KFAC` for sampled labels."""

from copy import deepcopy
from importlib.metadata import version

import backpack
import torch
from backpack.extensions import KFAC, KFLR
from torch import Tensor, nn

from kfs.conformance.adapter import Adapter


def compute(
    model: nn.Module, loss: nn.Module, data: list[tuple[Tensor, Tensor]], fisher: str, sharing: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return BackPACK's factors by parameter.

    Its documentation says that the Kronecker product of a parameter's factors, in their order, represents its block of
    the GGN of the loss that is differentiated: nothing is left to scale, not even for convolutions, where a note in its
    source (`hbp/convnd.py`) says that the first factor is larger than in the literature by the number of positions.

    Raises:
        NotImplementedError: If BackPACK refuses a layer or an option of the loss.
    """
    if fisher == "empirical":
        raise NotImplementedError("no KFAC of the empirical Fisher")
    if sharing == "reduce":
        raise NotImplementedError("no KFAC-reduce")
    extension = {"type-2": KFLR, "mc": KFAC}[fisher]()
    extended, criterion = backpack.extend(deepcopy(model)), backpack.extend(deepcopy(loss))
    # Factors belong to one backward pass, and it offers no way to add up those of several.
    try:
        X, y = (torch.cat(tensors) for tensors in zip(*data, strict=True))
    except RuntimeError as error:
        raise NotImplementedError("batches whose shapes differ") from error
    try:
        value = criterion(extended(X), y)
        with backpack.backpack(extension):
            value.backward()
    except ValueError as error:  # how it refuses predictions with several positions
        raise NotImplementedError(str(error)) from error
    factors = {}
    for name, p in extended.named_parameters():
        if p.requires_grad:
            B, *A = getattr(p, extension.savefield)
            factors[name] = (A[0] if A else B.new_ones(1, 1), B)
    return factors


# As of the version that benchmarks/peers.txt names.
KNOWN = {
    "exact: one example, activations in place": "Its hooks do not allow operations in place.",
}
# The adapter copies the model and puts batches together: these checks would be about the adapter.
NOT_ASKED = frozenset({"state", "split into batches", "deep linear net, uneven batches"})
ADAPTER = Adapter("BackPACK", compute, NOT_ASKED, KNOWN, version=version("backpack-for-pytorch"))
