"""Files on the disk: the order in which they are written, and tensors that share memory."""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kfs import files
from kfs.errors import StorageError


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes are written and synchronized, then the file is renamed, then the folder is synchronized."""
    path = tmp_path / "file"
    files.write(path, {}, {"old": torch.zeros(2)})
    calls: list[tuple[str, int, bytes | None]] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        fsync(descriptor)
        # The bytes that another process would read now: buffers of this process do not count.
        content = None if os.path.isdir(descriptor) else os.pread(descriptor, 2**20, 0)
        calls.append(("fsync", os.fstat(descriptor).st_ino, content))

    def recorded_replace(source: Any, target: Any) -> None:
        assert Path(target) == path
        calls.append(("replace", os.stat(source).st_ino, Path(source).read_bytes()))
        replace(source, target)

    monkeypatch.setattr("os.fsync", recorded_fsync)
    monkeypatch.setattr("os.replace", recorded_replace)
    files.write(path, {"kind": "new"}, {"new": torch.ones(3)})
    file, whole = path.stat().st_ino, path.read_bytes()
    assert calls == [("fsync", file, whole), ("replace", file, whole), ("fsync", tmp_path.stat().st_ino, None)]
    header, state = files.read(path)
    assert header["kind"] == "new"
    assert torch.equal(state["new"], torch.ones(3))


def test_tensors_that_share_memory_are_written_apart(tmp_path: Path) -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    state = {"whole": whole, "same": whole, "row": whole[1], "transposed": whole.T, "list": [whole.flatten()]}
    files.write(tmp_path / "file", {}, state)
    _, again = files.read(tmp_path / "file")
    assert set(again) == set(state)
    for name in ("whole", "same", "row", "transposed"):
        assert torch.equal(again[name], state[name])  # type: ignore[arg-type]
    assert torch.equal(again["list"][0], whole.flatten())


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def test_every_tool_for_the_format_reads_the_file(tmp_path: Path) -> None:
    """The library of the format reads tensors of all dtypes and shapes, in any memory layout."""
    state: dict[str, Any] = {}
    for dtype in DTYPES:
        whole = (10 * torch.randn(3, 4)).to(dtype)
        state[str(dtype)] = {"whole": whole, "strided": whole[:, 1:3].T, "single": whole[0, 0], "none": whole[:, :0]}
    state["conjugate"] = torch.randn(3, dtype=torch.complex64).conj()
    state["negative"] = state["conjugate"].imag
    files.write(tmp_path / "file", {"kind": 'a "digest":"', "größe": 3}, state)
    with safe_open(tmp_path / "file", framework="pt") as file:
        header = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
    assert (header["kind"], header["größe"]) == ('a "digest":"', "3")
    _, again = files.read(tmp_path / "file")
    for name, t in {"conjugate": state["conjugate"], "negative": state["negative"]}.items():
        assert torch.equal(tensors[name], t)
        assert torch.equal(again[name], t)
    for dtype in DTYPES:
        for name, t in state[str(dtype)].items():
            for found in (tensors[f"{dtype}.{name}"], again[str(dtype)][name]):
                assert found.dtype == dtype
                assert torch.equal(found, t)
    # Readers map numbers into memory, so they must be aligned to their size.
    content = (tmp_path / "file").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    entries = json.loads(content[8 : 8 + length])
    del entries["__metadata__"]
    assert all(entry["data_offsets"][0] % tensors[name].element_size() == 0 for name, entry in entries.items())


def test_what_the_library_of_the_format_writes_is_the_same(tmp_path: Path) -> None:
    """The bytes of all tensors are at the same offsets."""
    state = {"b": torch.randn(3), "a": torch.randn(2, 5), "c": torch.arange(3), "half": torch.ones(3).half()}
    files.write(tmp_path / "ours", {}, dict(state))
    save_file(state, tmp_path / "theirs", {"format": "kfs"})
    entries, numbers = [], []
    for name in ("ours", "theirs"):
        content = (tmp_path / name).read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        del header["__metadata__"]
        entries.append(header)
        numbers.append(content[8 + length :])
    assert entries[0] == entries[1]
    assert numbers[0] == numbers[1]


def test_nothing_is_left_behind_by_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match=r"a has dtype torch\.complex128"):
        files.write(tmp_path / "file", {}, {"a": torch.zeros(2, dtype=torch.complex128)})
    (tmp_path / "no folder").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        files.write(tmp_path / "no folder" / "file", {}, {"a": torch.zeros(2)})

    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    # In this thread, and in one that hashes.
    for function in ("_bytes", "_digest_of_piece"):
        with monkeypatch.context() as patch:
            patch.setattr(files, function, fails)
            with pytest.raises(RuntimeError, match="out of memory"):
                files.write(tmp_path / "file", {}, {"a": torch.zeros(2)})
    assert [path.name for path in tmp_path.iterdir()] == ["no folder"]


def several_pieces() -> dict[str, Tensor]:
    """Return tensors with a little more than three pieces of bytes; pieces and tensors end at different offsets."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**62), 2**62, (3 * 2**19 + 5,), generator=generator)
    parts = {"a": numbers[:3], "b": numbers[3:-20], "c": numbers[-20:]}
    return parts | {"strided": numbers[-6:].view(2, 3).T, "bytes": numbers[:2].view(torch.uint8)[:11]}


