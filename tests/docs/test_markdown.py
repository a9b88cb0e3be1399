"""Every Python block of every Markdown page runs: in order, in one namespace per page, in a temporary directory."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent.parent / "docs"
RUN_ELSEWHERE = {"test_your_kfac"}  # in a file of its own, with more to say about the results
BLOCKS = {
    file.stem: blocks
    for file in sorted(DOCS.glob("*.md"))
    if (blocks := re.findall(r"```python\n(.*?)```", file.read_text(encoding="utf-8"), flags=re.DOTALL))
    and file.stem not in RUN_ELSEWHERE
}


@pytest.mark.parametrize("page", BLOCKS)
def test_code_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": page}
    for block in BLOCKS[page]:
        exec(compile(block, f"{page}.md", "exec"), namespace)


def test_pages_with_code_are_found() -> None:
    guides = {"howto_natural_gradient", "howto_train", "howto_compare"}
    assert {"index", "cheatsheet_kfac", "cheatsheet_shapes"} | guides <= set(BLOCKS)
