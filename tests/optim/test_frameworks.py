"""Integration into training loops: mixed precision, schedulers, files, copies, compilers, and trainers."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from pytorch_lightning import LightningModule
from pytorch_lightning import Trainer as Lightning
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.utils.rnn import pad_sequence
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset, default_collate
from transformers import Trainer, TrainingArguments

import kfs
from examples import finetune
from kfs import EmpiricalRisk
from kfs.errors import ModelError
from kfs.losses import TokenCrossEntropy
from kfs.optim import KFAC
from tests.language_models import gpt2_without_dropout, llama
from tests.optim.training import data, mlp, train, weights

CE = nn.CrossEntropyLoss
EXACT: dict[str, Any] = {"fisher": "type-2"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """The step equals that in full precision, up to rounding."""
    start, moved = weights(mlp(torch.float32)), []
    for enabled in (False, True):
        model, (x, y) = mlp(torch.float32), data(dtype=torch.float32)
        # With less damping, round-off of bfloat16 is large in directions that twelve examples do not determine.
        optimizer = KFAC(model, CE(), **EXACT, damping=0.1, noise=None)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype, enabled=enabled):
                loss = CE()(model(x), y)
            loss.backward()
            optimizer.step()
        moved.append(weights(model))
    assert 0 < (moved[0] - moved[1]).norm() < 0.1 * (moved[0] - start).norm()


@pytest.mark.parametrize("fisher", ["type-2", "empirical", "mc"])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("overflow", [False, True])
def test_gradient_scaler(fisher: Any, clip: bool, overflow: bool) -> None:
    """Scaled training equals unscaled training; an overflow changes no state."""
    loss, (x, y), moved = CE(), data(dtype=torch.float32), []
    for scaled in (False, True):
        model = mlp(torch.float32)
        optimizer = KFAC(model, loss, fisher=fisher, factors_every=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        for step in range(5):
            bad = overflow and step == 2
            if bad and not scaled:
                continue
            optimizer.zero_grad()
            scaler.scale(loss(model(x), y) * (torch.inf if bad else 1.0)).backward()
            before = copy.deepcopy(optimizer.state_dict()), weights(model)
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            if bad:
                assert torch.equal(weights(model), before[1])
                assert same(optimizer.state_dict(), before[0])
        moved.append(weights(model))
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-5, atol=1e-6)


SCHEDULERS: list[Callable[[Any], Any]] = [
    lambda o: lr_scheduler.StepLR(o, 2),
    lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=6, cycle_momentum=True),
    lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [2]),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_schedulers(make: Callable[[Any], Any]) -> None:
    """A scheduler equals setting the same numbers by hand, with gradients of zero and of None."""
    loss, (x, y) = CE(), data()
    model, other = mlp(), mlp()
    groups = [{"params": list(model[:3].parameters()), "lr": 0.2}, {"params": list(model[3:].parameters())}]
    optimizer = KFAC(model, loss, groups, lr=0.1, **EXACT)
    groups = [{"params": list(other[:3].parameters())}, {"params": list(other[3:].parameters())}]
    by_hand, scheduler = KFAC(other, loss, groups, **EXACT), make(optimizer)
    for _ in range(5):
        for mine, theirs in zip(by_hand.param_groups, optimizer.param_groups, strict=True):
            mine |= {key: theirs[key] for key in ("lr", "momentum")}
        optimizer.zero_grad(set_to_none=False)
        by_hand.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        scheduler.step(*((1.0,) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else ()))
        train(other, by_hand, [(x, y)], loss)
    assert torch.equal(weights(model), weights(other))


def same(one: Any, other: Any) -> bool:
    """Whether two nested states are equal, bit by bit."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


STATES: dict[str, dict[str, Any]] = {
    "default": {},
    "sum": {"loss": CE(reduction="sum")},
    "amortised": {"factors_every": 3, "inverses_every": 4},
    "eigen": {"eigen": True, "inverses_every": 2},
    "empirical": {"fisher": "empirical", "weight_decay": 0.1, "kl_clip": 1e-3},
    "quadratic": {"quadratic_model": True},
    "bfloat16": {"dtype": torch.bfloat16},
    "adamw": {"adamw": True},
    "uncovered": {"norm": True},
}


