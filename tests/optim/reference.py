"""The optimizer's mathematics, written with dense matrices and loops over examples. No code is shared with `kfs`.

The reference trains a `Sequential` of linear layers and activations. Every linear layer is one block: its weight and
bias form a matrix `[d_B, d_A]`, and its curvature is a dense matrix over the entries of that matrix, row by row.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, hessian, vmap

Criterion = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Options:
    """Settings of one block, with the documented defaults of the optimizer."""

    lr: float = 1.0
    damping: float = 0.003
    momentum: float = 0.9
    weight_decay: float = 0.0
    trust: float | None = 0.03
    decay: float = 0.7
    damping_method: str = "factored"
    damping_unit: str = "relative"
    eigen: bool = False


@dataclass
class Block:
    """The averages of one layer, and its last inverse."""

    layer: nn.Linear
    options: Options
    A: Tensor = field(default_factory=lambda: torch.zeros(()))
    B: Tensor = field(default_factory=lambda: torch.zeros(()))
    weight: float = 0.0
    corrected: Tensor | None = None  # with eigen=True: the average of corrected curvatures, dense
    basis: tuple[Tensor, Tensor] | None = None
    inverse: Tensor | None = None
    inputs: float = 1.0  # root mean square of the layer's inputs
    added: Tensor = field(default_factory=lambda: torch.zeros(()))  # the damping that was added to all eigenvalues
    momentum: Tensor = field(default_factory=lambda: torch.zeros(()))
    previous: Tensor = field(default_factory=lambda: torch.zeros(()))
    before: Tensor = field(default_factory=lambda: torch.zeros(()))  # the matrix before the last step

    def matrix(self) -> Tensor:
        """Return the layer's parameters as one matrix."""
        return joined([p.detach() for p in self.layer.parameters()])

    def assign(self, M: Tensor) -> None:
        """Set the layer's parameters."""
        with torch.no_grad():
            self.layer.weight.copy_(M[:, : self.layer.in_features])
            if self.layer.bias is not None:
                self.layer.bias.copy_(M[:, -1])

    def add(self, pairs: list[list[tuple[Tensor, Tensor]]]) -> None:
        """Add new statistics to the averages.

        Args:
            pairs: For every example, an input, and an output gradient for every backpropagated vector.
        """
        decay = self.options.decay
        A, B = torch.zeros(()), torch.zeros(())
        for datum in pairs:
            A = A + torch.outer(datum[0][0], datum[0][0]) / len(pairs)
            for _, g in datum:
                B = B + torch.outer(g, g) / len(pairs)
        if self.basis is not None and self.corrected is not None:
            Q_A, Q_B = self.basis
            squares = torch.zeros(len(Q_B), len(Q_A), dtype=Q_A.dtype)
            for datum in pairs:
                for x, g in datum:
                    squares += (Q_B.T @ torch.outer(g, x) @ Q_A).square() / len(pairs)
            Q = torch.kron(Q_B, Q_A)
            self.corrected = decay * self.corrected + (1 - decay) * Q @ squares.flatten().diag() @ Q.T
        self.A = decay * self.A + (1 - decay) * A
        self.B = decay * self.B + (1 - decay) * B
        self.weight = decay * self.weight + (1 - decay)

    def invert(self, scale: float) -> None:
        """Compute the damped inverse of the averages."""
        A, B = self.A / self.weight, self.B / self.weight
        self.inputs = math.sqrt(float(A.trace()) / len(A))
        curvature = torch.kron(B, A)
        if self.options.eigen:
            Q_A, Q_B = (torch.linalg.eigh(factor).eigenvectors for factor in (A, B))
            Q = torch.kron(Q_B, Q_A)
            before = curvature if self.corrected is None else self.corrected
            curvature = Q @ (Q.T @ before @ Q).diagonal().diag() @ Q.T  # a diagonal in the new basis keeps only this
            self.basis, self.corrected = (Q_A, Q_B), curvature
        identity, I_A, I_B = (torch.eye(len(M), dtype=M.dtype) for M in (curvature, A, B))
        unit = curvature.trace() / len(curvature) if self.options.damping_unit == "relative" else curvature.new_ones(())
        self.added = self.options.damping * scale * unit
        if self.options.eigen or self.options.damping_method == "exact":
            self.inverse = torch.linalg.inv(curvature + self.added * identity)
            return
        if len(A) == 1 or len(B) == 1:
            # The Kronecker product with a number is a multiple of the other factor, which is damped.
            self.inverse = torch.linalg.inv((A[0, 0] * B if len(A) == 1 else B[0, 0] * A) + self.added * identity)
            return
        ratio = ((A.trace() / len(A)) / (B.trace() / len(B))).sqrt()
        root = self.added**0.5
        self.inverse = torch.linalg.inv(torch.kron(B + root / ratio * I_B, A + root * ratio * I_A))

    def natural(self, u: Tensor) -> Tensor:
        """Multiply with the damped inverse."""
        assert self.inverse is not None
        return (self.inverse @ u.flatten()).view_as(u)

    def trusted(self, D: Tensor) -> Tensor:
        """Shorten a step that changes outputs too much."""
        if self.options.trust is None:
            return D
        rows, columns = D.shape
        radius = self.options.trust * math.sqrt(max(1.0, rows / columns)) / self.inputs
        U, sizes, V = torch.linalg.svd(D, full_matrices=False)
        longest = float(sizes.pow(4).sum()) ** 0.25
        sizes = sizes * min(1.0, 30 * radius / longest)
        for i, size in enumerate(sizes.tolist()):
            sizes[i] = size / math.sqrt(1 + (size / radius) ** 2)
        result: Tensor = U @ sizes.diag() @ V
        return result


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Combine a weight, and a bias if there is one, in one matrix."""
    return torch.cat([part.reshape(len(part), -1) for part in parts], 1)


class Reference:
    """Trains a model with the formulas of the optimizer.

    Args:
        model: A sequence of linear layers and activations.
        criterion: For one example, `(f, y) -> scalar`; the loss is its average over examples.
        groups: Settings of layers that differ from `options`, by the layer's position.
        options: Settings of all layers.
        fisher: `"type-2"` or `"empirical"`.
        kl_clip: As in the optimizer.
        factors_every: Likewise.
        inverses_every: Likewise. Spreading of inverses over steps is not modeled: use it with one block.
    """

    def __init__(
        self,
        model: nn.Sequential,
        criterion: Criterion,
        groups: Mapping[int, Mapping[str, Any]] | None = None,
        *,
        fisher: str = "type-2",
        kl_clip: float | None = None,
        factors_every: int | Callable[[int], int] = lambda step: min(10, 1 + step // 10),
        inverses_every: int = 20,
        **options: Any,
    ) -> None:
        self.model, self.criterion, self.fisher, self.kl_clip = model, criterion, fisher, kl_clip
        self.factors_every, self.inverses_every = factors_every, inverses_every
        self.blocks = []
        for place, layer in enumerate(model):
            if isinstance(layer, nn.Linear):
                mine = dict((groups or {}).get(place, {}))
                self.blocks.append(Block(layer, replace(Options(**options), **mine)))
        self.steps, self.work, self.changed, self.damping_scale = 0, 0.0, False, 1.0
        self.shortened: list[bool] = []  # whether a trust region or `kl_clip` shortened a step to less than nine tenths

    def statistics(self, X: Tensor, y: Tensor) -> list[list[list[tuple[Tensor, Tensor]]]]:
        """Return an input, and output gradients, for every block, example and backpropagated vector."""
        result: list[list[list[tuple[Tensor, Tensor]]]] = [[] for _ in self.blocks]
        for n, columns in enumerate(self.columns(self.model(X).detach(), y)):
            inputs, outputs, z = [], [], X[n]
            for layer in self.model:
                if isinstance(layer, nn.Linear):
                    inputs.append(z.detach() if layer.bias is None else torch.cat([z.detach(), z.new_ones(1)]))
                z = layer(z)
                if isinstance(layer, nn.Linear):
                    outputs.append(z)
            for found in result:
                found.append([])
            for v in columns:
                gradients = torch.autograd.grad(z, outputs, v, retain_graph=True)
                for found, x, g in zip(result, inputs, gradients, strict=True):
                    found[n].append((x, g))
        return result

    def columns(self, f: Tensor, y: Tensor) -> list[list[Tensor]]:
        """Return vectors whose outer products sum to each example's Fisher matrix in prediction space."""
        if self.fisher == "empirical":
            return [[g] for g in vmap(grad(self.criterion))(f, y)]
        values, vectors = torch.linalg.eigh(self.hessians(f, y))
        return [list((V * value.clamp(min=0).sqrt()).T) for value, V in zip(values, vectors, strict=True)]

    def hessians(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the criterion's Hessian for every example."""
        result: Tensor = vmap(hessian(self.criterion))(f, y)
        return result

    def loss(self, X: Tensor, y: Tensor) -> Tensor:
        """Return the average of the criterion over examples."""
        result: Tensor = vmap(self.criterion)(self.model(X), y).mean()
        return result

    def gradients(self, X: Tensor, y: Tensor) -> list[Tensor]:
        """Return the gradient of every block as a matrix."""
        return self.derivatives(self.loss(X, y))

    def derivatives(self, value: Tensor) -> list[Tensor]:
        """Return the gradient of a scalar with respect to every block."""
        return [
            joined(torch.autograd.grad(value, list(block.layer.parameters()), retain_graph=True))
            for block in self.blocks
        ]

    def update_curvature(self, X: Tensor, y: Tensor, force: bool = False) -> None:
        """Recompute factors and inverses in the steps of their schedules."""
        every = self.factors_every(self.steps) if callable(self.factors_every) else self.factors_every
        if force or self.steps % every == 0:
            for block, pairs in zip(self.blocks, self.statistics(X, y), strict=True):
                block.add(pairs)
            self.changed = True
        interval = min(self.inverses_every, 1 + self.steps // 2)  # curvature changes fastest at the beginning
        self.work = min(1.0, self.work + 1 / interval)
        if force or (self.changed and self.work > 1 - 1e-9):
            for block in self.blocks:
                block.invert(self.damping_scale)
            self.work, self.changed = 0.0, False

    def step(self, X: Tensor, y: Tensor) -> None:
        """Take a step: momentum, natural gradient, trust region, weight decay."""
        gradients = self.gradients(X, y)
        self.update_curvature(X, y)
        ahead, steps = [], []
        for block, g in zip(self.blocks, gradients, strict=True):
            beta = block.options.momentum
            block.momentum = beta * block.momentum + (1 - beta) * g
            u = (beta * block.momentum + (1 - beta) * g) / (1 - beta ** (self.steps + 2))
            ahead.append(u)
            steps.append(block.natural(u))
        free = steps
        steps = [block.trusted(D) for block, D in zip(self.blocks, steps, strict=True)]
        if self.kl_clip is not None:
            lrs = [block.options.lr for block in self.blocks]
            change = sum(float((lr * u * lr * D).sum()) for lr, u, D in zip(lrs, ahead, steps, strict=True))
            steps = [D * min(1.0, (self.kl_clip / change) ** 0.5) for D in steps]
        self.shortened.append(any(float(D.norm()) < 0.9 * float(F.norm()) for D, F in zip(steps, free, strict=True)))
        for block, D in zip(self.blocks, steps, strict=True):
            lr, decay = block.options.lr, block.options.weight_decay
            block.assign((1 - lr * decay) * block.matrix() - lr * D)
        self.steps += 1


class QuadraticReference(Reference):
    """Takes steps that minimize a quadratic model with the exact curvature of the batch (Martens & Grosse, 2015)."""

    predicted = 0.0

    def ggn(self, X: Tensor, y: Tensor) -> Tensor:
        """Return the dense GGN over all blocks, from the Jacobian of every example."""
        total = torch.zeros((), dtype=X.dtype)
        for datum, H in zip(X, self.hessians(self.model(X).detach(), y), strict=True):
            rows = []
            for entry in self.model(datum):
                rows.append(torch.cat([g.flatten() for g in self.derivatives(entry)]))
            J = torch.stack(rows)
            total = total + J.T @ H @ J / len(X)
        return total

    def step(self, X: Tensor, y: Tensor) -> None:
        """Take a step along the natural gradient and the last step."""
        gradients = self.gradients(X, y)
        self.update_curvature(X, y, force=True)
        directions = [torch.cat([-block.natural(g).flatten() for block, g in zip(self.blocks, gradients, strict=True)])]
        if self.steps:
            directions.append(torch.cat([block.previous.flatten() for block in self.blocks]))
        g = torch.cat([g.flatten() for g in gradients])
        added = torch.cat([block.added * torch.ones_like(block.matrix()).flatten() for block in self.blocks])
        H = self.ggn(X, y) + added.diag()
        P = torch.stack(directions, 1)
        step = P @ torch.linalg.lstsq(P.T @ H @ P, -P.T @ g, driver="gelsd").solution
        lr = self.blocks[0].options.lr
        self.predicted = float(lr * g @ step + 0.5 * lr**2 * step @ H @ step)
        sizes = [block.matrix().numel() for block in self.blocks]
        for block, part in zip(self.blocks, step.split(sizes), strict=True):
            block.previous = part.view_as(block.matrix())
            block.before = block.matrix()
            block.assign(block.before + lr * block.previous)
        self.steps += 1

    def decay_weights(self) -> None:
        """Decay the weights, after the loss was evaluated."""
        for block in self.blocks:
            block.assign(block.matrix() - block.options.lr * block.options.weight_decay * block.before)

    def adapt_damping(self, change: Tensor) -> None:
        """Adapt damping by the ratio of the actual to the predicted change of the loss (Levenberg-Marquardt)."""
        came_true = float(change.detach()) / self.predicted
        if came_true > 0.9:
            self.damping_scale *= 0.5
        elif came_true > 0.75:
            self.damping_scale *= 0.95**5
        elif came_true < 0.25:
            self.damping_scale /= 0.95**5
