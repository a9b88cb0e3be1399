"""The optimizer in one file, `examples/kfac_in_one_file.py`: its factors are the engine's, its steps `kfs.optim`'s."""

import ast
import copy
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import kfs
from examples import kfac_in_one_file as one_file
from kfs.optim import KFAC
from tests.optim.training import train, weights

FILE = Path(one_file.__file__)
Batch = tuple[Tensor, Tensor]
LOSS = nn.CrossEntropyLoss()


def mlp() -> nn.Module:
    """Return linear layers, with and without bias, wide and narrow."""
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 8, bias=False), nn.Tanh(), nn.Linear(8, 3)).double()


def cnn() -> nn.Module:
    """Return convolutions with stride, padding and dilation, and activations that change outputs in place."""
    first = nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2))
    second = nn.Conv2d(3, 4, 2, dilation=2, bias=False)
    return nn.Sequential(first, nn.ReLU(inplace=True), second, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)).double()


class Words(nn.Module):
    """Applies a linear layer at every position, and averages over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        result: Tensor = self.head(torch.tanh(self.inner(x)).mean(1))
        return result


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (mlp, (6,)),
    "convolution": (cnn, (2, 7, 6)),
    "positions": (lambda: Words().double(), (4, 4)),
}


def made(name: str, steps: int = 1) -> tuple[nn.Module, list[Batch]]:
    """Return a model and batches."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    batches = [(torch.randn(9, *shape, dtype=torch.float64), torch.randint(3, (9,))) for _ in range(steps)]
    model(batches[0][0])  # Lazy layers learn their sizes.
    return model, batches


def steps_of_one_file(model: nn.Module, optimizer: one_file.KFAC, batches: list[Batch], every: int = 1) -> list[Tensor]:
    """Take one step per batch, and return the parameters after each step."""
    result = []
    for t, (X, y) in enumerate(batches):
        optimizer.zero_grad()
        f = model(X)
        if t % every == 0:
            optimizer.update_factors(f, y)
        F.cross_entropy(f, y).backward()
        optimizer.step()
        result.append(weights(model))
    return result


