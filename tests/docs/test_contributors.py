"""Pages for contributors are true: code runs and passes the named tests; named files, functions and rooms exist."""

import ast
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kfs.factors import rules
from tests.factors import models, test_ekfac, test_operations, test_rules

ROOT = Path(__file__).parents[2]
CONTRIBUTING, ENGINE, WAY, GLOSSARY, EXTENDING = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("CONTRIBUTING.md", "docs/engine.md", "docs/way_of_a_batch.md", "docs/glossary.md", "docs/extending.md")
)


def run_blocks() -> tuple[list[Any], dict[str, Any]]:
    """Run all Python blocks in order; return the values of blocks that end in an expression, and all names."""
    blocks = re.findall(r"^( *)```python\n(.*?)\n\1```$", EXTENDING, flags=re.DOTALL | re.MULTILINE)
    namespace: dict[str, Any] = {"__name__": "extending"}
    values = []
    for _, block in blocks:
        *body, last = ast.parse(textwrap.dedent(block)).body
        if isinstance(last, ast.Expr):
            exec(compile(ast.Module(body, []), "extending.md", "exec"), namespace)
            values.append(eval(compile(ast.Expression(last.value), "extending.md", "eval"), namespace))
        else:
            exec(compile(ast.Module([*body, last], []), "extending.md", "exec"), namespace)
    return values, namespace


@patch.dict(rules.RULES)  # restored after the test
def test_cases_of_the_new_rule_pass(capsys: pytest.CaptureFixture[str]) -> None:
    found, names = run_blocks()
    assert torch.tensordot not in rules.RULES  # the page leaves no state behind
    rules.RULES[torch.tensordot] = names["tensordot"]
    printed = capsys.readouterr().out
    assert "tensordot" in printed  # the table of covered operations
    assert "scaled identity" in printed  # the table of structures
    (alone,) = [case for case in found if isinstance(case, test_rules.Case)]
    (exact,) = [case for case in found if isinstance(case, models.Case)]
    test_rules.test_plans_give_the_parameters_gradients(alone)
    test_rules.test_rules_look_at_no_values(alone)
    for sharing in ("expand", "reduce"):
        test_operations.test_one_datum(exact, sharing)
    test_operations.test_coverage_does_not_depend_on_the_number_of_data(exact)
    test_ekfac.test_one_position(exact)


@pytest.mark.parametrize("text", [CONTRIBUTING, ENGINE, WAY, GLOSSARY, EXTENDING])
def test_files_and_folders_exist(text: str) -> None:
    """Paths are relative to the repository; in tables of rooms, to `kfs/factors`; `x.py` alone may be in any folder."""
    paths = set(re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|toml|md)|(?:[\w-]+/)+)`", text))
    paths |= set(re.findall(r"  ([\w/]+\.py)$", text, flags=re.MULTILINE))
    names = {path.name for path in (ROOT / "kfs").rglob("*.py")}
    places = (ROOT, ROOT / "kfs" / "factors")
    missing = {p for p in paths if not any((place / p).exists() for place in places) and p not in names}
    assert missing <= {"utils.py"}  # there is none


def test_what_is_where_lists_the_whole_library() -> None:
    listed = set(re.findall(r"`(kfs/[\w/.]+?)/?`", CONTRIBUTING))
    parts = {path for path in (ROOT / "kfs").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    unlisted = {path.name for path in parts if path.relative_to(ROOT).as_posix() not in listed}
    assert unlisted == {"__init__.py", "__main__.py"}


def test_rooms_are_those_of_the_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = [c for c in settings["tool"]["importlinter"]["contracts"] if c.get("containers") == ["kfs.factors"]]
    expected = [set(re.findall(r"\w+", layer)) for layer in contract["layers"]]
    table = ENGINE.partition("\n## Rooms\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = [{name.removesuffix(".py").rstrip("/") for name in re.findall(r"`([\w./]+)`", row)} for row in rows]
    level = {name: place for place, names in enumerate(expected) for name in names}
    assert set().union(*listed) == set(level)
    heights = [level[min(names)] for names in listed]
    assert heights == sorted(heights)


def test_glossary() -> None:
    rows = [line for line in GLOSSARY.splitlines() if line.startswith("| **")]
    words = [row.split("**")[1] for row in rows]
    assert 40 < len(words) <= 60
    assert words == sorted(set(words))
    for row in rows:
        (found,) = re.findall(r"`([\w.]+)` in `([\w/]+\.py)`", row)
        source = (ROOT / found[1]).read_text(encoding="utf-8")
        assert all(re.search(rf"\b{part}\b", source) for part in found[0].split(".")), row


def test_names_are_where_the_text_says() -> None:
    """Tables and functions that the text mentions are in the files that it names."""
    found = re.findall(r"`(\w+)`\s+(?:of|in)\s+`([\w/]+/\w+\.py)`", CONTRIBUTING + EXTENDING)
    assert {"CASES", "ONE_POSITION", "STRUCTURES", "OPERATORS", "EXACT"} <= {name for name, _ in found}
    for name, file in found:
        assert re.search(rf"\b{name}\b", (ROOT / file).read_text(encoding="utf-8")), (name, file)


def test_functions_on_the_way_exist() -> None:
    """Functions and methods in the drawing are defined in the engine or by PyTorch."""
    files = [*(ROOT / "kfs" / "factors").rglob("*.py"), *(ROOT / "kfs" / "runtime").rglob("*.py")]
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    defined = set(re.findall(r"(?:def|class) (\w+)", source)) | {"rule"}
    drawing = WAY.partition("```\n")[2].partition("```")[0]
    called = set(re.findall(r"(\w+)\(", drawing))
    assert len(called) > 12
    assert called <= defined, called - defined
