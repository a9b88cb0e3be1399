"""The matrices of the synthetic figures against their definitions, and the figures' files."""

import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.basics.emp_fishers import vec_empirical_fisher
from kfs.basics.exact_fishers import vec_type1_fisher, vec_type2_fisher
from kfs.basics.flattening import VecFunction, cvec, rvec
from kfs.basics.ggns import vec_ggn
from kfs.basics.hessians import vec_hessian
from kfs.losses.draws import Draws
from kfs.plots import heatmaps, synthetic_fisher, synthetic_hessian, synthetic_kfac
from kfs.plots.heatmaps import blocks, problem, run, save
from kfs.problem.risk import EmpiricalRisk
from tests.factors.definition import definition
from tests.operators.contract import close

LOSS = nn.MSELoss()
few = pytest.fixture(scope="module", name="few")(lambda: problem(num_data=4))  # definitions loop over examples
flattenings = pytest.mark.parametrize(("flattening", "vec"), [("cvec", cvec), ("rvec", rvec)])
MODULES = [synthetic_hessian, synthetic_fisher, synthetic_kfac]


def network(risk: EmpiricalRisk) -> tuple[nn.Sequential, Tensor, Tensor]:
    (batch,) = risk.batches()
    assert isinstance(risk.model, nn.Sequential)
    return risk.model, batch.x, batch.y


def assemble(risk: EmpiricalRisk, block: Callable[[str, str], Tensor]) -> Tensor:
    return torch.cat([torch.cat([block(row, column) for column in risk.params], 1) for row in risk.params])


def expected(kind: str, risk: EmpiricalRisk, vec: VecFunction) -> Tensor:
    """A matrix by definition, block by block."""
    model, X, y = network(risk)
    if kind in {"Hessian", "GGN"}:
        f = model(X)
        c, p = LOSS(f, y), dict(model.named_parameters())
        if kind == "Hessian":
            return assemble(risk, lambda row, column: vec_hessian(c, p[row], p[column], vec=vec))
        return assemble(risk, lambda row, column: vec_ggn(c, f, p[row], p[column], vec=vec))
    fisher = {"type-1": vec_type1_fisher, "type-2": vec_type2_fisher, "empirical": vec_empirical_fisher}[kind]
    return assemble(risk, lambda row, column: fisher(model, LOSS, X, y, (row, column), vec=vec))


def diagonal(matrix: Tensor, risk: EmpiricalRisk, params: int) -> Tensor:
    """Keep the diagonal blocks with these numbers of parameters."""
    sizes = list(blocks(risk).values())
    sizes = [sum(sizes[i : i + params]) for i in range(0, len(sizes), params)]
    mask: Tensor = torch.block_diag(*(torch.ones(d, d, dtype=matrix.dtype) for d in sizes))
    return matrix * mask


def vectors(kind: str, risk: EmpiricalRisk, mc_samples: int) -> Tensor:
    """The backpropagated vectors, `[V, N, C]`, for the criterion `(f - y)^2 / 2`."""
    model, X, y = network(risk)
    f: Tensor = model(X).detach()
    if kind == "type-2":
        return torch.eye(3, dtype=f.dtype).unsqueeze(1).expand(3, *f.shape)
    if kind == "empirical":
        return torch.sub(f, y).unsqueeze(0)
    draws = [risk.loss.sampled_gradient(f, y, Draws(0, 0, m)) for m in range(mc_samples)]
    return torch.stack(draws).div(mc_samples**0.5)