def split(content: bytes) -> tuple[bytes, bytes]:
    """Return the header of a file, up to its tensors, and its tensors."""
    length = 8 + int.from_bytes(content[:8], "little")
    return content[:length], content[length:]


def test_the_digest_is_that_of_the_digests_of_pieces(tmp_path: Path) -> None:
    state = several_pieces()
    files.write(tmp_path / "file", {}, state)
    header, again = files.read(tmp_path / "file")
    for name, t in state.items():
        assert torch.equal(again[name], t)
    assert header["digest_scheme"] == "blake2b of pieces of 4 MiB"
    beginning, numbers = split((tmp_path / "file").read_bytes())
    assert len(numbers) == sum(t.numel() * t.element_size() for t in state.values()) > 3 * 4 * 1024**2
    hashed = hashlib.blake2b(beginning.replace(header["digest"].encode(), 64 * b"0"), digest_size=32)
    for start in range(0, len(numbers), 4 * 1024**2):
        hashed.update(hashlib.blake2b(numbers[start : start + 4 * 1024**2], digest_size=32).digest())
    assert header["digest"] == hashed.hexdigest()


def test_changes_of_large_files_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write(path, {}, several_pieces())
    beginning, numbers = split(path.read_bytes())
    first, second, third, rest = (numbers[start : start + 2**22] for start in range(0, len(numbers), 2**22))
    for changed in (
        second + first + third + rest,
        first + second + rest + third,
        first + second + third,
        first + second + third[:-1] + b"\x00" + rest,
        first + second + third + rest[:-1] + bytes([rest[-1] ^ 1]),
        numbers + b"\x00",
    ):
        path.write_bytes(beginning + changed)
        with pytest.raises(StorageError, match="damaged"):
            files.read(path)


def test_a_digest_of_another_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write(path, {}, {"a": torch.ones(2)})
    good = path.read_bytes()
    path.write_bytes(good.replace(b"pieces of 4 MiB", b"pieces of 8 MiB"))
    with pytest.raises(StorageError, match=r"not know: 'blake2b of pieces of 8 MiB'.*Another version.*compute"):
        files.read(path)
    path.write_bytes(good.replace(b"digest_scheme", b"digest_schema"))
    with pytest.raises(StorageError, match=r"not know: None.*Another version.*compute and save"):
        files.read(path)


def test_few_pieces_are_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece is asked for only after the caller is done with the one that has to make room for it."""
    monkeypatch.setattr(files, "_PIECES_AT_A_TIME", 3)
    asked: list[int] = []
    done: list[int] = []

    def pieces() -> Iterator[int]:
        for piece in range(10):
            assert piece - len(done) < 3
            asked.append(piece)
            yield piece

    with ThreadPoolExecutor(2) as threads:
        for result in files._in_order(threads, lambda piece: piece**2, pieces()):
            done.append(result)
    assert asked == list(range(10))
    assert done == [piece**2 for piece in range(10)]


def test_tensors_without_numbers(tmp_path: Path) -> None:
    for number, state in enumerate(({}, {"a": torch.zeros(0, 3)})):
        files.write(tmp_path / str(number), {}, state)
        _, again = files.read(tmp_path / str(number))
        assert {name: t.shape for name, t in again.items()} == {name: t.shape for name, t in state.items()}


def test_contiguous_tensors_are_not_copied() -> None:
    t = torch.arange(6.0)
    parts = [part for piece in files._pieces([t, t[2:4]], pinned=False) for part in piece]
    assert [part.data_ptr() for part in parts] == [t.data_ptr(), t[2:].data_ptr()]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["pinned", "not pinned", "inference"])
def test_files_of_tensors_on_a_gpu_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """There are more pieces than buffers, some with bytes from both devices; numbers are still being computed."""
    monkeypatch.setattr(files, "_PIECES_AT_A_TIME", 2)
    if mode == "not pinned":
        monkeypatch.setattr(files, "_pinned_buffers", lambda _: [])
    state = several_pieces()
    files.write(tmp_path / "cpu", {}, state)
    with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode(mode == "inference"):
        slow = torch.ones(4096, 4096, device="cuda")
        for _ in range(20):
            slow = slow @ slow / 4096
        zero = (slow[0, 0] - slow[1, 1]).long()
        there = {name: t if name == "c" else t.cuda() + zero.to(t.dtype) for name, t in state.items()}
        there["strided"] = there["strided"].T.contiguous().T
        files.write(tmp_path / "gpu", {}, there)
    assert (tmp_path / "gpu").read_bytes() == (tmp_path / "cpu").read_bytes()


def test_names_that_look_alike(tmp_path: Path) -> None:
    """A key with a dot, and a key within a dictionary, are two tensors."""
    state = {"a": {"b": torch.ones(3)}, "a.b": torch.zeros(2)}
    files.write(tmp_path / "file", {}, state)
    _, found = files.read(tmp_path / "file")
    assert torch.equal(found["a"]["b"], torch.ones(3))
    assert torch.equal(found["a.b"], torch.zeros(2))


def test_a_header_that_is_nested_without_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes((400_000).to_bytes(8, "little") + b"[" * 400_000)
    with pytest.raises(StorageError, match="was not written by kfs"):
        files.read(tmp_path / "file")
