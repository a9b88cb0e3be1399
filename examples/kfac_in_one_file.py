"""KFAC in one file that needs only PyTorch: an optimizer to read and to copy.

Use it for a network that returns logits `[N, C]` of classes:

    optimizer = KFAC(model)
    for X, y in batches:
        optimizer.zero_grad()
        f = model(X)
        optimizer.update_factors(f, y)  # in every step, or in every tenth
        F.cross_entropy(f, y).backward()
        optimizer.step()

Weights and biases of `nn.Linear` and `nn.Conv2d` are trained with KFAC, all other parameters with SGD. For predictions
at several positions, such as words, use `f.flatten(0, 1)` and `y.flatten()`. Symbols are those of the paper
(https://arxiv.org/abs/2507.05127): inputs x of a layer, gradients g with respect to its outputs, factors A and B.

`python examples/kfac_in_one_file.py` trains a small CNN, and prints its loss beside those of SGD.
"""

from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F  # noqa: N812

Layer = nn.Linear | nn.Conv2d


def input_rows(layer: Layer, x: Tensor) -> Tensor:
    """Return the vectors that the weight is multiplied with as rows `[N S, d_A]`, for N examples with S positions."""
    # A convolution is a linear layer that is applied to every patch of the image.
    if isinstance(layer, nn.Conv2d):
        x = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride).mT  # type: ignore[arg-type]
    rows = x.flatten(0, -2)

    # A bias is a further column of the weight, whose input is always one.
    return rows if layer.bias is None else torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)


def gradient_rows(layer: Layer, g: Tensor) -> Tensor:
    """Return gradients with respect to a layer's outputs as rows `[N S, d_B]`."""
    return (g.movedim(1, -1) if isinstance(layer, nn.Conv2d) else g).flatten(0, -2)


def backpropagated_vectors(f: Tensor, y: Tensor, fisher: str) -> list[Tensor]:
    """Return vectors `[N, C]` to send backward from the predictions, for cross-entropy. Other losses need others.

    They are gradients of each example's loss: with a label that the model draws ("mc"), with the label of the data
    ("empirical"), or with all labels in turn, weighted by their probabilities ("type-2": exact, one pass per class).
    """
    p = f.softmax(dim=1)
    labels = torch.eye(f.shape[1], dtype=f.dtype, device=f.device)
    if fisher == "type-2":
        return [p[:, c : c + 1].sqrt() * (p - label) for c, label in enumerate(labels)]
    if fisher == "mc":
        y = torch.multinomial(p, 1).squeeze(1)
    return [p - labels[y]]


def damped_inverse(factor: Tensor, damping: float) -> Tensor:
    """Return the inverse of a factor, with damping relative to its mean eigenvalue."""
    # Each factor gets the root, so that the product of both gets the damping.
    added = sqrt(damping) * factor.diagonal().mean().clamp(min=1e-20)
    return torch.cholesky_inverse(torch.linalg.cholesky(factor + added * torch.eye(len(factor)).to(factor)))


def limited(D: Tensor, radius: Tensor) -> Tensor:
    """Return a step in the trust region: small singular values stay, and large ones end at the radius."""
    U, s, Vh = torch.linalg.svd(D, full_matrices=False)
    short: Tensor = U @ (s / (1 + (s / radius).square()).sqrt()).diag() @ Vh
    return short


def check(model: nn.Module) -> None:
    """Raise an error if factors of a model would be wrong."""
    if len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False))):
        raise ValueError("Two layers share a parameter. Its uses would have to be added up: see `update_factors`.")
    for layer in model.modules():
        if isinstance(layer, Layer) and len({p.requires_grad for p in layer.parameters()}) > 1:
            raise ValueError(f"A parameter of {layer} is frozen. Freeze its weight and its bias, or none of them.")
    for conv in [module for module in model.modules() if isinstance(module, nn.Conv2d)]:
        if conv.groups > 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise ValueError(f"{conv} is not supported. Use groups=1, numbers as padding, zeros: see `input_rows`.")


