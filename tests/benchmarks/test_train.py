"""The training benchmark runs and writes its files, and its baselines match their descriptions."""

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks import baseline_optimizers, report, train
from benchmarks.baseline_optimizers import (
    SOAP,
    MatrixOptimizer,
    Muon,
    Stepper,
    Together,
    factories,
    muon,
    orthogonalized,
)
from benchmarks.factor_problems import Batches
from benchmarks.training_tasks import TASKS, Task, autoencoder, cnn, gpt, sentences


def test_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "singd.optim.optimizer", None)  # as if it were not installed
    problem = Batches("MLP", nn.Linear(3, 2), [(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))])
    monkeypatch.setattr(train, "factor_problems", lambda _: [problem])
    train.main(["autoencoder", "cost", "--quick"], tmp_path)
    rows = json.loads((tmp_path / "train_autoencoder_quick.json").read_text(encoding="utf-8"))["rows"]
    assert [row["optimizer"] for row in rows] == ["sgd", "adam", "muon", "soap", "kfs", "singd", "kfac-pytorch"]
    assert all(len(row["runs"]) == (row["lr"] is not None) for row in rows)
    rows = json.loads((tmp_path / "train_cost_quick.json").read_text(encoding="utf-8"))["rows"]
    assert [row["optimizer"] for row in rows] == [
        *("sgd", "adamw", "muon", "soap"),
        "kfs, every 1",
        "kfs, every 10",
        "kfs",
    ]
    out = capsys.readouterr().out
    assert "| autoencoder | kfac-pytorch | | | | | not supported: it is not on PyPI |" in out
    assert "| autoencoder | singd | | | | | not installed: use .venv-bench |" in out
    assert "| MLP | sgd |" in out
    with pytest.raises(SystemExit, match="Unknown: rnn"):
        train.main(["rnn"], tmp_path)


def test_optimizers_in_several_processes() -> None:
    """Each optimizer has a process with one thread, and results come in order."""
    with report.processes(1) as run:
        assert list(run(os.getpid, [()])) == [os.getpid()]
    assert report.option(["a", "--jobs", "3", "b"], "--jobs") == (["a", "b"], 3)
    alone, other = (list(train.compare(cnn(), quick=True, jobs=jobs)) for jobs in (1, 2))
    assert [result.optimizer for result in alone] == [result.optimizer for result in other]
    assert [run.steps for result in alone for run in result.runs] == [run.steps for one in other for run in one.runs]


def test_the_learning_rate_that_needs_fewest_steps_is_chosen() -> None:
    task, made = replace(autoencoder(), target=2.0), []

    def make(model: nn.Module, lr: float) -> Stepper:
        made.append(lr)
        return factories(task.description)["adamw"](model, lr)

    runs = train.tune(task, make, (1e-5, 1e-3, 3e-3), 60)
    assert made == [1e-3, 3e-3, 1e-5]  # from the middle
    assert [run.reached for run in runs] == [True, True, False]
    assert runs[0].lr == 3e-3
    assert runs[2].steps == runs[0].steps  # could not win any more
    diverged = train.train(autoencoder(), factories(None)["sgd"], 1e3, 0, 100)
    assert diverged.steps < 100
    assert not diverged.reached


def test_errors_of_peers_are_reported_and_ours_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: nn.Module, lr: float) -> Stepper:
        raise NotImplementedError("no | embeddings\nsecond line")

    monkeypatch.setattr(train, "factories", lambda _: {"singd": fail})
    result = next(train.compare(autoencoder(), quick=True))
    assert train.line(result) == (
        "| autoencoder | singd | | | | | not supported: NotImplementedError: no / embeddings |"
    )
    assert train.reason(ValueError()) == "ValueError: "
    monkeypatch.setattr(train, "factories", lambda _: {"kfs": fail})
    with pytest.raises(NotImplementedError):
        next(train.compare(autoencoder(), quick=True))


class FakeSINGD(torch.optim.SGD):
    """Has the arguments of SINGD that depend on the task."""

    def __init__(self, model: nn.Module, params: list[nn.Parameter], lr: float, loss_average: str, **_: object) -> None:
        super().__init__(params, lr)
        self.loss_average = loss_average


def test_singd_leaves_embeddings_and_norms_to_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline_optimizers, "singd_class", lambda: FakeSINGD)
    task = gpt()
    model = task.model()
    together = factories(task.description)["singd"](model, 1e-3)
    assert isinstance(together, Together)
    layers, others = together.parts
    assert isinstance(layers, FakeSINGD)
    assert isinstance(others, torch.optim.AdamW)
    assert layers.loss_average == "batch+sequence"
    names = {id(p): name for name, p in model.named_parameters()}
    rest = {names[id(p)] for p in others.param_groups[0]["params"]}
    assert rest == {name for name in names.values() if "norm" in name or name in {"tokens.weight", "positions"}}
    assert len(layers.param_groups[0]["params"]) + len(rest) == len(names)
    task = autoencoder()
    alone = factories(task.description)["singd"](task.model(), 1e-3)
    assert isinstance(alone, FakeSINGD)
    assert alone.loss_average == "batch"


