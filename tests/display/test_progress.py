"""One line for an algorithm and its inner loops; silent unless the output is a terminal or a notebook."""

import gc
import io
import re
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import kfs
from kfs.display import progress
from kfs.display.progress import Line, show_progress, tracked
from kfs.operators import (
    diagonal,
    eigenvalues,
    lsmr,
    neumann,
    solve,
    spectral_density,
    squared_frobenius_norm,
    trace,
)


class Terminal(io.StringIO):
    """Claims to be a terminal."""

    def isatty(self) -> bool:
        return True

    @property
    def shown(self) -> list[str]:
        """Return all states of the line, in order."""
        return [text.strip() for text in self.getvalue().split("\r") if text.strip()]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return a terminal without the initial delay."""
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    monkeypatch.setattr(progress, "_INTERVAL", 0.0)
    monkeypatch.setenv("COLUMNS", "120")
    # Pytest puts a stream of its own into `sys` between fixtures and tests.
    stream = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))
    return stream


def risk(wanted: bool | None = None) -> kfs.EmpiricalRisk:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    X, y = torch.randn(8, 3, dtype=torch.float64), torch.randint(2, (8,))
    return kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X[:4], y[:4]), (X[4:], y[4:])], progress=wanted)


def system(wanted: bool | None = None) -> kfs.operators.LinearOperator:
    return kfs.GGN(risk(wanted)).shift(0.5)


def models_and_curvatures() -> tuple[list[nn.Module], list[kfs.GGN]]:
    risks = [risk(), risk()]
    models = [r.model for r in risks if isinstance(r.model, nn.Module)]
    return models, [kfs.GGN(r) for r in risks]


ALGORITHMS: dict[str, Callable[[bool | None], object]] = {
    "eigenvalues": lambda wanted: eigenvalues(kfs.Hessian(risk()), k=2, progress=wanted),
    "conjugate gradients": lambda wanted: solve(system(), torch.ones(26, dtype=torch.float64), progress=wanted),
    "Neumann series": lambda wanted: neumann(
        system(), torch.ones(26, dtype=torch.float64), scale=0.1, terms=3, progress=wanted
    ),
    "LSMR": lambda wanted: lsmr(system(), torch.ones(26, dtype=torch.float64), progress=wanted),
    "spectral density": lambda wanted: spectral_density(system(), num_vectors=2, num_steps=3, progress=wanted),
    "trace": lambda wanted: trace(system(), products=8, progress=wanted),
    "diagonal": lambda wanted: diagonal(system(), products=8, progress=wanted),
    "Frobenius norm": lambda wanted: squared_frobenius_norm(system(), products=8, progress=wanted),
    "gradient": lambda wanted: risk(wanted).gradient(),
    "KFAC": lambda wanted: kfs.KFAC(risk(wanted)),
    "EKFAC": lambda wanted: kfs.EKFAC(risk(wanted)),
    "merging": lambda wanted: kfs.merge(*models_and_curvatures(), progress=wanted),
    "optimal Kronecker": lambda wanted: kfs.factors.optimal_kronecker(risk(wanted), steps=2),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_line_for_each_algorithm(name: str, terminal: Terminal) -> None:
    """All output begins with the algorithm's name, and is removed at the end."""
    ALGORITHMS[name](None)
    tasks = {text.partition("  ")[0] for text in terminal.shown} - {"KFAC", "counting"}
    assert tasks == {name} - {"KFAC"}
    assert any("batch 1/2" in text for text in terminal.shown)
    assert terminal.getvalue().endswith(" \r")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_off(name: str, terminal: Terminal) -> None:
    ALGORITHMS[name](False)
    assert all(text.startswith("counting") for text in terminal.shown)


def test_products_with_many_columns(terminal: Terminal) -> None:
    kfs.GGN(risk()).to_dense()
    assert any(text.startswith("product with GGN") and "chunk 1/2" in text for text in terminal.shown)


def test_comparisons(terminal: Terminal) -> None:
    kfs.compare(risk(), ["KFAC", "diagonal"])
    comparison = [text for text in terminal.shown if text.startswith("comparison")]
    assert any("structure 2/3  diagonal" in text for text in comparison)


