"""Plots show data and labels, and one panel for each block."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from torch import Tensor, nn

import kfs
from kfs.display.charts import Panel, draw_bars, draw_factors, draw_matrix, short
from kfs.errors import ModelError, ShapeError, UnknownNameError
from kfs.factors import Inspection
from kfs.factors.comparison import Comparison, Row
from kfs.factors.inspection import Row as InspectedRow
from kfs.operators import lsmr, solve, spectral_density


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close all figures after a test."""
    yield
    pyplot.close("all")


def small_risk() -> kfs.EmpiricalRisk:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    data = torch.randn(20, 4, dtype=torch.float64), torch.randint(2, (20,))
    return kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), data)


def drawn(axes: Axes) -> Tensor:
    """Return the matrix of a heatmap."""
    (image,) = axes.images
    return torch.from_numpy(image.get_array().data)  # type: ignore[union-attr]


def lines(axes: Axes) -> list[Tensor]:
    """Return the heights of all lines that have more than two points."""
    heights = [torch.as_tensor(line.get_ydata()).double() for line in axes.lines]
    return [values for values in heights if len(values) > 2]


def test_factors_are_heat_maps() -> None:
    K = kfs.KFAC(small_risk())
    axes = K.plot()
    assert len(axes) == 4
    assert len(axes[0].figure.axes) == 4
    for place, block in enumerate(K.blocks.values()):
        assert torch.equal(drawn(axes[2 * place]), block.A)
        assert torch.equal(drawn(axes[2 * place + 1]), block.B)
    assert axes[0].get_title("left").startswith("0\nA: 5 x 5, to ")
    assert axes[3].get_title("left").startswith("\nB: 2 x 2, to ")
    low, high = axes[0].images[0].get_clim()
    assert low == -high  # white is zero
    assert float((K.blocks["0"].A.abs() > high).double().mean()) < 0.1


@pytest.mark.parametrize("make", [kfs.GGN, kfs.Hessian, kfs.Fisher, lambda risk: kfs.GGN(risk) - kfs.KFAC(risk)])
def test_matrices_are_heat_maps(make: Any) -> None:
    A = make(small_risk())
    (axes,) = A.plot()
    assert torch.equal(drawn(axes), A.to_dense())
    assert axes.get_title("left").startswith(f"{A.formula}, 23 x 23, to ")
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    for labels, ticks in ((axes.get_xticklabels(), axes.get_xticks()), (axes.get_yticklabels(), axes.get_yticks())):
        assert [label.get_text() for label in labels] == names
        assert list(ticks) == [5.5, 13.0, 17.5, 21.5]
    across = sorted({float(line.get_ydata()[0]) for line in axes.lines if line.get_ydata()[0] == line.get_ydata()[1]})
    assert across == [11.5, 14.5, 20.5]
    (part,) = A.plot(["2.weight"])
    assert torch.equal(drawn(part), A.submatrix("2.weight").to_dense())
    with pytest.raises(ModelError, match=r"no parameters \['x'\]"):
        A.plot("x")
    with pytest.raises(ShapeError, match=r"23 x 23, which is too large to draw.*most=22.*submatrix"):
        A.plot(most=22)
    assert len(A.plot("2.bias", most=2)) == 1


def test_matrices_that_are_not_square_or_have_very_many_entries() -> None:
    J = kfs.Jacobian(small_risk())
    (axes,) = J.plot(["2.weight", "2.bias"])
    assert torch.equal(drawn(axes), J.to_dense()[:, 15:])
    large = torch.zeros(4100, 4100)  # more numbers than torch.quantile takes
    large[0] = 1.0
    axes = draw_matrix("large", large, {"rows": 4100}, {"left": 4000, "narrow": 100})
    assert [label.get_text() for label in axes.get_xticklabels()] == ["left"]  # there is no room for the other one
    assert axes.get_xlim() == (-0.5, 4099.5)
    assert drawn(axes)[0].min() == 1


def test_some_factors() -> None:
    K = kfs.KFAC(small_risk())
    assert len(K.plot(["2"])) == 2
    assert torch.equal(drawn(kfs.EKFAC(small_risk()).plot("0")[0]), K.blocks["0"].A)
    with pytest.raises(UnknownNameError, match=r"There are no blocks \['x'\]\. Choose from '0', '2'\."):
        K.plot(["x"])


