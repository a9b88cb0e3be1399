"""The benchmark of rounded products runs on a CPU, and its errors equal those of literal formulas on a small model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import precision
from benchmarks.factor_problems import Batches, vit
from benchmarks.problems import GPT
from docs import results


def narrow(device: str = "cpu", scale: int = precision.SMALL) -> list[list[Batches]]:
    """Return a narrow GPT and an encoder of few tokens."""
    assert (device, scale) == ("cpu", precision.SMALL)
    torch.manual_seed(0)
    sentences = torch.randint(20, (4, 6))
    gpt = Batches("GPT float32", GPT(20, 8, 2, 3, 6).eval(), [(sentences, sentences)], few_columns=False, terms=6)
    encoder = [replace(p, data=[(X[:, :5], y) for X, y in p.data]) for p in vit(16, "cpu")]
    return [[gpt], [encoder[0], encoder[2]]]


def test_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(precision, "problems", narrow)
    precision.main(["cpu"], tmp_path)
    content = json.loads((tmp_path / "precision.json").read_text(encoding="utf-8"))
    found = {(row["problem"], row["products"]): row for row in content["rows"]}
    names = ("GPT float32", "ViT float32", "ViT bf16 autocast")
    assert set(found) == {(name, products) for name in names for products in ("float32", "bf16", "auto")}
    for name in names[:2]:
        # In float32 round-off is small, and rounding to eight bits is not.
        assert found[name, "float32"]["A"]["worst"] < 1e-5 < found[name, "bf16"]["A"]["median"] < 2**-7
        assert found[name, "auto"]["B_alone"]["worst"] == 0
        assert found[name, "float32"]["steps"]["0.1"]["median"] < found[name, "bf16"]["steps"]["0.1"]["median"]
    # Passes in half precision have made all of their errors before the outer products.
    assert found["ViT bf16 autocast", "float32"]["B"]["median"] > 1e-4
    assert found["ViT bf16 autocast", "bf16"]["A_alone"]["worst"] == 0
    assert "| GPT float32 | bf16 | " in capsys.readouterr().out
    page = results.markdown(tmp_path)
    assert "| step, damping 0.001 |" in page
    assert "| GPT float32 | float32 |" in page


def test_problems() -> None:
    (encoder, language_model) = precision.problems("cpu", precision.SMALL)
    assert [problem.autocast for problem in (*encoder, *language_model)] == [None, torch.bfloat16] * 2
    X, y = language_model[0].data[0]
    assert language_model[0].model(X).movedim(1, -1).shape[:-1] == y.shape


def test_errors_of_blocks() -> None:
    expected = {"a": [torch.tensor([3.0, 4.0])], "b": [torch.tensor([0.0]), torch.tensor([2.0])], "c": [torch.ones(4)]}
    found = {
        "a": [torch.tensor([3.0, 4.0])],
        "b": [torch.tensor([0.3]), torch.tensor([2.4])],
        "c": [1.1 * torch.ones(4)],
    }
    errors = precision.relative_errors(found, expected)
    assert (errors.median, errors.worst) == pytest.approx((0.1, 0.25))
    assert str(errors) == "1.0e-01 (2.5e-01)"


def test_steps_and_dampings() -> None:
    """The reference is in float64, and damps each block by a multiple of its mean eigenvalue."""
    ((problem,), _) = narrow()
    right = precision.reference(problem)
    chosen = precision.with_steps(problem)
    assert "blocks.1.up.weight" not in chosen
    assert {name.partition(".qkv")[0] for name in chosen if "qkv" in name} == {"blocks.0", "blocks.2"}
    A, B = right.A["blocks.2.out"][0], right.B["blocks.2.out"][0]
    assert A.dtype == torch.float64
    dense = torch.kron(B, A)
    mean = torch.linalg.eigvalsh(dense).mean()
    for d, steps in right.steps.items():
        assert steps is not None
        assert right.dampings[d]["blocks.2.out"] == pytest.approx(d * float(mean))
        weight, bias = steps["blocks.2.out"]
        damped = dense + d * mean * torch.eye(len(dense), dtype=torch.float64)
        g = torch.cat([right.gradient["blocks.2.out.weight"], right.gradient["blocks.2.out.bias"].unsqueeze(1)], 1)
        expected = torch.linalg.solve(damped, g.flatten()).reshape(g.shape)
        torch.testing.assert_close(torch.cat([weight, bias.unsqueeze(1)], 1), expected)


def test_small_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def too_large(_: Batches) -> Batches:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(precision, "in_double", too_large)
    ((problem,), _) = narrow()
    right = precision.reference(problem)
    assert all(t.dtype == torch.float32 for (t,) in right.A.values())
    assert "the reference is in float32" in capsys.readouterr().out


def test_a_factor_that_cannot_be_inverted(capsys: pytest.CaptureFixture[str]) -> None:
    ((problem,), _) = narrow()
    K = precision.factors(problem, precision.with_steps(problem), "float32")
    for block in K.blocks.values():
        block.sums.side_total("A").fill_(torch.nan)
    gradient: dict[str, Tensor] = {
        name: p.detach() for name, p in problem.model.named_parameters() if name in K.domain.shapes
    }
    assert precision.step(K, dict.fromkeys(K.blocks, 1.0), gradient) is None
    assert "refused: A factor of block" in capsys.readouterr().out
    errors = precision.Errors(1.0, 2.0)
    assert precision.ErrorRow("p", "bf16", errors, errors, steps={"0.1": None}).line().endswith("|  |  | refused |")


def test_precisions_of_a_gpu() -> None:
    found: dict[str, Any] = precision.choices(torch.device("cuda"))
    assert list(found) == ["float32", "tf32", "bf16", "auto", "auto, TF32"]
    assert list(precision.choices(torch.device("cpu"))) == ["float32", "bf16", "auto"]
