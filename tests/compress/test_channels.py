"""Pruning of channels: smaller layers compute the same as masked ones."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import kfs
from kfs.compress import low_rank, prune
from kfs.compress.channels import Channels, Link, _saved, links
from kfs.compress.layers import layers_of
from kfs.compress.surgery import cost_of_columns
from kfs.errors import ModelError
from kfs.factors import exact_blocks
from tests.compress.problems import cnn, constrained_minimum, damped, flat, image_risk, mlp, mlp_risk


def rows_left(before: nn.Module, after: nn.Module, name: str) -> Tensor:
    """Return which rows of a layer are left, by comparing its bias."""
    old, new = (dict(m.named_parameters())[f"{name}.bias"] for m in (before, after))
    return torch.isin(old, new)


def masked(model: nn.Module, small: nn.Module, pairs: list[tuple[str, str]]) -> nn.Module:
    """Return the original model, with zero columns for the channels that the smaller model has lost."""
    same = cnn().double()
    same.load_state_dict(model.state_dict())
    for source, reader in pairs:
        left = rows_left(model, small, source)
        weight = same.get_parameter(f"{reader}.weight")
        with torch.no_grad():
            channels = weight.reshape(len(weight), len(left), -1)
            channels[:, ~left] = 0.0
    return same.eval()


@pytest.mark.parametrize("keep", [0.7, 0.4, {"3": 0.5}, {"3": 0.01, "7": 0.5}], ids=str)
def test_smaller_layers_compute_what_masked_ones_do(keep: Any) -> None:
    model = cnn()
    model.get_buffer("1.running_mean").uniform_()
    model.get_parameter("1.weight").data.uniform_()
    K = kfs.KFAC(image_risk(model))
    images = torch.randn(3, 2, 7, 6, dtype=torch.float64)
    small, report = prune(model, K, keep, structured=True, update=False, sample=images)
    same = masked(model, small, [("0", "3"), ("3", "7")])
    torch.testing.assert_close(small(images), same(images), rtol=1e-12, atol=1e-13)
    assert not torch.allclose(small(images), model(images))
    numbers = sum(p.numel() for p in small.parameters() if p.ndim > 1)
    assert numbers < sum(p.numel() for p in model.parameters() if p.ndim > 1)
    if isinstance(keep, float):
        kept = [small.get_submodule(name) for name in ("0", "3", "7")]
        assert sum(p.numel() for module in kept for p in module.parameters()) <= keep * (76 + 222 + 75)
        assert sum(row.kept for row in report.rows) == sum(p.numel() for module in kept for p in module.parameters())
    else:
        left = {"3": small[3].in_channels, "7": small[7].in_features // 4}  # type: ignore[index]
        assert left == {"3": 2 if keep["3"] == 0.5 else 1, "7": 3 if "7" in keep else 6}
    assert report.parameters_after == report.stored_after == sum(p.numel() for p in small.parameters())
    assert report.flops_after is not None
    assert report.flops_before is not None
    assert report.flops_after < report.flops_before
    assert all(type(module).__module__.startswith("torch.nn") for module in small.modules())


@pytest.mark.parametrize("curvature", [kfs.KFAC, exact_blocks], ids=["KFAC", "blocks"])
def test_columns_that_are_left_adapt(curvature: Callable[..., Any]) -> None:
    model = mlp()
    K = curvature(mlp_risk(model))
    small, report = prune(model, K, {"2": 0.6}, structured=True, damping=0.01)
    names = ["2.weight", "2.bias"]
    C = damped(K.submatrix(names), 0.01)
    w = flat(model, names)
    # By brute force: remove each channel alone, with all of its columns.
    costs = []
    for channel in range(5):
        removed = torch.arange(7) * 5 + channel
        change = constrained_minimum(C, w, removed) - w
        costs.append(float(change @ C @ change))
    gone = sorted(range(5), key=lambda channel: costs[channel])[:2]
    left = rows_left(model, small, "0")
    assert (~left).nonzero().flatten().tolist() == sorted(gone)
    removed = torch.cat([torch.arange(7) * 5 + channel for channel in gone])
    best = constrained_minimum(C, w, removed)
    torch.testing.assert_close(small[2].weight, best[:35].reshape(7, 5)[:, left], rtol=1e-9, atol=1e-11)  # type: ignore[index]
    torch.testing.assert_close(small[2].bias, best[35:], rtol=1e-9, atol=1e-11)  # type: ignore[index]
    assert torch.equal(small[0].weight, model[0].weight[left])  # type: ignore[index]
    assert report.rows[0].matrix == "7 x 4 of 7 x 6"


def test_patches_adapt() -> None:
    model = cnn()
    K = kfs.KFAC(image_risk(model))
    small, _ = prune(model, K, {"3": 0.5}, structured=True, damping=0.01)
    left = rows_left(model, small, "0")
    names = ["3.weight", "3.bias"]
    C, w = damped(K.submatrix(names), 0.01), flat(model, names)  # type: ignore[arg-type]
    removed = torch.cat(
        [
            torch.zeros(0, dtype=torch.long),
            *[
                torch.arange(6).unsqueeze(1).mul(36).add(torch.arange(9) + 9 * channel).flatten()
                for channel in (~left).nonzero().flatten().tolist()
            ],
        ]
    )
    best = constrained_minimum(C, w, removed)[:216].reshape(6, 4, 3, 3)
    torch.testing.assert_close(small[3].weight, best[:, left], rtol=1e-8, atol=1e-10)  # type: ignore[index]


def test_channels_go_by_their_cost_for_each_number() -> None:
    """Channels of two links compete by their cost per number; the numbers of a channel are counted in the models."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 7)).double().eval()
    model.get_parameter("4.weight").data.mul_(10.0)  # so that channels of both links have similar costs
    K = kfs.KFAC(mlp_risk(model))
    total = 35 + 120 + 147
    candidates = []
    for source, reader, width in (("0", "2", 5), ("2", "4", 20)):
        smaller = prune(model, K, {reader: (width - 1) / width}, structured=True, update=False, damping=0.01).model
        saved = total - sum(p.numel() for p in smaller.parameters())
        names = [f"{reader}.weight", f"{reader}.bias"]
        C, w = damped(K.submatrix(names), 0.01), flat(model, names)  # type: ignore[arg-type]
        rows = len(model.get_parameter(names[1]))
        for channel in range(width):
            places = torch.arange(rows) * width + channel
            candidates.append((float((w.square() * C.diagonal())[places].sum()), saved, source, channel))
        layer = next(layer for layer in layers_of(model, K, 0.5, 0.01) if layer.name == reader)
        found = Channels(Link(source, reader, ()), layer, torch.zeros(width), _saved(model, Link(source, reader, ())))
        assert found.saved == saved
    small, _ = prune(model, K, 0.6, structured=True, update=False, damping=0.01)
    gone = {
        (source, channel)
        for source in ("0", "2")
        for channel in (~rows_left(model, small, source)).nonzero().flatten().tolist()
    }
    by_number, by_cost = (
        {(source, channel) for _, source, channel in sorted(keyed)[: len(gone)]}
        for keyed in (
            [(cost / saved, source, channel) for cost, saved, source, channel in candidates],
            [(cost, source, channel) for cost, saved, source, channel in candidates],
        )
    )
    assert gone == by_number != by_cost


