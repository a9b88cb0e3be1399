"""State dicts are complete: buffers, batch statistics, tied and uncovered parameters; and users' state is preserved."""

from collections import OrderedDict
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset

import kfs
from kfs.errors import DataError, DtypeError, KfsWarning, ModelError
from tests.merging.models import INPUTS, Tied, cnn, family, mlp, risks_of


def curvatures_of(models: list[nn.Module], make: Any = cnn, **settings: Any) -> list[kfs.KFAC]:
    return [kfs.KFAC(risk, **settings) for risk in risks_of(models, make)]


def test_buffers_are_averaged_and_counts_added_up() -> None:
    models = family(cnn, 3)
    weights = [1.0, 3.0, 0.0]
    state, report = kfs.merge(models, curvatures_of(models), weights=weights, report=True)
    states = [model.state_dict() for model in models]
    assert list(state) == list(states[0])
    for name in ("1.running_mean", "1.running_var"):
        expected = (states[0][name] + 3 * states[1][name]) / 4
        torch.testing.assert_close(state[name], expected)
        assert report.buffers[name] == "averaged"
    total = sum(int(s["1.num_batches_tracked"]) for s in states)
    assert int(state["1.num_batches_tracked"]) == total
    assert report.buffers["1.num_batches_tracked"] == "added up"
    merged = deepcopy(models[0])
    merged.load_state_dict(state)
    assert merged(INPUTS[cnn]()).isfinite().all()


@pytest.mark.parametrize("form", ["tensor", "pair", "loader", "mapping", "inputs"])
def test_statistics_are_recomputed(form: str) -> None:
    """The statistics are those of PyTorch's averaged weights; momentum, modes and random state of the models stay."""
    models = family(cnn, 2)
    X, y = INPUTS[cnn](), torch.randint(3, (24,))
    halves = [X[:12], X[12:]]
    data: Any = {
        "tensor": X,
        "pair": (X, y),
        "loader": DataLoader(TensorDataset(X, y), batch_size=12),
        "mapping": [{"input": x, "labels": y[:12]} for x in halves],
        "inputs": halves,
    }[form]
    before = [deepcopy(model.state_dict()) for model in models]
    curvatures = curvatures_of(models)
    generator = torch.get_rng_state()
    state, report = kfs.merge(models, curvatures, buffers="recompute", data=data, report=True)
    assert torch.equal(torch.get_rng_state(), generator)
    expected = deepcopy(models[0])
    expected.load_state_dict(state)
    update_bn([X] if form in {"tensor", "pair"} else halves, expected)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(state[name], value)
    assert set(report.buffers.values()) == {"recomputed"}
    assert not any(module.training for model in models for module in model.modules())
    for model, old in zip(models, before, strict=True):
        assert all(torch.equal(value, old[name]) for name, value in model.state_dict().items())


class Plain(nn.Module):
    """Has a buffer of each kind, and a state that is not a tensor."""

    scale: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("table", torch.arange(3))
        self.note = "a"

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.scale
        return y

    def get_extra_state(self) -> object:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def plain_models() -> tuple[list[Plain], list[kfs.KFAC]]:
    models = [Plain().double().eval() for _ in range(2)]
    data = [(INPUTS[mlp](), torch.randint(3, (24,))) for _ in models]
    risks = [kfs.EmpiricalRisk(m, nn.CrossEntropyLoss(), pair) for m, pair in zip(models, data, strict=True)]
    return models, [kfs.KFAC(risk) for risk in risks]


def test_entries_that_are_the_same_are_kept() -> None:
    models, curvatures = plain_models()
    state, report = kfs.merge(models, curvatures, report=True)
    assert state["_extra_state"] == {"note": "a"}
    assert torch.equal(state["table"], torch.arange(3))
    assert not report.buffers
    with torch.no_grad():
        models[1].scale += 1
    assert torch.equal(kfs.merge(models, curvatures)["scale"], torch.full((3,), 1.5, dtype=torch.float64))


def test_entries_that_cannot_be_averaged() -> None:
    models, curvatures = plain_models()
    models[1].note = "b"
    with pytest.raises(DtypeError, match=r"'_extra_state'.* differs between models.* same value in all models"):
        kfs.merge(models, curvatures)
    models[1].note = "a"
    models[1].table += 1
    with pytest.raises(DtypeError, match=r"'table'.* cannot be averaged"):
        kfs.merge(models, curvatures)


def test_tied_parameters_stay_tied() -> None:
    models = family(Tied, 2)
    state = kfs.merge(models, curvatures_of(models, Tied))
    assert state["head.weight"] is state["embedding.weight"]
    merged = deepcopy(models[0])
    merged.load_state_dict(state)
    assert merged.head.weight is merged.embedding.weight  # type: ignore[union-attr]
    assert torch.equal(merged.head.weight, state["head.weight"])  # type: ignore[union-attr, arg-type]


