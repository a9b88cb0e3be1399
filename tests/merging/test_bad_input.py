"""Invalid input raises an error with the cause and the way out, before any computation."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kfs
from kfs.errors import DtypeError, KfsError, KfsWarning, ModelError, ShapeError, SolverError
from kfs.factors import exact_diagonal
from kfs.factors.blocks import Method
from tests.merging.models import INPUTS, Tied, cnn, family, mlp, risks_of

Change = Callable[[list[Any], list[Any]], Any]


def two() -> tuple[list[Any], list[Any]]:
    """Return models and matching curvatures."""
    models: list[Any] = family(mlp, 2)
    return models, [kfs.KFAC(risk) for risk in risks_of(models)]


def other_layer(models: list[Any], _: list[Any]) -> None:
    models[1][1] = nn.ReLU()


def other_settings(models: list[Any], _: list[Any]) -> None:
    """Change a slope. Dropout may differ, too, since it has no effect here."""
    for place, model in enumerate(models):
        model.append(nn.Dropout(0.1 * place).eval())
        model.append(nn.LeakyReLU(0.1 + place))


def one_more_module(models: list[Any], _: list[Any]) -> None:
    models[1].append(nn.ReLU())


def wider(models: list[Any], _: list[Any]) -> None:
    models[1] = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()


def without_bias(models: list[Any], _: list[Any]) -> None:
    models[1][2] = nn.Linear(5, 3, bias=False).double().eval()


def one_more_buffer(models: list[Any], _: list[Any]) -> None:
    models[1].register_buffer("extra", torch.zeros(1))


def nan(models: list[Any], _: list[Any]) -> None:
    with torch.no_grad():
        models[1][0].weight[0, 0] = torch.nan


def on_meta(models: list[Any], _: list[Any]) -> None:
    models[1] = models[1].to("meta")


def only_weights(models: list[Any], curvatures: list[Any]) -> None:
    batch = next(iter(risks_of(models)[1].batches()))
    risk = kfs.EmpiricalRisk(models[1], nn.CrossEntropyLoss(), (batch.x, batch.y), params=["0.weight", "2.weight"])
    curvatures[1] = kfs.KFAC(risk)


def of_other_names(models: list[Any], curvatures: list[Any]) -> None:
    inside = nn.Sequential(deepcopy(models[1]))
    curvatures[1] = kfs.KFAC(kfs.EmpiricalRisk(inside, nn.CrossEntropyLoss(), risks_of(models)[0]._data))


def of_other_shapes(_: list[Any], curvatures: list[Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    curvatures[1] = kfs.KFAC(risks_of([model])[0])


MODELS: dict[str, tuple[Change, type[KfsError], str]] = {
    "another activation": (
        other_layer,
        ModelError,
        r"Module '1' is Tanh in models\[0\] and ReLU in models\[1\]\. Build",
    ),
    "another slope": (
        other_settings,
        ModelError,
        r"Module '4' \(LeakyReLU\) has different settings: negative_slope=0\.1 in models\[0\], and negative_slope=1\.1",
    ),
    "a module": (one_more_module, ModelError, r"models\[0\] and models\[1\] do not both have the modules '3'\. Build"),
    "another width": (wider, ShapeError, r"'0\.weight' has shape \[5, 4\] in models\[0\] and \[6, 4\] in models\[1\]"),
    "no bias": (without_bias, ModelError, r"models\[1\] lacks the parameters or buffers '2\.bias'"),
    "a buffer": (one_more_buffer, ModelError, r"models\[0\] lacks the parameters or buffers 'extra'"),
    "another dtype": (lambda m, _: m[1].float(), DtypeError, r"is torch\.float64 in models\[0\] and torch\.float32 in"),
    "NaN": (nan, ModelError, r"models\[1\]: Parameter '0\.weight' contains NaN.* Leave this model out"),
    "meta": (on_meta, ModelError, r"models\[1\]: Parameter '0\.weight' is on the meta device.*Load its values"),
    "one model": (lambda m, _: m.pop(), ModelError, r"There is 1 model to merge\. Pass at least two"),
    "the same twice": (
        lambda m, _: m.__setitem__(1, m[0]),
        ModelError,
        r"models\[0\] and models\[1\] are the same object\..*deepcopy",
    ),
    "a state dict": (
        lambda m, _: m.__setitem__(1, m[1].state_dict()),
        DtypeError,
        r"models\[1\] is a OrderedDict\. Pass modules",
    ),
    "too few curvatures": (
        lambda _, c: c.pop(),
        ModelError,
        r"curvatures has 1 operator for 2 models\. Pass one for each",
    ),
    "a matrix": (
        lambda _, c: c.__setitem__(0, torch.eye(3)),
        DtypeError,
        r"curvatures\[0\] is a Tensor\. Pass an operator",
    ),
    "not symmetric": (
        lambda _, c: c.__setitem__(0, c[0] @ c[1]),
        ModelError,
        r"curvatures\[0\] is not symmetric\. Pass a curvature matrix",
    ),
    "other parameters": (
        only_weights,
        ModelError,
        r"are curvatures of different parameters: '0\.bias', '2\.bias' only in the first one, and none .* same params=",
    ),
    "other names": (
        of_other_names,
        ModelError,
        r"curvatures\[1\] has the parameters '0\.0\.weight', .* which models\[1\] lacks\. Did you mean '0\.weight'",
    ),
    "other shapes": (
        of_other_shapes,
        ModelError,
        r"curvatures\[1\] .* other shapes: '0\.weight' has shape \[5, 4\] in models\[1\], and \[6, 4\] in",
    ),
    "other dtype of curvature": (
        lambda _, c: c.__setitem__(1, c[1].to(dtype=torch.float32)),
        DtypeError,
        r"curvatures\[0\] is torch\.float64 on cpu, but curvatures\[1\] is torch\.float32",
    ),
    "another order": (
        lambda _, c: c.reverse(),
        ModelError,
        r"curvatures\[0\] is the curvature of models\[1\], not of models\[0\]\. Pass .* in the same order",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_and_curvatures_that_do_not_fit(name: str) -> None:
    change, error, message = MODELS[name]
    models, curvatures = two()
    change(models, curvatures)
    with pytest.raises(error, match=message):
        kfs.merge(models, curvatures)


def test_no_lists() -> None:
    models, curvatures = two()
    with pytest.raises(DtypeError, match=r"models is a Sequential\. Pass a list of modules"):
        kfs.merge(models[0], curvatures)
    with pytest.raises(DtypeError, match=r"curvatures is a KFAC\. Pass a list with one operator"):
        kfs.merge(models, curvatures[0])
    with pytest.raises(DtypeError, match=r"weights is a int\. Pass a list"):
        kfs.merge(models, curvatures, weights=3)  # type: ignore[call-overload]


SETTINGS: dict[str, tuple[dict[str, Any], type[KfsError], str]] = {
    "weights, negative": ({"weights": [1, -2]}, ModelError, r"weights\[1\] is -2\. Pass numbers that are not negative"),
    "weights, number": ({"weights": [1, 2, 3]}, ModelError, r"There are 3 weights for 2 models"),
    "weights, zero": ({"weights": [0, 0]}, ModelError, r"All weights are zero\. Give at least one"),
    "weights, NaN": ({"weights": [1, float("nan")]}, DtypeError, r"weights\[1\] is nan\. Pass finite numbers"),
    "weights, text": ({"weights": ["a", 1]}, DtypeError, r"weights\[0\] is 'a'"),
    "weights, truth": ({"weights": [True, 1]}, DtypeError, r"weights\[0\] is True"),
    "damping, negative": ({"damping": -1.0}, DtypeError, r"curvatures\[0\]: A damping is -1\.0\. Use a finite number"),
    "damping, name": ({"damping": {"0": 1.0, "3": 1.0}}, ModelError, r"damping lacks the blocks '2', and has '3'"),
    "method": ({"method": "factorized"}, ModelError, r"method is 'factorized'\. Choose from 'exact'"),
    "tolerance": ({"tolerance": 0}, ModelError, r"tolerance is 0\. Use a number between 0 and 1"),
    "iterations": ({"max_iterations": 0}, ModelError, r"max_iterations is 0\. Use a positive integer"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str) -> None:
    settings, error, message = SETTINGS[name]
    with pytest.raises(error, match=message):
        kfs.merge(*two(), **settings)


def test_training_mode() -> None:
    models = family(cnn, 2)
    curvatures = [kfs.KFAC(risk) for risk in risks_of(models, cnn)]
    models[1].train()
    with pytest.raises(
        ModelError, match=r"models\[1\]: Module '1' \(BatchNorm2d\) is in training mode.*model\.eval\(\)"
    ):
        kfs.merge(models, curvatures)


def test_parameters_that_are_tied_in_one_model_only() -> None:
    models = family(Tied, 2)
    curvatures = [kfs.KFAC(risk) for risk in risks_of(models, Tied)]
    untied: Any = models[1]
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
    with pytest.raises(ModelError, match=r"do not tie the same parameters.*Tie them in all models"):
        kfs.merge(models, curvatures)


def test_preconditioners() -> None:
    models, curvatures = two()
    exact = [kfs.GGN(risk) for risk in risks_of(models)]
    with pytest.raises(
        ModelError, match=r"The preconditioner has operators without blocks\. Pass a kfs\.KFAC for each"
    ):
        kfs.merge(models, exact, preconditioner=exact)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"preconditioner has 1 operator for 2 models"):
        kfs.merge(models, exact, preconditioner=curvatures[:1])
    some = [K.submatrix(["0.weight", "0.bias"]) for K in curvatures]
    with pytest.raises(ModelError, match=r"curvatures\[0\] and preconditioner\[0\] are curvatures of different"):
        kfs.merge(models, exact, preconditioner=some)


def test_singular_curvature_without_damping() -> None:
    """Softmax has a direction without curvature, so the last layer's `B` is singular."""
    models, curvatures = two()
    with pytest.raises(SolverError, match=r"block '2' is singular, up to round-off\..*pass damping"):
        kfs.merge(models, curvatures, damping=0.0)
    exact = [kfs.EKFAC(risk) for risk in risks_of(models)]
    with pytest.raises(SolverError, match=r"Block '0' is not damped.*Pass a positive damping"):
        kfs.merge(models, exact, damping=kfs.Relative(0.0))
    with pytest.raises(SolverError, match=r"Block 'all parameters' is not damped"):
        kfs.merge(models, [kfs.GGN(risk) for risk in risks_of(models)], damping=0.0)