def test_of_many_blocks_matrices_come_first() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Linear(2, 2), nn.LayerNorm(2))]
    data = torch.randn(5, 2), torch.randn(5, 2)
    K = kfs.KFAC(kfs.EmpiricalRisk(nn.Sequential(*layers), nn.MSELoss(), data))
    axes = K.plot(most=4)
    assert [target.get_title("left").partition("\n")[0] for target in axes[::2]] == ["0", "2", "4", "6"]
    figure = axes[0].get_figure()
    assert figure is not None
    assert figure.get_supxlabel().endswith("in the title\n8 more blocks: pass names to draw them")
    assert len(figure.axes) == 8  # positions without a block are empty
    vectors = kfs.KFAC(kfs.EmpiricalRisk(nn.Sequential(*layers[1::2]), nn.MSELoss(), data))
    assert len(vectors.plot(most=2)) == 4  # there is nothing else


def test_kinds_of_factors() -> None:
    """Diagonals are stripes, the first of several groups represents all, and large factors keep their extremes."""
    large = torch.zeros(1000, 1000)
    large[3, 4] = -5.0
    large[700, 700] = 2.0
    panels = [
        Panel("diagonal", torch.arange(6.0), large),
        Panel("groups", torch.eye(3).repeat(2, 1, 1), torch.ones(2, 3)),
        Panel("nothing", torch.zeros(2, 2), torch.ones(1, 1)),
    ]
    axes = draw_factors(panels)
    titles = [target.get_title("left").partition("\n")[2] for target in axes]
    sizes = ["diagonal 6", "1000 x 1000", "3 x 3 (1 of 2)", "2 diagonals of 3", "2 x 2", "1 x 1"]
    assert [title[3:].rpartition(",")[0] for title in titles] == sizes
    assert torch.equal(drawn(axes[0]), torch.arange(6.0, dtype=torch.float64)[None])
    pooled = drawn(axes[1])
    assert pooled.shape == (200, 200)
    assert (float(pooled[0, 0]), float(pooled[140, 140]), int((pooled != 0).sum())) == (-5.0, 2.0, 2)


@pytest.mark.parametrize("make", [kfs.KFAC, kfs.EKFAC])
def test_spectra(make: type[kfs.KFAC]) -> None:
    """Lines are eigenvalues of blocks; dashed lines are eigenvalues of damped blocks."""
    K = make(small_risk())
    axes = K.plot_spectrum(damping={"0": 0.1, "2": 0.0})
    found = lines(axes)
    assert len(found) == 3
    params = {"0": ["0.weight", "0.bias"], "2": ["2.weight", "2.bias"]}
    exact = [torch.linalg.eigvalsh(K.submatrix(names).to_dense()).flip(0) for names in params.values()]
    bottom = axes.get_ylim()[0]
    torch.testing.assert_close(found[0], exact[0].clamp(min=bottom))
    torch.testing.assert_close(found[1], exact[0].clamp(min=0) + 0.1)
    torch.testing.assert_close(found[2], exact[1].clamp(min=bottom))
    assert axes.get_yscale() == "log"
    legend = axes.get_legend()
    assert legend is not None
    share = float((exact[0] < 0.1).double().mean())
    assert [text.get_text() for text in legend.get_texts()] == [f"0 ({share:.0%} below damping)", "2", "damping"]


def test_spectra_with_relative_damping() -> None:
    """Each block is shifted by a multiple of its mean eigenvalue; a block without curvature is not."""
    K = kfs.KFAC(small_risk())
    found = lines(K.plot_spectrum(damping={"0": kfs.Relative(0.5), "2": 0.1}))
    values = torch.linalg.eigvalsh(K.submatrix(["0.weight", "0.bias"]).to_dense()).flip(0)
    torch.testing.assert_close(found[1], values.clamp(min=0) + 0.5 * values.mean())
    zero = 0.0 * K
    assert len(lines(zero.plot_spectrum(damping=kfs.Relative(0.5)))) == 2  # type: ignore[attr-defined]


def test_spectra_of_sums() -> None:
    K = kfs.KFAC(small_risk()) + kfs.KFAC(small_risk(), "empirical")
    values = torch.linalg.eigvalsh(K.submatrix(["0.weight", "0.bias"]).to_dense()).flip(0)
    axes = K.plot_spectrum("0", damping=0)  # type: ignore[attr-defined]
    torch.testing.assert_close(lines(axes)[0], values.clamp(min=axes.get_ylim()[0]))


def test_spectra_without_damping_and_of_one_block() -> None:
    K = kfs.KFAC(small_risk())
    axes = K.plot_spectrum("0", damping=0)
    assert len(lines(axes)) == 1
    assert axes.get_ylabel() == "eigenvalue"
    with pytest.raises(ModelError, match="not symmetric"):
        (K @ K.inverse(1.0, "factored") @ K.power(0.5)).plot_spectrum()  # type: ignore[attr-defined]
    zero = 0.0 * K
    assert len(lines(zero.plot_spectrum(damping=0))) == 2  # type: ignore[attr-defined]


