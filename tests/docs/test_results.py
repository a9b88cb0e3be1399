"""The page of benchmarks: the main ratios, and a table or a picture for each file, with the origin of its numbers."""

import json
import re
from pathlib import Path

import pytest

from docs import results
from docs.measured import exceptions
from docs.results_summary import PARTS, heading, part_of
from kfs import __version__

# Other files, such as that of the conformance kit, have no table.
COMMITTED = [file for file in results.files() if json.loads(file.read_text(encoding="utf-8")).get("rows")]
KNOWN = exceptions().results


@pytest.mark.parametrize("file", results.files(), ids=lambda file: file.stem)
def test_committed_numbers_say_where_they_come_from(file: Path) -> None:
    """One command made them in one run with this version, or docs/numbers.toml gives a reason."""
    environment = json.loads(file.read_text(encoding="utf-8"))["environment"]
    assert {"command", "date", "device", "kfs", "machine", "python", "torch"} <= environment.keys()
    one_command = re.fullmatch(r"python (-W ignore )?-m benchmarks\.\w+( [\w.-]+)*", environment["command"])
    right = environment["kfs"] == __version__ and one_command is not None and "processor" in environment
    assert right != (file.stem in KNOWN), environment | {"listed": KNOWN.get(file.stem)}


def test_files_that_are_listed_exist() -> None:
    assert KNOWN.keys() <= {file.stem for file in results.files()}


def test_a_fresh_clone_has_numbers() -> None:
    assert len(COMMITTED) >= 3
    shown = results.markdown()
    for file in COMMITTED:
        assert json.loads(file.read_text(encoding="utf-8"))["environment"]["command"] in shown


def test_a_picture(tmp_path: Path) -> None:
    row = {"problem": "MLP", "program": "KFAC", "library": "kfs", "seconds": 1.0, "ratio": 1.2, "flop_ratio": None}
    content = {"environment": {"command": "python -m x", "date": "2025-01-02", "torch": "2"}, "rows": [row]}
    (tmp_path / "factors.json").write_text(json.dumps(content), encoding="utf-8")
    assert results.drawn(tmp_path) == ["factors"]
    results.draw("factors", tmp_path, tmp_path)
    assert "<svg" in (tmp_path / "benchmark_factors.svg").read_text(encoding="utf-8")
    shown = results.markdown(tmp_path)
    assert "(figures/benchmark_factors.svg)" in shown
    assert "| MLP | KFAC |" not in shown  # a picture or a table, not both
    assert "`python -m x`, 2025-01-02, torch 2" in shown
    assert "Note" not in shown
    content["environment"] = {"torch": "2", "note": "a guess"}
    (tmp_path / "factors.json").write_text(json.dumps(content), encoding="utf-8")
    assert "\ntorch 2. Note: a guess.\n" in results.markdown(tmp_path)


def test_benchmarks_with_and_without_results(tmp_path: Path) -> None:
    assert "make bench" in results.markdown(tmp_path).partition("no numbers yet")[2]
    row = {"problem": "MLP", "program": "KFAC", "library": "kfs", "seconds": 1.0, "ratio": 1.234, "flop_ratio": None}
    others = [{**row, "program": f"program {number}"} for number in range(results.MOST_PROGRAMS)]
    content = {"environment": {"torch": "2"}, "rows": [row, *others]}
    (tmp_path / "factors.json").write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "conformance.json").write_text(json.dumps({"results": {}}), encoding="utf-8")
    body = results.markdown(tmp_path)
    assert "| MLP | KFAC | kfs | 1.23 |" in body  # too many programs for a picture
    assert "![" not in body
    assert "no numbers yet" not in body


def test_benchmarks_of_merging(tmp_path: Path) -> None:
    row = {"start": "strong", "tasks": "halves", "way": "average", "accuracies": [90.0, 91.0]}
    rows = [row | {"iterations": None, "seconds": None}, row | {"way": "KFAC", "iterations": 3, "seconds": 0.5}]
    file = tmp_path / "applications_merging.json"
    file.write_text(json.dumps({"environment": {}, "rows": rows}), encoding="utf-8")
    body = results.markdown(tmp_path)
    assert "| strong start, halves | average | 90.50 |  |  |" in body
    assert "|  | KFAC | 90.50 | 3.00 | 0.50 |" in body