class KFAC(torch.optim.Optimizer):
    """Natural gradient descent with Kronecker-factored curvature.

    Args:
        model: The model. Call it, not its submodules, so that hooks run.
        lr: Learning rate. With 1, the whole natural gradient step is taken, within the trust region.
        damping: Added to the eigenvalues of each layer's curvature, relative to their mean.
        momentum: Fraction of the moving average of gradients that is kept in each step.
        decay: Fraction of the moving averages of factors that is kept when new factors are added.
        trust: Limits how much each layer's step may change the layer's outputs, before it is multiplied by `lr`.
        fisher: Which curvature matrix: see `backpropagated_vectors`.
        sgd_lr: Learning rate of SGD for parameters of other layers, relative to `lr`.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1.0,
        damping: float = 0.003,
        momentum: float = 0.9,
        decay: float = 0.7,
        trust: float = 0.03,
        fisher: str = "mc",
        sgd_lr: float = 0.1,
    ) -> None:
        check(model)
        if fisher not in {"mc", "empirical", "type-2"}:
            raise ValueError(f"fisher is {fisher!r}. Use 'mc', 'empirical' or 'type-2'.")
        options = {"lr": lr, "damping": damping, "momentum": momentum, "decay": decay, "trust": trust, "sgd_lr": sgd_lr}
        super().__init__(model.parameters(), options)
        self.fisher = fisher

        # Layers of the last pass: their inputs, and where the gradients with respect to their outputs will arrive.
        self.seen: dict[Layer, tuple[Tensor, GradientEdge]] = {}
        model.register_forward_pre_hook(lambda *_: self.seen.clear())
        self.layers = [module for module in model.modules() if isinstance(module, Layer)]
        for layer in self.layers:
            layer.register_forward_hook(self.see)

    def see(self, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Store the inputs of a layer, and prepare for the gradients of its outputs, during a forward pass."""
        if not output.requires_grad:
            return
        if layer in self.seen:
            raise RuntimeError(f"{layer} is used twice in a pass. Its uses would have to be added up.")
        self.seen[layer] = inputs[0].detach(), get_gradient_edge(output)

    @torch.no_grad()
    def update_factors(self, f: Tensor, y: Tensor) -> None:
        """Update the factors of all layers, given logits `f` `[N, C]` of the last pass and labels `y` `[N]`."""
        # Send vectors backward, through activations only: this computes no gradients of parameters.
        edges = [edge for _, edge in self.seen.values()]
        vectors = backpropagated_vectors(f.detach(), y, self.fisher)
        gradients = [torch.autograd.grad(f, edges, v, retain_graph=True) for v in vectors]
        options = self.param_groups[0]
        for i, (layer, (x, _)) in enumerate(self.seen.items()):
            X = input_rows(layer, x)
            G = torch.cat([gradient_rows(layer, g[i]) for g in gradients])

            # R is 1 / N, because the loss is a mean over N examples. Positions are treated like further examples
            # ("expand"): a layer that is used at S positions has N S rows.
            N, S = len(f), len(X) / len(f)
            R = 1 / N
            A = R * X.T @ X
            B = G.T @ G / (N * S)

            # Averages over updates. The first factors have the weight one, so there is no bias towards zero.
            state, decay = self.state[layer.weight], options["decay"]
            state["updates"] = state.get("updates", 0) + 1
            weight = (1 - decay) / (1 - decay ** state["updates"])
            for name, new in {"A": A, "B": B, "S": A.new_tensor(S)}.items():
                state[name] = state.get(name, new).lerp(new, weight)

            # The inverse of a Kronecker product is the product of the inverses.
            state["A_inverse"] = damped_inverse(state["A"], options["damping"])
            state["B_inverse"] = damped_inverse(state["B"], options["damping"])

    def natural(self, layer: Layer, U: Tensor) -> Tensor:
        """Multiply a layer's gradient `[d_B, d_A]` with the inverse curvature, and limit the step."""
        state = self.state[layer.weight]
        if "A" not in state:
            raise RuntimeError(f"{layer} has no factors. Call the model, then update_factors(f, y), before this step.")
        D = state["B_inverse"] @ U @ state["A_inverse"]

        # The radius: for inputs of their usual size, outputs change by about `trust`, or less.
        d_B, d_A = D.shape
        input_size = (state["A"].trace() / (d_A * state["S"])).sqrt()
        return limited(D, self.param_groups[0]["trust"] * sqrt(max(1.0, d_B / d_A)) / input_size)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        options = self.param_groups[0]
        beta = options["momentum"]

        # Momentum: average gradients, look one step ahead (Nesterov), and correct the bias towards zero.
        steps: dict[Tensor, Tensor] = {}
        for p in options["params"]:
            if p.grad is not None:
                state = self.state[p]
                state["t"] = state.get("t", 0) + 1
                state["m"] = state.get("m", torch.zeros_like(p)).lerp(p.grad, 1 - beta)
                ahead = beta * state["m"] + (1 - beta) * p.grad
                steps[p] = ahead / (1 - beta ** (state["t"] + 1))

        # The natural gradient of a layer: its weight and bias are one matrix, side by side.
        natural: dict[Tensor, Tensor] = {}
        for layer in self.layers:
            if layer.weight in steps:
                params = [p for p in (layer.weight, layer.bias) if p is not None]
                D = self.natural(layer, torch.cat([steps[p].reshape(len(p), -1) for p in params], dim=1))
                parts = D.split([p[0].numel() for p in params], dim=1)
                natural |= {p: part.reshape(p.shape) for p, part in zip(params, parts, strict=True)}

        # Parameters of all other layers take a step of SGD.
        for p, step in steps.items():
            p.sub_(natural[p] if p in natural else options["sgd_lr"] * step, alpha=options["lr"])
        return loss


def images(num: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return generated images `[num, 1, 8, 8]`, one of ten patterns at a random position, with noise; and labels."""
    patterns = torch.randn(10, 4, 4, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(10, (num,), generator=generator)
    X = 0.3 * torch.randn(num, 1, 8, 8, generator=generator)
    for n, (i, j) in enumerate(torch.randint(5, (num, 2), generator=generator).tolist()):
        X[n, 0, i : i + 4, j : j + 4] += patterns[y[n]]
    return X, y


def cnn() -> nn.Sequential:
    """Return a small network, the same in every call."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.Tanh()]
    layers += [nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(128, 32), nn.Tanh(), nn.Linear(32, 10))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 100) -> float:
    """Train a model with batches of 128 examples, and return its loss on new data."""
    X, y = images(4096, seed=1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for batch in torch.randint(len(X), (steps, 128)):
        optimizer.zero_grad()
        f = model(X[batch])
        if isinstance(optimizer, KFAC):
            optimizer.update_factors(f, y[batch])
        F.cross_entropy(f, y[batch]).backward()
        optimizer.step()
        schedule.step()
    X, y = images(1024, seed=2)
    return float(F.cross_entropy(model(X), y).detach())


if __name__ == "__main__":
    for rate in (0.1, 0.2, 0.4, 0.8):
        model = cnn()
        sgd = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
        print(f"SGD, learning rate {rate}: loss {train(model, sgd):.3f}")
    model = cnn()
    print(f"KFAC, learning rate 1: loss {train(model, KFAC(model)):.3f}")