class Tokens(nn.Module):
    """PyTorch's own Transformer, in which attention and a fused kernel read weights themselves."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 32, batch_first=True, **settings)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not settings)
        self.head = nn.Linear(8, 7)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        y: Tensor = self.head(self.encoder(x, src_key_padding_mask=padding)[:, 0])
        return y


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # PyTorch's own, where padding is left out
@pytest.mark.parametrize("settings", [{}, {"activation": "gelu", "norm_first": True}], ids=str)
@pytest.mark.parametrize(
    "compress",
    [
        low_rank,
        partial(prune, structured=True),
        partial(prune, structured=True, update=False),
        partial(prune, structured=True, basis="eigen", count_bases=True),
    ],
    ids=["low rank", "channels", "channels without update", "eigenbasis"],
)
def test_transformers_reach_their_share(compress: Any, settings: dict[str, Any]) -> None:
    """The share counts all linear layers; results agree with and without gradients, and with padding."""
    model = Tokens(**settings).double().eval()
    x, y = torch.randn(40, 3, 8, dtype=torch.float64), torch.randn(40, 7, dtype=torch.float64)
    K = kfs.KFAC(kfs.EmpiricalRisk(model, nn.MSELoss(), (x, y)))
    found = compress(model, K, 0.5, sample=x[:1])
    small, report = found
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    total = sum(p.numel() for m in linear for p in m.parameters())
    others = sum(p.numel() for p in model.parameters()) - total
    left = sum(p.numel() for p in small.parameters()) - others
    assert 0.4 * total < left <= 0.5 * total
    assert sum(row.kept + row.bases for row in report.rows) == left
    out = "encoder.layers.0.self_attn.out_proj"
    assert next(row.form for row in report.rows if row.layer == out) == "unchanged"
    with torch.no_grad():
        fast = small(x)
        shortened = small(x, torch.tensor([[False, False, True]]).expand(40, 3))
    torch.testing.assert_close(fast, small(x), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(shortened, small(x[:, :2]), rtol=1e-9, atol=1e-11)
    assert all(type(module).__module__.startswith("torch.nn") for module in small.encoder.modules())
    # Masking columns of the second feed-forward layer gives the same predictions as removing its channels.
    if compress is not low_rank and compress.keywords.get("update") is False:
        masked = deepcopy(model)
        for place in range(2):
            name = f"encoder.layers.{place}.linear"
            masked.get_parameter(f"{name}2.weight").data[:, ~rows_left(model, small, f"{name}1")] = 0.0
        torch.testing.assert_close(small(x), masked(x), rtol=1e-9, atol=1e-11)


def test_transformers_without_a_graph() -> None:
    """Readers of weights inside PyTorch's layers are known even if `torch.fx` fails on the model; none is found twice.

    A layer whose activation mixes channels has no channels that could be removed.
    """

    class Untraceable(Tokens):
        def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
            return super().forward(x if bool(x.sum() > 0) else -x, padding)

    expected = {Link(f"encoder.layers.{i}.linear1", f"encoder.layers.{i}.linear2", ()) for i in range(2)}
    assert set(links(Untraceable().eval())) == set(links(Tokens().eval())) == expected
    alone = links(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval())
    assert alone == [Link("linear1", "linear2", ())]
    mixing = nn.TransformerEncoderLayer(8, 2, 16, activation=nn.Softmax(-1), batch_first=True)
    assert links(nn.Sequential(mixing)) == []


class Net(nn.Module):
    """Functions in place of modules, a residual connection, a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(1, 3, 3)
        self.b = nn.Conv2d(3, 4, 3)
        self.c = nn.Conv2d(4, 4, 1)
        self.d = nn.Conv2d(4, 4, 1)
        self.e = nn.Linear(16, 6)
        self.f = nn.Linear(6, 6)
        self.g = nn.Linear(6, 5)
        self.h = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.a(x)), 2)
        x = self.b(x)
        x = x + self.c(x)  # b has two readers
        x = torch.flatten(F.adaptive_avg_pool2d(self.d(x).relu(), 2), 1)
        x = self.f(self.f(self.e(x)))
        result: Tensor = self.h(F.softmax(self.g(x), dim=1))  # mixes channels
        return result


