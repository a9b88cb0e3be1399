r"""Forms in which an index stores the gradients of training data, block by block.

- `"rows"`: the vectors of the rows of gradients. This form is exact.
- `"matrices"` and `"rotated"`: gradient matrices, unchanged or in the basis of the inverse. Both forms are exact.
- `"low rank"`: the leading singular vectors of every example's matrix, as rows.
- `"projected"`: some coordinates in the basis of the inverse, which are the same for all examples. They belong to the
  leading eigenvectors of the curvature, where the damped inverse has its smallest eigenvalues $1 / (\lambda + \delta)$.
  An eigenvalue of EKFAC is the mean square of a coordinate of gradients, up to scale. Hence $\lambda / (\lambda +
  \delta)$ is the share of a coordinate in self-scores, which is also largest for these coordinates.

Each block has the form that takes the fewest bytes. Exact forms win ties.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from kfs.errors import ModelError
from kfs.factors.accumulate import PlainVectors, RowProducts, RowVectors, UnitVectors, at_a_time
from kfs.factors.blocks import Kronecker, Structure
from kfs.factors.layout import Layout
from kfs.factors.per_example import Basis, BlockGradients
from kfs.files import UnfitError
from kfs.influence.scoring import check_choice, check_count
from kfs.influence.ways import Chosen, choose, rotated, truncated

Form = Literal["rows", "matrices", "rotated", "low rank", "projected"]
Compression = Literal["low rank", "projected"]


@dataclass(frozen=True)
class Storage:
    """The arguments of `Influence.index` that determine how gradients are stored. They are checked here.

    Attributes:
        rank: Number of coordinates or singular vectors to keep; `None` for all.
        compression: Whether to keep coordinates (`"projected"`) or singular vectors (`"low rank"`).
        dtype: Dtype of the stored numbers.

    Raises:
        ModelError: If one of them is invalid.
    """

    rank: int | None = None
    compression: Compression = "low rank"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        check_count("rank", self.rank)
        check_choice("compression", self.compression, get_args(Compression))
        if self.dtype not in {torch.float64, torch.float32, torch.bfloat16}:
            raise ModelError(f"dtype is {self.dtype!r}.", "Use torch.float32, torch.bfloat16 or torch.float64.")


def numbers_stored(form: Form, gradients: BlockGradients, rank: int | None) -> int:
    """Return the number of stored values per example of a block, for one of the forms."""
    groups, d_B, d_A = gradients.layout.matrix_shape
    if form == "rows":
        # The bias coordinate is one in every row and is not stored. Unit vectors are stored as indices.
        features = d_A - (gradients.layout.bias is not None)
        sizes = [(1 if x else features, 1 if g else d_B) for x, g in (use.units for use in gradients.uses)]
        shared = [use.shared for use in gradients.uses]
        return sum(rows * groups * sum(sides) for rows, sides in zip(shared, sizes, strict=True))
    if form == "low rank":
        return (rank or 0) * groups * (d_B + d_A)
    return (rank or 0) if form == "projected" else gradients.numbers


def choose_form(structure: Structure, gradients: BlockGradients, storage: Storage) -> Form:
    """Return the form of a block that takes the fewest bytes, given its inverse and gradients of some examples.

    Raises:
        ModelError: If the form is `"projected"`, but the inverse has no basis.
    """
    forms: list[Form] = ["rows"] if gradients.whole is None else []
    forms.append("rotated" if isinstance(structure, Basis) else "matrices")
    if storage.rank is not None:
        forms.append(storage.compression)
    best = min(forms, key=lambda form: numbers_stored(form, gradients, storage.rank))
    if best == "projected" and not isinstance(structure, (Basis, Kronecker)):
        raise ModelError(
            f"The inverse of block {gradients.layout.name!r} is a {type(structure).__name__} matrix, which has no "
            "basis of Kronecker products to project onto.",
            "Use compression='low rank', or use KFAC or EKFAC as curvature.",
        )
    return best


@dataclass(frozen=True)
class ChosenInBasis(Chosen):
    """Products of gradients of queries with gradients that are stored in the basis of the inverse.

    Attributes:
        coordinates: Indices of the stored coordinates in flat matrices `[groups * d_B * d_A]`; `None` for all.
    """

    coordinates: Tensor | None = None

    def of_queries(self, gradients: BlockGradients, structure: Structure) -> BlockGradients:
        """Multiply gradients of queries by the inverse, in its basis."""
        if self.coordinates is None:
            return super().of_queries(gradients, structure)
        basis = basis_of(structure)
        whole = projected(gradients, basis, self.coordinates) * basis.values.flatten()[self.coordinates]
        return replace(gradients, uses=(), whole=whole)

    def of_train(
        self, gradients: BlockGradients, structure: Structure | None, keep_rows: bool = False
    ) -> BlockGradients:
        """Return the stored gradients unchanged: they are already in the basis."""
        return gradients

    def bytes_of(self, gradients: BlockGradients) -> int:
        """Return the number of bytes per query."""
        if self.coordinates is None:
            return super().bytes_of(gradients)
        return len(self.coordinates) * gradients.dtype.itemsize


@dataclass(frozen=True)
class Stored:
    """How the gradients of one block are stored.

    Attributes:
        form: One of the forms.
        rank: Number of singular vectors.
        coordinates: As in `ChosenInBasis`.
    """

    form: Form
    rank: int = 0
    coordinates: Tensor | None = None

    def state(self, gradients: BlockGradients, dtype: torch.dtype, structure: Structure) -> dict[str, Any]:
        """Return the stored state of some gradients, given the inverse of the block; `restored` undoes it."""
        kept = gradients
        if self.form == "low rank":
            kept = truncated(gradients, self.rank).kept
        elif self.form == "rotated":
            assert isinstance(structure, Basis)  # noqa: S101 (by `choose_form`)
            kept = rotated(gradients, structure).formed()
        elif self.form == "projected":
            assert self.coordinates is not None  # noqa: S101 (they are chosen together)
            whole = projected(gradients, basis_of(structure), self.coordinates)
            kept = replace(gradients, uses=(), whole=whole)
        elif self.form == "matrices" or gradients.whole is not None:
            kept = gradients.formed()
        if kept.whole is not None:
            return {"whole": kept.whole.to(dtype)}
        return {"uses": [{"x": _state(part.x, dtype), "g": _state(part.g, dtype)} for part in kept.parts]}

    def way(
        self, gradients: BlockGradients, structure: Structure, queries: int, train: int, query_rank: int | None
    ) -> Chosen:
        """Choose how gradients of queries are multiplied with the stored gradients."""
        if self.form in {"rotated", "projected"}:
            return ChosenInBasis("rotated", 0, self.coordinates)
        if self.form == "matrices":
            return Chosen("matrices")
        return choose(structure, gradients, queries, train, query_rank, rotate=False)


def restored(state: Any, layout: Layout, num_data: int, dtype: torch.dtype, device: torch.device) -> BlockGradients:
    """Return gradients from a stored state, the inverse of `Stored.state`; raise `UnfitError` for other shapes."""
    if "whole" in state:
        whole = state["whole"].to(device, dtype)
        _check(whole.ndim == 4 and len(whole) == num_data)
        return BlockGradients(layout, num_data, dtype, device, (), whole)
    groups, d_B, d_A = layout.matrix_shape
    uses = []
    for use in state["uses"]:
        rows = RowProducts(_vectors(use["x"], d_A, dtype, device), _vectors(use["g"], d_B, dtype, device))
        _check({rows.x.num_data, rows.g.num_data} == {num_data} and rows.x.shared == rows.g.shared)
        _check({rows.x.groups, rows.g.groups} == {groups})
        uses.append(rows)
    return BlockGradients(layout, num_data, dtype, device, tuple(uses))


def basis_of(structure: Structure) -> Basis:
    """Return a block in its basis; that of a Kronecker product is its eigenbasis."""
    basis = structure.eigenbasis() if isinstance(structure, Kronecker) else structure
    assert isinstance(basis, Basis)  # noqa: S101 (by `choose_form`)
    return basis


def leading_coordinates(structure: Structure, rank: int) -> Tensor:
    """Return the `rank` coordinates at which the inverse, in its basis, is smallest, in ascending order."""
    values = basis_of(structure).values.flatten()
    return values.topk(min(rank, len(values)), largest=False).indices.sort().values


def projected(gradients: BlockGradients, basis: Basis, coordinates: Tensor) -> Tensor:
    """Return some coordinates of gradients in a basis, `[n, 1, 1, rank]`."""
    inside = rotated(gradients, basis)
    total = torch.zeros(inside.num_data, len(coordinates), dtype=inside.dtype, device=inside.device)
    if inside.whole is not None:
        total += inside.whole.flatten(1)[:, coordinates]
    _, d_B, d_A = basis.values.shape
    group, place = coordinates // (d_B * d_A), coordinates % (d_B * d_A)
    for part in inside.parts:
        x, g = part.x.dense(), part.g.dense()
        # Process a few examples at a time to bound the memory.
        step = at_a_time(total, part.shared * len(coordinates))
        for start in range(0, inside.num_data, step):
            data = slice(start, start + step)
            # Both are `[rank, examples, rows]`.
            on_inputs = x[group, data, :, place % d_A]
            on_gradients = g[group, data, :, place // d_A]
            total[data] += (on_inputs * on_gradients).sum(2).T
    return total[:, None, None]


def _state(vectors: RowVectors, dtype: torch.dtype) -> dict[str, Any]:
    """Return the stored state of one side of the rows."""
    if isinstance(vectors, UnitVectors):
        return {"index": vectors.index.to(torch.int32, copy=True), "size": vectors.size}
    assert isinstance(vectors, PlainVectors)  # noqa: S101 (there is no third kind)
    # Copy: inputs of the first layer are the user's data, and a loader may write its next batch into the same memory.
    return {"values": vectors.values.to(dtype, copy=True), "last": vectors.last}


def _vectors(state: Mapping[str, Any], size: int, dtype: torch.dtype, device: torch.device) -> RowVectors:
    """Return one side of the rows from a stored state; the inverse of `_state`."""
    vectors: RowVectors
    if "index" in state:
        index = state["index"].to(device, torch.int64)
        _check(index.ndim == 2 and state["size"] == size)
        _check(not index.numel() or (int(index.min()) >= 0 and int(index.max()) < size))
        vectors = UnitVectors(index, size, dtype)
    else:
        values = state["values"].to(device, dtype)
        _check(values.ndim == 4)
        vectors = PlainVectors(values, None if state["last"] is None else float(state["last"]))
        _check(vectors.size == size)
    return vectors


def _check(right: bool) -> None:
    if not right:
        raise UnfitError("gradients have another shape than their block")
