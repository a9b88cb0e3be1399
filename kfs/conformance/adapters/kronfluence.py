"""Adapter for Kronfluence (covariance matrices of its strategy "kfac")."""

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
    """The task that Kronfluence's documentation requires: a summed loss, with labels drawn by the user."""

    def __init__(self, loss: nn.Module, layers: list[str], mask: Callable[[Tensor], Tensor] | None) -> None:
        self.loss, self.layers, self.mask = loss, layers, mask

    def get_attention_mask(self, batch: tuple[Tensor, Tensor]) -> Tensor | None:
        """Return a mask that is one at real positions, for models with a method `mask`."""
        return None if self.mask is None else self.mask(batch[0]).long()

    def compute_train_loss(self, batch: tuple[Tensor, Tensor], model: nn.Module, sample: bool = False) -> Tensor:
        """Return the summed loss, with the given labels or with labels drawn from the model's distribution."""
        X, y = batch
        f = model(X)
        if sample and isinstance(self.loss, nn.MSELoss):
            y = torch.normal(f.detach(), 0.5**0.5)  # its negative log-likelihood is the squared error
        elif sample and isinstance(self.loss, nn.CrossEntropyLoss):
            drawn = torch.distributions.Categorical(logits=f.detach().movedim(1, -1)).sample()
            y = torch.where(y == self.loss.ignore_index, y, drawn)
        value: Tensor = self.loss(f, y)
        return value

    def compute_measurement(self, batch: tuple[Tensor, Tensor], model: nn.Module) -> Tensor:
        """Raise `NotImplementedError`: factors do not need a measurement."""
        raise NotImplementedError

    def get_influence_tracked_modules(self) -> list[str]:
        """Return the names of the layers with factors."""
        return self.layers


def compute(
    model: nn.Module, loss: nn.Module, data: Data, fisher: str, sharing: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return Kronfluence's factors by layer.

    Raises:
        NotImplementedError: If Kronfluence has no such Fisher, or does not support a layer.
    """
    if fisher == "type-2":
        raise NotImplementedError("only the Monte Carlo and the empirical Fisher")
    if sharing == "reduce":
        raise NotImplementedError("no KFAC-reduce")
    if fisher == "mc" and getattr(loss, "weight", None) is not None:
        raise NotImplementedError("no likelihood for class weights")
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
    # `perform_eigendecomposition` divides both sums by their number of terms, and the strategy multiplies the resulting
    # eigenvalues (`Kfac.prepare`). With a summed loss, this is a mean over examples.
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
    """Return the divisor of the mean loss over all data."""
    if not isinstance(loss, nn.CrossEntropyLoss):
        return sum(y.numel() for _, y in data)
    kept = torch.cat([y[y != loss.ignore_index] for _, y in data])
    return float(len(kept) if loss.weight is None else loss.weight[kept].sum())


# Known failures of the version in benchmarks/peers.txt.
KNOWN = {
    "exact: one example, subclass of Linear, ce mean, empirical, expand": "It looks layers up by their exact type.",
    "exact: groups of channels, ce mean, empirical, expand": "There is one factor pair for all groups.",
}
# The adapter works on a copy of the model, so this check would test the adapter.
NOT_ASKED = frozenset({"state"})
ADAPTER = Adapter("Kronfluence", compute, NOT_ASKED, KNOWN, version=version("kronfluence"))