@pytest.mark.filterwarnings("ignore::kfs.errors.KfsWarning")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("stop", "flat"), [(1, None), (4, None), (5, None), (0, False), (4, False), (0, True), (4, True)]
)
@pytest.mark.parametrize("name", STATES)
def test_a_stopped_training_goes_on_bit_by_bit(name: str, stop: int, flat: bool | None, tmp_path: Path) -> None:
    """The state is in a file or, with `flat`, in a checkpoint of `torch.distributed.checkpoint`, optionally by name."""
    options = dict(STATES[name])
    loss, dtype, norm = options.pop("loss", CE()), options.pop("dtype", torch.float64), options.pop("norm", False)
    (x, y), some = data(dtype=dtype), options.pop("adamw", False)
    y = y % 3

    def make() -> tuple[Any, KFAC]:
        model = mlp(dtype)
        if norm:
            nn.utils.parametrizations.weight_norm(model[2])
        first = {"params": list(model[:1].parameters())} | ({"method": "adamw"} if some else {})
        return model, KFAC(model, loss, [first, {"params": list(model[1:].parameters())}], **options)

    def go(model: Any, optimizer: KFAC, steps: range) -> None:
        for step in steps:
            part = slice(step % 3, 9 + step % 3)

            def closure(part: slice = part) -> Tensor:
                optimizer.zero_grad()
                value: Tensor = loss(model(x[part]), y[part])
                value.backward()
                return value.detach()

            optimizer.step(closure)

    model, optimizer = make()
    go(model, optimizer, range(stop))
    how = StateDictOptions(flatten_optimizer_state_dict=bool(flat))
    file = io.BytesIO()
    if flat is None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    else:
        before = weights(model), optimizer.steps, [group["lr"] for group in optimizer.param_groups]
        save(dict(zip("mo", get_state_dict(model, optimizer, options=how), strict=True)), checkpoint_id=tmp_path)
        assert torch.equal(weights(model), before[0])
        assert (optimizer.steps, [group["lr"] for group in optimizer.param_groups]) == before[1:]
    go(model, optimizer, range(stop, 8))
    resumed, again = make()
    if flat is None:
        file.seek(0)
        state = torch.load(file, weights_only=True)
        resumed.load_state_dict(state["model"])
        again.load_state_dict(state["optimizer"])
    else:
        state = dict(zip("mo", get_state_dict(resumed, again, options=how), strict=True))
        load(state, checkpoint_id=tmp_path)
        set_state_dict(resumed, again, model_state_dict=state["m"], optim_state_dict=state["o"], options=how)
    go(resumed, again, range(stop, 8))
    assert torch.equal(weights(model), weights(resumed))
    assert same(optimizer.state_dict()["kfac"], again.state_dict()["kfac"])


def through_file(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), through_file])
def test_copies_of_a_model_are_not_watched(copied: Callable[[Any], Any]) -> None:
    model, (x, y) = mlp(), data()
    optimizer = KFAC(model, CE(), **EXACT)
    train(model, optimizer, [(x, y)], CE())
    other = copied(model)
    CE()(other(x), y).backward()
    assert optimizer.preconditioner.watch.collect() is None
    train(model, optimizer, [(x, y)], CE())
    second = KFAC(other, CE(), **EXACT)
    second.load_state_dict(optimizer.state_dict())
    train(other, second, [(x, y)], CE())


@pytest.mark.filterwarnings("ignore")  # a warning about the optimizer's code
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models(backend: str) -> None:
    """The optimizer gets the compiled model; steps without new factors run compiled code."""
    torch._dynamo.reset()
    plain, model, (x, y) = mlp(), mlp(), data()
    compiled: Any = torch.compile(model, backend=backend)
    optimizer = KFAC(compiled, CE(), factors_every=2, **EXACT)
    train(compiled, optimizer, [(x, y)] * 3, CE())
    train(plain, KFAC(plain, CE(), factors_every=2, **EXACT), [(x, y)] * 3, CE())
    torch.testing.assert_close(weights(model), weights(plain))


