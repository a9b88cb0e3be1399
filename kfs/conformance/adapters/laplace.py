"""Adapter for laplace-torch (`KronLaplace` with its default backend, curvlinops)."""

from copy import deepcopy
from importlib.metadata import version
from typing import Any

import laplace
import torch
from laplace.curvature import CurvlinopsEF, CurvlinopsGGN
from torch import Tensor, nn
from torch.utils.data import DataLoader

from kfs.conformance.adapter import Adapter


def compute(
    model: nn.Module, loss: nn.Module, data: list[tuple[Tensor, Tensor]], fisher: str, sharing: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the factors of laplace-torch by parameter.

    Raises:
        NotImplementedError: If there is no likelihood for the loss, or a layer is not supported.
    """
    # laplace-torch takes a likelihood, not a loss.
    if isinstance(loss, nn.CrossEntropyLoss) and (
        loss.weight is not None or loss.ignore_index != -100 or loss.label_smoothing
    ):
        raise NotImplementedError("no options of the cross-entropy")
    if any((y == -100).any() for _, y in data):
        raise NotImplementedError("no ignored labels")
    # Pass a seed, because curvlinops has its own random generator.
    options = {"kfac_approx": sharing, "seed": int(torch.randint(2**31, ())) if fisher == "mc" else 0}
    examples = [example for X, y in data for example in zip(X, y, strict=True)]
    batches = torch.arange(len(examples)).split([len(X) for X, _ in data])
    indices: Any = [batch.tolist() for batch in batches]
    generator = torch.Generator()  # the loader would otherwise change the global random state
    loader: DataLoader[Any] = DataLoader(examples, batch_sampler=indices, generator=generator)  # type: ignore[arg-type]
    try:
        fitted = laplace.KronLaplace(
            deepcopy(model),
            "regression" if isinstance(loss, nn.MSELoss) else "classification",
            backend=CurvlinopsEF if fisher == "empirical" else CurvlinopsGGN,
            backend_kwargs={"stochastic": True} if fisher == "mc" else None,
            asdl_fisher_kwargs=options,  # despite the name, these options are passed to every backend
        )
        fitted.fit(loader)
    except ValueError as error:  # raised for everything unsupported, except layers
        raise NotImplementedError(str(error)) from error
    # The factors belong to a sum over data (`ParametricLaplace`), and to half the squared error for regression: a torch
    # loss times `factor` is a negative log-likelihood (`CurvatureInterface`). The library also multiplies its empirical
    # Fisher by `factor`.
    scale = 1 / fitted.backend.factor
    if loss.reduction == "mean":
        scale /= sum(y.numel() for _, y in data)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    factors = {}
    for name, (B, *A) in zip(names, fitted.H_facs.kfacs, strict=True):
        factors[name] = (A[0] if A else B.new_ones(1, 1), scale * B)
    return factors


# Known failures of the version in benchmarks/peers.txt.
KNOWN = {
    "exact: circular padding": "Patches are padded with zeros, whatever padding_mode says.",
    "exact: groups of channels": "There is one factor pair for all groups.",
    "exact: called twice": "Calls of one layer are added as if they were data.",
    "exact: two modules with one weight": "Modules with one weight have factors of their own.",
    "exact: sum over positions, two output axes": "Further output axes are wrong with 'reduce'.",
    "exact: sum over positions, several labels, ce mean, type-2": "Further output axes are wrong with 'reduce'.",
    "exact: sum over positions, several labels, ce sum, type-2": "Further output axes are wrong with 'reduce'.",
    "exact: folded positions": "Rows of a matrix are taken for data.",
    "exact: rows of mixed data": "Rows of a matrix are taken for data.",
    "exact: ragged data": "Rows of a matrix are taken for data.",
    "exact: a use in a custom function": "A use that hooks do not see is left out.",
    "relation: NaN": "It ends the process.",
}
# The adapter works on a copy of the model, so this check would test the adapter.
NOT_ASKED = frozenset({"state"})
ADAPTER = Adapter("laplace-torch", compute, NOT_ASKED, KNOWN, version=version("laplace-torch"))
