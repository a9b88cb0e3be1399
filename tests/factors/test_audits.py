"""When audits run, what they report, and that they leave no state behind; for KFAC, `inspect` and the optimizer."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs import optim
from kfs.conformance.checks import fingerprint
from kfs.errors import ModelError
from kfs.factors import EKFAC, KFAC, inspect
from kfs.factors.audit import Audit
from kfs.factors.audit.audit import FEW
from kfs.problem.risk import EmpiricalRisk
from tests.factors.arrangements import normal

LOSS = nn.CrossEntropyLoss()
MANY = 2 * FEW + 1


class Counted(nn.Module):
    """Counts its calls in a list, which is not restored."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        result: Tensor = self.layers(x)
        return result

    def calls_of(self, action: Callable[[], Any]) -> int:
        """Return how often a function calls the model."""
        self.sizes.clear()
        action()
        return len(self.sizes)


def mlp() -> Counted:
    return Counted(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def risk_of(model: nn.Module, num_data: int = MANY, *shape: int, **settings: Any) -> EmpiricalRisk:
    X = normal(num_data, *shape, 4)
    y = normal(num_data, *shape, 3) if shape else torch.arange(num_data) % 3
    return EmpiricalRisk(model, nn.MSELoss() if shape else LOSS, (X, y), **settings)


class TestWhen:
    """One audit per model and shape."""

    def test_once(self) -> None:
        model = mlp()
        assert model.calls_of(lambda: KFAC(risk_of(model))) > 1
        assert model.calls_of(lambda: KFAC(risk_of(model))) == 1
        assert model.calls_of(lambda: KFAC(risk_of(model), "empirical", "reduce")) == 1
        assert model.calls_of(lambda: EKFAC(risk_of(model))) == 2  # two passes over the data
        assert model.calls_of(lambda: inspect(model, normal(MANY, 4))) == 1

    def test_it_looks_at_a_few_data(self) -> None:
        model = mlp()
        KFAC(risk_of(model))
        assert sorted(model.sizes)[-1] == MANY
        assert all(size <= FEW for size in sorted(model.sizes)[:-1])

    def test_other_numbers_of_data_are_no_other_shape(self) -> None:
        model = mlp()
        KFAC(risk_of(model, MANY))
        for num_data in (1, 2, FEW, 3 * FEW):
            assert model.calls_of(lambda n=num_data: KFAC(risk_of(model, n))) == 1  # type: ignore[misc]

    def test_one_datum_does_not_tell_about_several(self) -> None:
        model = mlp()
        assert model.calls_of(lambda: KFAC(risk_of(model, 1))) > 1
        assert model.calls_of(lambda: KFAC(risk_of(model, 1))) == 1
        assert model.calls_of(lambda: KFAC(risk_of(model, 2))) > 1
        assert model.calls_of(lambda: KFAC(risk_of(model, 1))) == 1

    def test_every_shape(self) -> None:
        model = mlp()
        for shape in ((), (2,), (6,), (2, 2)):
            assert model.calls_of(lambda shape=shape: KFAC(risk_of(model, MANY, *shape))) > 1  # type: ignore[misc]
            assert model.calls_of(lambda shape=shape: KFAC(risk_of(model, MANY, *shape))) == 1  # type: ignore[misc]
        report = KFAC(risk_of(model)).audit
        assert report is not None
        assert report.shapes == 1

    def test_batches_of_several_shapes(self) -> None:
        model = mlp()
        data = [(normal(3, *shape, 4), normal(3, *shape, 3)) for shape in ((), (2,), (6,), (2,))]
        assert model.calls_of(lambda: KFAC(EmpiricalRisk(model, nn.MSELoss(), data))) > 4 + 3
        report = KFAC(EmpiricalRisk(model, nn.MSELoss(), data)).audit
        assert report is not None
        assert report.shapes == 3

    @pytest.mark.parametrize(
        "change",
        [
            lambda model: model.layers.__setitem__(1, nn.ReLU()),
            lambda model: model.layers.append(nn.Identity()),
            lambda model: model.layers[1].eval(),
            lambda model: model.get_parameter("layers.0.weight").requires_grad_(False),
            lambda model: model.float(),
        ],
        ids=["another module", "one more module", "mode", "frozen", "precision"],
    )
    def test_a_model_that_has_changed(self, change: Callable[[Counted], Any]) -> None:
        model = mlp()
        KFAC(risk_of(model))
        change(model)
        dtype = next(model.parameters()).dtype
        X, y = normal(MANY, 4).to(dtype), torch.arange(MANY) % 3
        assert model.calls_of(lambda: KFAC(EmpiricalRisk(model, LOSS, (X, y)))) > 1

    def test_new_values_of_parameters_change_nothing(self) -> None:
        model = mlp()
        KFAC(risk_of(model))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
        assert model.calls_of(lambda: KFAC(risk_of(model))) == 1

    def test_other_parameters_and_other_settings(self) -> None:
        model = mlp()
        KFAC(risk_of(model))
        assert model.calls_of(lambda: KFAC(risk_of(model, params=["layers.0.weight"]))) > 1
        assert model.calls_of(lambda: KFAC(risk_of(model), joint_bias=False)) > 1
        with torch.autocast("cpu", torch.bfloat16):
            assert model.calls_of(lambda: KFAC(risk_of(model))) > 1
            assert model.calls_of(lambda: KFAC(risk_of(model))) == 1

    def test_never(self) -> None:
        model = mlp()
        assert model.calls_of(lambda: KFAC(risk_of(model), audit=False)) == 1
        assert model.calls_of(lambda: EKFAC(risk_of(model), audit=False)) == 2
        assert model.calls_of(lambda: inspect(model, normal(MANY, 4), audit=False)) == 1
        assert model.calls_of(lambda: KFAC(risk_of(model))) > 1

    def test_a_failed_audit_fails_again(self) -> None:
        model = Counted(nn.Linear(4, 3)).double()
        model.register_forward_hook(lambda _, __, f: f - f.mean(0))
        for _ in range(2):
            with pytest.raises(ModelError, match="Examples mix"):
                KFAC(risk_of(model))

    def test_a_copy_is_another_model(self) -> None:
        model = mlp()
        KFAC(risk_of(model))
        other = copy.deepcopy(model)
        assert other.calls_of(lambda: KFAC(risk_of(other))) > 1

    def test_models_are_not_kept_alive(self) -> None:
        model = mlp()
        reference = weakref.ref(model)
        KFAC(risk_of(model))
        del model
        gc.collect()
        assert reference() is None


def train(model: nn.Module, optimizer: Any, num_data: int = MANY) -> None:
    """Take one step."""
    optimizer.zero_grad()
    LOSS(model(normal(num_data, 4)), torch.arange(num_data) % 3).backward()
    optimizer.step()


class TestOptimizer:
    """The model is called a few more times in the first watched pass, and in no other."""

    def test_once(self) -> None:
        model = mlp()
        optimizer = optim.KFAC(model, LOSS, factors_every=1)
        assert optimizer.audit is None
        assert model.calls_of(lambda: train(model, optimizer)) > 1
        assert optimizer.audit is not None
        assert model.calls_of(lambda: train(model, optimizer)) == 1
        assert model.calls_of(lambda: train(model, optimizer, FEW)) == 1

    def test_never(self) -> None:
        model = mlp()
        optimizer = optim.KFAC(model, LOSS, audit=False)
        assert model.calls_of(lambda: train(model, optimizer)) == 1
        assert optimizer.audit is None

    def test_only_passes_that_are_watched(self) -> None:
        model = mlp()
        optimizer = optim.KFAC(model, LOSS)
        with torch.no_grad():
            assert model.calls_of(lambda: model(normal(MANY, 4))) == 1
        assert optimizer.audit is None

    def test_dropout_and_batch_norm(self) -> None:
        """Training may mix data and draw random numbers; the user's pass draws the same numbers as without an audit."""
        torch.manual_seed(0)
        model = Counted(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3)).double()
        watched = copy.deepcopy(model)
        optimizer = optim.KFAC(watched, LOSS)
        X = normal(MANY, 4)
        predictions = []
        for one in (model, watched):
            torch.manual_seed(1)
            predictions.append(one(X))
        assert len(watched.sizes) > 1
        assert torch.equal(predictions[0], predictions[1])
        for (name, b), other in zip(model.named_buffers(), watched.buffers(), strict=True):
            assert torch.equal(b, other), name
        assert optimizer.audit is not None


