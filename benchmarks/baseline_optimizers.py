r"""The optimizers of the training benchmark: PyTorch's, Muon and SOAP from their published formulas, SINGD, and KFAC.

Muon replaces the momentum of a matrix by the nearest orthogonal matrix, roughly, with five steps of a Newton-Schulz
iteration. SOAP is Adam in the eigenbasis of Shampoo's factors. Both are for matrices; convolutions are flattened to
`[out, in * height * width]`, and all other parameters are left to AdamW.

SINGD is the package `singd` of W. Lin et al. (2023): KFAC with empirical factors, whose inverses are learned instead of
computed. It is installed in .venv-bench only; elsewhere it is left out.

kfac-pytorch is missing, because it is not on PyPI, where `kfac` is a package for TensorFlow.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kfs.losses import TokenCrossEntropy
from kfs.optim import KFAC

BETAS = (0.9, 0.95)
QUINTIC = 3.4445, -4.7750, 2.0315  # Muon's polynomial: its slope at zero is large, so that small values grow fast
# AdamW's learning rate for parameters that Muon does not cover, divided by Muon's: with the tuning seed, the best of
# 0.03, 0.1, 0.15, 0.2 and 0.3 for CNN and GPT together. No other optimizer had a second number tuned.
ADAM_RATIO = 0.2

# Half a decade between values, around a usual default; AdamW's is larger than PyTorch's, because the models are small.
# SINGD's values start at its default, 0.001: with the tuning seed, smaller ones were worse on all tasks, and 0.03 was
# the best for CNN and GPT.
GRIDS: dict[str, tuple[float, ...]] = {
    "sgd": (0.01, 0.03, 0.1, 0.3, 1.0),
    "adamw": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    "muon": (0.002, 0.006, 0.02, 0.06, 0.2),
    "soap": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    "singd": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    "kfs": (0.1, 0.3, 1.0, 3.0, 10.0),
}
PEERS = {"singd"}  # code of other libraries may fail; ours must not
Factory = Callable[[nn.Module, float], "Stepper"]


class Stepper(Protocol):
    """The interface of an optimizer in a training loop."""

    def zero_grad(self) -> None:
        """Reset the gradients."""

    def step(self) -> object:
        """Update the parameters."""


class Together:
    """Several optimizers for different parameters, as one."""

    def __init__(self, *parts: Stepper) -> None:
        self.parts = parts

    def zero_grad(self) -> None:
        """Reset the gradients."""
        for part in self.parts:
            part.zero_grad()

    def step(self) -> None:
        """Update the parameters."""
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
        """Reset the gradients."""
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters."""
        self.count += 1
        for p, state in zip(self.params, self.states, strict=True):
            if p.grad is not None:
                p.sub_(self.update(p.grad.flatten(1), state).view_as(p), alpha=self.lr)

    def update(self, G: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Return the update to subtract, given a gradient."""
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
    """Return a matrix with the same singular vectors, and all singular values roughly 1."""
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
        """Return Adam's update, computed in the basis; the first step only computes the basis."""
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
    """Improve eigenvectors by one step of orthogonal iteration; also return their order among the old ones.

    The iteration wants large eigenvalues first, so the old vectors are sorted by their Rayleigh quotients.
    """
    product = S @ Q
    order = (Q * product).sum(0).argsort(descending=True)
    return torch.linalg.qr(product[:, order])[0], order


class Prodigy:
    """Adam that estimates its learning rate (Mishchenko & Defazio, 2024), with default settings.

    The estimate is a lower bound of the distance to the solution, from the gradients and steps so far.
    """

    betas = (0.9, 0.999)
    epsilon = 1e-8
    first = 1e-6  # estimate

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1.0) -> None:
        self.params = [p for p in params if p.requires_grad]
        self.lr = lr
        self.start = [p.detach().clone() for p in self.params]
        self.m = [torch.zeros_like(p) for p in self.params]
        self.v = [torch.zeros_like(p) for p in self.params]
        self.s = [torch.zeros_like(p) for p in self.params]
        self.d = torch.full((), self.first, device=self.params[0].device)
        self.numerator = torch.zeros_like(self.d)

    def zero_grad(self) -> None:
        """Reset the gradients."""
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters and the estimate."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        kept = self.betas[1] ** 0.5
        d = self.d
        lr = d * self.lr
        way = sum((g * (x0 - p)).sum() for g, x0, p in zip(grads, self.start, self.params, strict=True))
        self.numerator = kept * self.numerator + d / self.first * lr * way
        for g, m, v, s in zip(grads, self.m, self.v, self.s, strict=True):
            m.mul_(self.betas[0]).add_((1 - self.betas[0]) * d * g)
            v.mul_(self.betas[1]).add_((1 - self.betas[1]) * d**2 * g**2)
            s.mul_(kept).add_(d / self.first * lr * g)
        size = torch.stack([s.abs().sum() for s in self.s]).sum()
        self.d = torch.maximum(d, self.numerator / size.clamp(min=1e-30))
        for p, m, v in zip(self.params, self.m, self.v, strict=True):
            p.sub_(lr * m / (v.sqrt() + d * self.epsilon))


