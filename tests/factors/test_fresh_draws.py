"""EKFAC with Monte Carlo draws: eigenvalues use other draws than eigenvectors, and are right on average."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs import EKFAC, GGN, KFAC, EmpiricalRisk, Fisher
from kfs.errors import ModelError, StorageError
from kfs.factors import Checkpoint
from kfs.factors.settings import Settings
from tests.factors.definition import fresh_fisher
from tests.operators.contract import close


def risk_of(part: slice = slice(None), num_data: int = 12) -> EmpiricalRisk:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    X, y = torch.randn(num_data, 4, dtype=torch.float64), torch.randint(4, (num_data,))
    return EmpiricalRisk(model, nn.CrossEntropyLoss(), (X[part], y[part]))


def smallest_half(values: Tensor, vectors: Tensor, C: Tensor) -> Tensor:
    """Sum the curvature along the eigenvectors of the smallest half of all eigenvalues."""
    order = values.argsort()[: len(values) // 2]
    return (vectors.T @ C @ vectors).diagonal()[order].sum()


def test_small_eigenvalues_are_right_on_average() -> None:
    """One draw per example, for few examples. With the draws of the factors, they are several times too small.

    Eigenvectors belong to drawn factors. Along them, draws have the curvature of the type-2 Fisher on average.
    """
    risk = risk_of(num_data=6)
    exact = GGN(risk).to_dense()
    fresh, same = [], []
    for seed in range(40):
        K, E = (make(risk, "mc", seed=seed) for make in (KFAC, EKFAC))
        values, Q = K.eigh()
        vectors = Q.to_dense()
        truth = smallest_half(values, vectors, exact)
        fresh.append(smallest_half(values, vectors, E.to_dense()) / truth)
        same.append(smallest_half(values, vectors, Fisher(risk, "type-1", seed=seed).to_dense()) / truth)
    ratios = torch.stack(fresh)
    error = float(ratios.std() / len(ratios) ** 0.5)
    assert error < 0.1
    assert abs(float(ratios.mean()) - 1) < 3 * error
    assert float(torch.stack(same).mean()) < 0.4


@pytest.mark.parametrize("mc_samples", [1, 3])
def test_draws_are_those_after_the_factors(mc_samples: int) -> None:
    """They depend on the number of the example, not on batches or on the order in which data are added."""
    settings: dict[str, Any] = {"fisher": "mc", "mc_samples": mc_samples, "seed": 5}
    risk = risk_of()
    K, E = KFAC(risk, **settings), EKFAC(risk, **settings)
    Q = K.eigh()[1].to_dense()
    for exact, right in (
        (fresh_fisher(risk, mc_samples, 5), True),
        (Fisher(risk, "type-1", mc_samples=mc_samples, seed=5), False),
    ):
        diagonal = (Q.T @ exact.to_dense() @ Q).diagonal()
        assert torch.allclose(E.to_dense(), Q @ diagonal.diag() @ Q.T) == right
    for name, block in K.blocks.items():
        assert torch.equal(E.blocks[name].B, block.B)
    close(EKFAC.from_kfac(K, risk).to_dense(), E.to_dense())
    updated = EKFAC.from_kfac(K, risk_of(slice(0, 5))).update(risk_of(slice(5, 12)))
    close(updated.to_dense(), E.to_dense())
    assert E.settings == K.settings == updated.settings


def test_files_continue_with_the_same_draws(tmp_path: Path) -> None:
    E = EKFAC(risk_of(slice(0, 5)), "mc")
    E.save(tmp_path / "e")
    loaded = kfs.load(tmp_path / "e")
    assert isinstance(loaded, EKFAC)
    close(loaded.update(risk_of(slice(5, 12))).to_dense(), E.update(risk_of(slice(5, 12))).to_dense())


def test_checkpoints_of_eigenvalues_from_the_draws_of_factors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not resumed, but those without draws are."""
    risk = risk_of()
    with monkeypatch.context() as earlier:
        earlier.setattr(Settings, "with_fresh_draws", lambda self: self)
        for fisher in ("mc", "type-2", "empirical"):
            EKFAC(risk, fisher, checkpoint=Checkpoint(tmp_path / fisher))
    with pytest.raises(StorageError, match=r"mc\.eigenvalues belongs to another computation: settings differ"):
        EKFAC(risk, "mc", checkpoint=tmp_path / "mc")
    for fisher in ("type-2", "empirical"):
        resumed = EKFAC(risk, fisher, checkpoint=tmp_path / fisher)  # type: ignore[arg-type]
        close(resumed.to_dense(), EKFAC(risk, fisher).to_dense())  # type: ignore[arg-type]
    (tmp_path / "mc.eigenvalues").unlink()
    for _ in range(2):
        close(EKFAC(risk, "mc", checkpoint=tmp_path / "mc").to_dense(), EKFAC(risk, "mc").to_dense())


def test_settings() -> None:
    settings = Settings(fisher="mc", mc_samples=3)
    assert "first_sample" not in settings.state()
    fresh = settings.with_fresh_draws()
    assert fresh == replace(settings, first_sample=3)
    for one in (settings, fresh):
        assert Settings.from_state(one.state()) == one
    assert Settings().with_fresh_draws() == Settings()
    with pytest.raises(ModelError, match="first_sample is -1"):
        Settings(first_sample=-1)
