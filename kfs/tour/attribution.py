"""The training data behind predictions, as a table for the terminal and as a self-contained HTML page."""

import base64
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from kfs.display.describe import counted, times
from kfs.errors import ModelError
from kfs.influence import Influence, Ranked, Top
from kfs.problem.data import cut
from kfs.problem.risk import EmpiricalRisk
from kfs.runtime.nested import tensors_in
from kfs.tour.play import asset
from kfs.version import __version__

_SMALLEST = 4  # smallest number of rows and columns of an image; smaller matrices are shown as numbers


def as_image(x: Tensor, shape: Sequence[int] | None = None) -> Tensor | None:
    """Return an input as an image, `[rows, columns]` or `[rows, columns, 3]`; `None` if it is not an image.

    Args:
        x: The input of one example: `[rows, columns]`, or with one or three channels first or last.
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
    """Return an image as a data URI for a page. Its smallest number is black, and its largest one white.

    Args:
        image: `[rows, columns]` or `[rows, columns, 3]`.
    """
    numbers = image.detach().to("cpu", torch.float64)
    numbers = numbers - numbers.min()
    # The clamp keeps a constant image black: all its numbers are zero here.
    pixels = (255 * numbers / numbers.max().clamp(min=1e-300)).round().to(torch.uint8)
    return f"data:image/png;base64,{base64.b64encode(_png(pixels)).decode()}"


def _png(pixels: Tensor) -> bytes:
    """Return pixels in PNG format. Each row starts with a zero byte, for "no filter"."""
    rows, columns = pixels.shape[:2]
    color = 2 if pixels.ndim == 3 else 0
    header = struct.pack(">IIBBBBB", columns, rows, 8, color, 0, 0, 0)
    lines = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in pixels)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


_SHOWN = 4  # how many numbers of an input or target are shown as text
_IN_TERMINAL = 20  # how many queries are shown in a terminal


@dataclass(frozen=True)
class Datum:
    """One example.

    Attributes:
        index: Its index in the data set.
        x: Its input, or the first tensor of its input.
        y: Its target.
    """

    index: int
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Attribution:
    """Result of a search for the training data behind predictions.

    Attributes:
        title: Describes the model and the curvature.
        queries: The data that are explained.
        train: The data that they are explained by.
        top: The most helpful and most harmful examples of each query.
        own: Self-scores of training data, if they were requested.
        shape: Shape of images that are stored as vectors.
        most: How many examples with large self-scores are shown.
        normalized: Whether scores were normalized.
    """

    title: str
    queries: EmpiricalRisk
    train: EmpiricalRisk
    top: Top
    own: Tensor | None = None
    shape: Sequence[int] | None = None
    most: int = 20
    normalized: bool = False

    @property
    def suspects(self) -> list[int]:
        """Indices of the training data with the largest self-scores."""
        if self.own is None:
            return []
        return [int(index) for index in self.own.topk(min(self.most, len(self.own))).indices]


@dataclass(frozen=True)
class Request:
    """Options of a search for the training data behind predictions.

    Attributes:
        top: Number of helpful and of harmful examples of each query.
        own: Whether to compute self-scores of training data.
        normalize: As in `Influence.top`.
        folder: Folder for an index of gradients; `None` for no index.
        rank: Rank of this index.
        shape: Shape of images that are stored as vectors.
    """

    top: int
    own: bool = False
    normalize: str | None = None
    folder: Path | None = None
    rank: int | None = None
    shape: Sequence[int] | None = None


def explain(queries: EmpiricalRisk, train: EmpiricalRisk, influence: Influence, wish: Request) -> Attribution:
    """Find the training data behind predictions.

    Raises:
        ModelError: If a rank is given without a folder for the index that it compresses, or if inputs do not fit the
            shape.
    """
    if wish.rank is not None and wish.folder is None:
        raise ModelError(
            f"rank is {wish.rank}, and there is no index that it could compress.",
            "Add --index folder, or leave it out.",
        )
    if wish.shape is not None:
        _check_shape(queries, wish.shape)
    asked = "1 query" if queries.num_data == 1 else f"{queries.num_data:,} queries"
    title = f"{influence.describe().title}, {counted(train.num_data, 'training example')}, {asked}"
    normalize: Any = wish.normalize
    if wish.folder is None:
        top = influence.top(queries, train, wish.top, normalize=normalize)
        own = influence.self_scores(train) if wish.own else None
    else:
        index = influence.index(train, rank=wish.rank, file=wish.folder)
        top = index.top(queries, wish.top, normalize=normalize)
        own = index.self_scores() if wish.own else None
        title += f", relative error {index.error:.2g}"
    return Attribution(title, queries, train, top, own, wish.shape, wish.top, wish.normalize is not None)


def _check_shape(queries: EmpiricalRisk, shape: Sequence[int]) -> None:
    """Raise if inputs do not fit the shape of images; otherwise, the page would silently lack pictures."""
    count = data_at(queries, [0])[0].x.numel()
    wanted = torch.Size(shape).numel()
    if count != wanted:
        raise ModelError(
            f"Images of shape {times(shape)} have {wanted:,} numbers, and inputs have {count:,}.",
            "Pass the shape of one input with --image, such as 8x8, or leave it out.",
        )


def data_at(risk: EmpiricalRisk, wanted: Iterable[int]) -> dict[int, Datum]:
    """Return some examples by their indices, using one pass over the data."""
    indices = set(wanted)
    found = {}
    for batch in risk.batches():
        num_data = len(batch.y)
        for index in sorted(indices & set(range(batch.first, batch.first + num_data))):
            place = index - batch.first
            tensors = tensors_in(cut(batch.x, num_data, [place]))
            found[index] = Datum(index, tensors[0][0], batch.y[place])
    return found


def first_data(risk: EmpiricalRisk, number: int) -> EmpiricalRisk:
    """Return the same risk over the first examples only."""
    batches = []
    left = number
    for batch in risk.batches():
        if left <= 0:
            break
        chosen = range(min(left, len(batch.y)))
        batches.append((cut(batch.x, len(batch.y), chosen), batch.y[: len(chosen)]))
        left -= len(chosen)
    return EmpiricalRisk(risk.model, risk.loss, batches, params=list(risk.params), progress=risk.progress)


def tables(found: Attribution) -> list[Table]:
    """Return tables for a terminal: helpful and harmful examples by query, and examples with large self-scores."""
    top = found.top
    targets = _targets(found)
    table = Table(title=found.title, title_justify="left")
    for name in ("query", "helpful: index (target) score", "harmful: index (target) score"):
        table.add_column(name, overflow="fold")
    of_queries = data_at(found.queries, range(min(_IN_TERMINAL, len(top.helpful.indices))))
    for place, query in of_queries.items():
        cells = [_cell(ranked, place, targets) for ranked in (top.helpful, top.harmful)]
        table.add_row(Text(f"{place} ({_text(query.y)})"), *map(Text, cells))
    if found.own is None:
        return [table]
    own = Table(title="Training data with the largest scores with themselves", title_justify="left")
    for name in ("index", "target", "self-score"):
        own.add_column(name, justify="right")
    for index in found.suspects:
        own.add_row(str(index), targets[index], f"{float(found.own[index]):.4g}")
    return [table, own]


def page(found: Attribution) -> str:
    """Return a self-contained HTML page: images as pictures, other inputs as indices and numbers."""
    title = escape(found.title)
    factor = found.train.reduction_factor
    meaning = (
        "Scores were divided by roots of self-scores."
        if found.normalized
        else f"Without the example, the loss of the query is predicted to be higher by its score times {factor:.3g}."
    )
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Training data behind predictions</title><style>{asset("report.css")}</style></head>
<body>
<h1>Training data behind predictions</h1>
<p>{title}. kfs {__version__}, PyTorch {torch.__version__}.</p>
<p>Below each training example: its index, its target, and its score. {meaning}</p>
{fragment(found)}
</body></html>
"""


