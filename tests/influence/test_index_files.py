"""Files of an index: resuming, reading, and errors."""

import json
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs import files
from kfs.errors import StorageError
from kfs.influence.index import Index
from tests.factors.test_checkpoint import finished, forks, in_child, kill_me
from tests.factors.test_gradient_streams import data, mlp

NUM_BATCHES = 5


class Batches:
    """Batches of two examples, with a callback before each one."""

    def __init__(self, before: Callable[[int], None] = lambda _: None, number: int = NUM_BATCHES) -> None:
        self.before, self.number = before, number
        self.X, self.y = data(2 * NUM_BATCHES)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for place in range(self.number):
            self.before(place)
            yield self.X[2 * place : 2 * place + 2], self.y[2 * place : 2 * place + 2]


def risk(model: nn.Module | None = None, batches: Any = None, **settings: Any) -> kfs.EmpiricalRisk:
    data_set = Batches() if batches is None else batches
    return kfs.EmpiricalRisk(model or mlp(), nn.CrossEntropyLoss(), data_set, **settings)


def curvature() -> kfs.EKFAC:
    return kfs.EKFAC(risk())


def make(
    folder: Path | None, train: kfs.EmpiricalRisk | None = None, K: Any = None, damping: Any = 0.1, **settings: Any
) -> Index:
    """Make an index with one shard for each batch."""
    options: dict[str, Any] = {"dtype": torch.float64, "shard_bytes": 0} | settings
    return kfs.Influence(K or curvature(), damping).index(train or risk(), file=folder, **options)


@forks
@pytest.mark.parametrize("compression", [{}, {"rank": 2, "compression": "projected"}], ids=["all", "projected"])
def test_killed_and_started_again(tmp_path: Path, compression: Any) -> None:
    """A process is killed before each batch in turn; the result is that of an uninterrupted process."""
    expected = make(None, **compression)
    deaths = 0
    status = -signal.SIGKILL
    while status:  # each process runs one batch longer than the one before
        left = iter(range(2 + deaths))

        def before(_: int, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                kill_me()

        train = partial(risk, batches=Batches(before), num_data=2 * NUM_BATCHES)
        status = finished(in_child(lambda train=train: make(tmp_path, train(), **compression)))  # type: ignore[misc]
        assert status in {0, -signal.SIGKILL}
        deaths += status == -signal.SIGKILL
    assert deaths >= NUM_BATCHES - 1  # the first two calls are not counted
    assert list(tmp_path.glob("shard-*"))
    index = make(tmp_path, **compression)
    close_to(index, expected)
    assert index.error == expected.error


def close_to(index: Index, expected: Index) -> None:
    assert torch.equal(index.scores(risk()), expected.scores(risk()))
    assert torch.equal(index.self_scores(), expected.self_scores())


def test_nothing_is_computed_twice(tmp_path: Path) -> None:
    """This is true for a complete index, and for batches whose shards exist."""
    first = make(tmp_path)
    calls: list[int] = []
    model = mlp()
    model.register_forward_hook(lambda _, args, __: calls.append(len(args[0])))
    K = curvature()
    again = make(tmp_path, risk(model), K)
    assert calls == []
    close_to(again, first)
    assert str(again) == str(first)
    assert f"in {tmp_path}, 5 shards" in repr(first)

    (tmp_path / "shard-000003.safetensors").unlink()
    (tmp_path / "shard-000004.safetensors").unlink()
    incomplete(tmp_path)
    calls.clear()
    close_to(make(tmp_path, risk(model), K), first)
    # The audit of the first computed batch needs a few more passes.
    assert sum(calls) < 4 * 4


def incomplete(folder: Path) -> None:
    """Change an index as if the process had ended before it was complete."""
    header, state = files.read(folder / "index.safetensors")
    about = {"kind": "index", "belongs_to": json.loads(header["belongs_to"])}
    files.write(folder / "index.safetensors", about, state | {"complete": False})


def other_model() -> nn.Module:
    model = mlp()
    with torch.no_grad():
        model.get_parameter("2.bias")[1] += 1e-6
    return model


def half(f: Tensor, _: Tensor) -> Tensor:
    return f[0] / 2


DIFFERENT: dict[str, tuple[Any, str]] = {
    "weights": (
        lambda folder: make(folder, risk(other_model()), kfs.EKFAC(risk(other_model()))),
        r"curvature, values of parameters, values of other",
    ),
    "damping": (lambda folder: make(folder, damping=kfs.Relative(0.1)), r"damping \(0.1 there, .*Relative.* here\)"),
    "curvature": (lambda folder: make(folder, K=kfs.EKFAC(risk(), "empirical")), r"something else: curvature differ"),
    "of_train": (lambda folder: make(folder, of_train="margin"), r"of_train \(loss there, margin here\)"),
    "function": (lambda folder: make(folder, of_train=half), r"of_train \(loss there, half \([0-9a-f]+\) here\)"),
    "dtype": (lambda folder: make(folder, dtype=torch.bfloat16), r"dtype \(torch.float64 there, torch.bfloat16 here"),
    "rank": (lambda folder: make(folder, rank=3), r"rank \(None there, 3 here\), compression \(None there, low rank"),
    "number": (
        lambda folder: make(folder, risk(batches=Batches(number=4))),
        r"number of examples \(10 there, 8 here\)",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_another_index_is_refused(what: str, tmp_path: Path) -> None:
    make(tmp_path)
    again, message = DIFFERENT[what]
    with pytest.raises(StorageError, match=message):
        again(tmp_path)


def changed(place: int) -> kfs.EmpiricalRisk:
    """Change one example of a batch."""
    batches = Batches()
    batches.X[2 * place + 1, 2] += 1e-6
    return risk(batches=batches)


def test_other_data_are_refused(tmp_path: Path) -> None:
    """All batches of a complete index are compared, and all batches that are not computed again."""
    K = curvature()
    make(tmp_path, K=K)
    for place in range(NUM_BATCHES):
        with pytest.raises(StorageError, match=rf"made from: batch {place} is another one. Pass the same data"):
            make(tmp_path, changed(place), K)
    large = [(Batches().X, Batches().y)]
    with pytest.raises(StorageError, match=r"batch 0 is another one"):
        make(tmp_path, risk(batches=large), K)
    incomplete(tmp_path)
    with pytest.raises(StorageError, match=r"batch 4 is another one"):
        make(tmp_path, changed(4), K)


def test_every_number_of_large_data_counts(tmp_path: Path) -> None:
    """A sample of a batch's numbers would miss a single different one."""
    torch.manual_seed(0)
    X, y = torch.rand(1200, 3, dtype=torch.float64), torch.randint(2, (1200,))
    model = nn.Linear(3, 2).double()
    train = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y))
    influence = kfs.Influence(kfs.KFAC(train))
    influence.index(train, file=tmp_path)
    for place in range(0, 1200, 100):
        other = X.clone()
        other[place, 1] += 1e-9
        with pytest.raises(StorageError, match=r"batch 0 is another one"):
            influence.index(kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), (other, y)), file=tmp_path)
    influence.index(train, file=tmp_path)


