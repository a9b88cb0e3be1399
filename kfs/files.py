"""Reads and writes files with tensors and a readable header, in the safetensors format, atomically and with a digest.

The header is JSON that any safetensors tool shows. It contains a digest of the whole file: reading a truncated file, or
a file with a single changed byte, raises an error. Reading a file never executes code from it.

The digest is computed over the header, followed by the digests of consecutive pieces of the tensors' bytes. Several
threads compute the digests of pieces. The header names this scheme; a file with another scheme raises an error.
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
    """A part of a state is not as expected. `require_valid` turns this into a `StorageError`."""


class Elsewhere:
    """A tensor that is fetched only when it is written.

    Args:
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        fetch: Returns the tensor.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, fetch: Callable[[], Tensor]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.fetch = fetch


Piece = TypeVar("Piece")
Result = TypeVar("Result")

_NO_DIGEST = "0" * 64
_OF_PIECES = "blake2b of pieces of 4 MiB"  # name of the digest scheme; change it if the pieces change
_PIECE = 2**22
_THREADS = min(8, os.cpu_count() or 1)
# Besides the pieces of all threads, one piece is being read or written, and one waits for the first free thread.
_PIECES_AT_A_TIME = _THREADS + 2
# Names of dtypes in the safetensors format.
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
_LARGEST_HEADER = 100_000_000  # limit of safetensors itself
_TENSOR = "$tensor"


def write(path: str | Path, about: Mapping[str, Any], state: Any) -> None:
    """Write a file atomically: if writing fails, an existing file at this path is not changed.

    Args:
        path: Path of the file.
        about: Information for readers of the header, by name: strings, numbers, lists, dictionaries.
        state: Nested dictionaries and lists of tensors, strings, numbers, booleans and `None`. Each `Elsewhere` is
            fetched one after the other.

    Raises:
        StorageError: If the file cannot be written.
    """
    # The header contains the state with names in place of tensors.
    path = Path(path)
    tensors: dict[str, Tensor | Elsewhere] = {}
    packed = _pack(state, "", tensors)
    header = {name: value if isinstance(value, str) else json.dumps(value) for name, value in about.items()}
    header |= {"format": "kfs", "kfs_version": __version__, "state": json.dumps(packed)}
    header |= {"digest_scheme": _OF_PIECES, "digest": _NO_DIGEST}

    # Write a temporary file, then rename it, which is atomic.
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
            f"{path} cannot be written: {error}.", "Choose an existing, writable folder with enough space."
        ) from error
    finally:
        with suppress(OSError):  # the file was renamed already, or could not be created
            partial.unlink()


def in_file_order(state: Any) -> list[Tensor | Elsewhere]:
    """Return all tensors of a state, in the order in which `write` writes them."""
    tensors: dict[str, Tensor | Elsewhere] = {}
    _pack(state, "", tensors)
    return [tensors[name] for name in _names_in_order(tensors)]


