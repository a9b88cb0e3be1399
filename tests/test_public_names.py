"""Names in `kfs`, the time to import it, and errors about names that do not exist."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import kfs
from kfs.errors import ModelError, ShapeError, UnknownNameError

SLOW = ("matplotlib", "rich", "scipy", "typer")


def in_new_process(program: str) -> str:
    """Run a program, and return its output."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_nothing_slow_is_imported() -> None:
    """Names are imported on first use; SciPy and other packages when a function needs them."""
    program = f"""
import sys
import kfs
print("torch" in sys.modules)
kfs.KFAC, kfs.EKFAC, kfs.GGN, kfs.optim.KFAC, kfs.inspect, kfs.compare, kfs.merge, kfs.operators.solve
print([name for name in {SLOW} if name in sys.modules])
"""
    assert in_new_process(program).splitlines() == ["False", "[]"]


def test_import_takes_no_time() -> None:
    """The limit is a tenth of a second in addition to PyTorch, far more than the import takes."""
    program = "import time, torch; start = time.perf_counter(); import kfs; print(time.perf_counter() - start)"
    assert float(in_new_process(program)) < 0.1


def test_only_public_names_are_listed() -> None:
    assert set(dir(kfs)) == {
        *kfs.__all__,
        "basics",
        "compress",
        "distributed",
        "laplace",
        "losses",
        "operators",
        "optim",
        "pinn",
    }
    assert all(getattr(kfs, name) is not None for name in dir(kfs))
    assert kfs.problem.risk.EmpiricalRisk is kfs.EmpiricalRisk  # other modules are available, too


def test_names_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KFACC", "_KFAC"):
        with pytest.raises(AttributeError, match=f"kfs has no '{name}'. Did you mean 'KFAC'"):
            getattr(kfs, name)
    for name in ("Kfac", "kfAc", "KFac"):  # `kfs.factors` is a package
        with pytest.raises(AttributeError, match=f"kfs has no '{name}'. Did you mean 'KFAC'?"):
            getattr(kfs, name)
    for name, meant in (("ekfac", "EKFAC"), ("ggn", "GGN"), ("Ekfacs", "EKFAC"), ("empirical_risk", "EmpiricalRisk")):
        with pytest.raises(AttributeError, match=f"kfs has no '{name}'. Did you mean .*'{meant}'"):
            getattr(kfs, name)
    assert not hasattr(kfs, "nothing")
    monkeypatch.setitem(sys.modules, "typer", None)  # a module needs a missing package
    monkeypatch.delitem(sys.modules, "kfs.cli", raising=False)
    with pytest.raises(ModuleNotFoundError, match="typer"):
        kfs.__getattr__("cli")


def test_load_is_a_function() -> None:
    risk, _ = many_layers()
    for cls in (kfs.KFAC, kfs.EKFAC):
        with pytest.raises(AttributeError, match=rf"{cls.__name__} has no 'load'\. Use kfs\.load\(path\)"):
            cls.load("k.safetensors")
    with pytest.raises(AttributeError, match=r"BlockDiagonal has no 'load'\. Use kfs\.load"):
        kfs.KFAC(risk).inverse(1.0).load("k.safetensors")
    assert not hasattr(kfs.KFAC, "load")


def many_layers() -> tuple[kfs.EmpiricalRisk, list[str]]:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(12)]).double()
    data = torch.randn(3, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    risk = kfs.EmpiricalRisk(model, nn.MSELoss(), data)
    return risk, list(risk.params)


def test_errors_suggest_similar_names() -> None:
    """The error does not list forty names, but the most similar one."""
    risk, names = many_layers()
    K = kfs.KFAC(risk)
    with pytest.raises(UnknownNameError, match=r"There is no block '11\.weigth'\. There are 12, such as '0', '1', "):
        K.blocks["11.weigth"]
    with pytest.raises(KeyError, match="There is no block"):  # the error of any dictionary
        K.inverse(1.0).structures["x"]
    assert K.blocks.get("x") is None
    assert "x" not in K.blocks
    with pytest.raises(ModelError, match=r"no parameters \['11\.weigth'\]\. Did you mean '11\.weight', "):
        kfs.EmpiricalRisk(risk.model, nn.MSELoss(), (torch.zeros(1, 2), torch.zeros(1, 2)), params=["11.weigth"])
    with pytest.raises(ModelError, match=r"Did you mean '3\.bias'"):
        K.submatrix(["3.bais"])
    gradient = risk.gradient()
    wrong = {name.replace("11.bias", "11.bais"): t for name, t in gradient.items()}
    with pytest.raises(ShapeError, match=r"lacks '11\.bias', and has '11\.bais' too many.*Did you mean '11\.bias'\?$"):
        K @ wrong
    with pytest.raises(ShapeError, match=r"lacks 24, such as '0\.weight'.* has nothing too many\. Give .*\.$"):
        K @ {}
    with pytest.raises(ModelError, match=r"damping lacks the blocks '11', and has '111' too many.*Did you mean '11'\?"):
        K.inverse({str(i): 1.0 for i in range(11)} | {"111": 1.0})
    with pytest.raises(ModelError, match=r"sharing has unknown names \['3\.weigth'\]\. Did you mean '3\.weight'"):
        kfs.KFAC(risk, sharing={"3.weigth": "reduce"})
    assert len(names) == 24
