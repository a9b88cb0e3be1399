"""Adapter for BackPACK: `KFLR` for type 2, `KFAC` for sampled labels."""

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

    According to its documentation, the Kronecker product of a parameter's factors, in their order, represents its block
    of the GGN of the differentiated loss. Hence no factor is scaled here, not even for convolutions, although a note in
    BackPACK's source (`hbp/convnd.py`) says that the first factor is larger than in the literature by the number of
    positions.

    Raises:
        NotImplementedError: If BackPACK does not support a layer or an option of the loss.
    """
    if fisher == "empirical":
        raise NotImplementedError("no KFAC of the empirical Fisher")
    if sharing == "reduce":
        raise NotImplementedError("no KFAC-reduce")
    extension = {"type-2": KFLR, "mc": KFAC}[fisher]()
    extended, criterion = backpack.extend(deepcopy(model)), backpack.extend(deepcopy(loss))
    # BackPACK's factors belong to one backward pass, and it cannot accumulate the factors of several batches.
    try:
        X, y = (torch.cat(tensors) for tensors in zip(*data, strict=True))
    except RuntimeError as error:
        raise NotImplementedError("batches with different shapes") from error
    try:
        value = criterion(extended(X), y)
        with backpack.backpack(extension):
            value.backward()
    except ValueError as error:  # raised for predictions with several positions
        raise NotImplementedError(str(error)) from error
    factors = {}
    for name, p in extended.named_parameters():
        if p.requires_grad:
            B, *A = getattr(p, extension.savefield)
            factors[name] = (A[0] if A else B.new_ones(1, 1), B)
    return factors


# Known failures of the version in benchmarks/peers.txt.
KNOWN = {
    "exact: one example, activations in place": "Its hooks do not allow operations in place.",
}
# The adapter copies the model and concatenates batches, so these checks would test the adapter.
NOT_ASKED = frozenset({"state", "split into batches", "deep linear net, uneven batches"})
ADAPTER = Adapter("BackPACK", compute, NOT_ASKED, KNOWN, version=version("backpack-for-pytorch"))
