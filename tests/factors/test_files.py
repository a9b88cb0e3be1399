"""Files are read to the last bit; damaged and foreign files are refused without a crash."""

import json
import pickle
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import kfs
from kfs import files
from kfs.errors import ModelError, StorageError
from kfs.factors import EKFAC, KFAC, BlockDiagonal, exact_blocks, load
from kfs.factors.blocks.dense import Dense
from kfs.factors.layout import Layout
from kfs.problem.risk import EmpiricalRisk
from tests.factors.test_ekfac import SHARED, risk_of
from tests.factors.test_kronecker import definite, kfac, of_structure


def mlp_risk(part: slice = slice(0, 8), loss: nn.Module | None = None) -> EmpiricalRisk:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    X, y = torch.randn(8, 3, dtype=torch.float64), torch.randint(2, (8,))
    return EmpiricalRisk(model, loss or nn.CrossEntropyLoss(), (X[part], y[part]))


OBJECTS: dict[str, Callable[[], BlockDiagonal]] = {
    "KFAC": kfac,
    "reduce, diagonals": lambda: kfac(sharing={"one": "reduce"}, max_dim=3, joint_bias=False),
    "forward-only": lambda: kfac(fisher="forward-only"),
    "tied": lambda: KFAC(risk_of(*SHARED["tied"])),
    "unused rows": lambda: KFAC(risk_of(*SHARED["positions"])),
    "EKFAC": lambda: EKFAC(risk_of(*SHARED["groups"]), "mc"),
    "inverse": lambda: kfac().inverse(0.1),
    "factored inverse": lambda: kfac().inverse(0.1, "factored"),
    "bfloat16": lambda: kfac(factor_dtype=torch.bfloat16),
    "dense": lambda: of_structure(Dense(definite(6).unsqueeze(0), 2, 3), (2, 3)),
}


@pytest.mark.filterwarnings("ignore:Factors wider")
@pytest.mark.parametrize("name", OBJECTS)
def test_what_was_saved_comes_back(name: str, tmp_path: Path) -> None:
    K = OBJECTS[name]()
    K.save(tmp_path / "k.safetensors")
    again = kfs.load(tmp_path / "k.safetensors")
    assert type(again) is type(K)
    assert again.domain == K.domain
    assert torch.equal(again.to_dense(), K.to_dense())
    assert torch.equal(again @ torch.ones(K.shape[1], dtype=K.dtype), K @ torch.ones(K.shape[1], dtype=K.dtype))
    assert [path.name for path in tmp_path.iterdir()] == ["k.safetensors"]
    if isinstance(K, (KFAC, EKFAC)) and isinstance(again, (KFAC, EKFAC)):
        assert (again.settings, again.num_data, list(again.blocks)) == (K.settings, K.num_data, list(K.blocks))
        for mine, theirs in zip(K.blocks.values(), again.blocks.values(), strict=True):
            assert (mine.layout, mine.operations) == (theirs.layout, theirs.operations)


@pytest.mark.parametrize("make", [KFAC, EKFAC])
def test_more_data_can_be_added_to_what_was_loaded(make: Any, tmp_path: Path) -> None:
    first, second = mlp_risk(slice(0, 5)), mlp_risk(slice(5, 8))
    for fisher in ("type-2", "mc"):
        make(first, fisher).save(tmp_path / "k")
        loaded = load(tmp_path / "k")
        assert isinstance(loaded, (KFAC, EKFAC))
        K: Any = loaded
        assert torch.equal(K.update(second).to_dense(), make(first, fisher).update(second).to_dense())
    other = mlp_risk(slice(5, 8), nn.CrossEntropyLoss(reduction="sum"))
    with pytest.raises(ModelError, match="The losses differ"):
        K.update(other)
    with pytest.raises(ModelError, match="The losses differ"):
        K.merge(make(other, "mc"))