def test_benchmarks_of_training(tmp_path: Path) -> None:
    runs = [{"steps": 10, "seconds": 0.5, "reached": True}, {"steps": 99, "seconds": 9.0, "reached": False}]
    row = {"task": "cnn", "optimizer": "kfs", "lr": 0.1, "runs": [runs[0], runs[1], runs[0]], "note": "at the edge"}
    lost, missing = {**row, "optimizer": "sgd", "runs": runs[1:]}, {**row, "optimizer": "peer", "lr": None, "runs": []}
    steps = [{"problem": "MLP", "optimizer": name, "seconds": 1.0, "ratio": 2.0} for name in ("kfs", "sgd")]
    for name, rows in {"train_cnn": [row, lost, missing], "train_cost": steps, "train_gpt_quick": steps}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"environment": {}, "rows": rows}), encoding="utf-8")
    body = results.markdown(tmp_path)
    assert "| kfs | at the edge | 0.1 | 10 | 0.50 |" in body
    assert "| sgd | at the edge, not reached | 0.1 |  |  |" in body
    assert "| peer | at the edge |  |" in body
    assert "| MLP | kfs | 2.00 |\n|  | sgd |" in body
    assert "## Cost of a training step" in body
    assert "quick" not in body


def test_runs_on_a_gpu(tmp_path: Path) -> None:
    history = [[step, step / 10, 1 / step] for step in range(1, 9)]
    row = {"task": "gpt", "optimizer": "kfs", "lr": 1.0, "seconds": 0.8, "end": 0.125, "history": history}
    worse = {**row, "lr": 0.3, "end": 0.25}
    (tmp_path / "train_cuda_gpt.json").write_text(json.dumps({"rows": [worse, row]}), encoding="utf-8")
    assert "## Training on a GPU" in results.markdown(tmp_path)
    assert "(figures/benchmark_train_cuda_gpt.svg)" in results.markdown(tmp_path)
    results.draw("train_cuda_gpt", tmp_path, tmp_path)
    picture = (tmp_path / "benchmark_train_cuda_gpt.svg").read_text(encoding="utf-8")
    for words in ("kfs, learning rate 1 ", "seconds of training", "loss"):
        assert f"<!-- {words}" in picture
    assert "learning rate 0.3" not in picture


def test_default_settings_are_one_table(tmp_path: Path) -> None:
    row = {"schedule": "constant", "lr": 1.0, "half": 1.0, "end": 0.5, "seconds": 4.0, "history": [[1, 0.1, 1.0]]}
    other = {"optimizer": "adamw", "end": 0.75, "seconds": 2.0}
    for task in ("cpu_cnn", "cuda_gpt"):
        rows = [row | other, row | {"optimizer": "kfs"}, row | {"optimizer": "kfs", "schedule": "cosine"}]
        content = {"environment": {"command": f"python -m {task}"}, "rows": rows}
        (tmp_path / f"train_defaults_{task}.json").write_text(json.dumps(content), encoding="utf-8")
    body = results.markdown(tmp_path)
    assert "| CPU, CNN on digits | constant | 0.75 | 0.5 | 2.00 |\n|  | cosine |  | 0.5 |  |" in body
    assert "| GPU, GPT | constant |" in body
    assert "`python -m cuda_gpt`" in body
    assert "| 2.00 | median of 2 tasks; kfs ends with the lower loss in 2 of 2 runs |" in body


