"""Files: tensors and a readable header, in the safetensors format, written atomically and checked when they are read.

The header is JSON that any safetensors tool shows. It has a digest of the whole file, so that a file that was cut off,
or of which a single byte was changed, is refused. Reading a file never executes code from it.

The digest is that of the header, followed by the digests of consecutive pieces of the tensors' bytes. Several threads
compute those of pieces. The header names this way of computing it, and a file with another one is refused.
"""

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kfs.errors import StorageError
from kfs.version import __version__


class UnfitError(Exception):
    """A part of a state is not what it should be; `require_valid` turns this into a helpful message."""


class Elsewhere:
    """A tensor that is fetched when it is written.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        fetch: Returns it.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, fetch: Callable[[], Tensor]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.fetch = fetch


Piece = TypeVar("Piece")
Result = TypeVar("Result")

_NO_DIGEST = "0" * 64
_OF_PIECES = "blake2b of pieces of 4 MiB"  # readers know this name: a digest over other pieces needs another one
_PIECE = 2**22
_THREADS = min(8, os.cpu_count() or 1)
# While all threads are busy with a piece, one more is written or read, and one is ready for the first free thread.
_PIECES_AT_A_TIME = _THREADS + 2
# What the safetensors format calls dtypes.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_LARGEST_HEADER = 100_000_000  # what safetensors itself accepts
_TENSOR = "$tensor"


def write(path: str | Path, about: Mapping[str, Any], state: Any) -> None:
    """Write a file, or leave an older one at its place as it was.

    Args:
        path: Where.
        about: What people want to see in the header, by name: strings, numbers, lists, dictionaries.
        state: Nested dictionaries and lists of tensors, strings, numbers, booleans and nothing. Tensors that are
            `Elsewhere` are fetched one after the other.

    Raises:
        StorageError: If the file cannot be written.
    """
    path = Path(path)
    tensors: dict[str, Tensor | Elsewhere] = {}
    packed = _pack(state, "", tensors)
    header = {name: value if isinstance(value, str) else json.dumps(value) for name, value in about.items()}
    header |= {"format": "kfs", "kfs_version": __version__, "state": json.dumps(packed)}
    header |= {"digest_scheme": _OF_PIECES, "digest": _NO_DIGEST}
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "w+b") as file:
            _write_tensors(file, header, tensors)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error}.", "Choose an existing folder with enough space that may be written to."
        ) from error
    finally:
        with suppress(OSError):  # it has got its name already, or could not even be made
            partial.unlink()


def in_file_order(state: Any) -> list[Tensor | Elsewhere]:
    """Return all tensors of a state, in the order in which `write` writes them."""
    tensors: dict[str, Tensor | Elsewhere] = {}
    _pack(state, "", tensors)
    return [tensors[name] for name in _names_in_order(tensors)]


def with_tensors(state: Any, function: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """Return a state in which everything of a kind, by default tensors, is replaced by what a function returns."""
    if isinstance(state, kind):
        return function(state)
    if isinstance(state, Mapping):
        return {key: with_tensors(value, function, kind) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [with_tensors(value, function, kind) for value in state]
    return state


def read(path: str | Path, device: str | torch.device = "cpu", check_digest: bool = True) -> tuple[dict[str, str], Any]:
    """Read a file that `write` has written.

    Args:
        path: Where.
        device: Where tensors go. On a CPU, they are mapped: they take memory when they are used.
        check_digest: Whether to read all bytes, to check them. A file that was cut off is refused in any case.

    Returns:
        The header, and the state.

    Raises:
        StorageError: If there is no such file, if it is foreign, or if it was damaged.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            header = _header(file, path)
            scheme = header.get("digest_scheme")
            if scheme != _OF_PIECES:
                raise StorageError(
                    f"{path} has a digest that kfs {__version__} does not know: {scheme!r}.",
                    f"Another version of kfs has written the file ({header.get('kfs_version')}), or it is damaged. "
                    "Install that version, use another copy, or compute and save it again.",
                )
            if check_digest and not _digest_is_right(file):
                raise _damaged(path)
        with safe_open(path, framework="pt", device=str(device)) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
            state = _unpack(json.loads(header["state"]), tensors)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}.", "Look at the path, and who may read it.") from error
    except (UnfitError, SafetensorError, ValueError, KeyError) as error:
        if isinstance(error, StorageError):
            raise
        raise _damaged(path) from error
    return header, state


