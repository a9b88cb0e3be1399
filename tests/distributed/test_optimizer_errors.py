"""Errors in one process of a training are raised in all processes."""

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from kfs.errors import DistributedError, KfsError, LossError, ModelError
from kfs.factors.blocks import BlockError
from kfs.optim import KFAC, across_ranks, averages, curvature, inverses
from kfs.optim.across_ranks import owners_of
from kfs.optim.averages import Average
from kfs.optim.curvature import Curvature
from kfs.optim.watch import Watch
from tests.distributed.pool import Pool
from tests.distributed.training import accelerators, average_gradients, batches, model_of, take_step

LOSS = nn.CrossEntropyLoss()


def rows(x: Tensor) -> Tensor:
    """Return the data of this rank."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def loss_with(fault: str, f: Tensor, y: Tensor) -> Tensor:
    """Return the loss of a rank that has a mistake."""
    value: Tensor = LOSS(f, y)
    if fault == "another loss":
        value = (f - functional.one_hot(y, 3)).square().mean()
    return value


def break_something(fault: str, model: nn.Module, optimizer: KFAC) -> None:
    """Make a mistake between the backward pass and `step()`."""
    if fault == "no gradients":
        model.zero_grad()
    elif fault == "changed model":
        model.add_module("more", nn.Linear(2, 2).double())
    elif fault == "another state":
        optimizer.load_state_dict(KFAC(model_of("net"), LOSS).state_dict())


def step_on_ranks(fault: str) -> tuple[str, str]:
    """Take two steps, with a mistake on the last rank in the second one; return type and text of the error."""
    last = dist.get_rank() == dist.get_world_size() - 1
    model = model_of("net")
    if fault == "other weights" and last:
        nn.init.zeros_(model.get_parameter("out.bias"))
    optimizer = KFAC(model, LOSS, group=dist.group.WORLD, fisher="type-2")
    try:
        for number, (x, y) in enumerate(batches(2)):
            optimizer.zero_grad()
            now = fault if last and number == 1 else ""
            loss_with(now, model(rows(x)), rows(y)).backward()
            if fault != "own gradients":
                average_gradients(model)
            break_something(now, model, optimizer)
            take_step(optimizer)
    except KfsError as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("another loss", LossError, "is not that of CrossEntropyLoss"),
        ("no gradients", DistributedError, "Parameters with gradients differ"),
        ("own gradients", DistributedError, "Gradients differ between processes: 7, such as 'turn'.* of rank 1 "),
        ("other weights", DistributedError, "Values of parameters differ"),
        ("another state", DistributedError, r"different places .* rank 1 at 'load_state_dict\(\)'"),
        ("changed model", ModelError, "parameters .* are new"),
    ],
)
def test_one_fault_is_everybodys(ranks: Pool, fault: str, kind: type[Exception], text: str) -> None:
    """An error on one rank ends the step on all ranks, with the same text."""
    results = ranks(2, step_on_ranks, fault)
    assert len(set(results)) == 1
    assert results[0][0] == kind.__name__
    assert re.search(text, results[0][1])


def with_unknown_targets(fisher: Any) -> str:
    """Train with a loss that needs targets, which are unknown on the first rank."""
    model = model_of("net")
    loss = nn.HuberLoss()
    optimizer = KFAC(DistributedDataParallel(model), loss, fisher=fisher)
    for x, y in batches(2):
        target = functional.one_hot(rows(y), 3).double()
        f = model(rows(x))
        value = loss(f, target) if dist.get_rank() else functional.huber_loss(f, target)
        value.backward()
        average_gradients(model)
        with pytest.raises(LossError, match="targets") as found:
            optimizer.step()
        optimizer.zero_grad()
    return str(found.value)


@pytest.mark.parametrize("fisher", ["ggn", "empirical"])
def test_errors_of_backward_passes(ranks: Pool, fisher: str) -> None:
    """They are raised in the step, since other ranks wait for gradients during the backward pass."""
    first, second = ranks(2, with_unknown_targets, fisher)
    assert first == second


def without_memory() -> tuple[str, float]:
    """Take a step in which the last rank has no memory for factors; return the error, and the seconds."""
    model = DistributedDataParallel(model_of("net"))
    optimizer = KFAC(model, LOSS, factors_every=1, inverses_every=1)
    with pytest.MonkeyPatch.context() as patch:
        for number, (x, y) in enumerate(batches(2)):
            optimizer.zero_grad()
            LOSS(model(rows(x)), rows(y)).backward()
            if number == 1 and dist.get_rank():
                patch.setattr(curvature, "add_factors", torch.empty)
            start = time.perf_counter()
            try:
                take_step(optimizer)
            except Exception as error:  # noqa: BLE001 (the kind depends on the rank)
                return str(error), time.perf_counter() - start
    raise AssertionError("There was no error.")


def test_errors_before_sums_of_factors(ranks: Pool) -> None:
    """Other ranks, which would wait for sums of this one, raise the error, too."""
    results = ranks(2, without_memory)
    assert all("empty()" in text and seconds < 10 for text, seconds in results)


def with_drift() -> tuple[bool, list[str]]:
    """Train such that one rank rounds differently."""
    model = DistributedDataParallel(model_of("net"))
    optimizer = KFAC(model, LOSS, factors_every=2)
    bias = model.module.get_parameter("out.bias")
    messages: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(across_ranks.log, "warning", messages.append)
        for x, y in batches(7):
            optimizer.zero_grad()
            LOSS(model(rows(x)), rows(y)).backward()
            take_step(optimizer)
            if optimizer.steps % 2 == 0 and dist.get_rank():
                with torch.no_grad():
                    bias.mul_(1 + 1e-15)
    everybody: list[Any] = [None, None]
    dist.all_gather_object(everybody, bias.detach())
    return torch.equal(*everybody), messages


def test_ranks_that_round_in_another_way(ranks: Pool) -> None:
    """All ranks take over the parameters of the first rank, and warn once."""
    for equal, messages in ranks(2, with_drift):
        assert equal
        assert len(messages) == 1
        assert "The parameters of rank 0 are copied" in messages[0]


def no_gradients_anywhere() -> str:
    model = model_of("net")
    optimizer = KFAC(DistributedDataParallel(model), LOSS)
    with pytest.raises(ModelError, match="No parameter has a gradient") as found:
        optimizer.step()
    with pytest.raises(ModelError, match="group= was given, too"):
        KFAC(DistributedDataParallel(model), LOSS, group=dist.group.WORLD)
    return str(found.value)


def test_nothing_to_do(ranks: Pool) -> None:
    """All ranks make the same mistake."""
    first, second = ranks(2, no_gradients_anywhere)
    assert first == second


def within_join() -> None:
    model = DistributedDataParallel(model_of("net"))
    optimizer = KFAC(model, LOSS)
    (batch,) = batches(1)
    with model.join():
        LOSS(model(batch[0]), batch[1]).backward()
        with pytest.raises(ModelError, match=r"within join\(\)"):
            optimizer.step()


def test_join(ranks: Pool) -> None:
    """With `Join`, ranks that end earlier would not take part."""
    ranks(2, within_join)


def without_group() -> None:
    model = model_of("net")
    (batch,) = batches(1)
    optimizer = KFAC(model, LOSS)
    LOSS(model(batch[0]), batch[1]).backward()
    with pytest.raises(ModelError, match="which of them train the model together"):
        optimizer.step()
    optimizer.close()
    # Each process may train a model of its own.
    model = model_of("net")
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    optimizer = KFAC(model, LOSS, group=own)
    LOSS(model(rows(batch[0])), rows(batch[1])).backward()
    take_step(optimizer)
    assert optimizer.steps == 1


def test_processes_that_nobody_told_of(ranks: Pool) -> None:
    """The user has to say whether processes train one model or several."""
    ranks(2, without_group)


def with_bad_numbers(kind: str) -> tuple[Any, int, Tensor]:
    """Train with a number that is not finite on the last rank in the third step."""
    last = dist.get_rank() == dist.get_world_size() - 1
    model = model_of("net").float() if kind == "factors" else model_of("net")
    optimizer = KFAC(model, LOSS, group=dist.group.WORLD, fisher="type-2", factors_every=1)
    for number, (x, y) in enumerate(batches(5)):
        optimizer.zero_grad()
        own = rows(x).to(next(model.parameters()).dtype)
        if number == 2 and last:
            # Squares of inputs of this size overflow. Behind a normalization, no other number does.
            own = own * (1e25 if kind == "factors" else torch.nan)
        LOSS(model(own), rows(y)).backward()
        if kind != "gradients":
            for p in model.parameters():
                assert p.grad is not None
                p.grad.nan_to_num_(0.0, 0.0, 0.0)
        average_gradients(model)
        take_step(optimizer)
    params = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return optimizer.events, optimizer.steps, params


@pytest.mark.parametrize(
    ("kind", "event"),
    [("gradients", "skipped_steps"), ("predictions", "refused_statistics"), ("factors", "refused_statistics")],
)
def test_not_finite_on_one_rank(ranks: Pool, kind: str, event: str) -> None:
    """If one rank has numbers that are not finite, all ranks skip the step or refuse its statistics."""
    first, second = ranks(2, with_bad_numbers, kind)
    assert getattr(first[0], event) == 1
    assert first[:2] == second[:2]
    assert torch.equal(first[2], second[2])
    assert first[2].isfinite().all()


def with_failing_inverse(accelerated: bool) -> tuple[Any, Tensor]:
    """Train such that the owner of a block cannot invert it in one step."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 3)).double()
    dist.broadcast_object_list(state := [model.state_dict()])
    model.load_state_dict(state[0])
    optimizer = KFAC(model, LOSS, group=dist.group.WORLD, fisher="type-2", inverses_every=1, factors_every=1)
    compute = averages.inverted

    def fail(some: list[Average], *rest: Any) -> Any:
        owners = owners_of(optimizer.preconditioner.curvature.averages.values(), False, dist.get_world_size())
        unlucky = min(key for key, owner in owners.items() if owner == 0)
        if optimizer.steps == 3 and any(a.layout.key == unlucky for a in some):
            raise BlockError(0, "has bad luck")
        return compute(some, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inverses, "inverted", fail)
        for x, y in batches(6):
            optimizer.zero_grad()
            LOSS(model(rows(x)), rows(y)).backward()
            average_gradients(model)
            if accelerated:
                with accelerators():
                    optimizer.step()
            else:
                optimizer.step()
    params = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return optimizer.events, params


