"""All models of these tests, as problems with separate examples; see `arrangements`."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from kfs.conformance.cases import APPROXIMATE, EXACT
from tests.factors.arrangements import Problem, normal
from tests.factors.models import ONE_POSITION, Function, between
from tests.factors.test_composites import CELLS, Attention, Cells, Recurrent
from tests.factors.test_constants import DERIVED
from tests.factors.test_definition import CONVOLUTIONS
from tests.factors.test_ekfac import SHARED
from tests.factors.test_experts import INPUTS, STYLES
from tests.factors.test_experts import make as make_experts
from tests.factors.test_mixtures import WIDTH, Mixture
from tests.factors.test_positions import Positions
from tests.operators.problems import PROBLEMS


def vectors(*shape: int) -> Callable[[int], Tensor]:
    return lambda _: normal(1, *shape)


def tokens(largest: int, *shape: int) -> Callable[[int], Tensor]:
    return lambda _: torch.randint(largest, (1, *shape))


def _one_position() -> Iterator[Problem]:
    for case in ONE_POSITION:
        yield Problem(case.name, case.make, tokens(5, 1) if case.tokens else vectors(3))
    for name, (function, params) in DERIVED.items():
        yield Problem(f"derived: {name}", lambda f=function, p=params: between(Function(f, **p)), vectors(3))  # type: ignore[misc]


def _several_positions() -> Iterator[Problem]:
    for name, (make, kind) in SHARED.items():
        yield Problem(name, make, tokens(7, 5) if kind == "tokens" else vectors(int(kind.partition(",")[0])))
    for name, (layer, shape) in CONVOLUTIONS.items():
        yield Problem(
            f"convolution: {name}",
            lambda layer=layer: nn.Sequential(layer(), nn.Tanh(), nn.Flatten(), nn.LazyLinear(2)),  # type: ignore[misc]
            vectors(*shape),
        )
    for case in (*(exact for exact in EXACT if not exact.may_refuse), APPROXIMATE):
        yield Problem(f"conformance: {case.name}", case.model, lambda _, case=case: _double(case.inputs(1)))  # type: ignore[misc]
    for problem in PROBLEMS:
        yield Problem(
            f"operators: {problem.name}",
            problem.make_model,
            lambda _, make=problem.make_data: make()[0][:1],  # type: ignore[misc]
        )
    for kind in ("row", "index", "scaled", "parameter"):
        yield Problem(f"positions: {kind}", lambda kind=kind: Positions(kind), tokens(7, 8))  # type: ignore[misc]


def _composites() -> Iterator[Problem]:
    networks: dict[str, Callable[[], nn.Module]] = {
        "two directions": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True),
        "projection": lambda: nn.LSTM(3, 4, proj_size=2, num_layers=2),
        "no bias": lambda: nn.GRU(3, 4, num_layers=2, bidirectional=True, bias=False),
    }
    for name, make in networks.items():
        yield Problem(f"recurrent: {name}", lambda make=make: Recurrent(make()), vectors(3, 3))  # type: ignore[misc]
    for name, (network, cell) in CELLS.items():
        yield Problem(f"recurrent: {name}", lambda network=network: Recurrent(network), vectors(3, 3))  # type: ignore[misc]
        yield Problem(f"cell: {name}", lambda cell=cell: Cells(cell), vectors(3, 3))  # type: ignore[misc]
    for batch_first in (True, False):
        for separate in (True, False):
            yield Problem(
                f"attention: {batch_first=}, {separate=}",
                lambda first=batch_first, separate=separate: _of_attention(Attention(False, first, separate)),  # type: ignore[misc]
                vectors(5, 4),
            )


def _experts() -> Iterator[Problem]:
    for style in STYLES:
        yield Problem(f"experts: {style}", lambda style=style: make_experts(style), vectors(INPUTS))  # type: ignore[misc]
    for style in ("layers", "loop", "grouped"):
        yield Problem(f"mixture: {style}", lambda style=style: Mixture(style, 2), vectors(5, WIDTH))  # type: ignore[misc]


def _of_attention(model: Attention) -> nn.Module:
    """Freeze the layers of the model's other formulation."""
    for name in ("q", "k", "v", "out"):
        model.get_submodule(name).requires_grad_(False)
    return model


def _double(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t


KNOWN = (*_one_position(), *_several_positions(), *_composites(), *_experts())
