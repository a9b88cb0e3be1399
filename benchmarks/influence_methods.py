"""Methods that score training data, with one interface: those of kfs, and simple baselines.

A pair's score is larger if the training example raises the query's margin. A self-score is larger for examples that are
harder to learn. Other libraries have their own modules, `influence_kronfluence` and `influence_dattri`.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from benchmarks.influence_digits import Data, margins
from kfs import EKFAC, GGN, KFAC, EmpiricalRisk, Influence, Relative

BATCH = 512
PROJECTIONS = 256  # number of dimensions in TRAK
RELATIVE = Relative(0.1)
ABSOLUTE = 1e-3
Quantity = Callable[[Tensor, Tensor], Tensor]  # of logits and labels


class Fitted:
    """A method that was fitted to model and training data. Some have only one of both kinds of scores."""

    def pairwise(self, queries: Data) -> Tensor:
        """Return the score of each pair, `[queries, train]`."""
        raise NotImplementedError

    def own(self) -> Tensor:
        """Return the self-score of each training example, `[train]`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Method:
    """A method to be measured.

    Attributes:
        name: Its name.
        library: Its library.
        damping: Its damping, in words.
        fit: Takes a model, training data, and a seed for draws; `None` if the library is not installed.
        draws: Whether labels are drawn.
        has_own: Whether it has self-scores.
    """

    name: str
    library: str
    damping: str
    fit: Callable[[nn.Module, Data, int], Fitted] | None
    draws: bool = False
    has_own: bool = True


class Ours(Fitted):
    """`kfs.Influence`.

    Args:
        kind: `KFAC` or `EKFAC`.
        damping: As in `Influence`.
        settings: Settings of the operator.
        model: The model.
        data: Its training data.
        seed: Seed of draws.
    """

    def __init__(
        self,
        kind: type[KFAC | EKFAC],
        damping: float | Relative,
        settings: dict[str, Any],
        model: nn.Module,
        data: Data,
        seed: int,
    ) -> None:
        self.model = model
        self.train = self._risk(data)
        self.influence = Influence(kind(self.train, seed=seed, **settings), damping)

    def pairwise(self, queries: Data) -> Tensor:
        """Return the score of each pair."""
        return -self.influence.scores(self._risk(queries), self.train, of="margin")

    def own(self) -> Tensor:
        """Return the self-score of each training example."""
        return self.influence.self_scores(self.train)

    def _risk(self, data: Data) -> EmpiricalRisk:
        batches = list(zip(*(part.split(BATCH) for part in data), strict=True))
        return EmpiricalRisk(self.model, nn.CrossEntropyLoss(), batches)


class DenseGGN(Fitted):
    """The whole generalized Gauss-Newton matrix, inverted in float64, as the reference for approximations.

    Args:
        damping: The number that is added to the diagonal, or a multiple of the mean eigenvalue.
        model: The model.
        data: Its training data.
        seed: Seed of draws.
    """

    def __init__(self, damping: float | Relative, model: nn.Module, data: Data, seed: int) -> None:
        self.model = copy.deepcopy(model).double()
        self.data = data[0].double(), data[1]
        G = GGN(EmpiricalRisk(self.model, nn.CrossEntropyLoss(), self.data)).to_dense()
        added = damping.fraction * float(G.diagonal().mean()) if isinstance(damping, Relative) else damping
        self.root = torch.linalg.cholesky(G + added * torch.eye(len(G), dtype=G.dtype))

    def pairwise(self, queries: Data) -> Tensor:
        """Return the score of each pair."""
        asked = flat(gradients(self.model, negative_margins, (queries[0].double(), queries[1])))
        return asked @ torch.cholesky_solve(self._own_gradients().T, self.root)

    def own(self) -> Tensor:
        """Return the self-score of each training example."""
        G = self._own_gradients()
        return (G * torch.cholesky_solve(G.T, self.root).T).sum(1)

    def _own_gradients(self) -> Tensor:
        return flat(gradients(self.model, losses, self.data))


class Projected(Fitted):
    """TRAK (Park et al., 2023) with a single network: gradients of margins, randomly projected.

    Args:
        model: The model.
        data: Its training data.
        seed: Seed of draws.
    """

    def __init__(self, model: nn.Module, data: Data, seed: int) -> None:
        self.model = model
        size = sum(p.numel() for p in model.parameters())
        self.P = torch.randn(size, PROJECTIONS, generator=torch.Generator().manual_seed(seed)) / PROJECTIONS**0.5
        self.features = flat(gradients(model, margins, data)) @ self.P
        with torch.no_grad():
            self.doubt = 1 - torch.exp(-losses(model(data[0]), data[1]))

    def pairwise(self, queries: Data) -> Tensor:
        """Return the score of each pair."""
        asked = flat(gradients(self.model, margins, queries)) @ self.P
        gram = self.features.T @ self.features
        scores: Tensor = asked @ torch.linalg.solve(gram, self.features.T) * self.doubt
        return scores