def test_the_header_is_readable(tmp_path: Path) -> None:
    KFAC(mlp_risk(), "mc", seed=7).save(tmp_path / "k")
    with safe_open(tmp_path / "k", framework="pt") as file:
        header = file.metadata()
    assert header["kind"] == "KFAC"
    assert header["kfs_version"] == kfs.__version__
    assert json.loads(header["parameters"]) == {"0.weight": [4, 3], "0.bias": [4], "2.weight": [2, 4], "2.bias": [2]}
    assert header["loss"] == "CrossEntropyLoss, reduction='mean'"
    assert (header["fisher"], header["sharing"], header["num_data"], header["seed"]) == ("mc", "expand", "8", "7")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    K = KFAC(mlp_risk())
    K.save(tmp_path / "k")
    before = (tmp_path / "k").read_bytes()

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(StorageError, match="cannot be written: No space left"):
        (2.0 * K).save(tmp_path / "k")  # type: ignore[attr-defined]
    assert (tmp_path / "k").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["k"]
    with pytest.raises(StorageError, match="cannot be written"):
        K.save(tmp_path / "nowhere" / "k")


@pytest.fixture(scope="module")
def file_of_ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "k"
    EKFAC(mlp_risk()).save(path)
    return path


@given(data=st.data())
def test_any_changed_byte_is_noticed(file_of_ours: Path, data: st.DataObject) -> None:
    whole = bytearray(file_of_ours.read_bytes())
    header = 8 + int.from_bytes(whole[:8], "little")
    place = data.draw(st.one_of(st.integers(0, header - 1), st.integers(0, len(whole) - 1)))
    whole[place] ^= data.draw(st.integers(1, 255))
    path = file_of_ours.with_name("changed")
    path.write_bytes(whole)
    with pytest.raises(StorageError, match=r"damaged|was not written by kfs"):
        load(path)


@given(data=st.data())
def test_any_other_length_is_noticed(file_of_ours: Path, data: st.DataObject) -> None:
    whole = file_of_ours.read_bytes()
    keep = data.draw(st.integers(0, len(whole) - 1))
    path = file_of_ours.with_name("cut")
    path.write_bytes(data.draw(st.sampled_from([whole[:keep], whole[keep:], whole + whole[: keep + 1]])))
    if path.read_bytes() != whole:
        with pytest.raises(StorageError, match=r"damaged|was not written by kfs"):
            load(path)


@given(content=st.binary(max_size=200))
def test_any_bytes_are_refused(file_of_ours: Path, content: bytes) -> None:
    path = file_of_ours.with_name("bytes")
    path.write_bytes(content)
    with pytest.raises(StorageError, match="was not written by kfs"):
        load(path)


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("executed"),))


def test_foreign_files_are_refused_and_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pickle").write_bytes(pickle.dumps(Evil()))
    torch.save({"a": torch.ones(2)}, tmp_path / "torch")
    save_file({"a": torch.ones(2)}, tmp_path / "foreign", {"format": "pt"})
    save_file({"a": torch.ones(2)}, tmp_path / "bare")
    (tmp_path / "list").write_bytes((2).to_bytes(8, "little") + b"[]")
    for name in ("pickle", "torch", "foreign", "bare", "list"):
        with pytest.raises(StorageError, match="was not written by kfs"):
            load(name)
    assert not (tmp_path / "executed").exists()
    for name in ("missing", "."):
        with pytest.raises(StorageError, match="cannot be read"):
            load(name)
    save_file({"a": torch.ones(2)}, tmp_path / "undigested", {"format": "kfs", "state": "{}"})
    with pytest.raises(StorageError, match="damaged"):
        load("undigested")
    files.write(tmp_path / "checkpoint", {"kind": "checkpoint"}, {})
    with pytest.raises(StorageError, match="holds a checkpoint"):
        load("checkpoint")


