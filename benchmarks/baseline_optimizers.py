r"""The optimizers of the training benchmark: PyTorch's, Muon and SOAP from their published formulas, and ours.

Muon replaces the momentum of a matrix by the nearest orthogonal matrix, roughly, with five steps of a Newton-Schulz
iteration. SOAP is Adam in the eigenbasis of Shampoo's factors. Both are for matrices; convolutions are flattened to
`[out, in * height * width]`, and all other parameters are left to AdamW.

kfac-pytorch is not among them: it is not on PyPI, where only a package for TensorFlow is called `kfac`.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from kfs.optim import KFAC

BETAS = (0.9, 0.95)
QUINTIC = 3.4445, -4.7750, 2.0315  # Muon's polynomial: slope at zero is large, so that small values grow fast
# AdamW's learning rate for what Muon does not cover, divided by Muon's: with the tuning seed, the best of 0.03, 0.1,
# 0.15, 0.2 and 0.3 for CNN and GPT together. No other optimizer had a second number tuned.
ADAM_RATIO = 0.2

# Half a decade between values, around a usual default; AdamW's is larger than PyTorch's, because the models are small.
GRIDS: dict[str, tuple[float, ...]] = {
    "sgd": (0.01, 0.03, 0.1, 0.3, 1.0),
    "adamw": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    "muon": (0.002, 0.006, 0.02, 0.06, 0.2),
    "soap": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    "kfs": (0.01, 0.03, 0.1, 0.3, 1.0),
}
NOT_SUPPORTED = {"kfac-pytorch": "it is not on PyPI"}


class Stepper(Protocol):
    """What a training loop needs of an optimizer."""

    def zero_grad(self) -> None:
        """Forget gradients."""

    def step(self) -> object:
        """Change the parameters."""


class Together:
    """Several optimizers for different parameters, as one."""

    def __init__(self, *parts: Stepper) -> None:
        """Take the optimizers."""
        self.parts = parts

    def zero_grad(self) -> None:
        """Forget gradients."""
        for part in self.parts:
            part.zero_grad()

    def step(self) -> None:
        """Change the parameters."""
        for part in self.parts:
            part.step()


class MatrixOptimizer:
    """An optimizer that computes an update for every parameter as a matrix, with a state of its own."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        """Take parameters of two or more dimensions."""
        self.params, self.lr = list(params), lr
        self.states: list[dict[str, Tensor]] = [{} for _ in self.params]
        self.count = 0

    def zero_grad(self) -> None:
        """Forget gradients."""
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Change the parameters."""
        self.count += 1
        for p, state in zip(self.params, self.states, strict=True):
            if p.grad is not None:
                p.sub_(self.update(p.grad.flatten(1), state).view_as(p), alpha=self.lr)

    def update(self, G: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Return what is subtracted, from a gradient."""
        raise NotImplementedError


class Muon(MatrixOptimizer):
    """Orthogonalized momentum (K. Jordan et al., 2024), in the parameters' precision."""

    def update(self, G: Tensor, state: dict[str, Tensor], momentum: float = 0.95) -> Tensor:
        """Return the orthogonalized Nesterov momentum; tall matrices move further."""
        M = state.setdefault("momentum", torch.zeros_like(G)).lerp_(G, 1 - momentum)
        rows, columns = G.shape
        scale: float = max(1.0, rows / columns) ** 0.5
        return scale * orthogonalized(G.lerp(M, momentum))


def orthogonalized(M: Tensor, steps: int = 5) -> Tensor:
    """Return a matrix with the same singular vectors, and singular values that are all roughly 1."""
    a, b, c = QUINTIC
    X: Tensor = (M.T if M.shape[0] > M.shape[1] else M) / M.norm().clamp_min(1e-7)
    for _ in range(steps):
        S = X @ X.T  # the smaller of both sides
        X = a * X + torch.addmm(S, S, S, beta=b, alpha=c) @ X
    return X.T if M.shape[0] > M.shape[1] else X


class SOAP(MatrixOptimizer):
    """Adam in the eigenbasis of Shampoo's factors (N. Vyas et al., 2024), which is refreshed every 10 steps."""

    beta, beta_squares, every, epsilon = 0.95, 0.95, 10, 1e-8

    def update(self, G: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Return Adam's update, computed in the basis; the first step has no basis yet and only makes it."""
        if not state:
            state |= {"L": (1 - self.beta) * G @ G.T, "R": (1 - self.beta) * G.T @ G}
            # In double: float32 does not converge for singular factors, like those of embeddings with unused tokens.
            state |= {f"Q{side}": torch.linalg.eigh(state[side].double())[1].flip(1).to(G) for side in "LR"}
            state |= {"mean": torch.zeros_like(G), "squares": torch.zeros_like(G)}
            return torch.zeros_like(G)
        QL, QR, done = state["QL"], state["QR"], self.count - 1
        mean = state["mean"].lerp_(G, 1 - self.beta) / (1 - self.beta**done)
        squares = state["squares"].lerp_((QL.T @ G @ QR).square_(), 1 - self.beta_squares)
        rotated = (QL.T @ mean @ QR) / ((squares / (1 - self.beta_squares**done)).sqrt_() + self.epsilon)
        result = QL @ rotated @ QR.T
        state["L"].lerp_(G @ G.T, 1 - self.beta)
        state["R"].lerp_(G.T @ G, 1 - self.beta)
        if self.count % self.every == 0:
            state["QL"], order = refreshed(state["L"], QL)
            state["squares"] = state["squares"][order]
            state["QR"], order = refreshed(state["R"], QR)
            state["squares"] = state["squares"][:, order]
        return result


def refreshed(S: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
    """Improve eigenvectors by one step of orthogonal iteration; also return which of the old ones became which.

    The iteration wants large eigenvalues first, so the old vectors are sorted by their Rayleigh quotients.
    """
    product = S @ Q
    order = (Q * product).sum(0).argsort(descending=True)
    return torch.linalg.qr(product[:, order])[0], order


def adamw(params: Iterable[nn.Parameter], lr: float) -> Stepper:
    """Return PyTorch's AdamW without weight decay, in its fastest version."""
    return torch.optim.AdamW(list(params), lr=lr, betas=BETAS, weight_decay=0, fused=True)


def sgd(model: nn.Module, lr: float) -> Stepper:
    """Return SGD with Nesterov momentum."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, fused=True)


def with_adamw(matrices: MatrixOptimizer, model: nn.Module, lr: float) -> Stepper:
    """Leave all parameters to AdamW that a matrix optimizer does not have."""
    inside = {id(p) for p in matrices.params}
    return Together(matrices, adamw((p for p in model.parameters() if id(p) not in inside), lr))


def muon(model: nn.Module, lr: float) -> Stepper:
    """Return Muon for weights of linear layers and convolutions, except for a last layer called `head`."""
    named = (pair for pair in model.named_modules() if isinstance(pair[1], nn.Linear | nn.Conv2d))
    weights = [layer.get_parameter("weight") for name, layer in named if name != "head"]
    return with_adamw(Muon(weights, lr), model, ADAM_RATIO * lr)


def soap(model: nn.Module, lr: float) -> Stepper:
    """Return SOAP for everything that has two or more dimensions."""
    return with_adamw(SOAP((p for p in model.parameters() if p.ndim > 1), lr), model, lr)


def factories(loss: object) -> dict[str, Callable[[nn.Module, float], Stepper]]:
    """Return what makes each optimizer from a model and a learning rate; only ours needs to know the loss."""
    return {
        "sgd": sgd,
        "adamw": lambda model, lr: adamw(model.parameters(), lr),
        "muon": muon,
        "soap": soap,
        "kfs": lambda model, lr: KFAC(model, loss, lr=lr),
    }