class Stateful(nn.Module):
    """Keeps its last activation and a counter in attributes, and has a buffer that it does not change."""

    def __init__(self, fails_after: int | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        self.register_buffer("scale", torch.ones(()))
        self.last: Tensor | None = None
        self.steps = 0
        self.called: list[int] = []
        self.fails_after = fails_after

    def forward(self, x: Tensor) -> Tensor:
        self.called.append(len(x))
        if self.fails_after is not None and len(self.called) > self.fails_after:
            raise RuntimeError("out of order")
        self.last = self.first(x).tanh()
        self.steps += 1
        result: Tensor = self.second(self.last) * self.scale
        return result


def mixes(model: nn.Module) -> None:
    model.register_forward_hook(lambda _, __, f: f - f.mean(0))


def nothing(_: nn.Module) -> None:
    pass


class TestNothingIsLeftBehind:
    """No state is left behind after an audit, a failed audit, or an error of the model during one."""

    @pytest.fixture(params=["kfac", "ekfac", "inspect"])
    def compute(self, request: pytest.FixtureRequest) -> Callable[[nn.Module], Any]:
        """Return a function that runs a computation with a model."""
        X, y = normal(MANY, 4), torch.arange(MANY) % 3
        computations: dict[str, Callable[[nn.Module], Any]] = {
            "kfac": lambda model: KFAC(EmpiricalRisk(model, LOSS, (X, y))),
            "ekfac": lambda model: EKFAC(EmpiricalRisk(model, LOSS, (X, y))),
            "inspect": lambda model: inspect(model, X),
        }
        return computations[request.param]

    @pytest.mark.parametrize("prepare", [nothing, mixes])
    @pytest.mark.parametrize("fails_after", [None, 0, 1, 2])
    def test_of_the_model(self, compute: Any, fails_after: int | None, prepare: Callable[[nn.Module], None]) -> None:
        model = Stateful(fails_after).double()
        model.second.bias.requires_grad_(False)
        model.first.eval()
        prepare(model)
        model.first.weight.register_hook(lambda g: 2 * g)
        before = fingerprint(model, with_random_state=True)
        try:
            compute(model)
        except (ModelError, RuntimeError) as error:
            assert fails_after is not None or prepare is mixes, error  # noqa: PT017
        assert fingerprint(model, with_random_state=True) == before
        assert torch.overrides._get_current_function_mode_stack() == []
        kept = model.last
        assert kept is None or not hasattr(kept, "_kfs_data")

    @pytest.mark.parametrize("fails_after", [None, 0, 1, 2])
    def test_in_training(self, fails_after: int | None) -> None:
        """Attributes are as if the model had been called once."""
        model, plain = Stateful().double(), Stateful().double()
        plain.load_state_dict(model.state_dict())
        optimizer = optim.KFAC(model, LOSS)
        model.fails_after = fails_after
        X = normal(MANY, 4)
        before = fingerprint(model, with_random_state=True)
        f = None
        try:
            f = model(X)
        except RuntimeError:
            assert fails_after is not None
        assert fingerprint(model, with_random_state=True) == before
        if f is None:
            assert model.steps == 0
            assert model.last is None
        else:
            assert torch.equal(f, plain(X))
            assert model.steps == 1
            assert model.last is not None
            assert len(model.last) == MANY
        model.fails_after = None
        LOSS(model(X), torch.arange(MANY) % 3).backward()  # later calls work as usual
        optimizer.step()


class TestReport:
    """The report `K.audit`."""

    def report(self) -> Audit:
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)).double()
        report = KFAC(risk_of(model, MANY, 2)).audit
        assert report is not None
        return report

    def test_contents(self) -> None:
        report = self.report()
        assert report.num_data == FEW
        assert report.shapes == 1
        assert 0 <= report.predictions <= report.tolerance < 1e-5
        assert list(report.gradients) == [f"{place}.{name}" for place in (0, 2, 3) for name in ("weight", "bias")]
        assert all(0 <= difference < 1e-10 for difference in report.gradients.values())
        uses = [(use.parameter, use.operation, use.rows) for use in report.uses]
        assert ("0.weight", "linear", "batch first") in uses
        assert ("2.weight", "layer_norm", "batch first") in uses
        assert all(use.mixing < 1e-6 for use in report.uses)

    def test_text(self) -> None:
        lines = str(self.report()).splitlines()
        assert lines[0] == f"audit of 6 parameters on {FEW} examples, 1 shape of inputs"
        assert all("differ by" in line for line in lines[1:3])
        assert "  0.weight: linear; batch first" in lines

    def test_rows(self) -> None:
        def rows(forward: Callable[[nn.Module, Tensor], Tensor], *shape: int) -> str:
            class Model(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.layer = nn.Linear(4, 3)

                def forward(self, x: Tensor) -> Tensor:
                    return forward(self.layer, x)

            model = Model().double()
            X = normal(FEW, *shape, 4)
            report = KFAC(EmpiricalRisk(model, LOSS, (X, torch.arange(FEW) % 3))).audit
            assert report is not None
            return report.uses[0].rows

        assert rows(lambda layer, x: layer(x)) == "one row per example"
        assert rows(lambda layer, x: layer(x).mean(1), 6) == "batch first"
        assert rows(lambda layer, x: layer(x.transpose(0, 1)).mean(0), 6) == "batch last"
        assert rows(lambda layer, x: layer(x[x[:, 0].argsort()])[x[:, 0].argsort().argsort()]) == (
            "rows are measured in every batch"
        )
        assert rows(lambda layer, x: layer(x).relu() * 0 + x[:, :3]) == "no gradient"
        folded = rows(lambda layer, x: layer(x.transpose(0, 1).reshape(-1, 2, 4)).view(3, -1, 2, 3).mean((0, 2)), 3, 2)
        assert folded == "2 of 6 rows of an example together"

    def test_inspection(self) -> None:
        """The report follows the table."""
        table = inspect(mlp(), normal(MANY, 4))
        assert table.audit is not None
        assert list(table.audit.gradients) == [row.parameter for row in table.rows]
        assert str(table).rstrip().endswith(str(table.audit))
        assert inspect(mlp(), normal(MANY, 4), audit=False).audit is None

    def test_functions(self) -> None:
        """A function of parameters is audited, too."""
        params = {"W": normal(4, 3)}
        data = (normal(MANY, 4), torch.arange(MANY) % 3)
        report = KFAC(EmpiricalRisk(lambda p, x: F.linear(x, p["W"].T), LOSS, data, params=params)).audit
        assert report is not None
        assert list(report.gradients) == ["W"]

    def test_eigenvalues_updates_and_files(self, tmp_path: Any) -> None:
        model = mlp()
        K = KFAC(risk_of(model))
        assert K.audit is not None
        K.update(risk_of(model))
        assert K.audit is not None
        assert K.audit.shapes == 1
        K.save(tmp_path / "k")
        assert EKFAC(risk_of(model)).audit is not None