def test_parameters_without_curvature_are_averaged() -> None:
    models = family(mlp, 2)
    for model in models:
        model.get_parameter("0.weight").requires_grad_(False)
    curvatures = curvatures_of(models, mlp)
    with pytest.warns(KfsWarning, match=r"No curvature covers the parameters '0\.weight', which differ.*averaged"):
        state, report = kfs.merge(models, curvatures, weights=[1, 2], report=True)
    first, second = (model.get_parameter("0.weight").detach() for model in models)
    torch.testing.assert_close(state["0.weight"], (first + 2 * second) / 3)
    assert report.averaged == ("0.weight",)
    assert "averaged parameters, which no curvature covers: '0.weight'" in str(report)
    with torch.no_grad():
        models[1].get_parameter("0.weight").copy_(first)
    state, report = kfs.merge(models, curvatures, report=True)  # frozen: equal in all models, and no warning
    assert torch.equal(state["0.weight"], first)
    assert report.averaged == ()


def test_models_curvatures_and_random_state_are_kept() -> None:
    models = family(cnn, 2)
    for model in models:
        model(INPUTS[cnn]()).sum().backward()
    curvatures = curvatures_of(models)
    states = [deepcopy(model.state_dict()) for model in models]
    gradients = [[p.grad.clone() for p in model.parameters() if p.grad is not None] for model in models]
    dense = [K.to_dense() for K in curvatures]
    data: Any = DataLoader(INPUTS[cnn](), 8, shuffle=True)  # type: ignore[arg-type]
    generator = torch.get_rng_state()
    state = kfs.merge(models, curvatures, buffers="recompute", data=data)
    for t in state.values():
        t.zero_()  # the result has other values than the models
    assert torch.equal(torch.get_rng_state(), generator)
    for model, old, g, K, matrix in zip(models, states, gradients, curvatures, dense, strict=True):
        assert all(torch.equal(value, old[name]) for name, value in model.state_dict().items())
        assert all(torch.equal(p.grad, q) for p, q in zip(model.parameters(), g, strict=True))  # type: ignore[arg-type]
        assert all(p.requires_grad for p in model.parameters())
        assert torch.equal(K.to_dense(), matrix)


def test_state_dicts_can_be_saved(tmp_path: Path) -> None:
    models = family(cnn, 2)
    state = kfs.merge(models, curvatures_of(models))
    assert type(state) is OrderedDict
    assert state._metadata == models[0].state_dict()._metadata  # type: ignore[attr-defined]
    torch.save(state, tmp_path / "merged.pt")
    loaded = torch.load(tmp_path / "merged.pt", weights_only=True)
    assert all(torch.equal(value, state[name]) for name, value in loaded.items())
    assert not any(t.requires_grad for t in state.values())


def test_recomputing_needs_data_and_statistics() -> None:
    models = family(cnn, 2)
    curvatures = curvatures_of(models)
    with pytest.raises(ModelError, match=r"buffers is 'recompute', and data is None.*Pass both"):
        kfs.merge(models, curvatures, buffers="recompute")
    with pytest.raises(ModelError, match="buffers is 'average', and data is given"):
        kfs.merge(models, curvatures, data=INPUTS[cnn]())
    with pytest.raises(ModelError, match=r"buffers is 'mean'\. Choose 'average' or 'recompute'"):
        kfs.merge(models, curvatures, buffers="mean")  # type: ignore[call-overload]
    with pytest.raises(DataError, match="The data are empty"):
        kfs.merge(models, curvatures, buffers="recompute", data=[])
    with pytest.raises(DataError, match=r"'1\.running_mean' is not finite"):
        kfs.merge(models, curvatures, buffers="recompute", data=torch.full((4, 1, 4, 4), torch.nan).double())
    plain = family(mlp, 2)
    with pytest.raises(ModelError, match=r"no BatchNorm statistics to recompute"):
        kfs.merge(plain, curvatures_of(plain, mlp), buffers="recompute", data=INPUTS[mlp]())


def test_buffers_that_are_not_saved() -> None:
    """They cannot be merged: a state dict does not have them."""
    models = family(mlp, 2)
    curvatures = curvatures_of(models, mlp)
    for model in models:
        model.register_buffer("same", torch.ones(2), persistent=False)
    kfs.merge(models, curvatures)
    for place, model in enumerate(models):
        model.register_buffer("scale", torch.full((2,), float(place)), persistent=False)
    with pytest.warns(
        KfsWarning, match=r"The buffers 'scale' differ between models, and are not in the state dict"
    ) as caught:
        state = kfs.merge(models, curvatures)
    assert "scale" not in state
    assert Path(caught[0].filename).name == "test_entries.py"
