"""Influence functions on an accelerator: scores, rankings and indices agree with the CPU."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.errors import DataError, ModelError, StorageError
from kfs.losses import TokenCrossEntropy
from tests.factors.test_devices import Mixed
from tests.influence.test_tokens import Tagger, sequences

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda"
DAMPING = kfs.Relative(0.1)
KINDS = [(kfs.KFAC, "exact"), (kfs.KFAC, "factored"), (kfs.EKFAC, "exact")]
BY_KIND = pytest.mark.parametrize(("make", "method"), KINDS, ids=["KFAC exact", "KFAC factored", "EKFAC"])


def image_net() -> nn.Module:
    """Return a net with several positions, groups of channels, and a layer with one position."""
    layers = (nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 2, groups=2), nn.Flatten(), nn.Linear(16, 3))
    return nn.Sequential(*layers)


def batches(make: type[nn.Module] | Any, sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Return data for one of the models, the same in every call."""
    torch.manual_seed(sum(sizes))
    if make is Mixed:
        return [(torch.randint(7, (size, 6)), torch.randint(3, (size,))) for size in sizes]
    return [(torch.randn(size, 2, 5, 5, dtype=torch.float64), torch.randint(3, (size,))) for size in sizes]


def both(make: Any, of_data: Any = batches, loss: Any = None) -> list[tuple[kfs.EmpiricalRisk, kfs.EmpiricalRisk]]:
    """Return training data and queries of one model, on the CPU and on the accelerator."""
    torch.manual_seed(0)
    here = make().double().eval()
    there = copy.deepcopy(here).to(DEVICE)
    loss = nn.CrossEntropyLoss() if loss is None else loss
    train, queries = of_data(make, (6, 5)), of_data(make, (3, 1))
    return [(kfs.EmpiricalRisk(m, loss, train), kfs.EmpiricalRisk(m, loss, queries)) for m in (here, there)]


def same(there: Tensor, here: Tensor) -> None:
    """Compare with a tolerance for other orders of sums, and for eigenvectors of another library."""
    assert there.device.type == DEVICE
    torch.testing.assert_close(there.cpu(), here, rtol=1e-8, atol=1e-8 * float(here.abs().max()))


@pytest.mark.parametrize("model", [Mixed, image_net])
@BY_KIND
def test_scores(model: Any, make: Any, method: Any) -> None:
    (train, queries), (train_there, queries_there) = both(model)
    here = kfs.Influence(make(train), DAMPING, method)
    elsewhere = {"factor_device": "cpu"} if method == "exact" else {}  # in host memory, copied block by block
    there = kfs.Influence(make(train_there, **elsewhere), DAMPING, method)
    for options in ({}, {"normalize": "cosine"}, {"of": "margin", "memory": 1}, {"of_train": lambda f, _: f[0]}):
        expected = here.scores(queries, train, **options)
        same(there.scores(queries_there, train_there, **options), expected)
    parts = here.scores(queries, train, by="layer")
    for name, found in there.scores(queries_there, train_there, by="layer").items():
        same(found, parts[name])
    same(there.self_scores(train_there), here.self_scores(train))
    expected_top = here.top(queries, train, 3)
    top = there.top(queries_there, train_there, 3)
    for ranked, right in ((top.helpful, expected_top.helpful), (top.harmful, expected_top.harmful)):
        assert torch.equal(ranked.indices.cpu(), right.indices)
        same(ranked.values, right.values)


def test_tokens() -> None:
    def data(_: object, sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
        return [sequences(size) for size in sizes]

    (train, queries), (train_there, queries_there) = both(Tagger, data, TokenCrossEntropy())
    here, there = (kfs.Influence(kfs.EKFAC(risk), DAMPING) for risk in (train, train_there))
    same(there.scores(queries_there, train_there, by="token"), here.scores(queries, train, by="token"))


def test_compressed_queries() -> None:
    (train, queries), (train_there, queries_there) = both(image_net)
    here, there = (kfs.Influence(kfs.EKFAC(risk), DAMPING) for risk in (train, train_there))
    same(there.scores(queries_there, train_there, query_rank=1), here.scores(queries, train, query_rank=1))
    expected = here.query_error(queries, train, 1)
    error = there.query_error(queries_there, train_there, 1)
    assert error.measured == pytest.approx(expected.measured, rel=1e-6)
    same(error.bound, expected.bound)
    assert there.cost(queries_there, train_there) == here.cost(queries, train)


def test_curvature_of_another_device() -> None:
    """Curvature computed on the CPU is moved to the device of the gradients."""
    (train, queries), (train_there, queries_there) = both(Mixed)
    influence = kfs.Influence(kfs.EKFAC(train), DAMPING)
    same(influence.scores(queries_there, train_there), influence.scores(queries, train))
    same(influence.self_scores(train_there), influence.self_scores(train))
    with pytest.raises(ModelError, match=r"has another value \(or device\) in queries"):
        influence.scores(queries, train_there)


@pytest.mark.parametrize("in_folder", [False, True])
@pytest.mark.parametrize("options", [{}, {"rank": 1}, {"rank": 2, "compression": "projected"}], ids=str)
def test_index(options: dict[str, Any], in_folder: bool, tmp_path: Path) -> None:
    """An index that was made on the accelerator equals the CPU's, in memory and from files."""
    (train, queries), (train_there, queries_there) = both(image_net)
    here = kfs.Influence(kfs.EKFAC(train), DAMPING)
    there = kfs.Influence(kfs.EKFAC(train_there, factor_device="cpu" if in_folder else None), DAMPING)
    settings: dict[str, Any] = {"dtype": torch.float64, "shard_bytes": 0} | options
    expected = here.index(train, **settings)
    file = tmp_path / "index" if in_folder else None
    for _ in range(2):  # made, and read again
        index = there.index(train_there, file=file, **settings)
        assert index.error == pytest.approx(expected.error, rel=1e-6, abs=1e-9)
        same(index.scores(queries_there), expected.scores(queries))
        same(index.scores(queries_there, normalize="cosine"), expected.scores(queries, normalize="cosine"))
        same(index.self_scores(), expected.self_scores())
        assert torch.equal(index.top(queries_there, 2).helpful.indices.cpu(), expected.top(queries, 2).helpful.indices)


def test_index_of_another_device_is_refused(tmp_path: Path) -> None:
    """Round-off differs between devices, so scores would belong to neither device."""
    (train, _), (train_there, _) = both(image_net)
    K = kfs.EKFAC(train)
    kfs.Influence(K, DAMPING).index(train, file=tmp_path)
    with pytest.raises(StorageError, match=r"precision \(torch.float64 on cpu there, torch.float64 on cuda here\)"):
        kfs.Influence(K, DAMPING).index(train_there, file=tmp_path)


def test_bad_data_are_named() -> None:
    torch.manual_seed(0)
    model = image_net().double().eval().to(DEVICE)
    train = batches(image_net, (6, 5))
    K = kfs.KFAC(kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), train))
    train[1][0][2, 0, 0, 0] = torch.nan
    bad = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), train)
    with pytest.raises(DataError, match=r"[eE]xample 8\b"):
        kfs.Influence(K, DAMPING).self_scores(bad)