def test_the_summary_is_first_and_its_numbers_are_those_of_the_files(tmp_path: Path) -> None:
    rows = [
        {"problem": problem, "program": "KFAC", "library": library, "seconds": seconds, "ratio": 1.0}
        for problem, library, seconds in (
            ("MLP", "kfs", 1.0),
            ("MLP", "curvlinops", 4.0),
            ("CNN", "kfs", 1.0),
            ("CNN", "curvlinops", 2.0),
            ("GPT", "kfs", 9.0),
        )
    ]
    (tmp_path / "algebra.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    link = "[Products, inverses and EKFAC](#products-inverses-and-ekfac)"
    assert f"| KFAC / curvlinops | 0.25 to 0.50 | MLP, CNN; one CPU thread | {link} |" in results.markdown(tmp_path)
    shown = results.markdown()
    assert shown.startswith("## The main ratios")
    ratios = json.loads((results.RESULTS / "factors.json").read_text(encoding="utf-8"))["rows"]
    least = min(row["ratio"] for row in ratios if row["program"] == "mc expand" and row["library"] == "kfs")
    assert f"| factors of KFAC / forward and backward pass | {least:.2f} to" in shown


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.stem)
def test_headings_are_words(file: Path) -> None:
    """No heading is a file name, and each result has one picture or one table."""
    assert "_" not in heading(file.stem)
    assert part_of(file.stem) in PARTS
    content = json.loads(file.read_text(encoding="utf-8"))
    section = results._section(file.stem, content["rows"], {})
    assert ("![" in section) + ("\n| --- |" in section) == 1


def test_many_problems_with_the_same_programs_have_a_row_each(tmp_path: Path) -> None:
    rows = [
        {"problem": f"LSTM {n}", "program": program, "library": "kfs", "seconds": 1.0, "ratio": n, "flop_ratio": None}
        for n in range(results.MOST_PROBLEMS + 1)
        for program in ("SGD", "KFAC")
    ]
    (tmp_path / "recurrent_cpu.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    assert "| time ratio | SGD | KFAC |" in results.markdown(tmp_path)
    assert "| LSTM 3 | 3.00 | 3.00 |" in results.markdown(tmp_path)


def test_traffic_of_several_processes(tmp_path: Path) -> None:
    row = {"model": "MLP", "ranks": 2, "seconds": 0.01, "busy": 0.01, "factors": 9}
    rows = [
        row | {"optimizer": "AdamW", "sent": 0.0, "scheme": 0.0, "held": 0},
        row | {"optimizer": "KFAC", "sent": 2e6, "scheme": 8e6, "held": 5_000_000},
    ]
    (tmp_path / "distributed.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    text = results.markdown(tmp_path)
    assert "| MLP | AdamW | 2 | 10.00 |  |  |  |" in text
    assert "| MLP | KFAC | 2 | 10.00 | 2.00 | 8.00 | 5.00 |" in text


def test_placements_of_factors(tmp_path: Path) -> None:
    row = {"ranks": 2, "placement": "owner", "most_held": 2**21, "all_held": 2**22, "sent": 2**20, "seconds": 0.5}
    rows = [row | {"sent_by_kfac_pytorch": 2**23, "seconds_of_inverse": 0.1}]
    (tmp_path / "distributed_factors.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    assert "| 2 | owner | 2.00 | 4.00 | 1.00 | 8.00 | 0.50 |" in results.markdown(tmp_path)


def test_benchmarks_of_compression(tmp_path: Path) -> None:
    row = {
        "method": "OBS",
        "keep": 0.2,
        "accuracy": 91.5,
        "accuracies": [91.5],
        "stored": 1.0,
        "flops": 0.5,
        "time": 0.7,
    }
    content = {"environment": {}, "rows": [row, {**row, "keep": 0.1}]}
    (tmp_path / "compression.json").write_text(json.dumps(content), encoding="utf-8")
    first = "| OBS | 0.20 | 91.50 | 1.00 | 0.50 | 0.70 |"
    assert f"{first}\n|  | 0.10 |" in results.markdown(tmp_path)


def test_benchmarks_of_pruning(tmp_path: Path) -> None:
    row = {"task": "digits", "method": "", "keep": 1.0, "accuracies": [98.0, 96.0], "losses": [], "dampings": []}
    content = {"environment": {}, "rows": [row, {**row, "method": "magnitude", "keep": 0.5, "accuracies": [50, 50]}]}
    (tmp_path / "pruning.json").write_text(json.dumps(content), encoding="utf-8")
    text = results.markdown(tmp_path)
    assert "| digits | whole network | 97.0 ± 1.0 |  |" in text
    assert "|  | magnitude |  | 50.0 ± 0.0 |" in text
