"""Data as pictures: which tensors are images, and PNG files of them, without a library for images."""

import base64
import struct
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

_SMALLEST = 4  # rows and columns; smaller matrices are numbers, and not images


def as_image(x: Tensor, shape: Sequence[int] | None = None) -> Tensor | None:
    """Return an input as an image, `[rows, columns]` or `[rows, columns, 3]`; `None` if it is none.

    Args:
        x: The input of one datum: `[rows, columns]`, or with one or three channels first or last.
        shape: Another shape of the same numbers, for images that are stored as vectors.

    Example:
        >>> as_image(torch.zeros(3, 8, 8)).shape
        torch.Size([8, 8, 3])
        >>> as_image(torch.zeros(64)) is None, as_image(torch.zeros(64), (8, 8)).shape
        (True, torch.Size([8, 8]))
    """
    if shape is not None:
        if x.numel() != torch.Size(shape).numel():
            return None
        x = x.reshape(tuple(shape))
    if not x.is_floating_point() and x.dtype != torch.uint8:
        return None
    if x.ndim == 3 and x.shape[0] in {1, 3}:
        x = x.movedim(0, 2)
    if x.ndim == 3 and x.shape[2] == 1:
        x = x.squeeze(2)
    fits = x.ndim == 2 or (x.ndim == 3 and x.shape[2] == 3)
    return x if fits and min(x.shape[:2]) >= _SMALLEST else None


def data_uri(image: Tensor) -> str:
    """Return an image as text for a page. Its smallest number is black, and its largest one white.

    Args:
        image: `[rows, columns]` or `[rows, columns, 3]`.
    """
    numbers = image.detach().to("cpu", torch.float64)
    numbers = numbers - numbers.min()
    # The clamp keeps a constant image black: all its numbers are zero here.
    pixels = (255 * numbers / numbers.max().clamp(min=1e-300)).round().to(torch.uint8)
    return f"data:image/png;base64,{base64.b64encode(_png(pixels)).decode()}"


def _png(pixels: Tensor) -> bytes:
    """Write the PNG format: a header, and rows that start with a zero, for "no filter"."""
    rows, columns = pixels.shape[:2]
    color = 2 if pixels.ndim == 3 else 0
    header = struct.pack(">IIBBBBB", columns, rows, 8, color, 0, 0, 0)
    lines = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in pixels)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