@pytest.mark.parametrize("accelerated", [False, True])
def test_inverse_that_fails_at_its_owner(ranks: Pool, accelerated: bool) -> None:
    """All ranks keep the last inverse of the block, and count the event; other blocks are inverted."""
    first, second = ranks(2, with_failing_inverse, accelerated)
    assert first[0].failed_inverses == 1
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])


def with_idle_rank(fisher: Any) -> Tensor:
    """Train with a last rank that has no data."""
    model = model_of("net")
    optimizer = KFAC(model, LOSS, group=dist.group.WORLD, fisher=fisher, eigen=True, factors_every=1)
    size = dist.get_world_size()
    for x, y in batches(6):
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            value = LOSS(model(x), y)
            (size * value).backward()  # This is the mean over all data, after gradients are averaged.
        average_gradients(model)
        take_step(optimizer)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_rank_without_data(ranks: Pool) -> None:
    """The rank has zero sums and squares, and takes part in all exchanges."""
    (expected,) = ranks(1, with_idle_rank, "type-2")
    first, second = ranks(2, with_idle_rank, "type-2")
    assert torch.equal(first, second)
    assert (first - expected).norm() / expected.norm() < 1e-12


class WithBuffers(nn.Module):
    """Normalizes over batches, keeps a statistic of its data, and adds a constant."""

    constant: Tensor
    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 3)
        self.register_buffer("constant", torch.zeros(3))
        self.register_buffer("largest", torch.zeros(()))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.largest.copy_(x.detach().max())  # a statistic of this rank's data
        y: Tensor = self.last(torch.tanh(self.norm(self.first(x)))) + self.constant
        return y