def fragment(
    found: Attribution, notes: Mapping[int, str] | None = None, of_queries: Mapping[int, str] | None = None
) -> str:
    """Return a part of a page: queries with their training data, and data with large self-scores.

    Args:
        found: The result to show.
        notes: Notes on training data, by index.
        of_queries: Notes on queries, by index.
    """
    notes, of_queries = notes or {}, of_queries or {}
    top = found.top
    queries = data_at(found.queries, range(len(top.helpful.indices)))
    wanted = {*top.helpful.indices.flatten().tolist(), *top.harmful.indices.flatten().tolist(), *found.suspects}
    train = data_at(found.train, wanted)
    parts = []
    for place, query in queries.items():
        parts.append(f'<div class="query"><h3>Query {place}</h3>')
        parts.append(_group("", [_datum(query, found.shape, "", of_queries.get(place, ""))]))
        for words, ranked in (("helps", top.helpful), ("harms", top.harmful)):
            pairs = zip(ranked.indices[place].tolist(), ranked.values[place].tolist(), strict=True)
            data = [_datum(train[index], found.shape, f"{score:.3g}", notes.get(index, "")) for index, score in pairs]
            parts.append(_group(words, data))
        parts.append("</div>")
    if found.own is not None:
        own = found.own
        data = [
            _datum(train[index], found.shape, f"{float(own[index]):.3g}", notes.get(index, ""))
            for index in found.suspects
        ]
        parts.append(f"<h3>The largest scores with themselves</h3>{_group('', data)}")
    return "\n".join(parts)


def _group(words: str, data: Sequence[str]) -> str:
    """Return a row of examples, which wraps at the end of the page."""
    title = f'<span class="words">{words}</span>' if words else ""
    return f'<div class="data">{title}{"".join(data)}</div>'


def _datum(datum: Datum, shape: Sequence[int] | None, score: str, note: str) -> str:
    image = as_image(datum.x, shape)
    words = f"example {datum.index}"
    if image is None:
        shown = f"<code>{escape(_text(datum.x))}</code>"
    else:
        shown = f'<img alt="{words}" src="{data_uri(image)}">'
    lines = [f"{datum.index} ({escape(_text(datum.y))})", score, escape(note)]
    return f'<figure class="datum">{shown}<figcaption>{"<br>".join(filter(None, lines))}</figcaption></figure>'


def _targets(found: Attribution) -> dict[int, str]:
    """Return the targets of all training data that are shown in a terminal."""
    ranked = (found.top.helpful, found.top.harmful)
    wanted = {int(index) for part in ranked for index in part.indices[:_IN_TERMINAL].flatten()}
    return {index: _text(one.y) for index, one in data_at(found.train, wanted | set(found.suspects)).items()}


def _cell(ranked: Ranked, place: int, targets: Mapping[int, str]) -> str:
    """Return the training data of one query, one line each."""
    pairs = zip(ranked.indices[place].tolist(), ranked.values[place].tolist(), strict=True)
    return "\n".join(f"{index} ({targets[index]}) {score:.4g}" for index, score in pairs)


def _text(t: Tensor) -> str:
    """Return the first few numbers of a tensor as text."""
    numbers = t.flatten()[:_SHOWN].tolist()
    more = ", ..." if t.numel() > _SHOWN else ""
    return ", ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in numbers) + more