@contextmanager
def require_valid(path: str | Path) -> Iterator[None]:
    """Say of a state that does not have the expected parts that it is not one of ours."""
    try:
        yield
    except (UnfitError, KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        raise StorageError(
            f"{path} does not hold what its header says ({type(error).__name__}: {error}).",
            "It was written by another version of kfs, or by something else. Compute and save it again.",
        ) from error


def _damaged(path: Path) -> StorageError:
    return StorageError(
        f"{path} is damaged: it was cut off or changed.", "Use another copy, or compute and save it again."
    )


def _header(file: Any, path: Path) -> dict[str, str]:
    """Return the metadata of a file in the safetensors format that kfs has written."""
    length = int.from_bytes(file.read(8), "little")
    header: Any = None
    if length <= min(os.fstat(file.fileno()).st_size - 8, _LARGEST_HEADER):
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):  # other bytes than text, or other text than JSON
            header = None
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or metadata.get("format") != "kfs" or "state" not in metadata:
        raise StorageError(
            f"{path} is not a file that kfs has written, or its beginning is damaged.",
            "Pass a file that K.save(...) has written.",
        )
    return metadata


def _place_of_digest(header: bytes) -> int:
    """Return where the digest starts."""
    mark = b'"digest":"'
    start = header.find(mark) + len(mark)
    if start < len(mark):
        raise UnfitError("there is no digest")
    return start


def _digest_is_right(file: BinaryIO) -> bool:
    """Whether the digest in a file is that of its bytes."""
    start, digest = _digest(file)
    file.seek(start)
    return file.read(64).decode(errors="replace") == digest


