"""The optimizer in ordinary training loops, with frequent changes of models."""

import gc
import threading
import warnings
import weakref
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import kfs
from kfs import EmpiricalRisk
from kfs.errors import DataError, KfsError, KfsWarning, LossError, ModelError
from kfs.losses import Custom, TokenCrossEntropy
from kfs.optim import KFAC
from tests.language_models import gpt2_without_dropout
from tests.optim.training import data, mlp, train, weights

CE = nn.CrossEntropyLoss
EXACT: dict[str, Any] = {"fisher": "type-2"}
Pair = namedtuple("Pair", ["logits", "hidden"])
Backward = Callable[[nn.Module, Any, Tensor], None]


class Tied(nn.Module):
    """An embedding that is optionally the output layer, too."""

    def __init__(self, sparse: bool = False, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6, sparse=sparse)
        self.hidden, self.out = nn.Linear(6, 6), nn.Linear(6, 7, bias=False)
        if tied:
            self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Any:
        return self.out(self.hidden(self.embedding(x)).tanh())


class Attention(nn.Module):
    """Self-attention alone, and in an encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.MultiheadAttention(4, 2, batch_first=True)
        self.two = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        x = x.unsqueeze(1) * torch.arange(1, 4, dtype=x.dtype).reshape(1, 3, 1)
        return self.head(self.two(self.one(x, x, x, need_weights=False)[0])).mean(1)


class Wrapped(nn.Module):
    """Calls a network in another way, or transforms its result."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self._forward = model, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self.model, *args, **kwargs)


def twice() -> nn.Module:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    return Wrapped(layers, lambda m, x: m[1](m[0](m[0](x).tanh()).tanh()))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3)
    )


def tokens(shape: tuple[int, int] = (4, 5), size: int = 7) -> tuple[Tensor, Tensor]:
    x = torch.randint(size, shape)
    y = torch.randint(size, shape)
    y[0, -1] = y[1, 2] = -100
    return x, y


MODELS: dict[str, tuple[Callable[[], Any], Any]] = {
    "mlp": (mlp, CE()),
    "cnn": (cnn, CE()),
    "twice": (twice, CE()),
    "attention": (Attention, CE()),
    "tied": (Tied, TokenCrossEntropy()),
    "gpt2": (gpt2_without_dropout, TokenCrossEntropy(shift=True)),
}


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", ["type-2", "empirical", "forward-only"])
@pytest.mark.parametrize("name", MODELS)
def test_curvature_is_that_of_kfac(name: str, fisher: Any, sharing: Any) -> None:
    """Watched passes give the factors that `kfs.KFAC` computes for the same batch with its own passes."""
    make, loss = MODELS[name]
    model = make().double()
    x, y = data(6) if name in {"mlp", "cnn", "twice", "attention"} else tokens(size=7 if name == "tied" else 11)
    batch = [{"input_ids": x, "labels": y}] if name == "gpt2" else (x, y)
    K = kfs.KFAC(EmpiricalRisk(model, loss, batch), fisher=fisher, sharing=sharing)
    optimizer = KFAC(model, loss, fisher=fisher, sharing=sharing, lr=0.0)
    value = model(input_ids=x, labels=y).loss if name == "gpt2" else loss(model(x), y)
    (value / 7).backward()  # for any scale of the vector
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The loss that is minimized is 0.143 times", KfsWarning)
        optimizer.step()
    assert not optimizer.uncovered
    averages = optimizer.preconditioner.curvature.averages
    assert len(averages) == len(K.blocks)
    for block in K.blocks.values():
        mine = averages[block.layout.key]
        for side in ("A", "B"):
            factor = getattr(mine.factors, side)
            if factor.kind != "identity":  # models of Hugging Face compute their loss, and its gradient, in float32
                near = 1e-5 if name == "gpt2" else 1e-10
                values = factor.values.squeeze(0) / mine.weight
                torch.testing.assert_close(values, getattr(block, side), rtol=near, atol=near)


def plain_backward(model: nn.Module, x: Any, y: Tensor) -> None:
    CE()(model(x), y).backward()


def after(
    model: nn.Module, backward: Backward = plain_backward, steps: int = 3, loss: Any = None, **options: Any
) -> Tensor:
    """Return the parameters after some steps."""
    optimizer = KFAC(model, loss or CE(), **EXACT | options)
    x, y = data(dtype=next(model.parameters()).dtype)
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model, x, y)
        optimizer.step()
    optimizer.close()
    return weights(model)


def in_two_forward_passes(model: nn.Module, x: Tensor, y: Tensor) -> None:
    one, other = model(x[:6]), model(x[6:])
    ((CE()(one, y[:6]) + CE()(other, y[6:])) / 2).backward()