def test_other_batches_are_refused(tmp_path: Path) -> None:
    """The number of examples is the same, with other batches after the first ones."""
    K = curvature()
    X, y = Batches().X, Batches().y
    halves = [(X[:2], y[:2]), (X[2:], y[2:])]
    pair = [(X[:2], y[:2]), (X[2:], y[2:]), (X[:0], y[:0])]
    make(tmp_path / "two", risk(batches=halves), K)
    make(tmp_path / "two", risk(batches=pair), K)  # an empty batch does not count
    make(tmp_path / "one", risk(batches=[(X, y)]), K)
    incomplete(tmp_path / "two")
    shard = tmp_path / "two" / "shard-000002.safetensors"
    shard.write_bytes((tmp_path / "two" / "shard-000001.safetensors").read_bytes())
    with pytest.raises(StorageError, match=r"there are fewer batches now"):
        make(tmp_path / "two", risk(batches=halves), K)
    (tmp_path / "one" / "shard-000000.safetensors").rename(shard)
    _, state = files.read(shard)
    files.write(tmp_path / "one" / "shard-000000.safetensors", {"kind": "shard"}, state | {"batches": []})
    with pytest.raises(StorageError, match=r"there are more batches now"):
        make(tmp_path / "one", risk(batches=[(X, y)]), K)


def test_weights_may_not_change_later(tmp_path: Path) -> None:
    model = mlp()
    index = make(tmp_path, risk(model))
    index.scores(risk(model))
    with torch.no_grad():
        model.get_parameter("0.weight")[0, 0] += 1
    with pytest.raises(StorageError, match=r"The index was made with other weights: values of parameters, values"):
        index.scores(risk(model))
    with pytest.raises(StorageError, match=r"The index was made with other weights"):
        index.self_scores()


