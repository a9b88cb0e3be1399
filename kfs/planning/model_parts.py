"""The parts of all blocks of a model: one that is here, one that is known by name, or shapes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from kfs.describing import counted
from kfs.distributed.placement import Part, eigenvalues, parts_of
from kfs.errors import DtypeError, ModelError
from kfs.kfac import inspect
from kfs.kfac.settings import Settings
from kfs.names import near
from kfs.planning.named_models import NAMED, BlockShape

TOKENS = 2048  # in a batch of a rank, if nobody says how many


class Source(NamedTuple):
    """What a plan is made for.

    Attributes:
        name: What to call it.
        parts: Parts of all blocks.
        max_dim: Factors wider than this are diagonal.
        batch: Number of data (or tokens) in a batch of one rank.
        activations: Precision of inputs and gradients.
        same_input: Blocks whose inputs are those of another block.
        uncovered: Parameters that have no block.
    """

    name: str
    parts: list[Part]
    max_dim: int | None
    batch: int = TOKENS
    activations: torch.dtype = torch.bfloat16
    same_input: frozenset[str] = frozenset()
    uncovered: tuple[str, ...] = ()


def source_of(model: Any, sample: Any, max_dim: int | None, eigen: bool) -> Source:
    """Find the parts of a module, of a named model, or of shapes; see `kfs.distributed.plan`."""
    if isinstance(model, Module):
        return _of_module(model, sample, max_dim, eigen)
    if isinstance(model, str):
        if model not in NAMED:
            raise ModelError(f"There is no model {model!r}.", near([model], NAMED))
        named = NAMED[model]
        shapes = list(named.blocks())
        name = named.title
        max_dim = max_dim or named.max_dim
    elif isinstance(model, Mapping):
        shapes = [_shape(name, shape) for name, shape in model.items()]
        name = counted(len(shapes), "shape")
    else:
        raise DtypeError(f"The model is a {type(model).__name__}.", "Pass a module, a name, or a dictionary of shapes.")
    settings = Settings(max_dim=max_dim)
    parts = [part for shape in shapes for part in _parts(shape, settings, eigen)]
    return Source(name, parts, max_dim, same_input=frozenset(shape.name for shape in shapes if shape.same_input))


def _of_module(model: Module, sample: Any, max_dim: int | None, eigen: bool) -> Source:
    if sample is None:
        raise ModelError("Blocks of a module depend on how it uses its parameters.", "Pass a batch of inputs: sample=.")
    found = inspect(model, sample, max_dim=max_dim, audit=False)
    parts = [part for block in found.blocks for part in parts_of(block, found.num_data, eigen)]
    dtype = next(model.parameters()).dtype
    return Source(found.model, parts, max_dim, found.num_data, dtype, uncovered=tuple(found.uncovered))


def _shape(name: str, shape: Any) -> BlockShape:
    valid = isinstance(shape, tuple | list | torch.Size) and len(shape) == 2
    if not valid or not all(type(size) is int and size > 0 for size in shape):
        raise ModelError(f"The shape of {name!r} is {shape!r}.", "Use (d_B, d_A): outputs, then inputs and bias.")
    return BlockShape(name, *shape)


def _parts(shape: BlockShape, settings: Settings, eigen: bool) -> list[Part]:
    """Describe the parts of a block by its shape."""
    diagonal_A = shape.indices or settings.is_diagonal(shape.columns)
    diagonal_B = settings.is_diagonal(shape.rows)
    A = Part(shape.name, "A", shape.columns, diagonal=(diagonal_A,), positions=shape.positions, eigen=eigen)
    B = Part(shape.name, "B", shape.rows, diagonal=(diagonal_B,), positions=shape.positions, eigen=eigen)
    return [A, B, eigenvalues(shape.name, shape.rows * shape.columns)] if eigen else [A, B]
