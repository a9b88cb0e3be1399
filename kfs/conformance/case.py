"""Cases of the conformance kit: a model, a loss and data for which KFAC is exact, created reproducibly."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Data = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Setting:
    """A model in float64 and evaluation mode, a loss, and a list of batches."""

    model: nn.Module
    loss: nn.Module
    data: Data

    def unpadded(self) -> "Setting":
        """Return the same sequences without the padding that the model's `mask` excludes, one sequence per batch."""
        masked = [(x, y, mask) for X, Y in self.data for x, y, mask in zip(X, Y, self.model.mask(X), strict=True)]  # type: ignore[operator]
        data = [(x[mask].unsqueeze(0), y[mask].unsqueeze(0)) for x, y, mask in masked]
        return Setting(self.model, self.loss, data)


@dataclass(frozen=True)
class Case:
    """A setting with the reason why KFAC is exact.

    Attributes:
        name: Name of the case.
        layer: Tag for the kind of layer.
        why: Reason why KFAC is exact, or purpose of the case.
        model: Function that creates the model.
        inputs: Function that creates inputs, given their number.
        outputs: Shape of the prediction for one example.
        num_data: Number of examples.
        sharings: Kinds of weight sharing for which KFAC is exact.
        fishers: Kinds of Fisher for which KFAC is exact.
        losses: Losses for which KFAC is exact: `"mse"`, `"ce"`, `"ce, ignored labels"`, `"ce, class weights"`, or
            `"ce, padding"`, where labels are ignored at positions that the model masks.
        reductions: Reductions to check.
        positions: Number of positions that share a weight.
        batches: Sizes of the batches. If empty, all examples are one batch.
        within_groups: Number of groups of channels in the first layer. Entries between groups are not compared.
        tied: For modules and parameters that share weights, the name to use instead.
        may_refuse: Whether an error is as good an answer as the right factors.
    """

    name: str
    layer: str
    why: str
    model: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    outputs: tuple[int, ...] = (3,)
    num_data: int = 1
    sharings: tuple[str, ...] = ("expand", "reduce")
    fishers: tuple[str, ...] = ("type-2", "empirical")
    losses: tuple[str, ...] = ("mse", "ce")
    reductions: tuple[str, ...] = ("mean",)
    positions: int = 1
    batches: tuple[int, ...] = ()
    within_groups: int = 1
    tied: dict[str, str] = field(default_factory=dict)
    may_refuse: bool = False

    def setting(self, loss: str = "mse", reduction: str = "mean") -> Setting:
        """Create model, loss and data reproducibly, without changing the global random state."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.model().double().eval()
            X = self.inputs(self.num_data)
            X = X.double() if X.is_floating_point() else X
            numbers = torch.randn(self.num_data, *self.outputs, dtype=torch.float64)
            labels = torch.randint(self.outputs[0], (self.num_data, *self.outputs[1:]))
        y = numbers if loss == "mse" else labels
        # Only the first label counts. All examples have the same input.
        if loss == "ce, ignored labels":
            X, y = X[:1].expand_as(X).clone(), labels.clone()
            y[1:] = -1
        if loss == "ce, padding":
            y = labels.masked_fill(~model.mask(X), -100)  # type: ignore[operator]
        sizes = list(self.batches or [self.num_data])
        weight = torch.arange(2.0, self.outputs[0] + 2, dtype=torch.float64) if loss == "ce, class weights" else None
        ignored = -1 if loss == "ce, ignored labels" else -100
        cross_entropy = nn.CrossEntropyLoss(weight, ignore_index=ignored, reduction=reduction)
        criterion = nn.MSELoss(reduction=reduction) if loss == "mse" else cross_entropy
        return Setting(model, criterion, list(zip(X.split(sizes), y.split(sizes), strict=True)))
