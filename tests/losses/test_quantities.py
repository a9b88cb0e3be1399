"""Quantities of a prediction and a target: their gradients, against autograd of their definitions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.errors import LossError
from kfs.losses import Custom, TokenCrossEntropy, describe
from kfs.losses.quantities import gradient_of, sign_of

N, C, S = 3, 4, 5
torch.manual_seed(0)
LOGITS = torch.randn(N, C, dtype=torch.float64)
TOKENS = torch.randn(N, S, C, dtype=torch.float64)
LABELS = torch.tensor([0, 3, 1])
TOKEN_LABELS = torch.randint(C, (N, S))
TOKEN_LABELS[1, 2] = -100
YES_OR_NO = torch.randint(2, (N, C)).double()


def log_p(f: Tensor, label: int) -> Tensor:
    return (f[label].exp() / f.exp().sum()).log()


def log_odds(f: Tensor, label: int) -> Tensor:
    p = f[label].exp() / f.exp().sum()
    return (p / (1 - p)).log()


def of_labels(value: Callable[[Tensor, int], Tensor], f: Tensor, y: Tensor) -> Tensor:
    return torch.stack([value(f[n], int(y[n])) for n in range(len(f))]).sum()


def of_tokens(value: Callable[[Tensor, int], Tensor], f: Tensor, y: Tensor, shift: int) -> Tensor:
    """Sum over positions that have a target which is not ignored."""
    places = [(n, s) for n in range(N) for s in range(S - shift) if int(y[n, s + shift]) >= 0]
    return torch.stack([value(f[n, s], int(y[n, s + shift])) for n, s in places]).sum()


def of_yes_or_no(value: Callable[[Tensor, int], Tensor], f: Tensor, y: Tensor) -> Tensor:
    """Treat each entry as two classes; the logit of "no" is zero."""
    both = torch.stack([torch.zeros_like(f), f], -1).flatten(0, -2)
    return of_labels(value, both, y.flatten().long())


CASES: dict[str, tuple[Any, Tensor, Tensor, Callable[..., Tensor]]] = {
    "labels": (nn.CrossEntropyLoss(), LOGITS, LABELS, of_labels),
    "weighted and smoothed": (
        nn.CrossEntropyLoss(torch.rand(C).double(), label_smoothing=0.1, reduction="sum"),
        LOGITS,
        LABELS,
        of_labels,
    ),
    "tokens": (TokenCrossEntropy(), TOKENS, TOKEN_LABELS, lambda v, f, y: of_tokens(v, f, y, 0)),
    "next tokens": (TokenCrossEntropy(shift=True), TOKENS, TOKEN_LABELS, lambda v, f, y: of_tokens(v, f, y, 1)),
    "yes or no": (nn.BCEWithLogitsLoss(pos_weight=torch.rand(C).double()), LOGITS, YES_OR_NO, of_yes_or_no),
}


def differentiated(value: Callable[[Tensor], Tensor], f: Tensor) -> Tensor:
    leaf = f.clone().requires_grad_()
    return torch.autograd.grad(value(leaf), leaf)[0]


@pytest.mark.parametrize(("quantity", "value"), [("log-probability", log_p), ("margin", log_odds)])
@pytest.mark.parametrize("case", CASES)
def test_labels(case: str, quantity: Any, value: Callable[[Tensor, int], Tensor]) -> None:
    """Weights and smoothing have no effect, and positions that do not count have no gradient."""
    loss, f, y, total = CASES[case]
    expected = differentiated(lambda f: total(value, f, y), f)
    torch.testing.assert_close(gradient_of(quantity, describe(loss))(f, y), expected)
    other = gradient_of({"margin": "log-probability"}.get(quantity, "margin"), describe(loss))(f, y)  # type: ignore[arg-type]
    assert not torch.allclose(other, expected)


def test_losses() -> None:
    y = torch.randn(N, C, dtype=torch.float64)
    normal = differentiated(lambda f: torch.distributions.Normal(f, 1.0).log_prob(y).sum(), LOGITS)
    torch.testing.assert_close(gradient_of("log-probability", describe(nn.MSELoss()))(LOGITS, y), normal)
    scale = Custom(lambda f, y: (f - y).abs().sum(), likelihood=lambda f: torch.distributions.Normal(f, 2.0))
    torch.testing.assert_close(gradient_of("log-probability", scale)(LOGITS, y), normal / 4)
    weighted = describe(nn.CrossEntropyLoss(torch.rand(C).double()))
    torch.testing.assert_close(gradient_of("loss", weighted)(LOGITS, LABELS), weighted.gradient(LOGITS, LABELS))


@pytest.mark.parametrize("together", [True, False])
def test_functions(together: bool) -> None:
    """A function that `vmap` does not support, because it reads values, is called for one example at a time."""

    def gap(f: Tensor, y: Tensor) -> Tensor:
        label = y if together else int(y)
        return f[label] - f.square().sum()

    gradient = gradient_of(gap, describe(nn.CrossEntropyLoss()))
    for _ in range(2):
        expected = differentiated(lambda f: sum(gap(f[n], LABELS[n]) for n in range(N)), LOGITS)  # type: ignore[arg-type, return-value]
        torch.testing.assert_close(gradient(LOGITS, LABELS), expected)
    constant = gradient_of(lambda _, y: torch.ones(()) * int(y), describe(nn.MSELoss()))
    assert not constant(LOGITS, LABELS).any()


def test_signs() -> None:
    assert [sign_of(one) for one in ("loss", "log-probability", "margin", log_p)] == [1, -1, -1, 1]  # type: ignore[arg-type]


def test_refusals() -> None:
    labels, square = describe(nn.CrossEntropyLoss()), describe(nn.MSELoss())
    with pytest.raises(LossError, match=r"no quantity 'margn'. Did you mean 'margin'"):
        gradient_of("margn", labels)  # type: ignore[arg-type]
    with pytest.raises(LossError, match="no class labels, so the margin is not defined"):
        gradient_of("margin", square)(LOGITS, LOGITS)
    with pytest.raises(LossError, match="targets are probabilities"):
        gradient_of("margin", labels)(LOGITS, LOGITS.softmax(1))
    with pytest.raises(LossError, match="there is only one class"):
        gradient_of("margin", labels)(LOGITS[:, :1], LABELS * 0)
    with pytest.raises(LossError, match="HuberLoss has no Fisher matrix"):
        gradient_of("log-probability", describe(nn.HuberLoss()))(LOGITS, LOGITS)
    with pytest.raises(LossError, match="a function alone does not define"):
        gradient_of("log-probability", describe(lambda f, y: (f - y).sum()))(LOGITS, LOGITS)
    for wrong in (lambda f, _: f, lambda *_: 1.0):
        with pytest.raises(LossError, match="for one example, expected a number"):
            gradient_of(wrong, labels)(LOGITS, LABELS)  # type: ignore[arg-type]