def test_functions_have_no_other_weights() -> None:
    """A model that is a function is identified by its name, and has no buffers."""
    params = {"W": torch.randn(3, 3, dtype=torch.float64)}
    X, y = data()
    one = kfs.EmpiricalRisk(lambda p, x: x @ p["W"], nn.CrossEntropyLoss(), (X, y), params=params)
    influence = kfs.Influence(kfs.KFAC(one), 0.1)
    index = influence.index(one, dtype=torch.float64, of_train=half)
    torch.testing.assert_close(index.scores(one), influence.scores(one, one, of_train=half), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["index", "shard-000002"])
@pytest.mark.parametrize("how", ["cut", "changed", "missing", "foreign"])
def test_damage(name: str, how: str, tmp_path: Path) -> None:
    """Truncated, modified, removed or replaced files are refused, both on opening and later."""
    K = curvature()
    index = make(tmp_path, K=K)
    file = tmp_path / f"{name}.safetensors"
    content = bytearray(file.read_bytes())
    if how == "cut":
        file.write_bytes(content[:-3])
    elif how == "changed":
        content[-4] ^= 1
        file.write_bytes(content)
    elif how == "foreign":
        file.write_text("something else", encoding="utf-8")
    else:
        file.unlink()
    expected = {
        "cut": r"is damaged: it was truncated or changed|its beginning is damaged",
        "changed": r"is damaged: it was truncated or changed|its beginning is damaged",
        "missing": r"shard-000002.safetensors is missing, and the index has 5 such files",
        "foreign": r"was not written by kfs",
    }[how]
    if (name, how) == ("index", "missing"):
        make(tmp_path, K=K)  # starts again from the beginning
        return
    with pytest.raises(StorageError, match=expected):
        make(tmp_path, K=K)
    if name != "index":
        with pytest.raises(StorageError, match=r"damaged|cannot be read|was not written by kfs"):
            index.scores(risk())


def replace_shard(folder: Path, change: Callable[[Any], None]) -> None:
    file = folder / "shard-000000.safetensors"
    _, state = files.read(file)
    change(state["batches"][0]["blocks"]["0"])
    files.write(file, {"kind": "shard"}, state)


def test_shapes_of_gradients_are_checked(tmp_path: Path) -> None:
    """A file with a valid digest may still have wrong contents."""
    index = make(tmp_path)
    file = tmp_path / "shard-000000.safetensors"
    content = file.read_bytes()
    for change in (
        lambda block: block["uses"][0]["x"].update(values=torch.zeros(1, 2, 1, 5)),
        lambda block: block["uses"][0]["x"].update(values=torch.zeros(2, 1, 3)),
        lambda block: block["uses"][0]["x"].update(values=torch.zeros(1, 3, 1, 3)),
        lambda block: block["uses"][0].update(x={"values": torch.zeros(2, 2, 1, 3), "last": 1.0}),
        lambda block: block["uses"][0].update(x={"index": torch.full((2, 1), 9), "size": 4}),
        lambda block: block["uses"][0].update(x={"index": torch.zeros(2, 1, dtype=torch.int32), "size": 3}),
        lambda block: block.pop("uses"),
        lambda block: block.update(whole=torch.zeros(3, 1, 4, 4)),
    ):
        replace_shard(tmp_path, change)
        with pytest.raises(StorageError, match=r"does not contain what its header declares"):
            index.scores(risk())
        file.write_bytes(content)
    assert torch.isfinite(index.scores(risk())).all()


def test_sums_of_operators(tmp_path: Path) -> None:
    """The terms of a sum distinguish it from other sums."""
    one, other = kfs.KFAC(risk()), kfs.KFAC(risk(batches=Batches(number=4)), "empirical")
    first = make(tmp_path, K=one + other, damping=0.1)
    close_to(make(tmp_path, K=one + other, damping=0.1), first)
    with pytest.raises(StorageError, match=r"something else: curvature differ"):
        make(tmp_path, K=one + one, damping=0.1)


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text", encoding="utf-8")
    with pytest.raises(StorageError, match=r"cannot be created: .* An index is a folder"):
        make(tmp_path / "file")


def test_files_are_mapped(tmp_path: Path) -> None:
    """Tensors of a file are memory-mapped, not copied into the process's memory."""
    index = make(tmp_path)
    values = index._shards.read(0)["batches"][0]["blocks"]["0"]["uses"][0]["x"]["values"]
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("there is no list of mapped files")
    for line in maps.read_text(encoding="utf-8").splitlines():
        start, stop = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= values.data_ptr() < stop:
            assert line.endswith("shard-000000.safetensors")
            return
    pytest.fail("the tensor is nowhere")