def error_of(call: Callable[[], Any]) -> str:
    """Return the type and text of an error, or an empty string."""
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (all ranks must raise any error)
        return f"{type(error).__name__}: {error}"
    return ""


def train_with(
    settings: dict[str, Any],
    change: Callable[[nn.Module, KFAC, int], Any] = lambda *_: None,
    loss: nn.Module = LOSS,
    way: str = "DDP",
) -> None:
    """Train for some steps; a change is made before each of them, and may return a function to call afterwards."""
    model: Any = WithBuffers()
    if way == "sharded":
        fully_shard(model)
    wrapped = DistributedDataParallel(model) if way == "DDP" else model
    optimizer = KFAC(wrapped, loss, group=dist.group.WORLD if way == "group" else None, **settings)
    if way == "late":  # create the optimizer first
        wrapped = DistributedDataParallel(model)
    for number, (x, y) in enumerate(batches(8)):
        optimizer.zero_grad()
        called = change(model, optimizer, number) or wrapped
        LOSS(called(rows(x)), rows(y)).backward()
        if way == "group":
            average_gradients(model)
        take_step(optimizer)


def at(step: int, act: Callable[[Any, KFAC], Any]) -> Callable[[nn.Module, KFAC, int], Any]:
    """Return a change on the last rank, before one step."""
    last = dist.get_rank() == dist.get_world_size() - 1
    return lambda model, optimizer, number: act(model, optimizer) if last and number == step else None


