"""Names of arguments: few come first, wrong ones are refused, and one name has one meaning."""

import pydoc
import re
from inspect import signature
from typing import Any

import pytest
import torch
from torch import nn

from kfs.errors import DtypeError, LossError
from kfs.factors import EKFAC, KFAC, exact_blocks
from kfs.factors.settings import Advanced
from kfs.operators import GGN, Fisher
from kfs.problem.risk import EmpiricalRisk
from tests.operators.contract import close
from tests.operators.problems import PROBLEMS


def test_few_arguments_come_first_and_the_others_are_advanced() -> None:
    """The first screen of help has at most eight of them, and all that exist are documented."""
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