def with_tensors(state: Any, function: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """Return a state in which a function is applied to all objects of a type, by default tensors."""
    if isinstance(state, kind):
        return function(state)
    if isinstance(state, Mapping):
        return {key: with_tensors(value, function, kind) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [with_tensors(value, function, kind) for value in state]
    return state


def read(path: str | Path, device: str | torch.device = "cpu", check_digest: bool = True) -> tuple[dict[str, str], Any]:
    """Read a file that was written by `write`.

    Args:
        path: Path of the file.
        device: Device of the tensors. On a CPU, they are memory-mapped and take memory only when they are used.
        check_digest: Whether to read all bytes and verify the digest. A truncated file raises an error in any case.

    Returns:
        The header and the state.

    Raises:
        StorageError: If the file does not exist, was not written by kfs, or is damaged.
    """
    path = Path(path)
    try:
        # Verify header and digest.
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

        # Load the tensors into the state.
        with safe_open(path, framework="pt", device=str(device)) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
            state = _unpack(json.loads(header["state"]), tensors)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}.", "Check the path and its permissions.") from error
    except (UnfitError, SafetensorError, ValueError, KeyError) as error:
        if isinstance(error, StorageError):
            raise
        raise _damaged(path) from error
    return header, state


@contextmanager
def require_valid(path: str | Path) -> Iterator[None]:
    """Turn an error in parsing a state into a `StorageError` that names the file."""
    try:
        yield
    except (UnfitError, KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        raise StorageError(
            f"{path} does not contain what its header declares ({type(error).__name__}: {error}).",
            "It was written by another version of kfs, or by another program. Compute and save it again.",
        ) from error


def _damaged(path: Path) -> StorageError:
    return StorageError(
        f"{path} is damaged: it was truncated or changed.", "Use another copy, or compute and save it again."
    )


def _header(file: Any, path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file; raise an error if it was not written by kfs."""
    length = int.from_bytes(file.read(8), "little")
    header: Any = None
    if length <= min(os.fstat(file.fileno()).st_size - 8, _LARGEST_HEADER):
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):  # the bytes are not text, or the text is not JSON
            header = None
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or metadata.get("format") != "kfs" or "state" not in metadata:
        raise StorageError(
            f"{path} was not written by kfs, or its beginning is damaged.",
            "Pass a file that was written by K.save(...).",
        )
    return metadata


def _place_of_digest(header: bytes) -> int:
    """Return the position of the digest in the header."""
    mark = b'"digest":"'
    start = header.find(mark) + len(mark)
    if start < len(mark):
        raise UnfitError("there is no digest")
    return start


def _digest_is_right(file: BinaryIO) -> bool:
    """Return whether the digest in a file matches its bytes."""
    start, digest = _digest(file)
    file.seek(start)
    return file.read(64).decode(errors="replace") == digest


def _digest(file: BinaryIO) -> tuple[int, str]:
    """Return the position of the digest in a file and its correct value, computed with zeros in place of the digest."""
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
    """Return the digest of consecutive bytes. Hashing releases the GIL, so other threads can run."""
    hashed = hashlib.blake2b(digest_size=32)
    for part in parts:
        hashed.update(part)
    return hashed.digest()


def _in_order(
    threads: ThreadPoolExecutor, work: Callable[[Piece], Result], pieces: Iterable[Piece]
) -> Iterator[Result]:
    """Apply a function to pieces in several threads, and yield the results in order.

    A piece is requested only when the result `_PIECES_AT_A_TIME` before it is no longer needed. This bounds the memory,
    and the new piece may reuse the memory of that result.
    """
    under_way: deque[Future[Result]] = deque()
    for piece in pieces:
        under_way.append(threads.submit(work, piece))
        if len(under_way) == _PIECES_AT_A_TIME:
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


def _names_in_order(tensors: Mapping[str, Tensor | Elsewhere]) -> list[str]:
    """Return the names of tensors sorted by descending item size, so that each tensor is aligned to its item size."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def _write_tensors(file: BinaryIO, header: dict[str, str], tensors: Mapping[str, Tensor | Elsewhere]) -> None:
    """Write a file in the safetensors format, with its digest.

    Hashing takes most of the time. Several threads therefore copy pieces from an accelerator and hash them, while the
    main thread writes the hashed pieces. The written file is not read again.
    """
    # The header has the dtype, shape and position of each tensor, and is padded to a multiple of 8 bytes.
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

    # Write the tensors piece by piece.
    hashed = hashlib.blake2b(beginning, digest_size=32)
    buffers = _pinned_buffers(t for t in tensors.values() if isinstance(t, Tensor))
    fetched = (t if isinstance(t, Tensor) else t.fetch() for t in map(tensors.__getitem__, names))
    # A piece reuses the buffer of an earlier piece that was written already (see `_in_order`).
    pieces = zip(_pieces(fetched, pinned=bool(buffers)), cycle(buffers or [None]), strict=False)
    with ThreadPoolExecutor(_THREADS) as threads:
        for parts, digest in _in_order(threads, _fetch_and_hash, pieces):
            file.writelines(parts)
            hashed.update(digest)

    # Replace the zeros in the header by the digest.
    file.seek(_place_of_digest(beginning))
    file.write(hashed.hexdigest().encode())


def _pinned_buffers(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return pinned memory for pieces, which makes copies from a GPU several times faster; empty without a GPU."""
    if not any(t.is_cuda for t in tensors):
        return []
    try:  # pragma: no cover (tested on a GPU)
        # Other threads write into the buffers. Inference mode is per thread, so the buffers must not use it.
        with torch.inference_mode(False):
            return [
                torch.empty(_PIECE, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(_PIECES_AT_A_TIME)
            ]
    except RuntimeError:  # pragma: no cover (the system provides no pinned memory; plain copies work, too)
        return []


def _pieces(tensors: Iterable[Tensor], pinned: bool) -> Iterator[list[Tensor]]:
    """Split the concatenated bytes of all tensors into pieces of equal size; only the last piece may be smaller.

    Yields:
        The parts of a piece, one for each tensor that overlaps with it.
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
    """Return the bytes of a tensor, without a copy if it is contiguous and stays on its device.

    The result is on the CPU, or on a GPU if there are pinned buffers to copy it to.
    """
    there = t.detach().resolve_conj().resolve_neg()
    stays = pinned and there.is_cuda
    flat = (there if stays else there.cpu()).contiguous().reshape(-1).view(torch.uint8)
    if stays:  # pragma: no cover (tested on a GPU)
        # Other threads copy the bytes, in streams that do not wait for the stream that computes them.
        torch.cuda.current_stream(flat.device).synchronize()
    return flat


def _fetch_and_hash(piece: tuple[list[Tensor], Tensor | None]) -> tuple[list[memoryview], bytes]:
    """Return the bytes of a piece and their digest. Parts on a GPU are copied to the buffer."""
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
    """Return a state with a name in place of each tensor, and add the tensors to a dictionary by name."""
    if isinstance(state, Tensor | Elsewhere):
        if state.dtype not in _DTYPES:
            raise StorageError(f"{name} has dtype {state.dtype}, which files do not support.", "Convert it first.")
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
    """Return a state from `_pack`, with its tensors in place of their names."""
    if isinstance(packed, dict):
        if set(packed) == {_TENSOR}:
            return tensors[packed[_TENSOR]]
        return {key: _unpack(value, tensors) for key, value in packed.items()}
    return [_unpack(value, tensors) for value in packed] if isinstance(packed, list) else packed


def _sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that a renamed file survives a power failure, if the system supports it."""
    if os.name != "posix":  # pragma: no cover (folders cannot be opened there)
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
