"""The promise of kfs.errors: every raised error states a cause and a way out."""

import ast
import builtins
import inspect
import pickle
from pathlib import Path

import pytest

import kfs
from kfs import errors

ERRORS = [e for _, e in inspect.getmembers(errors, inspect.isclass) if issubclass(e, errors.KfsError)]


@pytest.mark.parametrize("error", ERRORS)
def test_message_and_parts(error: type[errors.KfsError]) -> None:
    e = error("It broke.", "Mend it.")
    assert (e.cause, e.way_out, str(e)) == ("It broke.", "Mend it.", "It broke. Mend it.")
    copy = pickle.loads(pickle.dumps(e))
    assert type(copy) is error
    assert str(copy) == str(e)
    assert error.__doc__


@pytest.mark.parametrize("error", [e for e in ERRORS if e is not errors.KfsError])
def test_each_error_is_also_a_builtin_one(error: type[errors.KfsError]) -> None:
    builtin = [base for base in error.__mro__ if base.__module__ == "builtins"]
    assert builtin[0] is not Exception
    assert issubclass(error, errors.KfsError)


def test_every_error_is_made_with_a_cause_and_a_way_out() -> None:
    names = {e.__name__ for e in ERRORS}
    made = 0
    for file in Path(kfs.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            place = f"{file.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                made += 1
                assert len(node.args) == 2, f"{place}: state a cause and a way out"
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                contract = file.parent.name == "adapters" and node.exc.func.id == "NotImplementedError"
                assert contract or not hasattr(builtins, node.exc.func.id), f"{place}: raise an error of kfs.errors"
    assert made > 50
