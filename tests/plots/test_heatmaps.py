"""The shared parts of the matrix figures: problem, scale, axes, and files."""

from pathlib import Path

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from torch import nn

from kfs.plots.heatmaps import blocks, common_limit, draw_matrix, draw_panels, problem, save


def test_problem_is_the_documents_and_repeatable() -> None:
    before = torch.get_rng_state()
    risk, again, other = problem(), problem(), problem(seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    (batch,), (same,), (different,) = (list(r.batches()) for r in (risk, again, other))
    assert torch.equal(batch.x, same.x)
    assert torch.equal(batch.y, same.y)
    assert not torch.equal(batch.x, different.x)
    for name, p in risk.params.items():
        assert p.dtype == torch.float64
        assert torch.equal(p, again.params[name])
    assert isinstance(risk.model, nn.Sequential)
    assert [type(module) for module in risk.model] == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]
    assert (batch.x.shape, batch.y.shape) == ((100, 5), (100, 3))
    assert blocks(risk) == {"W1": 20, "b1": 4, "W2": 16, "b2": 4, "W3": 12, "b3": 3}


def test_no_unit_is_off_for_all_data() -> None:
    risk = problem()
    assert isinstance(risk.model, nn.Sequential)
    (batch,) = risk.batches()
    for depth in (2, 4):
        on = (risk.model[:depth](batch.x) > 0).double().mean(0)
        assert on.min() > 0.1
        assert on.min() < 0.9  # since the network is not linear


def test_limit_is_a_quantile_of_all_panels() -> None:
    panels = {"a": torch.tensor([[0.0, -4.0], [1.0, 0.0]]), "b": torch.tensor([[2.0, 0.0], [0.0, -3.0]])}
    assert common_limit(panels, 1.0) == 4
    assert common_limit(panels, 0.0) == 1
    assert common_limit({"a": torch.zeros(2, 2)}) == 1


def test_matrix_with_its_blocks() -> None:
    axes = Figure().subplots()
    matrix = torch.tensor([[1.0, -1, 0], [-1, 0.5, 0], [0, 0, 2]])
    image = draw_matrix(axes, matrix, {"W1": 1, "b1": 1, "W2": 1}, 1.0)
    assert image.get_clim() == (-1, 1)
    red, white, blue = torch.tensor(image.to_rgba(torch.tensor([1.0, 0, -1]).numpy()))[:, :3]
    assert red[0] > red[2]
    assert blue[2] > blue[0]
    assert white.min() > 0.95
    lines = [(set(line.get_xdata()), line.get_linewidth()) for line in axes.lines]  # type: ignore[arg-type]
    assert ({0.5}, 0.25) in lines  # within a layer
    assert ({1.5}, 0.6) in lines  # between layers
    assert len(lines) == 4
    assert [label.get_text() for label in axes.get_xticklabels()] == ["$W_{1}$", "$b_{1}$", "$W_{2}$"]
    assert list(axes.get_yticks()) == [0, 1, 2]
    assert len({to_hex(line.get_color()) for line in axes.lines}) == 1


@pytest.mark.parametrize("largest", [1.0, 100.0])
def test_panels_share_their_colours(largest: float) -> None:
    risk = problem()
    matrix = torch.ones(59, 59)
    matrix[0, 0] = largest
    figure = draw_panels({"one": matrix, "two": -0.5 * matrix}, risk, columns=1)
    one, two, bar = figure.axes
    assert [axes.get_title() for axes in (one, two)] == ["one", "two"]
    assert one.images[0].get_clim() == two.images[0].get_clim() == (-1, 1)
    colorbar = one.images[0].colorbar or two.images[0].colorbar
    assert colorbar is not None
    assert colorbar.ax is bar
    assert colorbar.extend == ("both" if largest > 1 else "neither")


def test_files(tmp_path: Path) -> None:
    paths = []
    for folder, formats in {"a/b": ("svg", "png"), "c": ("png", "svg")}.items():
        figure = draw_panels({"title of it": torch.eye(59)}, problem(), columns=1)
        paths += save(figure, tmp_path / folder, "name", formats)
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == [
        "a/b/name.svg",
        "a/b/name.png",
        "c/name.png",
        "c/name.svg",
    ]
    assert paths[0].read_bytes() == paths[3].read_bytes()
    text = paths[0].read_text(encoding="utf-8")
    assert "title of it" in text
    assert "<dc:date>" not in text
