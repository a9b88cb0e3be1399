"""The benchmark of influence functions runs with small models. No test depends on run times."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import influence, influence_gpt
from benchmarks.influence_digits import Recipe, digits, margins, predictions, train_together, trained
from benchmarks.influence_methods import RELATIVE, peer
from benchmarks.influence_quality import spearman, verdict
from docs import results as book
from kfs.errors import KfsError

SMALL = ["gpu", "--device=cpu", "--quick"]


def rows(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return found


def test_all_studies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    influence.main(["--quick"], tmp_path)
    influence.main(SMALL, tmp_path)
    out = capsys.readouterr().out
    quality = rows(tmp_path / "influence_lds_quick.json")
    dense = [row for row in quality if row["method"] == "dense GGN"]
    assert all(-1 <= row["values"][0] <= 1 for row in dense)
    assert {row["library"] for row in quality} == {"torch", "kfs", "kronfluence", "dattri"}
    assert quality[0]["method"] == "the same halves, other initializations"
    assert 0 < quality[0]["values"][0] < 1  # halves affect some decisions, but not all
    found = rows(tmp_path / "influence_mislabelled_quick.json")
    assert all(0 <= value <= 1 for row in found for value in row["values"])
    timed = [row for row in rows(tmp_path / "influence_time_quick.json") if row["library"] == "kfs"]
    assert [row["program"] for row in timed] == 3 * ["factors"] + 3 * ["pairwise"] + 3 * ["self"]
    errors = [row for row in rows(tmp_path / "influence_errors_quick.json") if row["library"] == "kfs"]
    assert len(errors) == 10
    assert all(row["error"] < 1e-12 for row in errors)  # round-off of float64
    if find_spec("kronfluence") is None:
        assert "| EKFAC mc | kronfluence | 0.1 x mean eigenvalue | not installed |" in out
    _check_book(tmp_path)


def _check_book(results: Path) -> None:
    """The book shows results, but no results of a quick run."""
    assert "There are no numbers yet" in book.markdown(results)
    for file in results.glob("*.json"):
        file.rename(results / file.name.replace("_quick", ""))
    body = book.markdown(results)
    for expected in ("dense GGN", "pairwise", "convolution, circular", "tokens / second"):
        assert expected in body


def test_margins_are_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    influence.main(["lds", "--quick"], tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    first = rows(tmp_path / "influence_lds_quick.json")
    monkeypatch.setattr("benchmarks.influence_quality.retrained_margins", None)
    influence.main(["lds", "--quick"], tmp_path)
    assert rows(tmp_path / "influence_lds_quick.json") == first
    assert file.exists()


def test_networks_of_a_stack_are_trained_as_if_alone() -> None:
    data, (X, _) = digits(0, 20, 5)
    recipe = Recipe((64, 4, 10), steps=5)
    kept = torch.stack([torch.arange(10), torch.arange(10, 20)])
    together = predictions(train_together(data, kept, recipe, 0), X.expand(2, -1, -1))
    for place, some in enumerate(kept):
        alone = trained((data[0][some], data[1][some]), recipe, 0)
        torch.testing.assert_close(together[place], alone(X))


def test_margin_is_a_log_ratio() -> None:
    f = torch.randn(6, 4, dtype=torch.float64)
    y = torch.randint(4, (6,))
    p = f.softmax(1)[torch.arange(6), y]
    torch.testing.assert_close(margins(f, y), (p / (1 - p)).log())


def test_spearman() -> None:
    a = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 30.0]])
    b = torch.tensor([[10.0, 3.0], [20.0, 2.0], [90.0, 1.0]])
    torch.testing.assert_close(spearman(a, b), torch.tensor([1.0, -1.0], dtype=torch.float64))


def test_verdict() -> None:
    assert verdict(0.5, 0.6, least=True) == ">= 0.5: yes"
    assert verdict(0.5, 0.6, least=False) == "<= 0.5: no"
    assert verdict(None, 0.6, least=True) == ""


def test_missing_library() -> None:
    assert peer("no_such_library", RELATIVE).fit is None


@pytest.mark.parametrize("transformers", [True, False])
def test_language_model(
    transformers: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        influence_gpt, "find_spec", lambda name: find_spec(name) if transformers or name != "transformers" else None
    )
    influence.main(SMALL, tmp_path)
    ours = [row for row in rows(tmp_path / "influence_gpu_quick.json") if row["library"] == "kfs"]
    programs = ["first batch", "factors", "factors, without decompositions", "pairwise", "self"]
    assert [row["program"] for row in ours] == programs
    assert [row["agreement"] for row in ours[3:]] == pytest.approx([1, 1])
    assert ("Hugging Face's GPT-2" in capsys.readouterr().out) == transformers


def test_no_time_left(tmp_path: Path) -> None:
    influence.main([*SMALL, "--seconds=0"], tmp_path)
    found = rows(tmp_path / "influence_gpu_quick.json")
    assert all(row["seconds"] is None for row in found)
    assert found[0]["why"] == "no time left"


def test_error_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KfsError("It is broken.", "Repair it.")

    monkeypatch.setattr(influence_gpt.Ours, "factors", broken)
    influence.main(SMALL, tmp_path)
    ours = [row for row in rows(tmp_path / "influence_gpu_quick.json") if row["library"] == "kfs"]
    assert "It is broken." in ours[1]["why"]
    assert [row["why"] for row in ours[2:]] == ["no factors", "no factors"]


def test_size_of_gpt2_small() -> None:
    given = influence_gpt.options([])
    with torch.device("meta"):
        given.device = "meta"
        model, _ = influence_gpt.language_model(given)
    layers = influence_gpt.tracked(model)
    assert len(layers) == 48
    block = 12 * 768**2 + (3 + 1 + 4 + 1) * 768  # weights and biases of its four layers
    assert sum(p.numel() for layer in layers for p in model.get_submodule(layer).parameters()) == 12 * block