def adamw(params: Iterable[nn.Parameter], lr: float) -> Stepper:
    """Return PyTorch's AdamW without weight decay, in its fastest version."""
    return torch.optim.AdamW(list(params), lr=lr, betas=BETAS, weight_decay=0, fused=True)


def sgd(model: nn.Module, lr: float) -> Stepper:
    """Return SGD with Nesterov momentum."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, fused=True)


def with_adamw(optimizer: Stepper, params: Iterable[nn.Parameter], model: nn.Module, lr: float) -> Stepper:
    """Return AdamW for all parameters that another optimizer does not train."""
    inside = {id(p) for p in params}
    others = [p for p in model.parameters() if id(p) not in inside]
    return Together(optimizer, adamw(others, lr)) if others else optimizer


def muon(model: nn.Module, lr: float) -> Stepper:
    """Return Muon for weights of linear, convolutional and recurrent layers, except for a last one called `head`."""
    named = (pair for pair in model.named_modules() if isinstance(pair[1], nn.Linear | nn.Conv2d))
    weights = [layer.get_parameter("weight") for name, layer in named if name != "head"]
    recurrent = (layer for layer in model.modules() if isinstance(layer, nn.RNNBase))
    weights += [p for layer in recurrent for p in layer.parameters() if p.ndim > 1]
    return with_adamw(Muon(weights, lr), weights, model, ADAM_RATIO * lr)


def soap(model: nn.Module, lr: float) -> Stepper:
    """Return SOAP for all parameters with two or more dimensions."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    return with_adamw(SOAP(weights, lr), weights, model, lr)


def singd_class() -> Any:
    """Return the optimizer of the package `singd`, or `None` if it is not installed."""
    try:
        from singd.optim.optimizer import SINGD  # noqa: PLC0415 (a peer, not a dependency)
    except ImportError:
        return None
    return SINGD


def singd(model: nn.Module, lr: float, loss_average: str) -> Stepper:
    """Return SINGD for linear layers and convolutions, and AdamW with the same learning rate for all others.

    The package leaves parameters of other layers untrained; its example for normalization layers trains them in this
    way.

    Args:
        model: The model.
        lr: The learning rate of both.
        loss_average: The axes that the loss averages over: "batch" or "batch+sequence".
    """
    kinds = (nn.Linear, nn.Conv2d)
    inside = [p for layer in model.modules() if isinstance(layer, kinds) for p in layer.parameters()]
    # The package's defaults, made explicit. Without `kfac_like` this is INGD, with it IKFAC.
    settings = {
        "structures": ("dense", "dense"),
        "kfac_like": False,
        "kfac_approx": "expand",
        "momentum": 0.9,
        "damping": 1e-3,
        "alpha1": 0.5,  # momentum of the factors
        "lr_cov": 1e-2,  # learning rate of the factors
        "T": 10,  # steps between updates of the factors
        "weight_decay": 0.0,
    }
    return with_adamw(singd_class()(model, inside, lr=lr, loss_average=loss_average, **settings), inside, model, lr)


def factories(loss: object) -> dict[str, Factory]:
    """Return functions that make each optimizer from a model and a learning rate.

    Only two need to know the loss: SINGD needs the axes that it averages over, and KFAC the whole loss.
    """
    average = "batch+sequence" if isinstance(loss, TokenCrossEntropy) else "batch"
    made: dict[str, Factory] = {
        "sgd": sgd,
        "adamw": lambda model, lr: adamw(model.parameters(), lr),
        "muon": muon,
        "soap": soap,
        "singd": lambda model, lr: singd(model, lr, average),
        "kfs": lambda model, lr: KFAC(model, loss, lr=lr),
    }
    return {name: make for name, make in made.items() if name not in left_out()}


def left_out() -> dict[str, str]:
    """Return the optimizers that cannot be measured, with reasons."""
    missing = {} if singd_class() else {"singd": "not installed: use .venv-bench"}
    return {**missing, "kfac-pytorch": "not supported: it is not on PyPI"}
