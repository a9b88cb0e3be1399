"""The comparison of default settings runs, and its peers match their names."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.baseline_optimizers import Prodigy
from benchmarks.default_settings import SIZES, Adapted, adapted, main


def test_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file for each task with a row for each optimizer and schedule, and a picture; other entries stay."""

    def rows(task: str) -> list[dict[str, object]]:
        found: list[dict[str, object]] = json.loads((tmp_path / f"train_defaults_cpu_quick_{task}.json").read_text())[
            "rows"
        ]
        return found

    main(["--quick", "lora", "diabetes"], tmp_path)
    before = rows("diabetes")
    assert len(rows("lora")) == len(before) == 2 * 6
    assert (tmp_path / "train_defaults_cpu_quick.png").stat().st_size > 0
    assert "| lora | constant | kfs |" in capsys.readouterr().out
    main(["--quick", "diabetes", "cosine", "kfs"], tmp_path)
    after = rows("diabetes")
    assert [one == other for one, other in zip(before, after, strict=True)] == 11 * [True] + [False]
    with pytest.raises(SystemExit, match="Unknown: other"):
        main(["other"], tmp_path)


def test_several_processes_and_seeds(tmp_path: Path) -> None:
    """Fine-tuning begins with the same model in all processes, so that losses equal those of one process."""
    words = ["--quick", "full", "constant", "adamw", "muon", "--seeds", "2"]
    ends = []
    for jobs in ("1", "2"):
        main([*words, "--jobs", jobs], tmp_path / jobs)
        content = json.loads((tmp_path / jobs / "train_defaults_cpu_quick_full.json").read_text())
        assert content["environment"]["jobs"] == int(jobs)
        ends.append([row["ends"] for row in content["rows"]])
        assert [len(losses) for losses in ends[-1]] == [2, 2]
    torch.testing.assert_close(torch.tensor(ends[0]), torch.tensor(ends[1]), rtol=1e-3, atol=0)


def test_adapters_change_nothing_at_first() -> None:
    """Their product is zero, and only the adapters are trained."""
    torch.manual_seed(0)
    size = SIZES["quick"]
    model, x = size.gpt(), torch.randint(256, (2, size.length))
    before = model(x)
    changed = adapted(model)
    torch.testing.assert_close(changed(x), before)
    trained = [name for name, p in changed.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * sum(isinstance(module, Adapted) for module in changed.modules())


def test_prodigy_finds_a_learning_rate() -> None:
    """On a parabola, its estimate grows from 1e-6 to the distance to the minimum, roughly, and the loss falls."""
    p = nn.Parameter(torch.zeros(10))
    optimizer = Prodigy([p])
    losses = []
    for _ in range(300):
        optimizer.zero_grad()
        loss = 0.5 * (p - 2.0).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.05 * losses[0]
    assert 0.1 < float(optimizer.d) < 20
