"""The vectors that operators act on: named tensors, flat vectors, matrices of columns, and conversions between them."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Literal, TypeAlias

import torch
from numpy import ndarray
from torch import Tensor

from kfs.basics.flattening import VecFunction, find_vec
from kfs.display.describe import counted, kind
from kfs.display.suggestions import few, guess, suggest
from kfs.errors import DtypeError, FlatteningError, ModelError, ShapeError
from kfs.problem.whole_parameters import is_sharded, sharded_like, whole

# Several vectors: for every name a tensor `[K, *shape]`, stacked along the first axis.
Columns: TypeAlias = dict[str, Tensor]
Vector: TypeAlias = Tensor | Mapping[str, Tensor] | Sequence[Tensor]
# The plural forms have several vectors, stacked along the first axis.
_Kind: TypeAlias = Literal["vector", "matrix", "dict", "dicts", "list", "lists"]
# Entries of flat vectors: integers, a mask or a slice; or names of tensors.
Index: TypeAlias = Tensor | slice | Iterable[int] | Iterable[str]


class Form(str):
    """The form in which vectors are passed and returned: `"vector"`, `"dict"`, and so on.

    Attributes:
        like: The input tensors by name. Results are sharded over processes like these tensors.
    """

    like: Mapping[str, Tensor]

    def __new__(cls, kind: _Kind, like: Mapping[str, Tensor] | None = None) -> "Form":
        """Create the string `kind`, with `like` as an attribute."""
        form = super().__new__(cls, kind)
        form.like = like or {}
        return form


class Space:
    """A vector space of named tensors. A flat vector concatenates all tensors in order, each flattened by rows.

    Args:
        shapes: Shape of every tensor, by name, in order.
        dtype: Dtype of flat vectors, and of all computations.
        device: Device of flat vectors.
        own: Dtype and device of the tensors in dictionaries and lists, by name. By default, those of flat vectors.

    Example:
        >>> space = Space({"W": (2, 3), "b": (2,)}, torch.float32, torch.device("cpu"))
        >>> space
        Space of 'W', 'b': 8 numbers, float32 on cpu
    """

    def __init__(
        self,
        shapes: Mapping[str, Iterable[int]],
        dtype: torch.dtype,
        device: torch.device,
        own: Mapping[str, tuple[torch.dtype, torch.device]] | None = None,
    ) -> None:
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self.sizes = {name: prod(shape) for name, shape in self.shapes.items()}
        self.size = sum(self.sizes.values())
        self.dtype, self.device = dtype, device
        given = {name: (own or {}).get(name, (dtype, device)) for name in self.shapes}
        self.own = given if set(given.values()) - {(dtype, device)} else {}  # empty if there are no others

    def __repr__(self) -> str:
        return f"Space of {self.listed}: {counted(self.size, 'number')}, {kind(self.dtype, self.device)}"

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Space":
        """Return the space on another device, or with another dtype."""
        new = None if device is None else torch.device(device)
        own = {name: (dtype or kind[0], new or kind[1]) for name, kind in self.own.items()}
        return Space(self.shapes, dtype or self.dtype, new or self.device, own)

    @property
    def listed(self) -> str:
        """Names of the tensors as text, shortened if there are many."""
        return few(self.shapes)

    def __eq__(self, other: object) -> bool:
        """Compare names, shapes, order and dtype, but not devices."""
        return (
            isinstance(other, Space)
            and list(self.shapes.items()) == list(other.shapes.items())
            and self.dtype == other.dtype
        )

    def __hash__(self) -> int:
        return hash((tuple(self.shapes.items()), self.dtype))

    def subspace(self, names: Iterable[str]) -> "Space":
        """Return the space of the named tensors, in the given order.

        The names in a set are sorted in the order of this space, because the order of a set differs between processes.

        Raises:
            ModelError: If a name is unknown, or there are no names.
        """
        if isinstance(names, set | frozenset):
            names = [*(name for name in self.shapes if name in names), *(names - self.shapes.keys())]
        names = [names] if isinstance(names, str) else list(names)
        unknown = [name for name in names if name not in self.shapes]
        if unknown or not names:
            text = f"There are no parameters {unknown}." if unknown else "No parameters are named."
            raise ModelError(text, suggest(unknown, self.shapes))
        return Space({name: self.shapes[name] for name in names}, self.dtype, self.device, self.own)

    def read(self, v: Vector) -> tuple[Columns, Form]:
        """Convert a vector, a matrix of columns, a dictionary or a list of tensors to columns.

        Returns:
            The columns, and the form of the input.

        Raises:
            DtypeError: If the input has another type, dtype or device.
            ShapeError: If the input has another shape or other names than this space.
        """
        if isinstance(v, Mapping):
            columns, several = self._read_dict(v)
            return columns, Form("dicts" if several else "dict", v)
        # A list or tuple has one tensor per name, in the order of this space.
        if isinstance(v, list | tuple) and all(isinstance(t, Tensor) for t in v):
            named = self._named(v)
            columns, several = self._read_dict(named)
            return columns, Form("lists" if several else "list", named)
        if not isinstance(v, Tensor):
            raise DtypeError(
                f"A {type(v).__name__} cannot be multiplied.",
                "Pass a flat vector, a matrix of columns, or a dictionary or list like the risk's params.",
            )
        self._check_kind("The vector", v)
        if v.ndim not in {1, 2} or v.shape[0] != self.size:
            raise ShapeError(
                f"The vector has shape {list(v.shape)}, but the operator acts on {self.size} numbers.",
                f"Pass shape [{self.size}], columns of shape [{self.size}, K], or a dictionary like the risk's params.",
            )
        if is_sharded(v):
            raise DtypeError(
                "The vector is a DTensor.", "Pass a dictionary like the risk's params, or v.full_tensor()."
            )
        # Columns have the axis of vectors first.
        flat = v.detach().unsqueeze(0) if v.ndim == 1 else v.detach().T
        return self.unflatten(flat), Form("vector" if v.ndim == 1 else "matrix")

    def write(self, columns: Columns, form: Form) -> Vector:
        """Convert columns to the given form; the inverse of `read`."""
        if form in {"dicts", "lists", "dict", "list"}:
            columns = self.like_own(columns)
            tensors = columns if form in {"dicts", "lists"} else {name: t.squeeze(0) for name, t in columns.items()}
            tensors = {name: sharded_like(t, form.like.get(name, t)) for name, t in tensors.items()}
            return tensors if form in {"dicts", "dict"} else [tensors[name] for name in self.shapes]
        flat = self.flatten(columns)
        return flat.squeeze(0) if form == "vector" else flat.T

    def like_own(self, columns: Columns) -> Columns:
        """Return columns in the dtype and on the device of the tensors in dictionaries."""
        if not self.own:
            return columns
        return {name: t.to(self.own[name][1], self.own[name][0]) for name, t in columns.items()}

    def flatten(self, columns: Columns) -> Tensor:
        """Return the columns as rows of a matrix, `[K, size]`."""
        return torch.cat(
            [columns[name].reshape(columns[name].shape[0], size) for name, size in self.sizes.items()], dim=1
        )

    def unflatten(self, flat: Tensor) -> Columns:
        """Split the rows of a matrix `[K, size]` into columns; the inverse of `flatten`."""
        parts = flat.split(list(self.sizes.values()), dim=1)
        return {
            name: part.reshape(len(flat), *shape)
            for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)
        }

    def padded(self, columns: Columns) -> Columns:
        """Return columns of a subspace as columns of this space, with zeros for all other tensors."""
        some = next(iter(columns.values()))
        return {
            name: columns[name] if name in columns else some.new_zeros(len(some), *shape)
            for name, shape in self.shapes.items()
        }

    def scattered(self, entries: Tensor, places: Tensor) -> Columns:
        """Return columns with entries `[K, n]` at the positions `places` of flat vectors, and zeros elsewhere."""
        flat = entries.new_zeros(len(entries), self.size)
        return self.unflatten(flat.index_add_(1, places, entries))

    def order(self, flattening: str | VecFunction) -> Tensor:
        """Return the permutation of flat vectors that flattens every tensor by `rvec` or `cvec`."""
        vec = find_vec(flattening)
        if vec is None:
            raise FlatteningError(f"flattening is {flattening!r}.", "Choose flattening='cvec' or flattening='rvec'.")
        index = self.unflatten(torch.arange(self.size, device=self.device).unsqueeze(0))
        return torch.cat([vec(t.squeeze(0)) for t in index.values()])

    def _read_dict(self, v: Mapping[str, Tensor]) -> tuple[Columns, bool]:
        """Return columns, and whether the tensors have a first axis for several vectors."""
        if set(v) != set(self.shapes):
            missing = [name for name in self.shapes if name not in v]
            extra = [name for name in v if name not in self.shapes]
            hint = guess(extra, missing)
            raise ShapeError(
                f"The dictionary lacks {few(missing) or 'nothing'}, and has {few(extra) or 'nothing'} too many.",
                f"Give it the keys of the risk's params. {hint}".rstrip(),
            )
        other = next((t for t in v.values() if not isinstance(t, Tensor)), None)
        if other is not None:
            raise DtypeError(f"The dictionary has a {type(other).__name__}.", "Give it tensors like the risk's params.")
        # There are several vectors if all tensors have one more axis than their parameters.
        several = all(v[name].ndim == 1 + len(shape) for name, shape in self.shapes.items())
        lengths = {len(v[name]) for name in self.shapes} if several else {1}
        for name, shape in self.shapes.items():
            self._check_kind(f"{name!r}", v[name], *self.own.get(name, ()))
            if (v[name].shape[1:] if several else v[name].shape) != shape or len(lengths) > 1:
                raise ShapeError(
                    f"{name!r} has shape {list(v[name].shape)}, but the parameter has shape {list(shape)}.",
                    "Pass tensors shaped like the risk's params. For several vectors at once, give all of them one "
                    "more axis in front, of one length.",
                )
        found = {name: whole(v[name].detach()) for name in self.shapes}
        if self.own:
            found = {name: t.to(self.device, self.dtype) for name, t in found.items()}
        return {name: t if several else t.unsqueeze(0) for name, t in found.items()}, several

    def _named(self, v: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return a list of tensors as a dictionary, with names in the order of this space."""
        if len(v) != len(self.shapes):
            raise ShapeError(
                f"The list has tensors of shapes {[list(t.shape) for t in v]}.",
                f"Pass one tensor for each of {list(self.shapes)}, in this order.",
            )
        return dict(zip(self.shapes, v, strict=True))

    def index(self, chosen: Index) -> Tensor:
        """Return the positions of the chosen entries in flat vectors.

        Args:
            chosen: Integers (negative ones count from the end), a mask, a slice, or names of tensors.

        Raises:
            ShapeError: If an index is out of range, or has another shape.
            ModelError: If a name is unknown.
        """
        places = torch.arange(self.size, device=self.device)
        if isinstance(chosen, slice):
            return places[chosen]
        if not is_index(chosen):
            by_name = self.unflatten(places.unsqueeze(0))
            return torch.cat([by_name[name].flatten() for name in self.subspace(chosen).shapes])  # type: ignore[arg-type]
        if isinstance(chosen, ndarray):
            chosen = chosen.copy()  # PyTorch does not support negative strides, and warns about read-only arrays.
        elif not isinstance(chosen, Tensor):
            chosen = list(chosen)
        index = torch.as_tensor(chosen, device=self.device)
        if index.dtype == torch.bool:
            fits = index.shape == (self.size,)
        else:
            integers = index.ndim == 1 and not (index.is_floating_point() or index.is_complex())
            fits = integers and bool(((index >= -self.size) & (index < self.size)).all())
        if not fits:
            raise ShapeError(
                f"An index of shape {list(index.shape)} and {index.dtype} does not choose among {self.size} entries.",
                f"Use integers from {-self.size} to {self.size - 1}, a mask of {self.size} booleans, or a slice.",
            )
        return places[index]

    def _check_kind(
        self, name: str, t: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> None:
        """Check that a tensor is like flat vectors, or of the given dtype and device."""
        dtype, device = dtype or self.dtype, device or self.device
        if (t.dtype, t.device.type) not in {(self.dtype, self.device.type), (dtype, device.type)}:
            raise DtypeError(
                f"{name} is {t.dtype} on {t.device}, but the operator is {dtype} on {device}.",
                f"Convert it: .to('{device}', {dtype}).",
            )


def is_index(chosen: object) -> bool:
    """Return whether the argument chooses entries of flat vectors by index, rather than tensors by name."""
    if isinstance(chosen, Tensor | slice | range):
        return True
    if isinstance(chosen, ndarray):
        return chosen.dtype.kind not in "OU"  # objects and text
    return isinstance(chosen, list | tuple) and len(chosen) > 0 and not isinstance(chosen[0], str)


def check_same(one: Space, other: Space, verb: str) -> None:
    """Check that two operators act on the same space.

    Raises:
        DtypeError: If dtypes differ.
        ShapeError: If names or shapes differ.
    """
    if one.dtype != other.dtype:
        raise DtypeError(
            f"Operators of {one.dtype} and {other.dtype} cannot be {verb}.",
            "Build both from models of one dtype.",
        )
    if one != other:
        raise ShapeError(
            f"Operators on {list(one.shapes)} ({one.size} numbers) and {list(other.shapes)} cannot be {verb}.",
            "Build both from risks with the same params.",
        )