def test_spectra_of_many_blocks_have_a_color_bar() -> None:
    data = torch.randn(5, 2), torch.randn(5, 2)
    K = kfs.KFAC(kfs.EmpiricalRisk(nn.Sequential(*[nn.Linear(2, 2) for _ in range(12)]), nn.MSELoss(), data))
    axes = K.plot_spectrum()
    assert axes.get_legend() is None
    figure = axes.get_figure()
    assert figure is not None
    bar = figure.axes[1]
    assert [label.get_text() for label in bar.get_yticklabels()] == ["0", "2", "4", "7", "9", "11"]
    assert len(lines(axes)) == 24


def test_density() -> None:
    density = spectral_density(kfs.GGN(small_risk()), num_vectors=3, num_steps=10)
    axes = density.plot()
    grid, values = (torch.as_tensor(part) for part in axes.lines[0].get_data())
    width = 0.01 * float(density.nodes.max() - density.nodes.min())
    torch.testing.assert_close(values, density.on(grid, width).clamp(min=axes.get_ylim()[0]))
    assert float(torch.trapezoid(values, grid)) == pytest.approx(1, abs=1e-3)
    torch.testing.assert_close(torch.as_tensor(axes.lines[1].get_xdata()), density.nodes)
    _, other = pyplot.subplots()
    assert density.plot(0.5, axes=other) is other
    constant = spectral_density(kfs.operators.Identity(kfs.GGN(small_risk()).domain), num_vectors=2)
    assert torch.as_tensor(constant.plot().lines[0].get_xdata()).mean() == pytest.approx(1)


def test_density_of_magnitudes() -> None:
    density = spectral_density(kfs.Hessian(small_risk()), num_vectors=3, num_steps=10)
    axes = density.log10(floor=1e-3).plot()
    assert (density.plot().get_xlabel(), axes.get_xlabel()) == ("eigenvalue", "log10 |eigenvalue|")
    masses = torch.as_tensor(axes.lines[1].get_xdata())
    torch.testing.assert_close(10**masses, density.nodes.abs() + 1e-3)


def test_convergence() -> None:
    risk = small_risk()
    solution = solve(kfs.GGN(risk).shift(0.1), risk.gradient())
    axes = solution.plot()
    assert tuple(torch.as_tensor(axes.lines[0].get_ydata()).tolist()) == solution.residuals
    assert torch.as_tensor(axes.lines[0].get_xdata()).tolist() == list(range(1, solution.iterations + 1))
    assert axes.lines[1].get_ydata()[0] == solution.tolerance == 1e-6  # type: ignore[index]
    assert axes.get_title() == f"converged after {solution.iterations} iterations"
    early = solve(kfs.GGN(risk).shift(0.1), risk.gradient(), max_iterations=1, tolerance=0.0)
    assert early.plot().get_title() == "not converged after 1 iteration"
    assert len(early.plot().lines) == 1  # a tolerance of zero cannot be shown on a log axis
    assert solution.plot(label="again", axes=axes) is axes
    assert [line.get_label() for line in axes.lines] == ["residual", "tolerance", "again"]
    assert axes.get_title() == f"converged after {solution.iterations} iterations"  # the tolerance of the first run


def test_convergence_of_least_squares() -> None:
    """For least squares, residuals are norms of gradients, and the axis says so."""
    solution = lsmr(kfs.Jacobian(small_risk()), torch.ones(40, dtype=torch.float64), damping=0.1)
    axes = solution.plot()
    assert axes.lines[0].get_label() == "gradient"
    assert axes.get_ylabel().startswith("norm of the gradient")
    assert axes.lines[1].get_ydata()[0] == solution.tolerance == 1e-6  # type: ignore[index]


def test_cost_and_memory_by_layer() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    inspection = kfs.inspect(model, torch.randn(4, 1, 4, 4))
    axes = inspection.plot()
    assert [label.get_text() for label in axes[0].get_yticklabels()] == ["0", "2"]
    sizes = {"0": (10, 2), "2": (9, 3)}
    positions = {"0": 4, "2": 1}
    memory = [4 * (a * a + b * b) for a, b in sizes.values()]
    work = [2 * positions[name] * (a * a + b * b) for name, (a, b) in sizes.items()]
    assert [bar.get_width() for bar in axes[0].patches] == memory  # type: ignore[attr-defined]
    assert [bar.get_width() for bar in axes[1].patches] == work  # type: ignore[attr-defined]
    assert axes[0].get_title() == f"factors: {sum(memory)} B"
    assert axes[1].get_title() == "operations for an example: 1.01 k"
    with pytest.raises(ModelError, match="No parameter is covered"):
        Inspection((InspectedRow("p", (2,), why_not="it is strange"),)).plot()


