"""The declared loss and the loss that training minimizes: differences that raise, warn, or are not noticed.

If the declared module computes the loss, or if targets are given, the optimizer can compare everything. Otherwise, it
knows only the gradient at the predictions.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs.errors import KfsWarning, LossError
from kfs.losses import Custom, HalfSquaredError, TokenCrossEntropy
from kfs.optim import KFAC
from tests.optim.training import data, mlp, train, weights

X, LABELS = data()
ONE_HOT = F.one_hot(LABELS, 3).double()
REAL = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

CE, MSE, BCE = nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss
cross_entropy = F.cross_entropy
mse = F.mse_loss
bce = F.binary_cross_entropy_with_logits
Minimized = Callable[[Tensor], Tensor]

# Declared loss, minimized loss of the predictions, and the outcome if targets are not known: a part of a message. Then
# the targets, and the outcome if they are given.
Case = tuple[Any, Minimized, str, Tensor, str]
FINE = ""
CASES: dict[str, Case] = {
    "CE": (CE(), lambda f: cross_entropy(f, LABELS), FINE, LABELS, FINE),
    "MSE": (MSE(), lambda f: mse(f, REAL), FINE, REAL, FINE),
    "BCE": (BCE(), lambda f: bce(f, ONE_HOT), FINE, ONE_HOT, FINE),
    "MSE for CE": (
        MSE(),
        lambda f: cross_entropy(f, LABELS),
        "error: is that of Cross",
        ONE_HOT,
        "error: is that of Cross",
    ),
    "MSE for BCE": (MSE(), lambda f: bce(f, ONE_HOT), "error: is that of BCE", ONE_HOT, "error: is that of BCE"),
    "CE for MSE": (CE(), lambda f: mse(f, ONE_HOT), "error: differs by", LABELS, "error: differs by"),
    "CE for BCE": (CE(), lambda f: bce(f, ONE_HOT), "error: is that of BCE", LABELS, "error: is that of BCE"),
    "BCE for CE": (
        BCE(),
        lambda f: cross_entropy(f, LABELS),
        "error: is that of Cross",
        ONE_HOT,
        "error: is that of Cross",
    ),
    "BCE for MSE": (BCE(), lambda f: mse(f, REAL), FINE, ONE_HOT, "error: differs by"),
    "CE, sum for mean": (
        *(CE(reduction="sum"), lambda f: cross_entropy(f, LABELS)),
        *("error: is a mean", LABELS, "error: is a mean"),
    ),
    "CE, mean for sum": (
        *(CE(), lambda f: cross_entropy(f, LABELS, reduction="sum")),
        *("error: is a sum", LABELS, "error: is a sum"),
    ),
    "MSE, sum for mean": (MSE(reduction="sum"), lambda f: mse(f, REAL), FINE, REAL, "error: is a mean"),
    "MSE, mean for sum": (MSE(), lambda f: mse(f, REAL, reduction="sum"), FINE, REAL, "error: is a sum"),
    "MSE, mean over data": (
        *(MSE(), lambda f: (f - REAL).square().sum(1).mean()),
        *(FINE, REAL, "warning: 3 times.*averaged over data"),
    ),
    "half, for MSE": (HalfSquaredError(), lambda f: mse(f, REAL), FINE, REAL, "warning: 0.667 times"),
    "BCE, sum for mean": (
        *(BCE(reduction="sum"), lambda f: bce(f, ONE_HOT)),
        *("error: is a mean", ONE_HOT, "error: is a mean"),
    ),
    "CE, factor": (
        *(CE(), lambda f: 5 * cross_entropy(f, LABELS)),
        *("warning: 5 times", LABELS, "warning: 5 times"),
    ),
    "MSE, factor": (MSE(), lambda f: 0.5 * mse(f, REAL), FINE, REAL, "warning: 0.5 times"),
    "CE, maximized": (CE(), lambda f: -cross_entropy(f, LABELS), FINE, LABELS, "warning: -1 times"),
    "smoothed CE, factor": (
        *(CE(label_smoothing=0.1), lambda f: 5 * cross_entropy(f, LABELS, label_smoothing=0.1)),
        *("warning: 5 times", LABELS, "warning: 5 times"),
    ),
    "soft CE, factor": (
        CE(),
        lambda f: 5 * cross_entropy(f, 0.7 * ONE_HOT + 0.3 * REAL.softmax(1)),
        FINE,
        LABELS,
        "differs",
    ),
    "smoothed CE": (
        *(CE(), lambda f: cross_entropy(f, LABELS, label_smoothing=0.1)),
        *("warning: label_smoothing=0.1, which was not declared", LABELS, "warning: label_smoothing=0.1"),
    ),
    "smoothed CE, factor, sum": (
        *(CE(reduction="sum"), lambda f: 5 * cross_entropy(f, 0.7 * ONE_HOT + 0.1, reduction="sum")),
        *("warning: label_smoothing=0.3", LABELS, "warning: label_smoothing=0.3"),
    ),
    "CE smoothed more than declared": (
        *(CE(label_smoothing=0.1), lambda f: cross_entropy(f, LABELS, label_smoothing=0.2)),
        *("warning: label_smoothing=0.2", LABELS, "warning: label_smoothing=0.2"),
    ),
}


def outcome(declared: Any, minimized: Minimized, y: Tensor | None, **options: Any) -> str:
    """Take two steps, and return the message of an error or a warning, or an empty string."""
    model = mlp()
    before = weights(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = KFAC(model, declared, factors_every=1, **options)
        try:
            for _ in range(2):
                optimizer.zero_grad()
                value = minimized(model(X))
                if y is not None:
                    optimizer.targets(y)
                value.backward()
                optimizer.step()
        except LossError as error:
            assert torch.equal(weights(model), before)
            assert not optimizer.preconditioner.curvature.averages
            return f"error: {error}"
    texts = [str(warning.message) for warning in caught if issubclass(warning.category, KfsWarning)]
    assert len(texts) <= 1, "warnings come once"
    return f"warning: {texts[0]}" if texts else ""


def check(message: str, expected: str) -> None:
    """Compare a message with a part of it; `"differs"` is a warning or an error, depending on the difference."""
    if expected in {FINE, "differs"}:
        assert ("differs" in message) if expected else not message
        return
    kind, text = expected.split(": ")
    assert message.startswith(kind), message
    with pytest.raises(LossError, match=text):
        raise LossError(message, "")


@pytest.mark.parametrize("fisher", ["mc", "forward-only"])
@pytest.mark.parametrize("case", CASES)
def test_targets_that_are_not_known(case: str, fisher: str) -> None:
    """The gradient alone reveals another loss, and the scale of a cross-entropy."""
    declared, minimized, expected, _, _ = CASES[case]
    check(outcome(declared, minimized, None, fisher=fisher), expected)


@pytest.mark.parametrize("fisher", ["mc", "empirical"])
@pytest.mark.parametrize("case", CASES)
def test_targets_that_are_known(case: str, fisher: str) -> None:
    """With targets, every difference is noticed."""
    declared, minimized, _, y, expected = CASES[case]
    check(outcome(declared, minimized, y, fisher=fisher), expected)


@pytest.mark.parametrize(
    ("loss", "y", "factor", "match"),
    [(MSE(), REAL, 5.0, "5 times"), (MSE(reduction="sum"), REAL, 0.2, "0.2 times"), (CE(), LABELS, 5.0, "5 times")],
)
def test_the_announced_module_computes_the_loss(loss: nn.Module, y: Tensor, factor: float, match: str) -> None:
    """The call of the module has the targets, so a factor on the loss is noticed for every loss, and reported once."""
    model = mlp()
    optimizer = KFAC(model, loss, factors_every=1)
    with pytest.warns(KfsWarning, match=match) as caught:
        train(model, optimizer, [(X, y)] * 3, lambda f, y: factor * loss(f, y))
    assert len(caught) == 1
    assert caught[0].filename == train.__code__.co_filename, "it points to the call of step"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda f: 20 * f, "error: differs by.*softmax or a temperature, must be part of the model"),
        (lambda f: (3 * f).softmax(1), "warning: differs by"),
        (lambda f: f.float(), FINE),
        (lambda f: f.flip(0).flip(0), FINE),
        (lambda f: f[:6], FINE),
    ],
)
def test_predictions_that_are_changed_before_the_loss(change: Callable[[Tensor], Tensor], expected: str) -> None:
    """If the declared module is called with labels, they must explain the gradient at the predictions."""
    loss = CE()

    def minimized(f: Tensor) -> Tensor:
        changed = change(f)
        value: Tensor = loss(changed, LABELS[: len(changed)])
        return value

    check(outcome(loss, minimized, None), expected)
    half = 0.5 * ONE_HOT + 1 / 6
    # For mixed labels, soft labels, and labels of another task, no check is possible.
    check(outcome(loss, lambda f: 0.5 * loss(20 * f, LABELS) + 0.5 * loss(20 * f, LABELS.flip(0)), None), FINE)
    check(outcome(loss, lambda f: loss(20 * f, half), None), FINE)
    other = mlp()
    check(outcome(loss, lambda f: cross_entropy(20 * f, half) + 0 * loss(other(X), LABELS), None), FINE)


def test_a_reduction_that_was_changed_later() -> None:
    """The optimizer compares with the settings at the time of its creation."""
    model, loss = mlp(), CE()
    optimizer = KFAC(model, loss)
    loss.reduction = "sum"
    with pytest.raises(LossError, match=r"is a sum.*reduction='sum'"):
        train(model, optimizer, [(X, LABELS)], loss)


def test_tokens() -> None:
    """A mean over tokens divides by the number of positions."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(7, (4, 5), generator=generator)
    y = torch.randint(7, (4, 5), generator=generator)
    y[0, :2] = -100

    def step(declared: Any, function: Callable[[Tensor], Tensor]) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 7)).double()
        optimizer = KFAC(model, declared)
        function(model(x)).backward()
        optimizer.step()

    def summed(f: Tensor) -> Tensor:
        return cross_entropy(f.flatten(0, 1), y.flatten(), reduction="sum")

    step(TokenCrossEntropy(), lambda f: summed(f) / 18)
    with pytest.raises(LossError, match="is a sum"):
        step(TokenCrossEntropy(), summed)
    with pytest.raises(LossError, match="is a mean"):
        step(TokenCrossEntropy(reduction="sum"), lambda f: summed(f) / 18)
    with pytest.warns(KfsWarning, match=r"4\.5 times.*averaged over data"):
        step(TokenCrossEntropy(), lambda f: summed(f) / 4)
    with pytest.raises(LossError, match=r"is that of TokenCrossEntropy, but MSELoss"):
        step(MSE(), lambda f: summed(f) / 18)


