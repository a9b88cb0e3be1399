"""The programs of the page about trainers run, including those that need TRL."""

from pathlib import Path

import pytest

from docs import blocks


@pytest.mark.filterwarnings("default")  # warnings of other libraries are not tested here
def test_all_programs_of_the_page(tmp_path: Path) -> None:
    page = Path(blocks.__file__).parent / "howto_finetune.md"
    with blocks.inside(tmp_path):
        outputs = blocks.run(page, blocks.libraries(page)).outputs
    assert None not in outputs