def with_evaluations(model: nn.Module, x: Tensor, y: Tensor) -> None:
    CE()(model(x[:5]), y[:5])
    with torch.no_grad():
        model.eval()(x[:2])
    f = model.train()(x[:3])
    plain_backward(model, x, y)
    model(f.detach().new_ones(1, 4))


def after_an_attack(model: nn.Module, x: Tensor, y: Tensor) -> None:
    inputs = x.clone().requires_grad_()
    torch.autograd.grad(CE()(model(inputs), y), inputs)
    plain_backward(model, x, y)


def by_functional_loss(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()


def checkpointed(model: Any, x: Tensor, reentrant: bool = False) -> Any:
    return model[4](checkpoint(model[:4], x, use_reentrant=reentrant))


@pytest.mark.parametrize(
    "options", [{}, {"fisher": "empirical"}, {"fisher": "mc"}, {"eigen": True}, {"factors_every": 2}]
)
@pytest.mark.parametrize("backward", [in_two_forward_passes, with_evaluations, after_an_attack, by_functional_loss])
def test_ways_of_training_make_the_same_steps(backward: Backward, options: dict[str, Any]) -> None:
    if options.get("fisher") == "mc" and backward is in_two_forward_passes:
        pytest.skip("the gradients of the second half come first, and get the first labels")
    torch.testing.assert_close(after(mlp(), backward, **options), after(mlp(), **options), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("options", [{}, {"fisher": "empirical"}, {"eigen": True}, {"inverses_every": 2}])
def test_activation_checkpoints(options: dict[str, Any]) -> None:
    expected = after(mlp(), **options)
    torch.testing.assert_close(after(Wrapped(mlp(), checkpointed), **options), expected, rtol=1e-10, atol=1e-12)
    model = mlp()
    reentrant = Wrapped(model, lambda m, x: checkpointed(m, x, reentrant=True))
    with pytest.raises(KfsError, match="use_reentrant=False"):
        after(reentrant, **options)
    assert not torch.overrides._get_current_function_mode_stack()
    gc.collect()
    torch.testing.assert_close(after(model, **options), expected, rtol=1e-10, atol=1e-12)


class Scaled(nn.Module):
    """Data that are multiplied with, divided by, and added to parameters, perhaps in a checkpoint."""

    def __init__(self, saves: bool) -> None:
        super().__init__()
        self.layer, self.saves = mlp()[4], saves
        first = torch.linspace(0.5, 1, 5, dtype=torch.float64)
        self.scale, self.divisor, self.shift = (nn.Parameter(first + n) for n in range(3))

    def inner(self, x: Tensor) -> Tensor:
        result: Tensor = (self.scale * x.repeat(1, 2)[:, :5].tanh() / self.divisor + self.shift).tanh()
        return result

    def forward(self, x: Tensor) -> Any:
        return self.layer(checkpoint(self.inner, x, use_reentrant=False) if self.saves else self.inner(x))


@pytest.mark.parametrize("fisher", ["type-2", "empirical"])
def test_checkpoints_of_scales(fisher: Any) -> None:
    """A checkpoint compares the tensors that it saves with those of a run without expanded parameters."""
    torch.testing.assert_close(after(Scaled(True), fisher=fisher), after(Scaled(False), fisher=fisher), rtol=0, atol=0)
    plain, saving = (kfs.KFAC(EmpiricalRisk(Scaled(saves), CE(), data()), fisher) for saves in (False, True))
    torch.testing.assert_close(saving.to_dense(), plain.to_dense(), rtol=0, atol=0)


def with_copies(model: Any, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return a loss, and a copy of predictions that was made afterwards, as trainers do in mixed precision."""
    f = model(x)
    return {"logits": f.float(), "loss": CE()(f, labels)}


@pytest.mark.parametrize("fisher", ["type-2", "mc", "empirical"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_predictions_that_are_copied_after_the_loss(fisher: Any, share: float) -> None:
    """The gradient of predictions is the one of the loss that the model computes, and of those of its copies."""

    def backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
        out = model(x, labels=y)
        ((1 - share) * out["loss"] + share * CE()(out["logits"], y)).backward()

    expected = after(mlp(), fisher=fisher)
    torch.testing.assert_close(
        after(Wrapped(mlp(), with_copies), backward, fisher=fisher), expected, rtol=1e-4, atol=1e-5
    )


def fused(model: Any, x: Tensor, labels: Tensor | None = None) -> Any:
    """Return a loss without predictions if there are labels."""
    f = model(x)
    if labels is None:
        return f
    return {"loss": CE()(f, labels), "terms": F.cross_entropy(f, labels, reduction="none"), "labels": labels}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fisher": "mc"},
        {"fisher": "empirical"},
        {"fisher": "forward-only"},
        {"eigen": True},
        {"loss": CE(reduction="sum"), "factors_every": 2},
    ],
)
def test_fused_losses(options: dict[str, Any]) -> None:
    """The curvature of a loss without predictions is that at predictions that are computed apart."""

    def backward(model: Any, x: Tensor, y: Tensor) -> None:
        terms = (
            model(x, labels=y)["terms"]
            if isinstance(model, Wrapped)
            else F.cross_entropy(model(x), y, reduction="none")
        )
        (terms.sum() if "loss" in options else terms.mean()).backward()

    torch.testing.assert_close(
        after(Wrapped(mlp(), fused), backward, **options), after(mlp(), backward, **options), rtol=1e-12, atol=0
    )


def test_fused_losses_with_dropout() -> None:
    """Computing predictions apart draws no random numbers of the training."""
    x, y = data()
    states = []
    for watched in (False, True):
        model = Wrapped(nn.Sequential(mlp(), nn.Dropout(0.5)), fused)
        optimizer = KFAC(model, CE(), fisher="mc") if watched else None
        torch.manual_seed(1)
        for _ in range(2):
            model(x, labels=y)["loss"].backward()
            if optimizer is not None:
                optimizer.step()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_fused_losses_whose_targets_or_predictions_are_wrong() -> None:
    x, y = data()
    places = slice(None)
    model = Wrapped(mlp(), lambda m, x, labels=None: fused(m, x, labels) if labels is not None else m(x)[places])
    optimizer = KFAC(model, CE())
    out = model(x, labels=y)
    for _ in range(2):  # neither belongs to the whole loss
        optimizer.targets(y)
    with pytest.raises(LossError, match="targets, which are unknown"):
        out["loss"].backward()
    out, places = model(x, labels=y), slice(5)
    with pytest.raises(DataError, match="called with 12 examples"):
        out["loss"].backward()
    places = slice(None)
    torch.testing.assert_close(model(x, labels=None), model(x))
    optimizer.close()


@pytest.mark.parametrize("audit", [False, True])
def test_losses_without_predictions(audit: bool) -> None:
    """Without an audit, or if the model needs labels, a fused loss is an error."""
    x, y = data()
    model = Wrapped(mlp(), fused if not audit else lambda m, x, labels: CE()(m(x), labels))
    optimizer = KFAC(model, CE(), audit=audit)
    out = model(x, labels=y)
    with pytest.raises(ModelError, match="If its loss is fused"):
        (out if audit else out["loss"]).backward()
    optimizer.close()


OUTPUTS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "tuple": (lambda m, x: (m(x), x), lambda out: out[0]),
    "list": (lambda m, x: [m(x), x], lambda out: out[0]),
    "named": (lambda m, x: Pair(m(x), x), lambda out: out.logits),
    "dict": (lambda m, x: {"hidden": x, "logits": m(x)}, lambda out: out["logits"]),
    "object": (lambda m, x: SimpleNamespace(logits=m(x)), lambda out: out.logits),
    "keyword": (lambda m, x: m(input=x), lambda out: out),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_models_may_return_anything(name: str) -> None:
    forward, read = OUTPUTS[name]
    model = Wrapped(mlp(), forward)
    kind = type(model(data()[0]))
    moved = after(model, lambda m, x, y: CE()(read(m(x)), y).backward())
    torch.testing.assert_close(moved, after(mlp()), rtol=0, atol=0)
    KFAC(model, CE())
    assert type(model(data()[0])) is kind


def test_sparse_gradients() -> None:
    x, y = tokens()
    moved = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = Tied(sparse, tied=False).double()
        train(model, KFAC(model, TokenCrossEntropy(), **EXACT), [(x, y)] * 3, TokenCrossEntropy())
        moved.append(weights(model))
    torch.testing.assert_close(moved[0], moved[1])


FAILURES = [RuntimeError("forward"), StopIteration()]


@pytest.mark.parametrize("what", FAILURES)
def test_forward_passes_that_fail(what: BaseException) -> None:
    def forward(model: Any, x: Tensor) -> Any:
        f = model(x)
        if x.shape[0] == 1:
            raise what
        return f

    def backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
        with pytest.raises(type(what)):
            model(x[:1])
        modes.append(len(torch.overrides._get_current_function_mode_stack()))
        plain_backward(model, x, y)

    modes: list[int] = []
    assert torch.equal(after(Wrapped(mlp(), forward), backward), after(mlp()))
    assert modes == [0, 0, 0]


def called_elsewhere(model: Any, x: Tensor, grad: bool) -> list[Exception]:
    """Call a model in another thread, and return the errors of that thread."""
    errors: list[Exception] = []

    def work() -> None:
        try:
            with torch.set_grad_enabled(grad):
                model(x)
        except Exception as error:  # noqa: BLE001 (the test inspects it)
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return errors


@pytest.mark.parametrize("grad", [False, True])
def test_other_threads_call_the_model(grad: bool) -> None:
    """Calls during and between passes: without gradients, they have no effect; with gradients, they raise there."""
    model, (x, y) = mlp(), data()
    optimizer = KFAC(model, CE(), **EXACT)
    main, errors = threading.current_thread(), []

    def call_elsewhere(*_: Any) -> None:
        if threading.current_thread() is main and torch.is_grad_enabled():
            errors.extend(called_elsewhere(model, x[:5], grad))

    for _ in range(3):
        optimizer.zero_grad()
        handle = model[2].register_forward_hook(call_elsewhere)
        value = CE()(model(x), y)
        handle.remove()
        assert not called_elsewhere(model, x[:3], grad)
        value.backward()
        optimizer.step()
    assert torch.equal(weights(model), after(mlp()))
    assert bool(errors) == grad
    assert all(isinstance(error, ModelError) and "two threads" in str(error) for error in errors)


def test_backward_passes_that_fail() -> None:
    """A hook fails in the middle of a backward pass; after gradients are zeroed, training continues."""
    model, (x, y) = mlp(), data()
    optimizer = KFAC(model, CE(), **EXACT)

    def fail(_: Any) -> None:
        raise RuntimeError("backward")

    handle = model[0].register_forward_hook(lambda _, __, out: out.register_hook(fail) and None)
    with pytest.raises(RuntimeError, match="backward"):
        plain_backward(model, x, y)
    handle.remove()
    assert not torch.overrides._get_current_function_mode_stack()
    train(model, optimizer, [(x, y)] * 3, CE())
    assert (weights(model) - after(mlp())).norm() < 0.1 * (weights(mlp()) - after(mlp())).norm()


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", ["mc", "empirical", "forward-only"])
def test_inputs_of_layers_are_freed(fisher: Any, sharing: Any) -> None:
    """Uses that wait for targets hold inputs of layers, which refer to the graph that holds the uses."""
    model, (x, y) = mlp(), data()
    optimizer = KFAC(model, CE(), fisher=fisher, sharing=sharing, factors_every=1)
    seen: list[weakref.ref[Tensor]] = []
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(weakref.ref(inputs[0])))
    gc.disable()
    try:
        for backward in (True, False):
            for _ in range(3):
                loss = CE()(model(x.clone()), y)
                if backward:
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                del loss
                assert len(seen) >= len(layers)
                assert [alive() for alive in seen] == [None] * len(seen), backward
    finally:
        gc.enable()


class Positions(nn.Module):
    """Adds the output of a network of learned positions, which is a derived parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.out = nn.Embedding(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, None] + self.mix(self.table(torch.arange(3)))
        result: Tensor = self.out(h.tanh().mean(1))
        return result


def test_passes_with_derived_parameters_are_freed() -> None:
    """A derived parameter refers to the pass, which must drop its reference after the backward pass."""
    model, (x, y) = Positions().double(), data()
    optimizer = KFAC(model, CE(), factors_every=1)
    seen: list[weakref.ref[Tensor]] = []
    train(model, optimizer, [(x, y)], CE())  # with an audit
    model.mix.register_forward_hook(lambda _, __, out: seen.append(weakref.ref(out)))
    gc.disable()
    try:
        train(model, optimizer, [(x, y)] * 3, CE())
        assert len(seen) == 3
        assert [alive() for alive in seen] == [None] * len(seen)
    finally:
        gc.enable()


@pytest.mark.parametrize("fisher", ["mc", "empirical"])
def test_graphs_are_freed(fisher: Any) -> None:
    """Activations are freed with the graph of the predictions, without a garbage collection."""
    model, (x, y) = mlp(), data()
    optimizer = KFAC(model, CE(), fisher=fisher)
    seen: list[weakref.ref[Tensor]] = []
    model[0].register_forward_hook(lambda _, __, out: seen.append(weakref.ref(out)))
    gc.disable()
    try:
        for _ in range(3):
            CE()(model(x), y)
            assert [alive() for alive in seen] == [None] * len(seen)
        train(model, optimizer, [(x, y)] * 2, CE())
        assert [alive() for alive in seen] == [None] * len(seen)
    finally:
        gc.enable()


def test_buffers_and_random_numbers_are_left_alone() -> None:
    """Running means change once per step, and dropout draws the same numbers as with another optimizer."""
    seen = []
    for natural in (True, False):
        torch.manual_seed(0)
        layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)]
        model = nn.Sequential(*layers).double()
        optimizer = KFAC(model, CE(), lr=0.0) if natural else torch.optim.SGD(model.parameters(), lr=0.0)
        values = train(model, optimizer, [data()] * 4, CE())
        seen.append([*values, float(torch.rand(1)), *model.buffers()])
    torch.testing.assert_close(seen[0][4:], seen[1][4:], rtol=0, atol=0)
    assert seen[0][:4] == pytest.approx(seen[1][:4])
    assert seen[0][-1] == 4


def use_curvature(model: nn.Module, x: Tensor, y: Tensor) -> None:
    v = {name: p.detach() for name, p in model.named_parameters()}
    for use in (kfs.KFAC, kfs.GGN, kfs.Hessian):
        assert (use(EmpiricalRisk(model, CE(), (x, y))) @ v)["0.weight"].isfinite().all()


def use_other_parameters(model: nn.Module, x: Tensor, y: Tensor) -> None:
    params = {name: p.detach() for name, p in model.named_parameters()}
    torch.func.grad(lambda p: CE()(torch.func.functional_call(model, p, (x,)), y))(params)


ELSEWHERE = [
    (use_curvature, "mean"),
    (use_other_parameters, "mean"),
    (use_other_parameters, "sum"),
    (lambda m, x, y: plain_backward(m, x[:4], y[:4]), "mean"),
    (lambda m, x, y: plain_backward(m, x * torch.nan, y), "mean"),
    (lambda m, x, _: torch.func.vmap(torch.func.jacrev(m))(x), "mean"),
    (lambda m, x, _: m(x[0]), "mean"),
]


@pytest.mark.parametrize(("something", "reduction"), ELSEWHERE)
def test_what_happens_between_steps(something: Backward, reduction: str) -> None:
    """Other calls between steps have no effect on them if gradients are zeroed."""
    loss = CE(reduction=reduction)

    def backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
        something(model, x, y)
        model.zero_grad()
        loss(model(x), y).backward()

    moved = after(mlp(), backward, loss=loss)
    torch.testing.assert_close(moved, after(mlp()), rtol=1e-9, atol=1e-11)


def test_mixup() -> None:
    seen = CE()

    def backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
        f = model(x)
        (0.7 * seen(f, y) + 0.3 * seen(f, y.flip(0))).backward()

    torch.testing.assert_close(after(mlp(), backward, loss=seen), after(mlp(), backward, loss=CE()))


def test_adapters_that_are_added_later() -> None:
    model, (x, y) = mlp(), data()
    optimizer = KFAC(model, CE(), **EXACT)
    train(model, optimizer, [(x, y)], CE())
    model[0] = nn.Sequential(model[0].requires_grad_(False), nn.Linear(6, 6).double())
    optimizer.add_param_group({"params": list(model[0][1].parameters())})
    values = train(model, optimizer, [(x, y)] * 10, CE())
    assert values[-1] < values[0]


def test_a_learned_temperature() -> None:
    model = Wrapped(mlp(), lambda m, x: m(x) * m.temperature.exp())
    model.model.temperature = nn.Parameter(torch.tensor(0.0, dtype=torch.float64))
    after(model)


def test_predictions_that_are_changed_in_place() -> None:
    torch.testing.assert_close(after(mlp(), lambda m, x, y: CE()(m(x).mul_(1), y).backward()), after(mlp()))


def custom(f: Tensor, y: Tensor) -> Tensor:
    return (f - F.one_hot(y, 3)).cosh().log().sum()


LIKELIHOOD = Custom(custom, likelihood=lambda f: torch.distributions.Categorical(logits=f))
HUBER = nn.HuberLoss()
LOSSES = [
    (LIKELIHOOD, "mc"),
    (custom, "forward-only"),
    (HUBER, "forward-only"),
]


@pytest.mark.parametrize(("loss", "fisher"), LOSSES)
def test_losses_of_ones_own(loss: Any, fisher: Any) -> None:
    def backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
        f = model(x)
        one = F.one_hot(y, 3).to(f.dtype)
        (F.huber_loss(f, one) if loss is HUBER else (f - one).cosh().log().sum(1).mean()).backward()

    after(mlp(), backward, loss=loss, fisher=fisher)
