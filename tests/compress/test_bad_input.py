"""Invalid input raises errors that give the cause and the way out; descriptions of results."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.compress import low_rank, prune
from kfs.errors import DataError, DtypeError, KfsWarning, ModelError, SolverError
from kfs.factors import exact_blocks
from tests.compress.problems import cnn, image_risk, mlp, mlp_risk

BOTH = pytest.mark.parametrize("compress", [prune, low_rank])


@BOTH
@pytest.mark.parametrize("keep", [0, -0.1, 1.5, float("nan"), True, "0.5", None])
def test_shares(compress: Any, keep: Any) -> None:
    model = mlp()
    K = kfs.KFAC(mlp_risk(model))
    with pytest.raises(ModelError, match=r"keep is .*above 0 and at most 1"):
        compress(model, K, keep)
    with pytest.raises(ModelError, match=r"keep\['0'\] is .*above 0 and at most 1"):
        compress(model, K, {"0": keep})


@BOTH
def test_names(compress: Any) -> None:
    model = mlp()
    K = kfs.KFAC(mlp_risk(model))
    with pytest.raises(ModelError, match=r"keep is empty.*Name at least one"):
        compress(model, K, {})
    with pytest.raises(ModelError, match=r"keep names '1', which is not a linear layer.*Choose from '0', '2'"):
        compress(model, K, {"1": 0.5})


@BOTH
@pytest.mark.parametrize("settings", [{}, {"keep": 1.0}])
def test_models_without_such_layers(compress: Any, settings: dict[str, Any]) -> None:
    """A product with a parameter has a block, but there is no module that could be compressed."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 7))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    model = Product().double().eval()
    with pytest.raises(ModelError, match=r"has no linear layer or convolution.*as such modules"):
        compress(model, kfs.KFAC(mlp_risk(model)), **settings)


@BOTH
def test_weights_that_are_not_finite(compress: Any) -> None:
    model = mlp()
    K = kfs.KFAC(mlp_risk(model))
    with torch.no_grad():
        model.get_parameter("2.weight")[0, 0] = torch.nan
    with pytest.warns(KfsWarning), pytest.raises(ModelError, match=r"Layer '2' has NaN or infinity in its weights"):
        compress(model, K, 0.9)


@BOTH
def test_types(compress: Any) -> None:
    model = mlp()
    risk = mlp_risk(model)
    K = kfs.KFAC(risk)
    with pytest.raises(DtypeError, match=r"The model is a str.*torch\.nn\.Module"):
        compress("model", K)
    with pytest.raises(DtypeError, match=r"The curvature is a GGN, which has no blocks.*kfs\.KFAC"):
        compress(model, kfs.GGN(risk))
    for damping in (-1.0, float("inf"), "much"):
        with pytest.raises(DtypeError, match=r"The damping is .*kfs\.Relative"):
            compress(model, K, damping=damping)


@BOTH
def test_curvature_of_others(compress: Any) -> None:
    K = kfs.KFAC(mlp_risk())
    with pytest.raises(ModelError, match=r"The curvature has the parameters .* Use the model that it was computed for"):
        compress(cnn(), K)
    wider = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7)).double()
    with pytest.raises(
        ModelError, match=r"with other shapes: '0\.weight' has shape .* '0\.bias' has .* '2\.weight' has"
    ):
        compress(wider, K)


@BOTH
@pytest.mark.parametrize("curvature", [kfs.KFAC, kfs.EKFAC])
def test_curvature_of_another_model_of_the_same_shapes(compress: Any, curvature: Any) -> None:
    """A warning on the user's line, not an error: the model may have been trained a little since then."""
    model = mlp()
    K = curvature(mlp_risk(model))
    compress(deepcopy(model), K, 0.6)
    with pytest.warns(KfsWarning, match=r"The curvature was computed at other values .* pass its own") as seen:
        compress(mlp(), K, 0.6)
    assert seen[0].filename == __file__


@BOTH
def test_layers_without_a_block(compress: Any) -> None:
    model = mlp()
    data = torch.randn(60, 6, dtype=torch.float64), torch.randn(60, 7, dtype=torch.float64)
    K = kfs.KFAC(kfs.EmpiricalRisk(model, nn.MSELoss(), data, params=["2.weight", "2.bias"]))
    with pytest.raises(ModelError, match=r"Layer '0' has no block.*keep=\{\.\.\.\}"):
        compress(model, K, 0.6)
    assert compress(model, K, {"2": 0.6}).report.kept_share <= 0.6


