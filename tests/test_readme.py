"""What the README says is true: its Python blocks run, its commands and files exist."""

import re
from pathlib import Path

import pytest

from tests.losses.cases import CASES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_blocks_run_in_order(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # files are written
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 7
    namespace: dict[str, object] = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert "Pass the very tensor that entered the computation" in capsys.readouterr().out


def test_ten_lines_are_ten_lines() -> None:
    first = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[0]
    assert len([line for line in first.splitlines() if line]) == 10


def test_links_and_pictures_exist() -> None:
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", README) if "://" not in target]
    for target in targets:
        assert (ROOT / target.partition("#")[0]).is_file(), target
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", contributing, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert {target.partition("#")[2] for target in targets} - {""} <= anchors


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    mentioned = set(re.findall(r"\bmake ([a-z]+)\b", README)) - {"kfs"}
    assert {"tour", "test", "lint", "docs", "bench", "dist", "help"} <= mentioned <= set(targets)


def test_files_exist() -> None:
    for name in re.findall(r"`((?:kfs|docs|benchmarks|examples|tests)/[\w/.]*)`", README):
        assert (ROOT / name).exists(), name


def test_loss_table_is_true() -> None:
    rows = re.findall(
        r"^\| (.*?(?:Loss|Cross|Custom|SquaredError).*?) \| (.*?) \| (.*?) \| (.*?) \|$", README, flags=re.MULTILINE
    )
    claims = {name: cells for name, *cells in rows}
    groups = {
        "mse": "`MSELoss`",
        "half": "`kfs.losses.HalfSquaredError`",
        "ce": "`CrossEntropyLoss`",
        "masked-lm": "`kfs.losses.TokenCrossEntropy`",
        "causal-lm": "`kfs.losses.TokenCrossEntropy`",
        "bce": "`BCEWithLogitsLoss`",
        "poisson": "`PoissonNLLLoss`",
        "gaussian": "`GaussianNLLLoss`",
        "huber": "`HuberLoss`",
        "smooth": "`HuberLoss`",
        "log": "a function",
        "double": "a function",
        "my": "a function",
    }
    assert len(claims) == len(set(groups.values()))
    for case in CASES:
        group = groups.get(case.name, groups.get(case.name.split("-")[0], ""))
        (cells,) = [cells for name, cells in claims.items() if name.startswith(group)]
        ggn, type2, type1 = cells
        if group != "a function":
            assert (ggn == "yes") == case.convex, case
            assert type2.startswith("yes") == type1.startswith("yes") == (case.fisher != "none"), case
            assert ("equals the GGN" in type2) == (case.fisher == "equal") or "log_input" in type2, case
