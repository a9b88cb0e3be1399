"""What the README says is true: its Python blocks run, its commands and files exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_blocks_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 2
    namespace: dict[str, object] = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert "Pass the very tensor that entered the computation" in capsys.readouterr().out


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    mentioned = set(re.findall(r"\bmake ([a-z]+)\b", README)) - {"kfs"}
    assert {"tour", "test", "lint", "docs", "bench", "help"} <= mentioned <= set(targets)


def test_files_exist() -> None:
    for name in re.findall(r"`((?:kfs|docs|benchmarks|tests)/[\w/.]*)`", README):
        assert (ROOT / name).exists(), name