def factors(model: nn.Module, batch: Batch, fisher: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the factors of the one file, by the name of the weight."""
    optimizer = one_file.KFAC(model, fisher=fisher)
    optimizer.update_factors(model(batch[0]), batch[1])
    found = {name: optimizer.state[p] for name, p in model.named_parameters()}
    return {name: (state["A"], state["B"]) for name, state in found.items() if state}


def engine(model: nn.Module, batch: Batch, fisher: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the factors of the engine, by the name of the weight."""
    K = kfs.KFAC(kfs.EmpiricalRisk(model, LOSS, batch), fisher=fisher)
    return {block.layout.weight: (block.A, block.B) for block in K.blocks.values()}


def assert_same(found: dict[str, tuple[Tensor, Tensor]], expected: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Compare factors of all layers."""
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("fisher", ["empirical", "type-2"])
@pytest.mark.parametrize("name", MODELS)
def test_factors_are_the_engines(name: str, fisher: str) -> None:
    model, (batch,) = made(name)
    expected = engine(model, batch, fisher)
    assert_same(factors(model, batch, fisher), expected)


@pytest.mark.parametrize("name", MODELS)
def test_factors_with_drawn_labels(name: str) -> None:
    """The factors are those of the empirical Fisher with the drawn labels."""
    model, (batch,) = made(name)
    torch.manual_seed(1)
    drawn = torch.multinomial(model(batch[0]).detach().softmax(1), 1).squeeze(1)
    assert not torch.equal(drawn, batch[1])
    expected = engine(model, (batch[0], drawn), "empirical")
    torch.manual_seed(1)
    assert_same(factors(model, batch, "mc"), expected)


def test_labels_are_drawn_from_the_models_likelihood() -> None:
    """The average of the vectors' outer products over draws is the Fisher matrix of the predictions."""
    torch.manual_seed(0)
    f = torch.randn(1, 3, dtype=torch.float64).expand(50_000, 3)
    (v,) = one_file.backpropagated_vectors(f, torch.zeros(len(f), dtype=torch.long), "mc")
    p = f[0].softmax(0)
    # Entries have variances below 1/4, so five standard errors are 5 * 0.5 / sqrt(50000) = 0.011.
    torch.testing.assert_close(v.T @ v / len(f), p.diag() - p.outer(p), rtol=0, atol=0.011)


def test_wrong_scale_of_a_factor_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, `B` from gradients of the mean loss, or `A` with channels in another order."""
    model, (batch,) = made("convolution")
    expected = engine(model, batch, "empirical")
    right = one_file.backpropagated_vectors
    monkeypatch.setattr(one_file, "backpropagated_vectors", lambda f, *rest: [v / len(f) for v in right(f, *rest)])
    with pytest.raises(AssertionError, match="not close"):
        assert_same(factors(model, batch, "empirical"), expected)
    monkeypatch.undo()
    rows = one_file.input_rows
    monkeypatch.setattr(one_file, "input_rows", lambda layer, x: rows(layer, x.flip(1)))
    with pytest.raises(AssertionError, match="not close"):
        assert_same(factors(model, batch, "empirical"), expected)


# Settings whose steps are at most 30 times as long as the radius of the trust region. The library first shortens
# longer steps as a whole, because its iteration for the trust region needs a bound; the one file has singular values.
OPTIONS: dict[str, dict[str, Any]] = {
    "trust": {"lr": 0.3, "damping": 0.3, "trust": 1.0},
    "averages": {"lr": 0.1, "damping": 1.0, "trust": 0.5, "momentum": 0.5, "decay": 0.9},
    "no momentum": {"lr": 0.2, "damping": 1.0, "trust": 0.5, "momentum": 0.0},
    "no trust region": {"lr": 0.01, "damping": 0.3, "trust": 1e9},
}


def both(name: str, every: int = 1, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return parameters after each step of the one file, and of `kfs.optim.KFAC`, with the same settings."""
    model, batches = made(name, 7)
    peer = copy.deepcopy(model)
    found = steps_of_one_file(model, one_file.KFAC(model, fisher="empirical", **options), batches, every)
    same: Any = {"fisher": "empirical", "noise": None, "factors_every": every, "inverses_every": 1, **options}
    optimizer, expected = KFAC(peer, LOSS, **same), []
    for batch in batches:
        train(peer, optimizer, [batch], LOSS)
        expected.append(weights(peer))
    return found, expected


def lengths_of_steps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list of the lengths of steps before the limit, in units of the radius, which grows with every step."""
    lengths: list[float] = []
    limited = one_file.limited

    def measured(D: Tensor, radius: Tensor) -> Tensor:
        lengths.append(float(torch.linalg.svdvals(D).norm(4) / radius))
        return limited(D, radius)

    monkeypatch.setattr(one_file, "limited", measured)
    return lengths


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_the_optimizers(name: str, options: str, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = lengths_of_steps(monkeypatch)
    found, expected = both(name, every, **OPTIONS[options])
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    assert max(lengths) < 30
    assert max(lengths) > 1 or options == "no trust region"  # otherwise the trust region has no effect


@pytest.mark.parametrize("name", MODELS)
def test_steps_with_default_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's shortening of long steps is the only difference."""
    lengths = lengths_of_steps(monkeypatch)
    found, expected = both(name)
    assert max(lengths) > 30
    assert not torch.allclose(found[-1], expected[-1])
    limited = one_file.limited

    def shortened(D: Tensor, radius: Tensor) -> Tensor:
        return limited(D * (30 * radius / torch.linalg.svdvals(D).norm(4)).clamp(max=1), radius)

    monkeypatch.setattr(one_file, "limited", shortened)
    torch.testing.assert_close(*both(name), rtol=1e-11, atol=1e-12)


WRONG: dict[str, Any] = {
    "damping": ("damped_inverse", lambda right: lambda factor, damping: right(factor, damping**2)),
    "trust": ("limited", lambda right: lambda D, radius: right(D, 2 * radius)),
    "scale": ("gradient_rows", lambda right: lambda layer, g: right(layer, g) * len(g)),
    "bias": ("input_rows", lambda right: lambda layer, x: right(layer, x).roll(1, dims=1)),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_steps_are_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, wrong = WRONG[mistake]
    monkeypatch.setattr(one_file, function, wrong(getattr(one_file, function)))
    found, expected = both("linear", **OPTIONS["trust"])
    assert not torch.allclose(found[0], expected[0], rtol=1e-3)


def test_other_parameters_take_steps_of_sgd() -> None:
    """The steps use the average of gradients, with a separate learning rate."""
    torch.manual_seed(0)
    first, norm = nn.Linear(4, 5), nn.LayerNorm(5)
    model = nn.Sequential(first, norm, nn.Linear(5, 3)).double()
    optimizer = one_file.KFAC(model, lr=0.5, momentum=0.9, sgd_lr=0.2, fisher="type-2")
    X, y = torch.randn(9, 4, dtype=torch.float64), torch.randint(3, (9,))
    before = copy.deepcopy([first.weight, norm.weight])
    steps_of_one_file(model, optimizer, [(X, y)])
    assert first.weight.grad is not None
    assert norm.weight.grad is not None
    # After one step, the bias-corrected average is the gradient itself.
    torch.testing.assert_close(norm.weight, before[1] - 0.5 * 0.2 * norm.weight.grad)
    assert not torch.allclose(first.weight, before[0] - 0.5 * 0.2 * first.weight.grad)


def test_a_checkpoint_has_everything() -> None:
    """A training that is resumed from a state equals an uninterrupted one."""
    model, batches = made("convolution", 4)
    options: Any = {"fisher": "type-2", "lr": 0.3}
    optimizer = one_file.KFAC(model, **options)
    steps_of_one_file(model, optimizer, batches[:2])
    resumed, state = made("convolution")[0], copy.deepcopy(optimizer.state_dict())
    resumed.load_state_dict(model.state_dict())
    expected = steps_of_one_file(model, optimizer, batches[2:], every=2)
    again = one_file.KFAC(resumed, **options)
    again.load_state_dict(state)
    torch.testing.assert_close(steps_of_one_file(resumed, again, batches[2:], every=2), expected, rtol=0, atol=0)


def test_the_last_pass_counts() -> None:
    """Passes before it do not count, nor do evaluations."""
    model, (other, batch) = made("linear", 2)
    optimizer = one_file.KFAC(model, fisher="empirical")
    model(other[0])
    optimizer.update_factors(model(batch[0]), batch[1])
    A = optimizer.state[next(model.parameters())]["A"]
    torch.testing.assert_close(A, engine(model, batch, "empirical")["0.weight"][0])
    with torch.no_grad():
        model(other[0])
    assert not optimizer.seen


class Twice(nn.Module):
    """Uses a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        result: Tensor = self.layer(self.layer(x))
        return result


def tied() -> nn.Module:
    """Return two layers with the same weight."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


def half_frozen() -> nn.Module:
    """Return a layer that trains its bias only."""
    model = nn.Linear(3, 3)
    model.weight.requires_grad_(False)
    return model


REFUSED: dict[str, Any] = {
    "groups": (lambda: nn.Conv2d(2, 4, 3, groups=2), "groups=1"),
    "padding": (lambda: nn.Conv2d(2, 4, 3, padding="same"), "numbers as padding"),
    "padding mode": (lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), "zeros"),
    "tied": (tied, "share a parameter"),
    "frozen": (half_frozen, "frozen"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        one_file.KFAC(make())


def test_wrong_use_is_refused() -> None:
    with pytest.raises(ValueError, match="'mc', 'empirical' or 'type-2'"):
        one_file.KFAC(Twice(), fisher="exact")
    model = Twice()
    optimizer = one_file.KFAC(model)
    with pytest.raises(RuntimeError, match="used twice"):
        model(torch.randn(4, 3))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="update_factors"):
        optimizer.step()


def test_a_closure() -> None:
    """As in other optimizers, it is called with gradients enabled."""
    model, (batch,) = made("linear")
    optimizer = one_file.KFAC(model)

    def closure() -> Tensor:
        f = model(batch[0])
        optimizer.update_factors(f, batch[1])
        loss = F.cross_entropy(f, batch[1])
        loss.backward()
        return loss

    before = weights(model)
    assert optimizer.step(closure).detach() > 0
    assert not torch.equal(weights(model), before)


def test_it_trains_better_than_sgd() -> None:
    """The program's result is that on the page; SGD uses the best of its learning rates."""
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=one_thread)
    *sgd, kfac = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert len(sgd) == 4
    assert kfac < 0.2
    assert min(sgd) > 0.5
    assert done.stderr == ""


def test_the_file_is_short_and_needs_pytorch_alone() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 250
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} == {"math", "torch", "typing"}


def test_the_page_shows_the_whole_file() -> None:
    """The page includes each function and method by name, and the rest by its first and last lines."""
    page = (FILE.parents[1] / "docs" / "kfac_in_one_file.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^:pyobject: (.+)$", page, flags=re.MULTILINE))
    starts = re.findall(r"^:start-at: (.+)$", page, flags=re.MULTILINE)
    assert starts == ["class KFAC", "def images"]
    module = ast.parse(FILE.read_text(encoding="utf-8")).body
    functions = [node.name for node in module if isinstance(node, ast.FunctionDef)]
    (kfac,) = [node for node in module if isinstance(node, ast.ClassDef)]
    methods = [node.name for node in kfac.body if isinstance(node, ast.FunctionDef)]
    assert methods[:2] == ["__init__", "see"]  # the page shows the class up to its second method
    assert functions[0] == "input_rows"  # and the file up to the first function
    own = functions[: functions.index("images")]  # The page shows the rest of the file as a whole.
    assert shown == {*own, *(f"KFAC.{name}" for name in methods[1:])}