def test_links_end_where_channels_are_mixed() -> None:
    found = [(link.source, link.reader) for link in links(Net())]
    assert found == [("a", "b"), ("d", "e")]


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 2)), 1),
        (nn.Sequential(nn.Linear(4, 6), nn.MaxPool1d(2), nn.Linear(3, 2)), 0),  # pools channels
        (nn.Sequential(nn.Conv1d(2, 4, 3), nn.Linear(4, 2)), 0),  # reads pixels
        (nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(0), nn.Linear(4, 2)), 0),
        (nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(6, 2)), 0),
        (nn.Sequential(nn.Conv1d(2, 4, 3, groups=2), nn.ReLU(), nn.Conv1d(4, 2, 3)), 0),
        (nn.Sequential(nn.Conv1d(2, 4, 3), nn.PReLU(4), nn.Conv1d(4, 2, 3)), 0),
        (nn.Sequential(nn.Conv1d(2, 4, 3), nn.LayerNorm(4), nn.Conv1d(4, 2, 3)), 0),
    ],
    ids=["norm", "pooled", "pixels", "flat", "size", "groups", "slopes", "layer norm"],
)
def test_which_layers_are_linked(model: nn.Module, count: int) -> None:
    assert len(links(model)) == count


class Branch(nn.Module):
    """Branches on values."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 5)
        self.b = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.a(x).relu() if x.sum() != 1 else x)
        return result


class ReadsWeight(nn.Module):
    """Uses the weight of a layer a second time, all rows of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out + F.linear(x, self.first.weight).sum(1, keepdim=True)


