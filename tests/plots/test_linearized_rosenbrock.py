"""The figure of the Rosenbrock function shows the function, its partial linearization, and their common point."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from kfs.basics.ggn_rosenbrock import rosenbrock_ggn, rosenbrock_hessian, rosenbrock_inner, rosenbrock_outer
from kfs.basics.hessians import hessian
from kfs.basics.linearization import linearize
from kfs.plots import linearized_rosenbrock
from kfs.plots.linearized_rosenbrock import ALPHA
from tests.operators.contract import close


def test_grids_are_the_composed_functions() -> None:
    shown = linearized_rosenbrock.data(points=6)
    anchor = shown["anchor"].requires_grad_()
    h_lin = linearize(lambda x: rosenbrock_inner(x, ALPHA), anchor)
    for i, x2 in enumerate(shown["x2"]):
        for j, x1 in enumerate(shown["x1"]):
            x = torch.stack([x1, x2])
            close(shown["function"][i, j], (1 - x1) ** 2 + ALPHA * (x2 - x1**2) ** 2)
            close(shown["approximation"][i, j], rosenbrock_outer(h_lin(x)).detach())
    assert not torch.allclose(shown["function"], shown["approximation"])
    assert not torch.allclose(shown["function"], shown["function"].T)  # the axes are not exchanged


def test_points() -> None:
    shown = linearized_rosenbrock.data(points=2)
    anchor, step = shown["anchor"].requires_grad_(), shown["step"].requires_grad_()
    h_lin = linearize(lambda x: rosenbrock_inner(x, ALPHA), anchor)
    f_lin = rosenbrock_outer(h_lin(step))
    close(f_lin, torch.zeros_like(f_lin))  # a sum of squares cannot be smaller
    close(hessian(f_lin, step), rosenbrock_ggn(anchor, ALPHA))
    f = rosenbrock_outer(rosenbrock_inner(shown["minimum"], ALPHA))
    close(f, torch.zeros_like(f))
    assert torch.linalg.eigvalsh(rosenbrock_hessian(anchor, ALPHA)).min() < 0  # the value in the docstring


def test_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_rng_state()
    (svg,) = linearized_rosenbrock.draw(tmp_path / "a", ("svg",))
    monkeypatch.setattr(sys, "argv", ["linearized_rosenbrock.py", str(tmp_path / "b")])
    runpy.run_path(linearized_rosenbrock.__file__, run_name="__main__")
    assert torch.equal(torch.get_rng_state(), before)
    printed = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == [tmp_path / "b" / f"linearized_rosenbrock.{kind}" for kind in ("png", "svg")]
    assert printed[0].stat().st_size > 1000
    assert printed[1].read_bytes() == svg.read_bytes()
