"""Factors of Kronfluence (covariance matrices of its strategy "kfac")."""

from collections.abc import Callable
from copy import deepcopy
from importlib.metadata import version

import kronfluence
import torch
from kronfluence.factor.covariance import fit_covariance_matrices_with_loader
from kronfluence.utils.state import State
from torch import Tensor, nn

from kfs.conformance.adapter import Adapter

Data = list[tuple[Tensor, Tensor]]


class _Task(kronfluence.Task):  # type: ignore[misc]
    """The loss as Kronfluence's documentation wants it: summed, with labels drawn by the user."""

    def __init__(self, loss: nn.Module, layers: list[str], mask: Callable[[Tensor], Tensor] | None) -> None:
        self.loss, self.layers, self.mask = loss, layers, mask

    def get_attention_mask(self, batch: tuple[Tensor, Tensor]) -> Tensor | None:
        """Return which positions are not padding, for models that know it."""
        return None if self.mask is None else self.mask(batch[0]).long()

    def compute_train_loss(self, batch: tuple[Tensor, Tensor], model: nn.Module, sample: bool = False) -> Tensor:
        """Return the sum of losses, for labels at hand or drawn from the model's distribution."""
        X, y = batch
        f = model(X)
        if sample and isinstance(self.loss, nn.MSELoss):
            y = torch.normal(f.detach(), 0.5**0.5)  # whose negative log-likelihood the squared error is
        elif sample and isinstance(self.loss, nn.CrossEntropyLoss):
            drawn = torch.distributions.Categorical(logits=f.detach().movedim(1, -1)).sample()
            y = torch.where(y == self.loss.ignore_index, y, drawn)
        value: Tensor = self.loss(f, y)
        return value

    def compute_measurement(self, batch: tuple[Tensor, Tensor], model: nn.Module) -> Tensor:
        """Return what influence is measured on, which factors do not need."""
        raise NotImplementedError

    def get_influence_tracked_modules(self) -> list[str]:
        """Return the layers to consider."""
        return self.layers


def compute(
    model: nn.Module, loss: nn.Module, data: Data, fisher: str, sharing: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return Kronfluence's factors by layer.

    Raises:
        NotImplementedError: If Kronfluence has no such Fisher, or does not support a layer.
    """
    if fisher == "type-2":
        raise NotImplementedError("labels are drawn or at hand")
    if sharing == "reduce":
        raise NotImplementedError("no KFAC-reduce")
    if fisher == "mc" and getattr(loss, "weight", None) is not None:
        raise NotImplementedError("weighted classes are no likelihood to draw labels from")
    layers = []
    for name, module in model.named_modules():
        trained = [p.requires_grad for p in module.parameters(recurse=False)]
        if any(trained):
            if not all(trained) or not isinstance(module, nn.Linear | nn.Conv2d):
                raise NotImplementedError(f"no factors for {name}, a {type(module).__name__}")
            layers.append(name)
    summed = deepcopy(loss)
    summed.reduction = "sum"  # type: ignore[assignment]
    task = _Task(summed, layers, getattr(model, "mask", None))
    dtype = next(model.parameters()).dtype
    arguments = kronfluence.FactorArguments(
        strategy="kfac",
        use_empirical_fisher=fisher == "empirical",
        activation_covariance_dtype=dtype,
        gradient_covariance_dtype=dtype,
    )
    prepared = kronfluence.prepare_model(deepcopy(model), task)
    num_data, found = fit_covariance_matrices_with_loader(
        prepared, State(cpu=True), task, data, arguments, disable_tqdm=True
    )
    # `perform_eigendecomposition` divides both sums by how many terms they have; the strategy multiplies eigenvalues as
    # they then are (`Kfac.prepare`). With the loss summed, that is a mean over data.
    scale = float(num_data) / (_divisor(loss, data) if loss.reduction == "mean" else 1)
    factors = {}
    for name in layers:
        A, B = (
            found[f"{kind}_covariance"][name] / found[f"num_{kind}_covariance_processed"][name]
            for kind in ("activation", "gradient")
        )
        factors[name] = A, scale * B
    return factors


def _divisor(loss: nn.Module, data: Data) -> float:
    """Return what a mean over all data divides by."""
    if not isinstance(loss, nn.CrossEntropyLoss):
        return sum(y.numel() for _, y in data)
    kept = torch.cat([y[y != loss.ignore_index] for _, y in data])
    return float(len(kept) if loss.weight is None else loss.weight[kept].sum())


# As of the version that benchmarks/peers.txt names.
KNOWN = {
    "exact: one example, subclass of Linear, ce mean, empirical, expand": "It looks layers up by their exact type.",
    "exact: groups of channels, ce mean, empirical, expand": "There is one factor pair for all groups.",
}
# The adapter works on a copy of the model: this check would be about the adapter.
NOT_ASKED = frozenset({"state"})
ADAPTER = Adapter("Kronfluence", compute, NOT_ASKED, KNOWN, version=version("kronfluence"))