def _digest(file: BinaryIO) -> tuple[int, str]:
    """Return where in a file its digest is, and what it should be; the digest itself counts as zeros."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    header = file.read(length)
    start = _place_of_digest(header)
    hashed = hashlib.blake2b(length.to_bytes(8, "little"), digest_size=32)
    hashed.update(header[:start] + _NO_DIGEST.encode() + header[start + 64 :])
    pieces = iter(lambda: file.read(_PIECE), b"")
    with ThreadPoolExecutor(_THREADS) as threads:
        for digest in _in_order(threads, _digest_of_piece, ([piece] for piece in pieces)):
            hashed.update(digest)
    return 8 + start, hashed.hexdigest()


def _digest_of_piece(parts: Iterable[bytes | memoryview]) -> bytes:
    """Return the digest of bytes that are consecutive in the file. Other threads run meanwhile."""
    hashed = hashlib.blake2b(digest_size=32)
    for part in parts:
        hashed.update(part)
    return hashed.digest()


def _in_order(
    threads: ThreadPoolExecutor, work: Callable[[Piece], Result], pieces: Iterable[Piece]
) -> Iterator[Result]:
    """Let threads work on pieces, and return their results in order.

    The next piece is only asked for when the result `_PIECES_AT_A_TIME` before it is not needed any more. So memory
    stays bounded, and that piece may use the same memory.
    """
    under_way: deque[Future[Result]] = deque()
    for piece in pieces:
        under_way.append(threads.submit(work, piece))
        if len(under_way) == _PIECES_AT_A_TIME:
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


def _names_in_order(tensors: Mapping[str, Tensor | Elsewhere]) -> list[str]:
    """Return the names of tensors, the largest numbers first, so that all of them lie at multiples of their size."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def _write_tensors(file: BinaryIO, header: dict[str, str], tensors: Mapping[str, Tensor | Elsewhere]) -> None:
    """Write a file in the safetensors format, with its digest.

    Hashing takes longer than anything else here. So threads copy pieces from an accelerator and hash them, while this
    one writes those that are hashed. What was written is not read again.
    """
    entries: dict[str, Any] = {"__metadata__": header}
    names = _names_in_order(tensors)
    end = 0
    for name in names:
        t = tensors[name]
        start, end = end, end + prod(t.shape) * t.dtype.itemsize
        entries[name] = {"dtype": _DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    beginning = len(text).to_bytes(8, "little") + text
    file.write(beginning)
    hashed = hashlib.blake2b(beginning, digest_size=32)
    buffers = _pinned_buffers(t for t in tensors.values() if isinstance(t, Tensor))
    fetched = (t if isinstance(t, Tensor) else t.fetch() for t in map(tensors.__getitem__, names))
    # A piece gets the buffer of an earlier one whose result was written (see `_in_order`).
    pieces = zip(_pieces(fetched, pinned=bool(buffers)), cycle(buffers or [None]), strict=False)
    with ThreadPoolExecutor(_THREADS) as threads:
        for parts, digest in _in_order(threads, _fetch_and_hash, pieces):
            file.writelines(parts)
            hashed.update(digest)
    file.seek(_place_of_digest(beginning))
    file.write(hashed.hexdigest().encode())


def _pinned_buffers(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return memory for pieces that a GPU copies to directly, which is several times faster; none if not needed."""
    if not any(t.is_cuda for t in tensors):
        return []
    try:  # pragma: no cover (tested on a GPU)
        # Other threads write into buffers, and they are not in inference mode even if this one is.
        with torch.inference_mode(False):
            return [
                torch.empty(_PIECE, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(_PIECES_AT_A_TIME)
            ]
    except RuntimeError:  # pragma: no cover (the system does not give any; plain copies work as well)
        return []


def _pieces(tensors: Iterable[Tensor], pinned: bool) -> Iterator[list[Tensor]]:
    """Cut the bytes of all tensors in a row into pieces of equal size; only the last one may be smaller.

    Yields:
        The parts of a piece: one for every tensor that it has bytes of.
    """
    parts: list[Tensor] = []
    room = _PIECE
    for t in tensors:
        rest = _bytes(t, pinned)
        while len(rest):
            part, rest = rest[:room], rest[room:]
            parts.append(part)
            room -= len(part)
            if not room:
                yield parts
                parts = []
                room = _PIECE
    if parts:
        yield parts


def _bytes(t: Tensor, pinned: bool) -> Tensor:
    """Return a tensor's bytes, without a copy if they lie in memory as they will in the file.

    They are on the CPU, or on a GPU if there are pinned buffers to copy them to.
    """
    there = t.detach().resolve_conj().resolve_neg()
    stays = pinned and there.is_cuda
    flat = (there if stays else there.cpu()).contiguous().reshape(-1).view(torch.uint8)
    if stays:  # pragma: no cover (tested on a GPU)
        # Other threads copy the bytes, in streams that do not wait for the one in which they are computed.
        torch.cuda.current_stream(flat.device).synchronize()
    return flat


def _fetch_and_hash(piece: tuple[list[Tensor], Tensor | None]) -> tuple[list[memoryview], bytes]:
    """Return the bytes of a piece, and their digest. Parts that are on a GPU are copied to the buffer."""
    parts, buffer = piece
    there: list[memoryview] = []
    start = 0
    for part in parts:
        end = start + len(part)
        on_cpu = part
        if part.is_cuda and buffer is not None:  # pragma: no cover (tested on a GPU)
            on_cpu = buffer[start:end].copy_(part)
        numbers: Any = on_cpu.numpy()
        there.append(memoryview(numbers))
        start = end
    return there, _digest_of_piece(there)


def _pack(state: Any, name: str, tensors: dict[str, Tensor | Elsewhere]) -> Any:
    """Take tensors out of a state."""
    if isinstance(state, Tensor | Elsewhere):
        if state.dtype not in _DTYPES:
            raise StorageError(f"{name} has dtype {state.dtype}, which files cannot have.", "Convert it before.")
        while name in tensors:  # `{"a": {"b": ...}, "a.b": ...}`
            name += "'"
        tensors[name] = state
        return {_TENSOR: name}
    if isinstance(state, Mapping):
        return {key: _pack(value, f"{name}.{key}".lstrip("."), tensors) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [_pack(value, f"{name}.{place}".lstrip("."), tensors) for place, value in enumerate(state)]
    return state


def _unpack(packed: Any, tensors: dict[str, Tensor]) -> Any:
    """Put tensors back."""
    if isinstance(packed, dict):
        if set(packed) == {_TENSOR}:
            return tensors[packed[_TENSOR]]
        return {key: _unpack(value, tensors) for key, value in packed.items()}
    return [_unpack(value, tensors) for value in packed] if isinstance(packed, list) else packed


def _sync_folder(folder: Path) -> None:
    """Make sure that the new name survives a power failure, where the system can do that."""
    if os.name != "posix":  # pragma: no cover (folders cannot be opened there)
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