def test_no_curvature_at_all() -> None:
    """Then relative damping has no unit, for blocks or for the whole operator."""
    models, _ = two()
    risks = risks_of(models)
    none = [0.0 * exact_diagonal(risks[0]), exact_diagonal(risks[1])]
    with pytest.raises(SolverError, match=r"curvatures\[0\]: .*block '0' has no curvature.*absolute number"):
        kfs.merge(models, none)
    whole = [0.0 * kfs.GGN(risks[0]), kfs.GGN(risks[1])]
    with pytest.raises(SolverError, match=r"curvatures\[0\]: The curvature has a trace of .*Pass a number as damping"):
        kfs.merge(models, whole)


def test_an_indefinite_hessian() -> None:
    models, _ = two()
    hessians = [-1.0 * kfs.GGN(risk) for risk in risks_of(models)]
    with pytest.raises(SolverError, match=r"not positive definite.*larger damping"):
        kfs.merge(models, hessians, damping=1e-6)


def test_not_converged() -> None:
    models = family(mlp, 3)
    curvatures = [kfs.KFAC(risk) for risk in risks_of(models)]
    message = (
        r"not converged in block '0': after 1 iterations, the residual is .*e-.*max_iterations=.*kfs\.KFAC\(risk\)"
    )
    with pytest.raises(SolverError, match=message):
        kfs.merge(models, curvatures, max_iterations=1)


