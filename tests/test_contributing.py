"""What CONTRIBUTING says is true: its Python blocks run and pass the tests that it names, and files and names exist."""

import ast
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from kfs.factors import rules
from tests.factors import models, test_ekfac, test_operations, test_rules

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
KFAC = ROOT / "kfs" / "kfac"


def section(title: str) -> str:
    """Return the text below a heading."""
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def run_blocks() -> list[Any]:
    """Run all Python blocks in order; return the values of those that end in an expression."""
    blocks = re.findall(r"^( *)```python\n(.*?)\n\1```$", TEXT, flags=re.DOTALL | re.MULTILINE)
    namespace: dict[str, Any] = {"__name__": "contributing", "Tensor": torch.Tensor}
    values = []
    for _, block in blocks:
        *body, last = ast.parse(textwrap.dedent(block)).body
        if isinstance(last, ast.Expr):
            exec(compile(ast.Module(body, []), "CONTRIBUTING.md", "exec"), namespace)
            values.append(eval(compile(ast.Expression(last.value), "CONTRIBUTING.md", "eval"), namespace))
        else:
            exec(compile(ast.Module([*body, last], []), "CONTRIBUTING.md", "exec"), namespace)
    return values


def test_python_blocks_run_and_cases_pass(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # a picture is written
    assert torch.tensordot not in rules.RULES  # the example is about an operation without a rule
    with_example = dict(rules.RULES)
    monkeypatch.setattr(rules, "RULES", with_example)
    monkeypatch.setattr(test_rules, "RULES", with_example)
    found = run_blocks()
    printed = capsys.readouterr().out
    assert (tmp_path / "factors.png").is_file()
    assert "tensordot" in printed  # the table of what is covered
    assert "scaled identity" in printed  # the table of structures
    (alone,) = [case for case in found if isinstance(case, test_rules.Case)]
    (exact,) = [case for case in found if isinstance(case, models.Case)]
    test_rules.test_plans_give_the_parameters_gradients(alone)
    test_rules.test_rules_look_at_no_values(alone)
    for sharing in ("expand", "reduce"):
        test_operations.test_one_datum(exact, sharing)
    test_operations.test_coverage_does_not_depend_on_the_number_of_data(exact)
    test_ekfac.test_one_position(exact)


def test_files_and_folders_exist() -> None:
    """Paths are relative to the repository, or to `kfs/kfac`, or to a folder that a table is about."""
    text = TEXT.replace(section("What is where"), "")
    paths = set(re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|toml|md)|(?:[\w-]+/)+)`", text))
    drawn = re.findall(r" ([\w/]+\.py)\b", section("The way of a batch"))
    assert len(paths) > 40
    assert len(drawn) > 10
    folders = (ROOT, ROOT / "kfs", KFAC, KFAC / "structures", ROOT / "kfs" / "losses")
    missing = [p for p in (*paths, *drawn) if not any((folder / p).exists() for folder in folders)]
    assert missing == ["utils.py"]  # there is none


def test_what_is_where() -> None:
    """Files on the right of the table are in the folders on the left, and every folder of the library has a row."""
    rows = [line.split("|")[1:3] for line in section("What is where").splitlines() if line.startswith("| `")]
    places = [[ROOT / path for path in re.findall(r"`([^`]+)`", left)] for left, _ in rows]
    for folders, (_, right) in zip(places, rows, strict=True):
        assert all(folder.exists() for folder in folders), folders
        for name in re.findall(r"`(\w+\.(?:py|md))`", right):
            assert any((folder / name).exists() for folder in folders), name
    parts = {path for path in (ROOT / "kfs").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    unlisted = {path.name for path in parts - {place for row in places for place in row}}
    assert unlisted == {"__init__.py", "__main__.py"}


def test_glossary_names_exist_where_it_says() -> None:
    rows = [line for line in section("Glossary").splitlines() if line.startswith("| **")]
    assert len(rows) > 40
    words = [row.split("**")[1] for row in rows]
    assert words == sorted(words)
    for row in rows:
        found = re.findall(r"`([\w.]+)` (?:in|of) `([\w/]+\.py)`", row)
        assert found or "`expand_Linear.py`" in row, row
        for name, file in found:
            folder = ROOT if file.startswith("kfs/") else KFAC
            source = (folder / file).read_text(encoding="utf-8")
            assert all(re.search(rf"\b{part}\b", source) for part in name.split(".")), row


def test_names_are_where_the_text_says() -> None:
    """Tables and functions that the text sends people to are in the files that it names."""
    found = re.findall(r"`(\w+)`\s+(?:of|in)\s+`([\w/]+/\w+\.py)`", re.sub(r"\|.*\|", "", TEXT))
    assert {"RULES", "CASES", "ONE_POSITION", "STRUCTURES", "OPERATORS", "EXACT", "PAGES"} & {name for name, _ in found}
    assert len(found) >= 10
    for name, file in found:
        assert re.search(rf"\b{name}\b", (ROOT / file).read_text(encoding="utf-8")), (name, file)


def test_layers_are_those_of_the_contract() -> None:
    """The table of layers has all of them, from the bottom to the top of the import contract."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = [c for c in settings["tool"]["importlinter"]["contracts"] if c.get("containers") == ["kfs"]]
    levels = [re.findall(r"\w+", layer) for layer in reversed(contract["layers"])]
    level = {name: place for place, names in enumerate(levels) for name in names if name != "__main__"}
    rows = [line.split("|")[1] for line in section("The layer rule").splitlines() if line.startswith("| `")]
    listed = [re.findall(r"`(\w+)`", row) for row in rows]
    assert sorted(name for names in listed for name in names) == sorted(level)
    heights = [level[names[0]] for names in listed]
    assert heights == sorted(heights)


def test_rooms_are_those_of_the_contract() -> None:
    """The list of rooms is that of the import contract, line by line."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = [c for c in settings["tool"]["importlinter"]["contracts"] if c.get("containers") == ["kfs.factors"]]
    expected = [set(re.split(r" [:|] ", layer)) for layer in contract["layers"]]
    listed = section("The rooms of kfac").partition("```\n")[2].partition("\n```")[0].splitlines()
    short = {"expand_*": {"expand_Conv", "expand_Linear"}, "reduce_*": {"reduce_Conv", "reduce_Linear"}}
    names = [re.split(r" {5,}", line)[0].split() for line in listed]
    assert [set().union(*(short.get(name, {name}) for name in line)) for line in names] == expected


def test_functions_on_the_way_exist() -> None:
    """Functions and methods that the way of a batch names are defined in the engine, the optimizer, or PyTorch."""
    sources = [
        file.read_text(encoding="utf-8")
        for folder in ("kfac", "optim", "recording")
        for file in (ROOT / "kfs" / folder).rglob("*.py")
    ]
    defined = set(re.findall(r"(?:def|class) (\w+)", "\n".join(sources)))
    defined |= {"TorchFunctionMode", "vmap", "grad", "apply", "plans", "read", "rule"}  # PyTorch's, fields, arguments
    drawing = section("The way of a batch").partition("```\n")[2].partition("```")[0]
    called = set(re.findall(r"([\w]+)\(", drawing))
    assert len(called) > 12
    assert called <= defined, called - defined
