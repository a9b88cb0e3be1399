"""The factor benchmark for GPUs runs on a CPU, without graphs. No test depends on run times."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import factors, replayed_factors
from benchmarks.factor_problems import Batches, vit
from benchmarks.factor_programs import kfs_factors
from tests.benchmarks.test_factors import small


@pytest.fixture(autouse=True)
def _few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "curvlinops", None)  # as if it were not installed
    monkeypatch.setattr(replayed_factors, "COUNTS", (2, 3))
    monkeypatch.setattr(replayed_factors, "LARGE_COUNTS", (2, 3))


def narrow_encoder() -> list[Batches]:
    """Return encoders of few tokens on the CPU."""
    return [replace(p, data=[(X[:, :5], y) for X, y in p.data]) for p in vit(16, "cpu")]


def test_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replayed_factors.main(small(8, "cpu") + narrow_encoder()[1:], tmp_path, repeats=1)
    content = json.loads((tmp_path / "factors_cuda.json").read_text(encoding="utf-8"))
    found = {(row["problem"], row["program"], row["library"]): row for row in content["rows"]}
    assert {key[0] for key in found} == {"MLP", "GPT", "ViT TF32", "ViT bf16 autocast"}
    assert found["MLP", "forward+backward", "torch"]["ratio"] == 1
    assert found["ViT bf16 autocast", "mc expand", "kfs, all parameters"]["first"] > 0
    assert found["GPT", "EKFAC mc expand", "kfs"]["kfac_ratio"] is not None
    assert ("GPT", "type-2 expand", "kfs") not in found
    assert ("ViT TF32", "mc reduce", "kfs") not in found
    assert (tmp_path / "factors_cuda.png").stat().st_size > 1000
    out = capsys.readouterr().out
    assert "There is no replay here" in out
    assert "| MLP | type-2 expand | kfs |" in out


def test_settings_for_gpus_are_passed_where_they_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_replay(risk: Any, fisher: str, *, replay: bool = True) -> None: ...

    monkeypatch.setattr(replayed_factors, "KFAC", with_replay)
    assert replayed_factors.replay_settings(torch.device("cpu")) == {}
    assert replayed_factors.replay_settings(torch.device("cuda"), replay=False) == {"replay": False}


def test_cost_of_one_more_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds_of(call: Callable[[], float]) -> float:
        return call()

    def program(count: int) -> float:  # the cost of a computation with so few batches
        return 7.0 if count == 1 else 7 + 100 + 3 * (count - 1)

    monkeypatch.setattr(replayed_factors, "seconds_of", seconds_of)
    found = replayed_factors.cost(program, (12, 44), repeats=3)
    assert found == replayed_factors.Cost(first=7, marginal=3, recording=100)
    assert replayed_factors.marginal_without_replay(lambda n: 5.0 + 2 * n, (12, 44), repeats=2) == 2


def test_a_program_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(replayed_factors, "measure_job", fail)
    rows = list(replayed_factors.measure(small(8, "cpu")[:1], repeats=1))
    assert [row.program for row in rows] == ["forward+backward"]
    assert "MLP, mc expand, kfs: OutOfMemoryError: no memory" in capsys.readouterr().out


def test_problems_are_chosen_by_how_their_names_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(factors, "factor_problems", lambda *_: small(8, "cpu"))
    monkeypatch.setattr(factors, "vit", lambda *_: narrow_encoder())
    monkeypatch.setattr(replayed_factors, "main", lambda chosen, *_: seen.extend(p.name for p in chosen))
    factors.main(tmp_path, device="cuda", names=["ViT", "MLP"])
    assert seen == ["MLP", "ViT float32", "ViT TF32", "ViT bf16 autocast"]
    with pytest.raises(SystemExit, match="ViT bf16 autocast"):
        factors.main(tmp_path, device="cuda", names=["vit"])


def test_replay_and_precision_of_products_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[bool, str]] = set()

    def with_settings(*args: Any, replay: bool, products: str, **settings: Any) -> Any:
        seen.add((replay, products))
        return kfs_factors(*args, **settings)

    monkeypatch.setattr(
        replayed_factors,
        "replay_settings",
        lambda _, replay=True, products="auto": {"replay": replay, "products": products},
    )
    monkeypatch.setattr(replayed_factors, "kfs_factors", with_settings)
    rows = list(replayed_factors.measure(narrow_encoder()[1:2], repeats=1))
    assert seen == {(replay, products) for replay in (True, False) for products in ("auto", "bf16")}
    assert [row.program for row in rows[1:]] == ["mc expand", "mc expand", "mc expand, bf16 products"]
    assert all(row.no_replay is not None for row in rows[1:])