def test_factored_damping_needs_factors() -> None:
    models, _ = two()
    with pytest.raises(
        ModelError, match=r"without Kronecker factors cannot have factored damping\. Use method='exact'"
    ):
        kfs.merge(models, [kfs.EKFAC(risk) for risk in risks_of(models)], method="factored")
    risks = risks_of(models)
    methods: list[Method] = ["factored", "per-factor"]
    for method in methods:
        for second in (kfs.GGN(risks[1]), kfs.KFAC(risks[1])):
            with pytest.raises(ModelError, match=rf"curvatures\[0\]: method is '{method}', but not all .* have blocks"):
                kfs.merge(models, [kfs.GGN(risks[0]), second], method=method)


def test_curvature_of_a_model_that_has_changed() -> None:
    """A warning, if the parameter values of the curvature are known, which is not the case for all operators."""
    models, curvatures = two()
    diagonals = [exact_diagonal(risk) for risk in risks_of(models)]
    exact = [
        kfs.GGN(kfs.EmpiricalRisk(deepcopy(m), nn.CrossEntropyLoss(), (INPUTS[mlp](), torch.arange(24) % 3)))
        for m in models
    ]
    with torch.no_grad():
        models[1][0].bias += 1
    for known in (curvatures, exact):
        with pytest.warns(
            KfsWarning, match=r"curvatures\[1\] was computed at other values .* compute it again"
        ) as seen:
            kfs.merge(models, known, 0.1)
        assert seen[0].filename == __file__  # the user's line
    kfs.merge(models, diagonals)


def test_files_keep_where_curvature_was_computed(tmp_path: Path) -> None:
    models, curvatures = two()
    for place, K in enumerate((*curvatures, *(kfs.EKFAC(risk) for risk in risks_of(models)))):
        K.save(tmp_path / f"{place}.safetensors")
    loaded = [kfs.load(tmp_path / f"{place}.safetensors") for place in range(4)]
    for pair in (loaded[:2], loaded[2:]):
        assert kfs.merge(models, pair).keys() == models[0].state_dict().keys()
        with pytest.raises(ModelError, match=r"curvatures\[0\] is the curvature of models\[1\]"):
            kfs.merge(models, pair[::-1])
    half = [deepcopy(model).float() for model in models]
    with pytest.raises(ModelError, match=r"curvatures\[0\] is the curvature of models\[1\]"):
        kfs.merge(half, loaded[1::-1])