@BOTH
def test_tied_weights(compress: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 7)).double().eval()
    model[2].weight = model[0].weight
    K = kfs.KFAC(mlp_risk(model))
    with pytest.raises(ModelError, match=r"'weight' of layer '0' is tied: it is '0\.weight', '2\.weight'.*Leave"):
        compress(model, K, 0.6)
    small, _ = compress(model, K, {"3": 0.6})
    assert small[2].weight is small[0].weight


@BOTH
def test_modes(compress: Any) -> None:
    model = cnn()
    K = kfs.KFAC(image_risk(model))
    model[1].train()  # type: ignore[index]
    with pytest.raises(ModelError, match=r"'1' \(BatchNorm2d\) is in training mode.*model\.eval\(\)"):
        compress(model, K, 0.9)


@pytest.mark.parametrize("options", [{}, {"structured": True}, None], ids=str)
def test_undamped_singular_curvature(options: dict[str, Any] | None) -> None:
    """There are more weights than examples."""
    model = mlp()
    data = torch.randn(3, 6, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64)
    K = kfs.KFAC(kfs.EmpiricalRisk(model, nn.MSELoss(), data))
    with pytest.raises(SolverError, match=r"block '0' is singular.*pass damping|block '2' is singular.*pass damping"):
        low_rank(model, K, 0.6, damping=0.0) if options is None else prune(model, K, 0.6, damping=0.0, **options)
    assert prune(model, K, 0.6, damping=0.0, update=False).report.kept_share <= 0.6  # needs no inverse


@BOTH
def test_no_curvature_at_all(compress: Any) -> None:
    model = mlp()
    data = torch.zeros(3, 6, dtype=torch.float64), torch.zeros(3, 7, dtype=torch.float64)
    K = kfs.KFAC(kfs.EmpiricalRisk(model, nn.MSELoss(), data)) * 0.0
    with pytest.raises(SolverError, match=r"Block '0' has no curvature.*absolute damping"):
        compress(model, K, 0.6)


class PartlyUsed(nn.Module):
    """Predictions do not depend on one of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.unused = mlp(), nn.Linear(3, 4).double()
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result


@pytest.mark.parametrize(
    "compress", [prune, low_rank, partial(prune, structured=True), partial(prune, basis="eigen", damping=0.1)]
)
def test_layers_that_are_not_used(compress: Any) -> None:
    """Unused layers stay as they are and do not count, unless they are named."""
    torch.manual_seed(0)
    model = PartlyUsed()
    K = kfs.KFAC(mlp_risk(model))
    small, report = compress(model, K, 0.8)
    assert [row.layer for row in report.rows] == ["net.0", "net.2"]
    assert sum(row.before for row in report.rows) == sum(p.numel() for p in model.net.parameters())
    assert report.kept_share <= 0.8
    assert torch.equal(small.unused.weight, model.unused.weight)
    with pytest.raises(SolverError, match=r"no curvature.*predictions do not depend on the layer.*leave the layer out"):
        compress(model, K, {"unused": 0.5}, damping=kfs.Relative(0.1))


def test_channels_of_a_layer_without_curvature() -> None:
    """Its rows stay, although the layer that reads them has curvature."""
    torch.manual_seed(0)
    first = nn.Linear(6, 5)
    nn.init.constant_(first.bias, -100.0)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 7)).double().eval()
    small, report = prune(model, kfs.KFAC(mlp_risk(model)), 0.7, structured=True)
    assert [row.layer for row in report.rows] == ["2", "4"]
    assert torch.equal(small.get_parameter("0.weight"), first.weight)


def test_training_losses_with_ignored_targets() -> None:
    """Batches without targets are not chosen; if there are no others, the error says how to proceed."""
    torch.manual_seed(0)
    model, loss = mlp(), nn.CrossEntropyLoss()
    X, y = torch.randn(40, 6, dtype=torch.float64), torch.randint(7, (40,))
    y[::5] = -100  # all batches that would be read
    risk = kfs.EmpiricalRisk(model, loss, [(X[i : i + 1], y[i : i + 1]) for i in range(40)])
    report = prune(model, kfs.KFAC(risk), 0.5).report
    assert len(report.losses) == 4
    assert 0 < report.loss_data <= 8
    ignored = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(reduction="sum"), (X, torch.full_like(y, -100)))
    with pytest.raises(DataError, match=r"All targets are ignored.*Pass damping="):
        prune(model, kfs.KFAC(risk), 0.5, risk=ignored)


def test_groups_of_channels() -> None:
    model = cnn(groups=2)
    K = kfs.KFAC(image_risk(model))
    for compress in (lambda: low_rank(model, K, {"3": 0.5}), lambda: _eigendamage(model, K)):
        with pytest.raises(ModelError, match=r"Layer '3' is a convolution with 2 groups.*prune without structured"):
            compress()


def _eigendamage(model: nn.Module, K: kfs.KFAC) -> None:
    prune(model, K, {"3": 0.5}, basis="eigen", structured=True)


class Scaled(nn.Linear):
    """Computes more than a linear layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_layers_that_cannot_be_replaced() -> None:
    model = nn.Sequential(Scaled(6, 5), nn.Tanh(), nn.Linear(5, 7)).double().eval()
    K = kfs.KFAC(mlp_risk(model))
    with pytest.raises(ModelError, match=r"Layer '0' is a Scaled, which does not simply multiply"):
        low_rank(model, K, 0.6)
    small, _ = prune(model, K, 0.6)  # weights may change
    assert isinstance(small[0], Scaled)  # type: ignore[index]
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).double().eval()
    tokens = torch.randn(5, 3, 4, dtype=torch.float64)
    K = kfs.KFAC(kfs.EmpiricalRisk(layer, nn.MSELoss(), (tokens, torch.randn(5, 3, 4, dtype=torch.float64))))
    with pytest.raises(ModelError, match=r"'self_attn\.out_proj' is the last product of a MultiheadAttention"):
        low_rank(layer, K, {"self_attn.out_proj": 0.6})
    with pytest.raises(ModelError, match=r"'self_attn\.out_proj' is the last product of a MultiheadAttention"):
        prune(layer, K, {"self_attn.out_proj": 0.6}, basis="eigen", structured=True)
    assert prune(layer, K, {"linear1": 0.6, "linear2": 0.6}).model(tokens).shape == tokens.shape