def paths_of(state: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all leaves of a state."""
    if isinstance(state, dict):
        return [p for key, value in state.items() for p in paths_of(value, (*path, key))]
    if isinstance(state, list):
        return [p for place, value in enumerate(state) for p in paths_of(value, (*path, place))]
    return [path]


def replaced(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(state) if isinstance(state, dict) else list(state)
    copy[path[0]] = replaced(state[path[0]], path[1:], value)
    return copy


@given(data=st.data())
def test_a_valid_file_with_other_contents_loads_consistently_or_not_at_all(
    file_of_ours: Path, data: st.DataObject
) -> None:
    """A well-formed file with wrong shapes, types or names may load, but only if its contents are consistent."""
    header, state = files.read(file_of_ours)
    path = data.draw(st.sampled_from(paths_of(state)))
    old = state
    for key in path:
        old = old[key]
    others: list[Any] = [None, -1, 3, "nothing", [], {}, True]
    if isinstance(old, Tensor):
        others += [old[..., :-1].contiguous(), old.unsqueeze(0), torch.zeros(0), old.to(torch.int64)]
    value = data.draw(st.sampled_from([other for other in others if type(other) is not type(old) or other is not old]))
    target = file_of_ours.with_name("other")
    files.write(target, {"kind": header["kind"]}, replaced(state, path, value))
    try:
        E = load(target)
        dense = E.to_dense()
    except StorageError:
        return
    assert dense.shape == (26, 26)


def test_wrong_shapes_are_named(file_of_ours: Path) -> None:
    _, state = files.read(file_of_ours)
    path: tuple[Any, ...] = ("blocks", 0, "pairs", "A", "input", "total")
    wrong: Any
    target = file_of_ours.with_name("shapes")
    files.write(target, {"kind": "KFAC"}, replaced(state, path, torch.zeros(3, 3)))
    with pytest.raises(StorageError, match=r"a factor has shape \[3, 3\] instead of \[1, 4, 4\]"):
        load(target)
    files.write(target, {"kind": "KFAC"}, replaced(state, ("space", "shapes", 0, 1), [4, 4]))
    with pytest.raises(StorageError, match="does not contain what its header declares"):
        load(target)
    files.write(target, {"kind": "KFAC"}, replaced(state, ("space", "dtype"), "nn"))
    with pytest.raises(StorageError, match="is no dtype"):
        load(target)
    blocks = EKFAC(mlp_risk()).inverse(0.1), of_structure(Dense(definite(6).unsqueeze(0), 2, 3), (2, 3))
    for K, path, wrong in (
        (blocks[0], ("groups", 0, "layouts", 0, "bias"), None),
        (blocks[0], ("groups", 0, "blocks", "values"), torch.zeros(3)),
        (blocks[1], ("groups", 0, "blocks", "matrix"), torch.zeros(3, 3)),
        (blocks[1], ("groups", 0, "layouts"), [asdict(Layout("W", (2, 3), (0, n), (0, 1), 1)) for n in (1, 2)]),
    ):
        K.save(target)
        _, good = files.read(target)
        files.write(target, {"kind": "BlockDiagonal"}, replaced(good, path, wrong))
        with pytest.raises(StorageError, match="does not contain what its header declares"):
            load(target)
    EKFAC(mlp_risk()).save(target)
    _, good = files.read(target)
    dense = [exact_blocks(mlp_risk()).stacks[place].state() for place in range(2)]
    files.write(target, {"kind": "EKFAC"}, replaced(good, ("eigenvalues",), dense))
    with pytest.raises(StorageError, match="blocks are not given by eigenvalues"):
        load(target)
    for key, wrong in (("pairs", {}), ("layout", {}), ("operations", 3)):
        files.write(target, {"kind": "KFAC"}, replaced(state, ("blocks", 0, key), wrong))
        with pytest.raises(StorageError, match="does not contain what its header declares"):
            load(target)


def test_files_that_lack_a_block(tmp_path: Path) -> None:
    path = tmp_path / "k"
    kfac().inverse(0.1).save(path)
    header, state = files.read(path)
    state["groups"].pop()
    files.write(path, {"kind": header["kind"]}, state)
    with pytest.raises(StorageError, match="do not cover all parameters once"):
        load(path)