@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_accumulated_gradients(reduction: str, divided: bool) -> None:
    """Means of parts may be divided by their number or not; sums are added."""
    model, loss = mlp(), CE(reduction=reduction)
    optimizer = KFAC(model, loss)
    for rows in (slice(0, 6), slice(6, 12)):
        part = loss(model(X[rows]), LABELS[rows])
        (part / 2 if divided and reduction == "mean" else part).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_a_part_whose_scale_is_not_known() -> None:
    """Then there is no warning, since the unknown part may explain the difference."""
    model, loss = mlp(), CE()
    optimizer = KFAC(model, loss)
    soft = 0.7 * ONE_HOT + 0.3 * REAL.softmax(1)
    (5 * loss(model(X), LABELS)).backward()
    (5 * cross_entropy(model(X), soft)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


class OwnLoss(nn.Module):
    """A network that computes its loss from labels, as models of Hugging Face do."""

    def __init__(self, reduction: str, factor: float) -> None:
        super().__init__()
        self.net, self.reduction, self.factor = mlp(), reduction, factor

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        f = self.net(x)
        return self.factor * cross_entropy(f, labels, reduction=self.reduction), f


@pytest.mark.parametrize(("reduction", "factor"), [("mean", 1.0), ("mean", 0.8), ("sum", 1.0)])
def test_models_that_compute_their_loss(reduction: str, factor: float) -> None:
    """Trainers tell models the divisor, so a factor is not reported; another reduction is."""
    model = OwnLoss(reduction, factor)
    optimizer = KFAC(model, CE())
    model(X, labels=LABELS)[0].backward()
    if reduction == "mean":
        optimizer.step()
        return
    with pytest.raises(LossError, match="is a sum"):
        optimizer.step()


@pytest.mark.parametrize("weights_of_parts", [(1.0, 3.0), (3.0, 1.0)])
def test_parts_with_weights(weights_of_parts: tuple[float, float]) -> None:
    """Weights are a choice of the user."""
    model = mlp()
    optimizer = KFAC(model, CE())
    for weight in weights_of_parts:
        (weight * cross_entropy(model(X), LABELS)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_a_gradient_scaler() -> None:
    """The scaler's factor is divided out of the gradients again."""
    model, loss = mlp(torch.float32), CE()
    optimizer = KFAC(model, loss)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss(model(X.float()), LABELS)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.step(optimizer)
    assert optimizer.steps == 1


def test_gradients_that_vanish_have_no_scale() -> None:
    """The scale is taken from the first step in which it is known."""
    model = mlp()
    loss = MSE()
    optimizer = KFAC(model, loss, factors_every=1)
    exact = model(X).detach()
    train(model, optimizer, [(X, exact)], loss)
    with pytest.warns(KfsWarning, match="5 times"):
        train(model, optimizer, [(X, REAL)], lambda f, y: 5 * loss(f, y))


def test_residuals_that_look_like_probabilities() -> None:
    """If predictions are zero, many losses have the same gradient, so no conclusion is drawn."""
    model = mlp()
    with torch.no_grad():
        for p in model[4].parameters():
            p.zero_()
    optimizer = KFAC(model, MSE())
    train(model, optimizer, [(X, ONE_HOT - 1 / 3)], mse)  # the gradient of a cross-entropy at zero
    assert optimizer.steps == 1


def test_too_few_numbers_to_tell() -> None:
    """One or two residuals fit any loss."""
    model = mlp(classes=1)
    optimizer = KFAC(model, MSE())
    train(model, optimizer, [(X[:2], torch.tensor([[3.0], [-2.0]]).double())], mse)
    assert optimizer.steps == 1


def test_a_function_may_be_any_loss() -> None:
    """User-defined losses are not compared with other losses."""
    custom = Custom(lambda f, y: cross_entropy(f.unsqueeze(0), y.unsqueeze(0)))
    check(outcome(custom, lambda f: cross_entropy(f, LABELS), LABELS, fisher="ggn"), FINE)
    likely = Custom(lambda f, _: f.sum(), likelihood=lambda f: torch.distributions.Categorical(logits=f))
    check(outcome(likely, lambda f: cross_entropy(f, LABELS), None), FINE)


@pytest.mark.parametrize(
    ("declared", "minimized", "expected"),
    [
        (MSE(), lambda f: mse(f, REAL), FINE),
        (MSE(), lambda f: mse(f, REAL, reduction="sum"), "error: is a sum"),
        (MSE(reduction="sum"), lambda f: mse(f, REAL), "error: is a mean"),
        (HalfSquaredError("sum"), lambda f: 0.5 * (f - REAL).square().sum() / 12, "error: is a mean"),
        (MSE(), lambda f: mse(f, REAL) + 3.0, FINE),  # a penalty that does not depend on predictions
        (CE(reduction="sum"), lambda f: cross_entropy(f, 0.7 * ONE_HOT + 0.3 * REAL.softmax(1)), FINE),
    ],
)
def test_the_value_of_a_square_loss(declared: Any, minimized: Minimized, expected: str) -> None:
    """A closure returns the value, which has the scale of the squared residuals: their mean or their sum."""
    model = mlp()
    optimizer = KFAC(model, declared)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = minimized(model(X))
        value.backward()
        return value

    message = ""
    try:
        optimizer.step(closure)
    except LossError as error:
        message = f"error: {error}"
    check(message, expected)


@pytest.mark.parametrize("by_module", [True, False])
def test_gradients_that_vanish(by_module: bool) -> None:
    """If a network is certain of all labels, gradients are round-off, which is not evidence of another loss."""
    torch.manual_seed(0)
    X = torch.randn(64, 4)
    y = X[:, :3].argmax(1)
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.copy_(20 * torch.eye(3, 4))
    criterion = nn.CrossEntropyLoss()
    optimizer = KFAC(model, criterion, factors_every=1)
    for scale in (1, 2, 4, 8, 16, 64):  # the last gradients are zero
        optimizer.zero_grad()
        f = scale * X
        value = criterion(model(f), y) if by_module else nn.functional.cross_entropy(model(f), y)
        value.backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
    target = nn.functional.one_hot(y, 3).float()
    optimizer.zero_grad()
    f = model(X)
    optimizer.targets(y)
    (1e-3 * (f - target).square().mean()).backward()
    with pytest.raises(LossError, match="is not that of CrossEntropyLoss"):
        optimizer.step()
