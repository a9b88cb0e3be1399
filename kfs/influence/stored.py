r"""Forms in which the gradients of training data are stored, block by block.

- `"rows"`: the vectors of their rows, which is exact.
- `"matrices"`: matrices, and `"rotated"`: matrices in the basis of the inverse. Both are exact, too.
- `"low rank"`: the leading singular vectors of every example's matrix, which are rows.
- `"projected"`: some coordinates in the basis of the inverse, the same ones for all data: those of the leading
  eigenvectors of the curvature, where the damped inverse has its smallest eigenvalues $1 / (\lambda + \delta)$. An
  eigenvalue of EKFAC is the mean square of a coordinate of gradients, up to scale, so that $\lambda / (\lambda +
  \delta)$ is the share of a coordinate in self-scores. It is largest for these, too.

Each block has the form that takes the fewest bytes, and an exact one if there is a tie.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kfs.errors import ModelError
from kfs.factors.accumulate import PlainVectors, RowProducts, RowVectors, UnitVectors, at_a_time
from kfs.factors.blocks import Kronecker, Structure
from kfs.factors.layout import Layout
from kfs.factors.per_example import Basis, BlockGradients
from kfs.files import UnfitError
from kfs.influence.checks import check_choice, check_count
from kfs.influence.ways import Chosen, choose, rotated, truncated

Form = Literal["rows", "matrices", "rotated", "low rank", "projected"]
Compression = Literal["low rank", "projected"]
_COMPRESSIONS = ("low rank", "projected")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def check_storage(rank: int | None, compression: Compression, dtype: torch.dtype) -> None:
    """Refuse settings of an index that do not exist.

    Raises:
        ModelError: If there is no such rank, compression or dtype.
    """
    check_count("rank", rank)
    check_choice("compression", compression, _COMPRESSIONS)
    if dtype not in _DTYPES:
        raise ModelError(f"dtype is {dtype!r}.", "Use torch.float32, torch.bfloat16 or torch.float64.")


def numbers_stored(form: Form, gradients: BlockGradients, rank: int | None) -> int:
    """Return how many numbers are stored for each example of a block, in one of the forms."""
    groups, d_B, d_A = gradients.layout.matrix_shape
    if form == "rows":
        # The coordinate of a bias is one in every row, and unit vectors are indices.
        features = d_A - (gradients.layout.bias is not None)
        sizes = [(1 if x else features, 1 if g else d_B) for x, g in (use.units for use in gradients.uses)]
        shared = [use.shared for use in gradients.uses]
        return sum(rows * groups * sum(sides) for rows, sides in zip(shared, sizes, strict=True))
    if form == "low rank":
        return (rank or 0) * groups * (d_B + d_A)
    return (rank or 0) if form == "projected" else gradients.numbers


def choose_form(structure: Structure, gradients: BlockGradients, rank: int | None, compression: Compression) -> Form:
    """Choose the form that takes the fewest bytes.

    Args:
        structure: The block's inverse.
        gradients: Some of its gradients.
        rank: How many coordinates or singular vectors may be kept. `None` for all.
        compression: Whether these are coordinates (`"projected"`) or singular vectors (`"low rank"`).

    Raises:
        ModelError: If coordinates are asked for, and the inverse has no basis.
    """
    forms: list[Form] = ["rows"] if gradients.whole is None else []
    forms.append("rotated" if isinstance(structure, Basis) else "matrices")
    if rank is not None:
        forms.append(compression)
    best = min(forms, key=lambda form: numbers_stored(form, gradients, rank))
    if best == "projected" and not isinstance(structure, (Basis, Kronecker)):
        raise ModelError(
            f"The inverse of block {gradients.layout.name!r} is a {type(structure).__name__} matrix, which has no "
            "basis of Kronecker products to project onto.",
            "Use compression='low rank', or KFAC or EKFAC as curvature.",
        )
    return best


@dataclass(frozen=True)
class InBasis(Chosen):
    """How gradients are multiplied with those that are stored in the basis of the inverse.

    Attributes:
        coordinates: Places of the coordinates that are stored, in flat matrices `[groups * d_B * d_A]`. `None` for all.
    """

    coordinates: Tensor | None = None

    def of_queries(self, gradients: BlockGradients) -> BlockGradients:
        """Multiply gradients of queries with the inverse, in its basis."""
        if self.coordinates is None:
            return super().of_queries(gradients)
        assert isinstance(self.structure, Basis)  # noqa: S101 (others have no coordinates)
        values = self.structure.values.flatten()[self.coordinates]
        whole = projected(gradients, self.structure, self.coordinates) * values
        return replace(gradients, uses=(), whole=whole)

    def of_train(self, gradients: BlockGradients, keep_rows: bool = False) -> BlockGradients:
        """Return them as they are: they are in the basis."""
        return gradients

    def bytes_of(self, gradients: BlockGradients) -> int:
        """Return how many bytes are kept for each query."""
        if self.coordinates is None:
            return super().bytes_of(gradients)
        return len(self.coordinates) * gradients.dtype.itemsize


@dataclass(frozen=True)
class Stored:
    """How the gradients of one block are stored.

    Attributes:
        form: One of the forms.
        structure: The block's inverse.
        rank: Number of singular vectors.
        coordinates: As in `InBasis`.
    """

    form: Form
    structure: Structure
    rank: int = 0
    coordinates: Tensor | None = None

    def state(self, gradients: BlockGradients, dtype: torch.dtype) -> dict[str, Any]:
        """Return what a file stores of some gradients."""
        kept = gradients
        if self.form == "low rank":
            kept = truncated(gradients, self.rank).kept
        elif self.form == "rotated":
            assert isinstance(self.structure, Basis)  # noqa: S101 (others have no basis)
            kept = rotated(gradients, self.structure).formed()
        elif self.form == "projected":
            assert isinstance(self.structure, Basis) and self.coordinates is not None  # noqa: PT018, S101 (as above)
            whole = projected(gradients, self.structure, self.coordinates)
            kept = replace(gradients, uses=(), whole=whole)
        elif self.form == "matrices" or gradients.whole is not None:
            kept = gradients.formed()
        if kept.whole is not None:
            return {"whole": kept.whole.to(dtype)}
        return {"uses": [{"x": _state(part.x, dtype), "g": _state(part.g, dtype)} for part in kept.parts]}

    def way(self, gradients: BlockGradients, queries: int, train: int, query_rank: int | None) -> Chosen:
        """Choose how the gradients of queries are multiplied with what is stored."""
        if self.form in {"rotated", "projected"}:
            return InBasis("rotated", self.structure, 0, self.coordinates)
        if self.form == "matrices":
            return Chosen("matrices", self.structure)
        return choose(self.structure, gradients, queries, train, query_rank, rotate=False)


def restored(state: Any, layout: Layout, num_data: int, dtype: torch.dtype, device: torch.device) -> BlockGradients:
    """Undo `Stored.state`.

    Raises:
        UnfitError: If something has another shape than it should.
    """
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


def basis_of(structure: Structure) -> Structure:
    """Return a block in its basis, if it has one of Kronecker products."""
    return structure.eigenbasis() if isinstance(structure, Kronecker) else structure


def leading_coordinates(structure: Structure, rank: int) -> Tensor:
    """Return the places of the coordinates for which the inverse is smallest, in ascending order.

    Args:
        structure: The block's inverse, in its basis.
        rank: How many.
    """
    assert isinstance(structure, Basis)  # noqa: S101 (others have no coordinates)
    values = structure.values.flatten()
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
        step = at_a_time(total, part.shared * len(coordinates))
        for start in range(0, inside.num_data, step):
            data = slice(start, start + step)
            # Both are `[rank, some data, rows]`.
            on_inputs = x[group, data, :, place % d_A]
            on_gradients = g[group, data, :, place // d_A]
            total[data] += (on_inputs * on_gradients).sum(2).T
    return total[:, None, None]


def _state(vectors: RowVectors, dtype: torch.dtype) -> dict[str, Any]:
    """Return what a file stores of one side of rows."""
    if isinstance(vectors, UnitVectors):
        return {"index": vectors.index.to(torch.int32, copy=True), "size": vectors.size}
    assert isinstance(vectors, PlainVectors)  # noqa: S101 (there is no third kind)
    # Inputs of the first layer are the user's data. A loader may write its next batch into the same memory.
    return {"values": vectors.values.to(dtype, copy=True), "last": vectors.last}


def _vectors(state: Mapping[str, Any], size: int, dtype: torch.dtype, device: torch.device) -> RowVectors:
    """Undo `_state`."""
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
