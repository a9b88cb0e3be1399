"""The README is correct: its Python blocks run, its commands and files exist."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture
def one_process() -> Iterator[None]:
    """A group of one process, like that of `torchrun`."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_python_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "readme", "copy": copy}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), namespace)


def test_nine_tasks_have_two_lines_and_a_page_each() -> None:
    tasks = README.partition("\n## Nine tasks\n")[2].partition("\n## ")[0]
    parts = tasks.split("\n**[")[1:]
    assert len(parts) == 9
    for part in parts:
        assert re.match(r"[^]]+\]\(docs/\w+\.md\)\*\*", part), part
        (code,) = re.findall(r"```python\n(.*?)```", part, flags=re.DOTALL)
        assert len(code.splitlines()) == 2, code


def test_it_is_short() -> None:
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    assert 700 <= len(prose.split()) <= 900


def test_ten_lines_are_ten_lines() -> None:
    assert len([line for line in BLOCKS[0].splitlines() if line]) == 10


def test_links_and_pictures_exist() -> None:
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", README) if "://" not in target]
    for target in targets:
        name, _, anchor = target.partition("#")
        file = ROOT / (name or "README.md")
        assert file.is_file(), target
        if anchor:
            headings = re.findall(r"^##+ (.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, target


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    mentioned = set(re.findall(r"\bmake ([a-z]+)\b", README)) - {"kfs"}
    assert {"tour", "test", "docs", "help"} <= mentioned <= set(targets)


def test_files_exist() -> None:
    for name in re.findall(r"`((?:kfs|docs|benchmarks|examples|tests)/[\w/.]*)`", README):
        assert (ROOT / name).exists(), name
