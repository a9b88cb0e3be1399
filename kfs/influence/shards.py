"""Where an index keeps its gradients: in a folder of files, each written completely or not at all, or in memory.

A folder has `index.safetensors`, which says what the index belongs to and whether it is complete, and one file for
every shard: the gradients of some consecutive batches. All are in the safetensors format, with a digest; see
`kfs.storage`. Files are mapped into memory when they are read.
"""

import json
from pathlib import Path
from typing import Any, Protocol

from kfs import storage
from kfs.errors import StorageError
from kfs.influence.identity import differences
from kfs.nested import tensors_in


class Shards(Protocol):
    """Keeps the state of an index, and of its shards."""

    def open(self, belongs_to: dict[str, Any]) -> tuple[dict[str, Any], int] | None:
        """Return the state that was written before, and the number of shards; `None` if there is none."""

    def save(self, state: dict[str, Any]) -> None:
        """Write the state of the index."""

    def write(self, place: int, state: dict[str, Any]) -> None:
        """Write a shard."""

    def read(self, place: int) -> Any:
        """Read a shard."""

    def size(self) -> int:
        """Return how many bytes there are."""


class InMemory:
    """Keeps everything in memory."""

    def __init__(self) -> None:
        self._shards: list[dict[str, Any]] = []

    def open(self, belongs_to: dict[str, Any]) -> None:
        """Start anew."""

    def save(self, state: dict[str, Any]) -> None:
        """Do nothing: whoever calls this has the state."""

    def write(self, place: int, state: dict[str, Any]) -> None:
        """Keep a shard."""
        self._shards.append(state)

    def read(self, place: int) -> dict[str, Any]:
        """Return a shard."""
        return self._shards[place]

    def size(self) -> int:
        """Count the bytes of all tensors."""
        return sum(t.nbytes for t in tensors_in(self._shards))


class Folder:
    """Keeps everything in files.

    Args:
        path: The folder. It is made if it does not exist.
    """

    def __init__(self, path: str | Path) -> None:
        """Make the folder.

        Raises:
            StorageError: If that is not possible.
        """
        self.path = Path(path)
        self._belongs_to: dict[str, Any] = {}
        # Files whose digest was checked, with size and time of their last change.
        self._checked: dict[Path, tuple[int, int]] = {}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"{path} cannot be made: {error}.",
                "An index is a folder. Choose one that is new, or that has an index.",
            ) from error

    def open(self, belongs_to: dict[str, Any]) -> tuple[dict[str, Any], int] | None:
        """Return the state in the folder, and how many shards there are.

        Raises:
            StorageError: If it belongs to something else, or is damaged.
        """
        self._belongs_to = json.loads(json.dumps(belongs_to))
        if not self._main.exists():
            return None
        header, state = storage.read(self._main)
        with storage.valid(self._main):
            differ = differences(json.loads(header["belongs_to"]), self._belongs_to)
            number = int(state["shards"]) if state["complete"] else None
        if differ:
            raise StorageError(
                f"The index in {self.path} was made for something else: {', '.join(differ)} differ.",
                "Use the same model, curvature, settings and data, delete the folder, or choose another one. A "
                "curvature that is computed again may differ in its last digits: keep it with K.save(...).",
            )
        return state, self._count(number)

    def save(self, state: dict[str, Any]) -> None:
        """Write what the index belongs to, and its state."""
        storage.write(self._main, {"kind": "index", "belongs_to": self._belongs_to}, state)

    def _count(self, most: int | None) -> int:
        """Return how many shards are there, without a gap.

        Args:
            most: How many there have to be; `None` if that is not known yet.

        Raises:
            StorageError: If one is missing.
        """
        number = 0
        while number != most and self._file(number).exists():
            number += 1
        if most is not None and number < most:
            raise StorageError(
                f"{self._file(number)} is missing, and the index has {most} such files.",
                "Use another copy of the folder, or delete it and make the index again.",
            )
        return number

    def write(self, place: int, state: dict[str, Any]) -> None:
        """Write a shard."""
        file = self._file(place)
        storage.write(file, {"kind": "shard of an index", "start": state["start"], "stop": state["stop"]}, state)
        self._checked[file] = _version(file)

    def read(self, place: int) -> Any:
        """Map a shard into memory; its digest is checked once.

        Raises:
            StorageError: If it is missing or damaged.
        """
        file = self._file(place)
        known = file.exists() and self._checked.get(file) == _version(file)
        _, state = storage.read(file, check_digest=not known)
        self._checked[file] = _version(file)
        return state

    def size(self) -> int:
        """Count the bytes of all files of the index."""
        return sum(file.stat().st_size for file in self.path.glob("*.safetensors"))

    @property
    def _main(self) -> Path:
        return self.path / "index.safetensors"

    def _file(self, place: int) -> Path:
        return self.path / f"shard-{place:06}.safetensors"


def _version(file: Path) -> tuple[int, int]:
    """Return what changes when a file does."""
    found = file.stat()
    return found.st_size, found.st_mtime_ns