class LossAlone(Fitted):
    """Large losses instead of large self-scores: a baseline without influence functions.

    Args:
        model: The model.
        data: Its training data.
        seed: Seed of draws.
    """

    def __init__(self, model: nn.Module, data: Data, seed: int) -> None:
        self.model = model
        self.data = data

    def own(self) -> Tensor:
        """Return the loss of each training example."""
        with torch.no_grad():
            return losses(self.model(self.data[0]), self.data[1])


def losses(f: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of every example, for logits `[N, C]` or `[C]`."""
    return cross_entropy(f, y, reduction="none")


def negative_margins(f: Tensor, y: Tensor) -> Tensor:
    """Return the negative margins, which are small for good predictions like a loss, for logits `[..., C]`."""
    return -margins(f, y)


def gradients(model: nn.Module, quantity: Quantity, data: Data) -> dict[str, Tensor]:
    """Differentiate a quantity of every example: `[data, *shape]` for each parameter."""
    params = {name: p.detach() for name, p in model.named_parameters()}

    def value(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return quantity(functional_call(model, params, (x[None],))[0], y)

    found: dict[str, Tensor] = vmap(grad(value), in_dims=(None, 0, 0))(params, *data)
    return found


def flat(found: Mapping[str, Tensor]) -> Tensor:
    """Concatenate the gradients of all parameters, in the model's order: `[data, parameters]`."""
    return torch.cat([g.flatten(1) for g in found.values()], 1)


def ours(kind: type[KFAC | EKFAC], damping: float | Relative = RELATIVE, **settings: Any) -> Method:
    """Return one of the methods of kfs."""
    samples = f", {settings['mc_samples']} samples" if "mc_samples" in settings else ""
    name = f"{kind.__name__} {settings['fisher']}{samples}"
    fit = partial(Ours, kind, damping, settings)
    return Method(name, "kfs", in_words(damping), fit, draws=settings["fisher"] == "mc")


def peer(library: str, damping: float | Relative, has_own: bool = True) -> Method:
    """Return EKFAC of another library: its module's `Fitted`, if that library is installed."""
    fit = None
    if find_spec(library) is not None:
        fit = partial(import_module(f"benchmarks.influence_{library}").Fitted, damping)
    draws = library == "kronfluence"
    fisher = "mc" if draws else "empirical"
    return Method(f"EKFAC {fisher}", library, in_words(damping), fit, draws, has_own)


def in_words(damping: float | Relative) -> str:
    """Describe the damping of a method."""
    return f"{damping.fraction:g} x mean eigenvalue" if isinstance(damping, Relative) else f"{damping:g}"


def predictors() -> list[Method]:
    """Return the methods that predict margins of networks trained with a part of the data."""
    found: list[Method] = []
    for damping in (RELATIVE, ABSOLUTE):
        found += [
            Method("dense GGN", "torch", in_words(damping), partial(DenseGGN, damping)),
            ours(KFAC, damping, fisher="type-2"),
            ours(EKFAC, damping, fisher="type-2"),
            ours(EKFAC, damping, fisher="mc"),
            ours(EKFAC, damping, fisher="mc", mc_samples=8),
            peer("kronfluence", damping),
        ]
    return [
        *found,
        peer("kronfluence", 1e-8),  # the default of the library
        peer("dattri", ABSOLUTE, has_own=False),
        Method(f"TRAK, {PROJECTIONS} dimensions", "torch", "", Projected, draws=True, has_own=False),
    ]


def detectors() -> list[Method]:
    """Return the methods that find wrong labels."""
    return [
        ours(KFAC, fisher="type-2"),
        ours(EKFAC, fisher="type-2"),
        ours(EKFAC, fisher="mc"),
        peer("kronfluence", RELATIVE),
        peer("kronfluence", 1e-8),
        Method("loss", "torch", "", LossAlone),
    ]


def timed() -> list[Method]:
    """Return the methods that are timed."""
    return [
        ours(KFAC, fisher="type-2"),
        ours(EKFAC, fisher="type-2"),
        ours(EKFAC, fisher="mc"),
        peer("kronfluence", RELATIVE),
        peer("dattri", ABSOLUTE, has_own=False),
    ]