def layers(risk: EmpiricalRisk, backpropagated: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Inputs with an appended one, `[N, d_A]`, and gradients, `[V, N, d_B]`, of every linear layer."""
    model, x, _ = network(risk)
    inputs, outputs = [], []
    for module in model:
        if isinstance(module, nn.Linear):
            inputs.append(torch.cat([x, torch.ones_like(x[:, :1])], 1).detach())
            outputs.append(module(x))
        x = outputs[-1] if isinstance(module, nn.Linear) else module(x)
    gradients = [torch.autograd.grad(x, outputs, v, retain_graph=True) for v in backpropagated]
    return list(zip(inputs, map(torch.stack, zip(*gradients, strict=True)), strict=True))


def ordered(A: Tensor, B: Tensor, flattening: str) -> Tensor:
    """The Kronecker product of a layer's factors, for its weight and then its bias."""
    if flattening == "cvec":
        return torch.kron(A, B)
    places = torch.arange(len(A) * len(B)).reshape(len(B), len(A))
    order = torch.cat([places[:, :-1].flatten(), places[:, -1]])
    return torch.kron(B, A)[order][:, order]


@flattenings
def test_hessian(few: EmpiricalRisk, flattening: str, vec: VecFunction) -> None:
    shown = synthetic_hessian.data(flattening, few)
    H, G = expected("Hessian", few, vec), expected("GGN", few, vec)
    close(shown["Hessian"], H)
    close(shown["GGN"], G)
    close(shown["Hessian, block-diagonal"], diagonal(H, few, 1))
    close(shown["GGN, block-diagonal"], diagonal(G, few, 1))
    assert len(shown) == 4


def test_hessian_and_ggn_differ_only_beside_the_diagonal_blocks() -> None:
    shown = synthetic_hessian.data("rvec")
    difference = shown["Hessian"] - shown["GGN"]
    assert difference.norm() > 0.3 * shown["GGN"].norm()
    close(diagonal(difference, problem(), 2), torch.zeros_like(difference))
    assert torch.linalg.eigvalsh(shown["Hessian"]).min() < -0.1
    assert torch.linalg.eigvalsh(shown["GGN"]).min() > -1e-12


@flattenings
def test_fisher(few: EmpiricalRisk, flattening: str, vec: VecFunction) -> None:
    shown = synthetic_fisher.data(flattening, few)
    G = expected("GGN", few, vec)
    close(shown["GGN"], G)
    close(shown["GGN, block-diagonal"], diagonal(G, few, 1))
    close(shown["Fisher, exact (type II)"], expected("type-2", few, vec))
    close(shown["Fisher, exact (type II)"], expected("type-1", few, vec))
    close(shown["empirical Fisher"], expected("empirical", few, vec))
    for title, mc_samples in (("1 sample", 1), ("100 samples", 100)):
        parts = layers(few, vectors("mc", few, mc_samples))
        columns = [
            torch.stack([vec(torch.outer(g[v, n], x[n, :-1])) for v in range(len(g)) for n in range(len(x))])
            if leaf == "weight"
            else g.flatten(0, 1)
            for x, g in parts
            for leaf in ("weight", "bias")
        ]
        per_datum = torch.cat(columns, 1)
        close(shown[f"Monte Carlo Fisher, {title}"], few.reduction_factor * per_datum.T @ per_datum)
    assert len(shown) == 6


def test_more_samples_are_closer_and_the_empirical_fisher_is_not() -> None:
    shown = synthetic_fisher.data("cvec")
    error = {title: ((M - shown["GGN"]).norm() / shown["GGN"].norm()).item() for title, M in shown.items()}
    assert error["Fisher, exact (type II)"] < 1e-12
    assert error["Monte Carlo Fisher, 100 samples"] < 0.1
    assert error["Monte Carlo Fisher, 1 sample"] > 3 * error["Monte Carlo Fisher, 100 samples"]
    assert error["empirical Fisher"] > 0.5


def test_convergence() -> None:
    samples = (1, 4, 16, 64)
    before = torch.get_rng_state()
    errors = synthetic_fisher.convergence(samples, seeds=10)
    assert torch.equal(torch.get_rng_state(), before)
    assert errors.shape == (10, 4)
    shown = synthetic_fisher.data("rvec")
    residual = shown["Monte Carlo Fisher, 1 sample"] - shown["GGN"]
    norm = torch.linalg.eigvalsh(residual).abs().max() / torch.linalg.eigvalsh(shown["GGN"]).abs().max()
    close(errors[0, 0], norm)
    log_M, log_error = torch.tensor(samples, dtype=torch.float64).log(), errors.mean(0).log()
    slope = torch.stack([log_M, log_error]).cov()[0, 1] / log_M.var()
    # Ten runs with errors of some 40 percent: 0.13 for each mean, 0.04 for the slope over a factor 64.
    assert abs(slope.item() + 0.5) < 0.1


@flattenings
def test_kfac(few: EmpiricalRisk, flattening: str, vec: VecFunction) -> None:
    shown = synthetic_kfac.data(flattening, few)
    model, X, y = network(few)
    full = {"GGN": expected("GGN", few, vec), "empirical Fisher": expected("empirical", few, vec)}
    full["Monte Carlo Fisher"] = synthetic_fisher.data(flattening, few)["Monte Carlo Fisher, 100 samples"]
    for title, kind in (("GGN", "type-2"), ("Monte Carlo Fisher", "mc"), ("empirical Fisher", "empirical")):
        close(shown[title], full[title])
        close(shown[f"{title}, layer blocks"], diagonal(full[title], few, 2))
        parts = layers(few, vectors(kind, few, synthetic_kfac.MC_SAMPLES))
        factors = [(few.reduction_factor * x.T @ x, torch.einsum("vni,vnj->ij", g, g) / len(X)) for x, g in parts]
        close(shown[f"KFAC of the {title}"], torch.block_diag(*(ordered(A, B, flattening) for A, B in factors)))
    literal = [
        definition(model, LOSS, X, y, layer, "expand", few.reduction_factor)
        for layer in model
        if isinstance(layer, nn.Linear)
    ]
    dense = torch.block_diag(*(ordered(A.squeeze(0), B.squeeze(0), flattening) for A, B in literal))
    close(shown["KFAC of the GGN"], dense)
    assert len(shown) == 9


def test_kfac_is_exact_in_the_last_layer_only() -> None:
    """Its gradients are equal for all examples, so averaging them separately from the inputs is exact."""
    shown = synthetic_kfac.data("rvec")
    exact, approximation = shown["GGN, layer blocks"], shown["KFAC of the GGN"]
    close(approximation[-15:, -15:], exact[-15:, -15:])
    for part in (slice(0, 24), slice(24, 44)):
        assert (approximation - exact)[part, part].norm() > 0.1 * exact[part, part].norm()


@pytest.mark.parametrize("module", MODULES)
def test_flattenings_are_reorderings_and_differ(few: EmpiricalRisk, module: ModuleType) -> None:
    columns, rows = module.data("cvec", few), module.data("rvec", few)
    places = torch.arange(59).split(list(blocks(few).values()))
    order = torch.cat([cvec(i.reshape(p.shape)) for i, p in zip(places, few.params.values(), strict=True)])
    for title, matrix in columns.items():
        assert matrix.dtype == torch.float64
        close(matrix, rows[title][order][:, order])
        assert not torch.allclose(matrix, rows[title])


@pytest.mark.parametrize("module", MODULES)
def test_files(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = module.__name__.rpartition(".")[2]
    small: dict[str, Any] = {"samples": (1, 2), "seeds": 2} if name == "synthetic_fisher" else {}
    before = torch.get_rng_state()
    once = module.draw(tmp_path / "a", ("svg",), **small)
    endings = ["cvec", "rvec", "convergence"] if small else ["cvec", "rvec"]
    assert once == [tmp_path / "a" / f"{name}_{ending}.svg" for ending in endings]
    assert once[0].read_bytes() != once[1].read_bytes()

    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    monkeypatch.setattr(heatmaps, "run", lambda draw: run(partial(draw, **small)))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(module.__file__), run_name="__main__")
    assert torch.equal(torch.get_rng_state(), before)
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"{name}_{ending}.{kind}" for ending in endings for kind in ("png", "svg")]
    assert all(Path(path).stat().st_size > 1000 for path in printed)
    for path in once:
        assert Path(path.name).read_bytes() == path.read_bytes()


def test_figure_of_the_convergence_shows_the_errors(tmp_path: Path) -> None:
    samples, errors = (1, 4), torch.tensor([[1.0, 0.4], [0.6, 0.4]], dtype=torch.float64)
    figures = [synthetic_fisher.draw_convergence(samples, errors) for _ in range(2)]
    drawn = torch.stack([torch.as_tensor(line.get_ydata()) for line in figures[0].axes[0].lines])
    mean = errors.mean(0, keepdim=True)
    close(drawn, torch.cat([errors, mean, mean]))  # these decrease like one over the square root
    paths = [save(figure, tmp_path / str(i), "name", ("svg",))[0] for i, figure in enumerate(figures)]
    assert paths[0].read_bytes() == paths[1].read_bytes()
