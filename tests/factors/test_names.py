"""Names of arguments: few are positional, wrong ones are refused, and each name has one meaning."""

import pydoc
import re
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kfs import optim
from kfs.errors import DtypeError, LossError
from kfs.factors import EKFAC, KFAC, exact_blocks
from kfs.factors.loading import load
from kfs.factors.settings import Advanced
from kfs.operators import GGN, Fisher
from kfs.problem.risk import EmpiricalRisk
from tests.operators.contract import close
from tests.operators.problems import PROBLEMS


def test_few_arguments_come_first_and_the_others_are_advanced() -> None:
    """The signature has at most eight arguments; all others are documented as advanced."""
    parameters = signature(KFAC).parameters
    assert [p.kind.name for p in parameters.values()].count("VAR_KEYWORD") == 1
    assert len(parameters) - 1 <= 8
    args, _, rest = (KFAC.__doc__ or "").partition("    Advanced:\n")
    advanced = rest.partition("    Attributes:\n")[0]
    assert re.findall(r"^        (\w+): ", args.partition("    Args:\n")[2], re.MULTILINE) == list(parameters)[:-1]
    assert re.findall(r"^        (\w+): ", advanced, re.MULTILINE) == list(Advanced.__annotations__)
    shown = help_of(KFAC).partition("Advanced:")[0]
    assert len(shown.splitlines()) < 45
    assert "replay" not in shown


def help_of(cls: type) -> str:
    return pydoc.plain(pydoc.render_doc(cls))


def test_arguments_that_do_not_exist() -> None:
    risk, *_ = PROBLEMS[0].make()
    for make in (KFAC, EKFAC):
        with pytest.raises(TypeError, match=r"KFAC has no argument 'max_dims'. Did you mean 'max_dim'\?"):
            make(risk, max_dims=3)  # type: ignore[call-arg]
        with pytest.raises(DtypeError, match=r"no argument 'zzz'.*mc_samples.*factor_dtype"):
            make(risk, zzz=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("mc_samples", [1, 3])
def test_monte_carlo_has_one_name_and_one_meaning(mc_samples: int) -> None:
    """The same labels are drawn for both; for one example, KFAC is the exact block of that Fisher."""
    settings: Any = {"mc_samples": mc_samples, "seed": 5}
    risk, *_ = PROBLEMS[1].make((2, 3))
    F = Fisher(risk, "mc", **settings)
    assert torch.equal(F.to_dense(), Fisher(risk, "type-1", **settings).to_dense())
    C = exact_blocks(risk, fisher="mc", **settings)
    for block in KFAC(risk).blocks.values():
        params = block.layout.params
        close(C.submatrix(params).to_dense(), F.submatrix(params).to_dense())
        assert (C.submatrix(params).to_dense() - GGN(risk).submatrix(params).to_dense()).norm() > 1e-3
    batch = next(iter(risk.batches()))
    one = EmpiricalRisk(risk.model, nn.CrossEntropyLoss(), (batch.x[:1], batch.y[:1]))
    K = KFAC(one, fisher="mc", **settings)
    for block in K.blocks.values():
        params = block.layout.params
        close(K.submatrix(params).to_dense(), Fisher(one, "mc", **settings).submatrix(params).to_dense())
    with pytest.raises(LossError, match=r"kind is 'ggn'.*'mc'.*use GGN"):
        Fisher(risk, "ggn")  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [KFAC, EKFAC, exact_blocks])
def test_type_1_is_another_name_for_mc(make: Any, tmp_path: Path) -> None:
    """Settings, descriptions and files use a single name."""
    risk, *_ = PROBLEMS[1].make((2, 3))
    drawn, same, other = (make(risk, fisher=fisher, seed=5) for fisher in ("mc", "type-1", "type-2"))
    assert torch.equal(drawn.to_dense(), same.to_dense())
    assert not torch.allclose(drawn.to_dense(), other.to_dense())
    assert str(drawn) == str(same)
    if make in {KFAC, EKFAC}:
        assert same.settings.fisher == "mc"
        same.save(tmp_path / "k.safetensors")
        loaded: Any = load(tmp_path / "k.safetensors")
        assert loaded.settings == drawn.settings
        assert "type-1" not in (tmp_path / "k.safetensors").read_bytes().decode("latin1")
    if make is KFAC:
        assert torch.allclose(drawn.merge(same).to_dense(), same.to_dense())


def test_type_1_in_the_optimizer() -> None:
    X, y = torch.randn(8, 3, dtype=torch.float64), torch.randint(2, (8,))
    weights = []
    for fisher in ("mc", "type-1"):
        torch.manual_seed(0)
        model, loss = nn.Linear(3, 2).double(), nn.CrossEntropyLoss()
        optimizer = optim.KFAC(model, loss, fisher=fisher)
        for _ in range(3):
            optimizer.zero_grad()
            loss(model(X), y).backward()
            optimizer.step()
        assert "fisher='mc'" in str(optimizer)
        weights.append(model.weight.detach())
    assert torch.equal(*weights)
