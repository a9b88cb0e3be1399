"""Every mutant still applies: its line exists exactly once, and its replacement gives a different valid program."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.__main__ import chosen, main
from tests.mutants.mutants import MUTANTS, ROOT, Mutant

ROOMS = {
    *("basics", "compress", "conformance", "distributed", "influence", "laplace", "losses", "merging", "operators"),
    *("factors", "optim", "problem", "runtime"),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_applies(mutant: Mutant) -> None:
    path, text = mutant.apply()
    before = path.read_text(encoding="utf-8")
    compile(text, str(path), "exec")
    assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(before))
    changed = [one for one in zip(before.splitlines(), text.splitlines(), strict=True) if one[0] != one[1]]
    assert len(changed) == 1
    for tests in mutant.tests:
        assert (ROOT / tests).exists()


def test_they_differ_and_cover_all_rooms() -> None:
    assert max(Counter((mutant.apply()) for mutant in MUTANTS).values()) == 1
    assert {mutant.file.partition("/")[0] for mutant in MUTANTS} >= ROOMS


def copied(tmp_path: Path, **files: str) -> Path:
    """Return a folder with a package `kfs` of some files."""
    for name, text in files.items():
        path = tmp_path / "kfs" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def test_files_may_move(tmp_path: Path) -> None:
    mutant = Mutant("room", "old.py", "a + b", "a - b", "sign", ())
    root = copied(tmp_path, new__place="c = a + b\n", other="c = a * b\n")
    assert mutant.apply(root) == (root / "kfs" / "new" / "place.py", "c = a - b\n")


@pytest.mark.parametrize(
    ("text", "near", "number"), [("c = a\n", "", 0), ("c = a + b\nd = a + b\n", "", 2), ("c = a + b\n", "d", 0)]
)
def test_lines_that_are_not_there_once(text: str, near: str, number: int, tmp_path: Path) -> None:
    mutant = Mutant("room", "file.py", "a + b", "a - b", "sign", (), near, "room-1")
    with pytest.raises(ValueError, match=rf"room-1 \(sign\): 'a \+ b' occurs {number} times"):
        mutant.apply(copied(tmp_path, file=text))


def test_the_first_one_after_a_text(tmp_path: Path) -> None:
    mutant = Mutant("room", "file.py", "a + b", "a - b", "sign", (), "d =")
    root = copied(tmp_path, file="c = a + b\nd = a + b\ne = a + b\n")
    assert mutant.apply(root)[1] == "c = a + b\nd = a - b\ne = a + b\n"


def test_choice() -> None:
    assert chosen([]) == list(MUTANTS)
    assert [mutant.name for mutant in chosen(["2", "factors-blocks-1"])] == [MUTANTS[1].name, "factors-blocks-1"]
    assert {mutant.room for mutant in chosen(["losses", "factors-accumulate"])} == {"losses", "factors accumulate"}
    with pytest.raises(SystemExit, match=r"no mutant 'nothing-7'\. Choose a number from 1 to"):
        chosen(["nothing-7"])


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["losses-1", "--list"]) == 0
    assert "losses-1" in capsys.readouterr().out