def test_weights_that_others_read() -> None:
    """Without one row of the first layer, the sum would change."""
    model = ReadsWeight().double().eval()
    assert not links(model)
    K = kfs.KFAC(mlp_risk(model))
    with pytest.raises(ModelError, match=r"Layer 'second' does not read exactly the channels of one other layer"):
        prune(model, K, {"second": 0.5}, structured=True)


def test_models_that_cannot_be_traced() -> None:
    model = Branch().double().eval()
    with pytest.raises(ModelError, match=r"torch.fx cannot trace the model.*\)\. Use basis='eigen'"):
        prune(model, kfs.KFAC(mlp_risk(model)), 0.5, structured=True)


def test_what_cannot_be_reached() -> None:
    model = mlp()
    K = kfs.KFAC(mlp_risk(model))
    with pytest.raises(ModelError, match=r"Without all channels.* 21 numbers are left, more than the 7 .*Keep more"):
        prune(model, K, 0.1, structured=True)
    with pytest.raises(ModelError, match=r"Layer '0' does not read exactly the channels of one other.*Leave it out"):
        prune(model, K, {"0": 0.5}, structured=True)
    small, report = prune(model, K, {"0": 1.0, "2": 0.5}, structured=True)
    assert [row.form for row in report.rows] == ["smaller", "smaller"]
    assert small[0].out_features == small[2].in_features == 2  # type: ignore[index]
    _, report = prune(model, K, {"2": 0.9}, structured=True)  # four channels of five
    assert report.rows[0].matrix == "7 x 5 of 7 x 6"


def test_layers_without_bias() -> None:
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 7, bias=False)).double().eval()
    small, report = prune(model, kfs.KFAC(mlp_risk(model)), 0.7, structured=True, update=False)
    assert small[0].bias is None  # type: ignore[index]
    assert sum(p.numel() for p in small.parameters()) == report.parameters_after == 39
    X = torch.randn(4, 6, dtype=torch.float64)
    first, second = (model.get_parameter(f"{name}.weight") for name in "02")
    left = (first.unsqueeze(1) == small.get_parameter("0.weight")).all(2).any(1)
    torch.testing.assert_close(small(X), (torch.tanh(X @ first.T) * left) @ second.T)


def test_hooks_are_not_lost() -> None:
    model = mlp()
    K = kfs.KFAC(mlp_risk(model))
    model[0].register_forward_hook(lambda *_: None)  # type: ignore[index]
    with pytest.raises(ModelError, match=r"Layer '0' has hooks, which would be lost"):
        prune(model, K, 0.5, structured=True)


@pytest.mark.parametrize("curvature", [kfs.KFAC, kfs.EKFAC, exact_blocks], ids=["KFAC", "EKFAC", "blocks"])
def test_costs_of_channels(curvature: Callable[..., Any]) -> None:
    """By dense algebra: all columns of a channel at zero, all other weights free."""
    model = cnn()
    K = curvature(image_risk(model))
    layer = next(layer for layer in layers_of(model, K, 0.5, 0.01) if layer.name == "3")
    names = ["3.weight", "3.bias"]
    C, w = damped(K.submatrix(names), 0.01), flat(model, names)
    expected = []
    for channel in range(4):
        rows, columns = torch.meshgrid(torch.arange(6), 9 * channel + torch.arange(9), indexing="ij")
        change = constrained_minimum(C, w, (36 * rows + columns).flatten()) - w
        expected.append(change @ C @ change)
    torch.testing.assert_close(cost_of_columns(layer, 4), torch.stack(expected), rtol=1e-8, atol=1e-10)