def test_bases() -> None:
    model = mlp()
    risk = mlp_risk(model)
    with pytest.raises(ModelError, match=r"basis is 'eigne'.*Choose 'parameters' or 'eigen'"):
        prune(model, kfs.KFAC(risk), basis="eigne")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"eigenvectors of the block of layer '0' are not Kronecker.*parameters"):
        prune(model, exact_blocks(risk), basis="eigen")
    with pytest.raises(ModelError, match=r"block of layer '0' is not a Kronecker product.*optimal_kronecker"):
        low_rank(model, exact_blocks(risk), 0.6)


def test_what_low_rank_cannot_reach() -> None:
    model = mlp()
    with pytest.raises(ModelError, match=r"With rank one in all layers, 25 numbers are left, more than the 7"):
        low_rank(model, kfs.KFAC(mlp_risk(model)), 0.1)
    with pytest.raises(ModelError, match=r"Without all rows and columns.*Keep more"):
        prune(model, kfs.KFAC(mlp_risk(model)), 0.02, basis="eigen", structured=True)


@pytest.mark.parametrize("options", [{}, {"update": False}, {"basis": "eigen"}], ids=str)
def test_nothing_would_be_left(options: dict[str, Any]) -> None:
    model = mlp()
    K = kfs.KFAC(mlp_risk(model))
    with pytest.raises(ModelError, match=r"A share of 0\.01 of the 77 numbers in 2 layers is less than one.*Keep more"):
        prune(model, K, 0.01, **options)
    with pytest.raises(ModelError, match=r"A share of 0\.02 of the 35 numbers in layer '0' is less than one"):
        prune(model, K, {"0": 0.02}, **options)


@BOTH
def test_results_are_no_models(compress: Any) -> None:
    model = mlp()
    found = compress(model, kfs.KFAC(mlp_risk(model)), 0.6)
    with pytest.raises(DtypeError, match=r"Compressed, the result of a compression.*prune\(\.\.\.\)\.model"):
        found(torch.randn(2, 6))
    assert isinstance(DtypeError("a", "b"), TypeError)


def test_what_reports_say() -> None:
    model = cnn()
    K = kfs.KFAC(image_risk(model))
    images = torch.randn(3, 2, 7, 6, dtype=torch.float64)
    found = prune(model, K, 0.5, basis="eigen", structured=True, sample=images)
    assert repr(found).startswith("Compressed Sequential\nstructured eigenbasis of KFAC, keep=0.5\n")
    text = str(found.report)
    assert "numbers of fixed bases are not counted" in text
    assert "floating-point operations of the sample" in text
    assert "layer  before  kept  share" in text
    assert "<table>" in found.report._repr_html_()
    assert "floating" not in repr(prune(model, K, 0.5).report)
    counted = prune(model, K, 0.5, basis="eigen", structured=True, count_bases=True).report
    assert "fixed bases are counted" in repr(counted)
    assert counted.flops_before is None