def test_json_has_no_nan(tmp_path: Path) -> None:
    run = train.Run(0, 0.1, 10, 1.0, math.nan, False)
    row = train.Result("task", "sgd", 0.1, [run, replace(run, loss=2.0)], [replace(run, loss=math.inf)])
    report.save([row], "name", {"target": -math.inf}, tmp_path)
    content = json.loads((tmp_path / "name.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert content["environment"] == report.environment() | {"target": None}
    assert [run["loss"] for run in content["rows"][0]["runs"] + content["rows"][0]["tuning"]] == [None, 2.0, None]


def test_tables_mark_targets_that_were_not_reached() -> None:
    good, bad = train.Run(0, 0.1, 10, 1.0, 0.1, True), train.Run(1, 0.1, 20, 2.0, math.nan, False)
    assert "| 10, 10, not reached (nan) | 1.00, 1.00, 2.00 | 10 steps, 1.00 s | |" in train.line(
        train.Result("task", "sgd", 0.1, [good, good, bad], [])
    ).replace("|  |", "| |")
    assert "| not reached | " in train.line(train.Result("task", "sgd", 0.1, [good, bad, bad], []))


@pytest.mark.parametrize("make", TASKS.values(), ids=TASKS)
def test_tasks(make: Callable[[], Task]) -> None:
    task = make()
    torch.manual_seed(0)
    model = task.model()
    X, y = next(task.batches(0))
    assert torch.equal(X, next(task.batches(0))[0])
    assert not torch.equal(X, next(task.batches(1))[0])
    assert task.checked_loss(model) > 2 * task.target
    assert 20_000 < sum(p.numel() for p in model.parameters()) < 120_000
    task.loss(model(X), y).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_sentences_are_about_one_world() -> None:
    text, other = sentences(50_000, 1), sentences(50_000, 2)
    assert text == sentences(50_000, 1)

    def homes(text: str) -> set[str]:
        return {sentence for sentence in text.split(". ")[:-1] if " lives in " in sentence}

    assert text != other
    assert homes(text) == homes(other)
    assert all(int(a) + int(b) == int(c) for a, b, c in sums(text))
    X, y = next(gpt().batches(0))
    assert torch.equal(X[:, 1:], y[:, :-1])


def sums(text: str) -> list[list[str]]:
    """Evaluate all sums in a text, and return their values."""
    return [s.replace("=", "+").split("+") for s in text.split(". ")[:-1] if "+" in s]


@pytest.mark.parametrize("shape", [(6, 6), (12, 5), (4, 9)])
def test_muon_makes_singular_values_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    M = torch.randn(shape, dtype=torch.float64)
    U, S, V = torch.linalg.svd(M, full_matrices=False)
    values = U.T @ orthogonalized(M) @ V.T
    assert torch.allclose(values, values.diag().diag(), atol=1e-10)
    assert (values.diag() - 1)[S / S[0] > 0.1].abs().max() < 0.35  # the polynomial's values are between 0.7 and 1.2


@pytest.mark.parametrize("kind", [Muon, SOAP])
def test_matrix_optimizers_follow_rotations(kind: type[MatrixOptimizer]) -> None:
    """Rotating gradients rotates updates, which is wrong for Adam itself."""
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0] for n in (5, 4))
    gradients = torch.randn(25, 5, 4, dtype=torch.float64)

    def trained(gradients: Tensor) -> Tensor:
        p = nn.Parameter(torch.zeros(5, 4, dtype=torch.float64))
        optimizer = kind([p], lr=0.1)
        for G in gradients:
            optimizer.zero_grad()
            p.grad = G.clone()
            optimizer.step()
        return p.detach()

    expected = left @ trained(gradients) @ right
    assert expected.norm() > 1
    assert torch.allclose(trained(left @ gradients @ right), expected, atol=1e-6)  # epsilon of SOAP: nearly 0/0


def test_muon_leaves_heads_and_vectors_to_adamw() -> None:
    optimizer = muon(cnn().model(), 0.02)
    shapes = [list(p.shape) for p in optimizer.parts[0].params]  # type: ignore[attr-defined]
    assert shapes == [[16, 1, 3, 3], [32, 16, 3, 3], [64, 32, 3, 3], [64, 256]]