def test_many_bars() -> None:
    """The thirty largest bars are shown in order, and all others as one."""
    numbers = [float(place * 7 % 40) for place in range(40)]
    (axes,) = draw_bars([f"layer {place}" for place in range(40)], {"numbers": (numbers, lambda x: f"{x:.0f}")})
    widths = [bar.get_width() for bar in axes.patches]  # type: ignore[attr-defined]
    assert len(widths) == 31
    assert sum(widths) == sum(numbers)
    assert axes.get_yticklabels()[-1].get_text() == "10 smaller ones"
    assert widths[:-1] == [number for number in numbers if number >= 10]
    (zeros,) = draw_bars(["a"], {"numbers": ([0.0], str)})
    assert len(zeros.patches) == 1


def test_errors_of_structures() -> None:
    comparison = kfs.compare(small_risk(), ["KFAC", "EKFAC", "exact blocks"])
    axes = comparison.plot()
    heights = [bar.get_height() for bar in axes.patches]  # type: ignore[attr-defined]
    errors = {(row.structure, row.layer): row.frobenius for row in comparison.rows}
    names = [(structure, layer) for structure in ("KFAC", "EKFAC") for layer in ("0", "2")]
    assert heights[:4] == [errors[name] for name in names]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "2"]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()][:2] == ["KFAC", "EKFAC"]
    _, other = pyplot.subplots()
    assert comparison.plot(axes=other) is other
    assert other.get_legend() is None


def test_errors_of_many_layers_are_lines() -> None:
    rows = tuple(Row(f"layer.{i}", "KFAC", i / 10, i / 10, 8) for i in range(10))
    axes = Comparison(rows, {"KFAC": 1.0}).plot()
    assert torch.as_tensor(axes.lines[0].get_ydata()).tolist() == [i / 10 for i in range(10)]
    assert axes.get_xticklabels()[0].get_rotation() == 90
    long = Comparison((Row("a_layer_with_a_long_name", "KFAC", 0.5, 0.5, 8),), {"KFAC": 1.0}).plot()
    assert long.get_xticklabels()[0].get_rotation() == 30


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    monkeypatch.delattr("matplotlib.pyplot", raising=False)
    with pytest.raises(ModelError, match=r"matplotlib is not installed.*pip install matplotlib"):
        kfs.KFAC(small_risk()).plot()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModelError, match=r"matplotlib is not installed"):
        kfs.KFAC(small_risk()).plot_spectrum()


def test_layers_of_one_kind_have_different_labels() -> None:
    """Layer numbers in the middle of names are kept."""
    names = [
        f"bert.encoder.layer.{layer}.attention.{place}"
        for layer in range(12)
        for place in ("self.query", "self.key", "output.LayerNorm.weight", "output.LayerNorm.bias")
    ]
    labels = [short(name) for name in names]
    assert len(set(labels)) == len(names)
    assert max(map(len, labels)) <= 32


def test_every_plot_says_what_its_axes_and_lines_are() -> None:
    """Numeric axes have labels, several lines or bars have a legend, and matrices have a color bar."""
    risk = small_risk()
    K = kfs.KFAC(risk)
    plots = {
        "spectra": K.plot_spectrum(damping=0.1),
        "density": spectral_density(kfs.Hessian(risk), num_vectors=1).plot(),
        "residuals": solve(kfs.GGN(risk).shift(0.1), risk.gradient()).plot(),
        "errors": kfs.compare(risk).plot(),
    }
    for name, axes in plots.items():
        assert axes.get_xlabel(), name
        assert axes.get_ylabel(), name
        legend = axes.get_legend()
        assert legend is not None, name
        # Dashed lines have the color of a solid one; the axis says what they are.
        assert len(legend.get_texts()) >= sum(line.get_linestyle() != "--" for line in axes.lines), name
    layers, operations = kfs.inspect(risk.model, torch.zeros(1, 4, dtype=torch.float64)).plot()
    assert layers.get_ylabel() == "layer"
    assert "operations" in operations.get_title()
    (matrix,) = kfs.GGN(risk).plot()
    assert "positive" in matrix.get_xlabel()
    figure = K.plot()[0].get_figure()
    assert figure is not None
    assert "positive" in figure.get_supxlabel()
