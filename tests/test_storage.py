"""Files on the disk: in which order they get there, and that tensors may share memory."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from kfs import storage


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes are handed over and synchronized, then the file is renamed, then the folder is synchronized."""
    path = tmp_path / "file"
    storage.write(path, {}, {"old": torch.zeros(2)})
    calls: list[tuple[str, int, bytes | None]] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        fsync(descriptor)
        # What another process would read now: what is still in a buffer of this one does not count.
        content = None if os.path.isdir(descriptor) else os.pread(descriptor, 2**20, 0)
        calls.append(("fsync", os.fstat(descriptor).st_ino, content))

    def recorded_replace(source: Any, target: Any) -> None:
        assert Path(target) == path
        calls.append(("replace", os.stat(source).st_ino, Path(source).read_bytes()))
        replace(source, target)

    monkeypatch.setattr("os.fsync", recorded_fsync)
    monkeypatch.setattr("os.replace", recorded_replace)
    storage.write(path, {"kind": "new"}, {"new": torch.ones(3)})
    file, whole = path.stat().st_ino, path.read_bytes()
    assert calls == [("fsync", file, whole), ("replace", file, whole), ("fsync", tmp_path.stat().st_ino, None)]
    header, state = storage.read(path)
    assert header["kind"] == "new"
    assert torch.equal(state["new"], torch.ones(3))


def test_tensors_that_share_memory_are_written_apart(tmp_path: Path) -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    state = {"whole": whole, "same": whole, "row": whole[1], "transposed": whole.T, "list": [whole.flatten()]}
    storage.write(tmp_path / "file", {}, state)
    _, again = storage.read(tmp_path / "file")
    assert set(again) == set(state)
    for name in ("whole", "same", "row", "transposed"):
        assert torch.equal(again[name], state[name])  # type: ignore[arg-type]
    assert torch.equal(again["list"][0], whole.flatten())