def fail(*_: Any, **__: Any) -> Any:
    raise ArithmeticError("bad luck")


def interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def with_other_settings() -> dict[str, str]:
    """Return the errors of trainings in which a setting differs on the last rank."""
    second = dist.get_rank() == 1
    choose = {
        "damping": (0.003, 0.3),
        "decay": (0.7, 0.1),
        "seed": (0, 1),
        "lr": (1.0, 0.1),
        "inverses_every": (20, 5),
        "eigen": (True, False),
        "fisher": ("mc", "type-2"),
        "factors_every": (1, 5),
        "trust": (0.03, -1.0),
        "quadratic_model": (False, "typo"),
        "patience": (3, 4),
    }
    found = {name: error_of(partial(train_with, {name: values[second]})) for name, values in choose.items()}
    found["unknown"] = error_of(lambda: train_with({"dampin": 1.0} if second else {}))
    found["loss"] = error_of(lambda: train_with({}, loss=nn.CrossEntropyLoss(label_smoothing=0.1 * second)))
    schedules = (lambda step: 1 + step // 2), (lambda step: 1 + step // 3)
    found["schedule"] = error_of(lambda: train_with({"factors_every": schedules[second]}))
    found["schedule of inverses"] = error_of(lambda: train_with({"inverses_every": schedules[second]}))
    changes: dict[str, Callable[[Any, KFAC], Any]] = {
        "lr later": lambda _, optimizer: optimizer.param_groups[0].update(lr=0.5),
        "mode": lambda model, _: setattr(model.last, "training", False),
        "constant": lambda model, _: setattr(model, "constant", torch.ones(3, dtype=torch.float64)),
    }
    for name, act in changes.items():
        found[name] = error_of(partial(train_with, {"fisher": "type-2"}, at(5, act), way="group"))
    # The inner module is called, so gradients are not averaged.
    skip: Callable[[Any, KFAC, int], Any] = lambda model, _, number: model if number == 4 else None  # noqa: E731
    found["gradients later"] = error_of(lambda: train_with({"fisher": "type-2"}, skip))
    # Steps without factors do not compare gradients. Parameters are compared in the next step with factors.
    every = {"fisher": "empirical", "factors_every": 6, "inverses_every": 6}
    found["parameters"] = error_of(lambda: train_with(every, skip))
    found["nothing"] = "".join(
        error_of(partial(train_with, {}, way=way)) for way in ("DDP", "group", "sharded", "late")
    )
    with pytest.MonkeyPatch.context() as patch:
        if second:
            patch.setattr(Watch, "_audited", fail)
        found["an audit"] = error_of(lambda: train_with({"fisher": "mc"}))
    for name, act in {"an error": fail, "an interrupt": interrupt}.items():
        with pytest.MonkeyPatch.context() as patch:
            if second:
                patch.setattr(Curvature, "precondition", act)
            found[f"{name} in an update"] = error_of(lambda: train_with({}))
            found[f"{name} in a sharded update"] = error_of(lambda: train_with({}, way="sharded"))
            if name == "an error":
                with accelerators():
                    settings = {"replay": False, "factors_every": 1}
                    found["behind"] = error_of(partial(train_with, settings, way="sharded"))
    for name in ("fisher", "factors_every", "damping"):
        values = choose[name]
        found[f"{name}, sharded"] = error_of(partial(train_with, {name: values[second]}, way="sharded"))
    for name in ("fisher", "decay", "seed", "eigen", "patience"):
        found[f"{name}, late"] = error_of(partial(train_with, {name: choose[name][second]}, way="late"))
    smoothing = nn.CrossEntropyLoss(label_smoothing=0.1 * second)
    found["loss, late"] = error_of(lambda: train_with({}, loss=smoothing, way="late"))
    return found


def test_what_differs_is_named(ranks: Pool) -> None:
    """Settings, options, modes, buffers and gradients: all ranks name the difference, without long waits."""
    start = time.monotonic()
    first, second = ranks(2, with_other_settings)
    assert time.monotonic() - start < 30
    assert first == second
    settings = "DistributedError: Settings differ between processes: rank 0 has {0}={1!r}, and rank 1 has {0}={2!r}"
    expected = {
        "damping": settings.format("damping", 0.003, 0.3),
        "decay": settings.format("decay", 0.7, 0.1),
        "seed": settings.format("seed", 0, 1),
        "lr": settings.format("lr", 1.0, 0.1),
        "inverses_every": settings.format("inverses_every", 20, 5),
        "eigen": settings.format("eigen", True, False),
        "fisher": settings.format("fisher", "mc", "type-2"),
        "factors_every": settings.format("factors_every", 1, 5),
        "trust": "ModelError: trust is -1.0",
        "patience": settings.format("patience", 3, 4),
        "unknown": "TypeError: ",
        "loss": "DistributedError: Losses differ between processes: rank 0 has ",
        "schedule": "DistributedError: Schedules differ between processes: rank 0 has next step with factors=",
        "schedule of inverses": "DistributedError: Schedules differ between processes: rank 0 has inverses_every=[",
        "lr later": "DistributedError: Options of parameter groups differ between processes: rank 0 has lr of group 0=",
        "mode": "DistributedError: Modes of modules differ between processes: rank 0 has last='train', and rank 1 has ",
        "constant": "DistributedError: Buffers differ between processes: 'constant'.",
        "gradients later": "DistributedError: Gradients differ between processes: ",
        "parameters": "DistributedError: Values of parameters differ between processes: ",
        "an audit": "ArithmeticError: bad luck",
        "an error in an update": "ArithmeticError: bad luck",
        "an error in a sharded update": "ArithmeticError: bad luck",
        "behind": "ArithmeticError: bad luck",
        "an interrupt in an update": "KeyboardInterrupt: ",
        "an interrupt in a sharded update": "KeyboardInterrupt: ",
        "fisher, sharded": settings.format("fisher", "mc", "type-2"),
        "factors_every, sharded": settings.format("factors_every", 1, 5),
        "fisher, late": settings.format("fisher", "mc", "type-2"),
        "decay, late": settings.format("decay", 0.7, 0.1),
        "seed, late": settings.format("seed", 0, 1),
        "eigen, late": settings.format("eigen", True, False),
        "patience, late": settings.format("patience", 3, 4),
        "loss, late": "DistributedError: Losses differ between processes: rank 0 has ",
        "damping, sharded": settings.format("damping", 0.003, 0.3),
    }
    assert not first["nothing"]  # Statistics that are not read in training mode may differ.
    for name, text in expected.items():
        assert first[name].startswith(text), (name, first[name])