@pytest.mark.filterwarnings("ignore")
def test_compiled_models_whose_original_the_optimizer_has() -> None:
    """Operations would be hidden, and AdamW would train all parameters, so this is an error."""
    torch._dynamo.reset()
    model, (x, y) = mlp(), data()
    compiled: Any = torch.compile(model, backend="eager")
    optimizer = KFAC(model, CE())
    with pytest.raises(ModelError, match=r"model = torch\.compile\(model\)"):
        compiled(x)
    assert not torch.overrides._get_current_function_mode_stack()
    train(model, optimizer, [(x, y)], CE())


def gpt2() -> Any:
    torch.manual_seed(0)
    return gpt2_without_dropout(layers=1)


SENTENCES = [
    {"input_ids": t, "labels": t} for t in torch.randint(11, (16, 5), generator=torch.Generator().manual_seed(0))
]


def hugging_face(
    folder: Path,
    resume: str | None = None,
    max_steps: int = 6,
    make: Callable[[], Any] = gpt2,
    fisher: Any = "type-2",
    sentences: Any = SENTENCES,
    **options: Any,
) -> tuple[Any, KFAC, Any]:
    """Train a small language model by `transformers.Trainer`."""
    model = make()
    optimizer = KFAC(model, TokenCrossEntropy(shift=True), lr=0.05, fisher=fisher)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 12)
    settings: dict[str, Any] = {"per_device_train_batch_size": 8, "logging_steps": 1, "save_strategy": "no"} | options
    arguments = TrainingArguments(
        str(folder), report_to=[], use_cpu=True, disable_tqdm=True, max_steps=max_steps, max_grad_norm=0.0, **settings
    )
    trainer = Trainer(model, arguments, train_dataset=sentences, optimizers=(optimizer, scheduler))  # type: ignore[arg-type]
    trainer.train(resume_from_checkpoint=resume)
    return model, optimizer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_hugging_face_trainer(tmp_path: Path) -> None:
    """Training works, equals a plain loop, and halves of batches equal batches."""
    model, optimizer, losses = hugging_face(tmp_path)
    assert losses[-1] < losses[0]
    assert not optimizer.uncovered
    assert optimizer.events.skipped_steps == 0
    halves, _, _ = hugging_face(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    # Six float32 steps with singular factors (rare tokens) amplify round-off of another order of sums by this much.
    torch.testing.assert_close(weights(halves), weights(model), rtol=1e-3, atol=1e-4)


def test_hugging_face_trainer_resumes(tmp_path: Path) -> None:
    model, _, _ = hugging_face(tmp_path / "one", save_strategy="steps", save_steps=3)
    resumed, optimizer, _ = hugging_face(tmp_path / "two", resume=str(tmp_path / "one" / "checkpoint-3"))
    assert optimizer.steps == 6
    torch.testing.assert_close(weights(resumed), weights(model), rtol=0, atol=0)


def some_tokens(count: int) -> list[dict[str, Tensor]]:
    """Return sentences of which fewer and fewer tokens count."""
    return [
        s | {"labels": s["labels"].where(torch.arange(5) < 5 - n % 4, -100)} for n, s in enumerate(SENTENCES[:count])
    ]


@pytest.mark.parametrize("fisher", ["type-2", "mc", "empirical"])
def test_parts_of_a_batch_with_different_numbers_of_tokens(fisher: Any, tmp_path: Path) -> None:
    """Trainer divides the loss of each part by the tokens of all parts; the step is that of one large batch."""
    parts, optimizer, _ = hugging_face(
        tmp_path,
        max_steps=2,
        fisher=fisher,
        sentences=some_tokens(8),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        train_sampling_strategy="sequential",
    )
    whole, loss = gpt2(), TokenCrossEntropy(shift=True)
    plain = KFAC(whole, loss, lr=0.05, fisher=fisher)
    batch = default_collate(some_tokens(8))
    scheduler = lr_scheduler.CosineAnnealingLR(plain, 12)
    for _ in range(2):
        plain.zero_grad()
        loss(whole(batch["input_ids"]).logits, batch["labels"]).backward()
        plain.step()
        scheduler.step()
    assert optimizer.events.skipped_steps == 0
    torch.testing.assert_close(weights(parts), weights(whole), rtol=1e-3, atol=1e-4)  # see above


@pytest.mark.filterwarnings("ignore:.*use_cache=True.*")
def test_hugging_face_trainer_in_half_precision_with_checkpoints(tmp_path: Path) -> None:
    """Casts of outputs and checkpoints change nothing but round-off: Llama's scales are trained, too."""

    def make() -> Any:
        torch.manual_seed(0)
        return llama()

    start = weights(make())
    plain, _, _ = hugging_face(tmp_path, make=make, max_steps=3)
    saving, optimizer, _ = hugging_face(tmp_path, make=make, max_steps=3, gradient_checkpointing=True)
    torch.testing.assert_close(weights(saving), weights(plain), rtol=0, atol=0)
    half, optimizer, _ = hugging_face(tmp_path, make=make, max_steps=3, gradient_checkpointing=True, bf16=True)
    assert not optimizer.uncovered
    assert 0 < (weights(half) - weights(plain)).norm() < 0.1 * (weights(plain) - start).norm()
    # Afterwards, the model is used as before.
    risk = EmpiricalRisk(half.eval(), TokenCrossEntropy(shift=True), [default_collate(SENTENCES)])
    assert len(kfs.KFAC(risk, fisher="mc").blocks) == len(optimizer.preconditioner.curvature.averages)


def test_the_example_learns() -> None:
    before, after = finetune.main(steps=20)
    assert after < 0.7 * before


@pytest.mark.parametrize("own_loss", [False, True])
def test_accelerate(own_loss: bool) -> None:
    """With mixed precision and accumulated gradients, weights are those of a plain loop with autocast, bit by bit."""
    loss, batches = TokenCrossEntropy(shift=True), [default_collate(SENTENCES[n : n + 4]) for n in (0, 4, 8, 12)]
    moved = []
    for prepared in (False, True):
        model = gpt2()
        optimizer = KFAC(model, loss, lr=0.05, **EXACT)
        accelerator = Accelerator(mixed_precision="bf16", cpu=True, gradient_accumulation_steps=2)
        run, steps = (model, optimizer) if not prepared else accelerator.prepare(model, optimizer)
        for number, batch in enumerate(batches):
            with accelerator.accumulate(run) if prepared else torch.autocast("cpu", torch.bfloat16):
                out = run(**batch)
            value = loss(out.logits.float(), batch["labels"]) if own_loss else out.loss
            if prepared:
                accelerator.backward(value)
            else:
                (value / 2).backward()
            if prepared or number % 2:
                steps.step()
                steps.zero_grad()
        assert optimizer.steps == 2
        moved.append(weights(model))
    torch.testing.assert_close(moved[0], moved[1], rtol=0, atol=0)


def test_packed_sequences() -> None:
    """Sequences in one row, told apart by their positions, have the factors of padded sequences."""
    torch.manual_seed(0)
    model, loss = llama().double().eval(), TokenCrossEntropy(shift=True)
    rows = [torch.randint(11, (n,)) for n in (5, 3, 4)]
    labels = [torch.cat([row.new_full((1,), -100), row[1:]]) for row in rows]
    # With a cache, the model would not tell sequences apart.
    packed = {
        "input_ids": torch.cat(rows)[None],
        "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None],
        "labels": torch.cat(labels)[None],
        "use_cache": False,
    }
    padded = {
        "input_ids": pad_sequence(rows, True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], True),
        "labels": pad_sequence(labels, True, -100),
    }
    one, other = (kfs.KFAC(EmpiricalRisk(model, loss, [batch]), "type-2") for batch in (packed, padded))
    for name, block in one.blocks.items():
        mine, theirs = block.structure(), other.blocks[name].structure()
        # Normalizations and rotations of positions are in float32.
        torch.testing.assert_close(mine.to_dense(), theirs.to_dense(), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("items", [16, 32])
def test_losses_divided_by_the_items_of_all_parts(items: int) -> None:
    """Hugging Face's Trainer divides in this way; the empirical Fisher must not depend on it."""
    model, x, moved = gpt2(), torch.stack([sentence["labels"] for sentence in SENTENCES[:4]]), []
    for given in ({}, {"num_items_in_batch": torch.tensor(items)}):
        copied = copy.deepcopy(model)
        optimizer = KFAC(copied, TokenCrossEntropy(shift=True), fisher="empirical", lr=0.0)
        copied(input_ids=x, labels=x, **given).loss.backward()
        optimizer.step()
        moved.append([a.factors.B.values for a in optimizer.preconditioner.curvature.averages.values()])
    torch.testing.assert_close(moved[0], moved[1])


class OwnLoss(nn.Module):
    """A network that computes its own loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = mlp(), kind

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        f = self.net(x)
        loss = CE()(f, labels)
        return {"tuple": (f, loss), "loss first": (loss, f), "dict": {"logits": f, "loss": loss}}[self.kind]


PLACES = [("tuple", 1), ("loss first", 0), ("dict", "loss")]


@pytest.mark.parametrize(("kind", "place"), PLACES)
def test_models_that_compute_their_loss(kind: str, place: Any) -> None:
    model, plain, (x, y) = OwnLoss(kind), mlp(), data()
    optimizer = KFAC(model, CE(), **EXACT)
    model(x, labels=y)[place].backward()
    optimizer.step()
    train(plain, KFAC(plain, CE(), **EXACT), [(x, y)], CE())
    torch.testing.assert_close(weights(model), weights(plain))


class Lit(LightningModule):
    """A LightningModule with a training step."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.loss = mlp(torch.float32), CE()
        self.values: list[float] = []

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss: Tensor = self.loss(self(batch[0]), batch[1])
        self.values.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = KFAC(self.watched(), self.loss)
        return [optimizer], [{"scheduler": lr_scheduler.StepLR(optimizer, 4), "interval": "step"}]

    def watched(self) -> nn.Module:
        return self.net


class Whole(Lit):
    """The same, with the LightningModule itself as the optimizer's model."""

    def watched(self) -> nn.Module:
        return self


def lightning(folder: Path, make: type[Lit] = Lit, epochs: int = 4, resume: Any = None, **options: Any) -> Lit:
    """Train with `pytorch_lightning.Trainer`."""
    module = make()
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    trainer = Lightning(accelerator="cpu", max_epochs=epochs, default_root_dir=folder, **quiet | options)
    trainer.fit(module, DataLoader(TensorDataset(*data(16, torch.float32)), 8), ckpt_path=resume)
    if resume is None:
        trainer.save_checkpoint(folder / "last.ckpt")
    return module


LIGHTNING = pytest.mark.filterwarnings(
    "ignore:.*num_workers.*", "ignore:.*isinstance.*LeafSpec.*", "ignore:.*logging.*"
)


@LIGHTNING
@pytest.mark.parametrize("make", [Lit, Whole])
def test_lightning(make: type[Lit], tmp_path: Path) -> None:
    module = lightning(tmp_path, make, epochs=6)
    assert module.values[-1] < module.values[0]
    optimizer: Any = module.optimizers(use_pl_optimizer=False)
    assert optimizer.steps == 12
    assert not optimizer.uncovered
    clipped = lightning(tmp_path, make, epochs=6, gradient_clip_val=0.1, accumulate_grad_batches=2)
    assert clipped.values[-1] < clipped.values[0]


@LIGHTNING
def test_lightning_resumes(tmp_path: Path) -> None:
    whole = lightning(tmp_path / "whole")
    lightning(tmp_path / "half", epochs=2)
    resumed = lightning(tmp_path / "rest", resume=tmp_path / "half" / "last.ckpt")
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "parts", "norm"),
    [
        ({}, 1, True),
        ({}, 1, False),
        ({}, 4, False),
    ],
)
def test_quadratic_model(options: dict[str, Any], parts: int, norm: bool) -> None:
    """The loss stays close to its first value, due to the quadratic model with the batch's curvature."""
    x, y = data()
    model = nn.Sequential(nn.Linear(4, 6), *([nn.BatchNorm1d(6)] if norm else []), nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer = KFAC(model, CE(), quadratic_model=True, **EXACT | options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses = [CE()(model(x[i::parts]), y[i::parts]) / parts for i in range(parts)]
        torch.stack(losses).sum().backward()
        return torch.stack(losses).sum().detach()

    values = [float(optimizer.step(closure)) for _ in range(8)]
    assert max(values) < 2 * values[0]
