"""Adapter for NNGeometry (`PMatKFAC` of the Fisher)."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib.metadata import version
from typing import Any

import torch
from nngeometry.layercollection import LayerCollection
from nngeometry.metrics import FIM, FIM_MonteCarlo
from nngeometry.object import PMatKFAC
from torch import Tensor, nn
from torch.utils.data import DataLoader

from kfs.conformance.adapter import Adapter


def compute(
    model: nn.Module, loss: nn.Module, data: list[tuple[Tensor, Tensor]], fisher: str, sharing: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return NNGeometry's factors by layer.

    Raises:
        NotImplementedError: If NNGeometry does not support the kind of Fisher, the loss or a layer.
    """
    if fisher == "empirical":
        raise NotImplementedError("no empirical Fisher")
    if sharing == "reduce":
        raise NotImplementedError("no KFAC-reduce")
    # NNGeometry takes a likelihood, not a loss.
    if isinstance(loss, nn.CrossEntropyLoss):
        if loss.weight is not None or loss.ignore_index != -100 or loss.label_smoothing:
            raise NotImplementedError("no options of the cross-entropy")
        variant = {1: "classif_logits", 3: "segmentation_logits"}.get(data[0][1].ndim, "")
    else:
        variant = "regression"
    if variant not in (
        {"classif_logits", "regression"} if fisher == "type-2" else {"classif_logits", "segmentation_logits"}
    ):
        raise NotImplementedError(f"no {fisher} Fisher for {variant or 'this kind of prediction'}")
    copied = deepcopy(model)
    layers = LayerCollection()
    for name, module in copied.named_modules():
        trained = [p.requires_grad for p in module.parameters(recurse=False)]
        if any(trained):
            if not all(trained) or type(module) not in {nn.Linear, nn.Conv1d, nn.Conv2d}:
                raise NotImplementedError(f"no factors for {name}, a {type(module).__name__}")
            layers.add_layer_from_model(copied, module)
    examples = [example for X, y in data for example in zip(X, y, strict=True)]
    batches = torch.arange(len(examples)).split([len(X) for X, _ in data])
    indices: Any = [batch.tolist() for batch in batches]
    generator = torch.Generator()  # the loader would otherwise change the global random state
    loader: DataLoader[Any] = DataLoader(examples, batch_sampler=indices, generator=generator)  # type: ignore[arg-type]
    with _default_dtype(next(copied.parameters()).dtype):
        metric = FIM if fisher == "type-2" else FIM_MonteCarlo
        matrix = metric(copied, loader, PMatKFAC, variant=variant, layer_collection=layers)
    # NNGeometry's Fisher is a mean over data (`TorchHooksJacobianBackend`: 1/n). For regression, its likelihood is a
    # normal distribution with identity covariance (`FIM`: variants), which corresponds to half the squared error.
    scale = len(examples) * (1.0 if isinstance(loss, nn.CrossEntropyLoss) else 2.0)
    if loss.reduction == "mean":
        scale /= sum(y.numel() for _, y in data)
    return {name: (A, scale * B) for name, (A, B) in matrix.data.items()}


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the default dtype in this context, because NNGeometry creates some tensors without an explicit dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# Known failures of the version in benchmarks/peers.txt.
KNOWN = {
    "exact: independent positions": "Linear layers take vectors only, which it does not check.",
    "exact: groups of channels, mse mean, type-2, expand": "Groups are not respected.",
    "exact: groups of channels, ce mean, type-2, expand": "Groups are not respected.",
    "exact: called twice, results kept": "Calls of one layer overwrite each other.",
    "exact: folded positions, mse": "Rows of a matrix are taken for data.",
    "exact: rows of mixed data, mse": "Rows of a matrix are taken for data.",
    "exact: ragged data, mse": "Rows of a matrix are taken for data.",
}
# The adapter works on a copy of the model, so this check would test the adapter.
NOT_ASKED = frozenset({"state"})
ADAPTER = Adapter("NNGeometry", compute, NOT_ASKED, KNOWN, version=version("nngeometry"))