def test_the_risk_decides_for_algorithms_without_opinion(terminal: Terminal) -> None:
    b = torch.ones(26, dtype=torch.float64)
    solve(system(False), b)
    assert not terminal.shown
    solve(system(False), b, progress=True)
    assert terminal.shown


def test_nothing_is_shown_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written to files, without a stream, or within the first two seconds."""
    monkeypatch.setattr(progress, "_INTERVAL", 0.0)
    for stream in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        kfs.KFAC(risk(True))
        assert stream is None or not stream.getvalue()
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    kfs.KFAC(risk())
    assert not terminal.shown
    kfs.KFAC(risk(True))
    assert terminal.shown


def test_a_notebook_is_no_terminal_but_shows_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    monkeypatch.setattr(sys, "stderr", stream)
    kfs.KFAC(risk(True))
    assert "batch 1/2" in stream.getvalue()


def test_eigenvalues_have_a_bound_and_no_estimate(terminal: Terminal) -> None:
    """ARPACK has at least 20 vectors, with one product each. The number of further products is unknown."""
    eigenvalues(kfs.Hessian(risk()), k=2)
    by_products = {}
    for text in terminal.shown:
        if found := re.search(r"^eigenvalues .* product (\d+)", text):
            by_products[int(found[1])] = text
    assert max(by_products) >= 20
    for products, text in by_products.items():
        assert ("at least" in text) == (0 < products < 20)
        assert ("s per product" in text) == (products >= 20)
        assert "about" not in text


def test_estimates_of_time() -> None:
    line = Line("task", total=4, unit="step")
    assert line.text(10.0) == "task  [..........]   0%  00:10  step 0/4"
    line.advance(1)
    assert line.text(10.0) == "task  [##........]  25%  00:10, about 00:30 left  step 1/4"
    inner = Line("inside", total=2, unit="batch")
    inner.inside(line)
    inner.advance(note="a note")
    assert line.text(15.0) == "task  [###.......]  38%  00:15, about 00:25 left  step 1/4  batch 1/2  a note"
    line.advance(0, share=2.0)
    assert "100%" in line.text(3 * 3600.0)
    assert "3:00:00" in line.text(3 * 3600.0)
    assert Line("unknown").text(1.0) == "unknown  00:01  0"


def test_inner_algorithms_share_the_outermost_line(terminal: Terminal) -> None:
    with show_progress("outer", 2) as outer:
        with show_progress("middle", 2) as middle:
            for _ in tracked([1, 2], "inner", 2, None, "batch"):
                pass
            middle.advance()
        assert outer.inner is None
        outer.advance()
    assert {text.partition(" ")[0] for text in terminal.shown} == {"outer"}
    with (
        show_progress("outer", 2) as outer,
        show_progress("middle", wanted=False),
        show_progress("inner", wanted=False),
    ):
        assert outer.wanted is False


def test_a_line_that_was_shown_is_removed_if_a_part_does_not_want_it(terminal: Terminal) -> None:
    with show_progress("outer", 2) as outer:
        outer.advance()
        list(tracked([1], "inner", 1, False, "batch"))
        assert terminal.getvalue().endswith(" \r")
        outer.advance()
    assert terminal.shown == ["outer  [#####.....]  50%  00:00, about 00:00 left  1/2"]


def test_loops_that_are_abandoned_leave_nothing_behind(terminal: Terminal) -> None:
    """After an error, a traceback may keep a loop alive. Later algorithms must not be shown as a part of it."""
    loop = tracked([1, 2], "abandoned", 2, True, "batch")
    next(loop)
    solve(system(), torch.ones(26, dtype=torch.float64))
    assert any(text.startswith("conjugate") for text in terminal.shown)
    del loop
    gc.collect()


def test_narrow_terminals(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "16")
    kfs.KFAC(risk(True))
    assert max(map(len, terminal.shown)) == 15


def test_threads_have_lines_of_their_own() -> None:
    seen: list[Line | None] = []

    def run() -> None:
        with show_progress("other", 1) as line:
            seen.append(line.outer)

    with show_progress("outer", 1):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert seen == [None]
