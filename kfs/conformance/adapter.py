"""Adapters, which call an implementation of KFAC, and the conversion of their answers to dense blocks.

An adapter is a function `compute(model, loss, data, fisher, sharing)`:

- `model` is a module in float64, `loss` an `nn.MSELoss` or `nn.CrossEntropyLoss`, `data` a list of batches `(X, y)`.
- `fisher` is `"type-2"`, `"mc"` (one label drawn per example) or `"empirical"`; `sharing` is `"expand"` or `"reduce"`.
- It returns a dictionary `{layer: (A, B)}` by module name, such that `kron(B, A)` approximates the curvature of weight
  and bias, where the matrix `(W b)` of shape `[d_out, d_in + 1]` is flattened by rows (`rvec`). For grouped
  convolutions, the value may be a list of pairs, or a pair of stacks `[G, d, d]`. A diagonal factor may be a vector.
  If weight and bias have separate factors, the keys are the names of the parameters. Alternatively, `compute` returns
  a matrix for all parameters in the order of `model.named_parameters()`, each flattened by rows.
- A model of padded sequences has a method `mask(X)`, which returns a boolean tensor `[batch, positions]` that is false
  at padded positions. The labels of padded positions are -100.
- For unsupported settings, it raises `NotImplementedError`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kfs.errors import ModelError

Compute = Callable[[nn.Module, nn.Module, list[tuple[Tensor, Tensor]], str, str], Any]


@dataclass(frozen=True)
class Adapter:
    """An implementation to check.

    Attributes:
        name: Name of the implementation.
        compute: Function that returns factors, or a matrix; see the module docstring.
        unsupported: Tags of checks that the implementation does not support. Empty by default.
        expected_failures: Reasons of expected failures, by prefixes of the names of checks. All these checks must fail.
        version: Version of the library.
        single: Whether it computes in float32.
        flattening: How parameters are flattened in a matrix: `"rvec"` (by rows) or `"cvec"` (by columns).
    """

    name: str
    compute: Compute
    unsupported: frozenset[str] = frozenset()
    expected_failures: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    single: bool = False
    flattening: Literal["rvec", "cvec"] = "rvec"

    def expects_failure(self, check: str) -> str | None:
        """Return the reason why a check is expected to fail; `None` if it is expected to pass."""
        return next((why for name, why in self.expected_failures.items() if check.startswith(name)), None)


@dataclass(frozen=True)
class Answer:
    """The answer of an implementation as dense blocks.

    Attributes:
        blocks: Curvature by the names of the parameters in a block, in the order weight, bias; each flattened by rows.
    """

    blocks: dict[tuple[str, ...], Tensor]


class UnreadableError(Exception):
    """Raised if an answer does not fit the model. The message gives the reason."""


def built_in() -> list[str]:
    """Return the names of all built-in adapters."""
    folder = Path(__file__).parent / "adapters"
    return sorted(file.stem for file in folder.glob("[a-z]*.py"))


def find(target: str) -> Adapter:
    """Return a built-in adapter, or import the user's adapter.

    Args:
        target: Name of a built-in adapter, such as `"curvlinops"`; or `"package.module:name"` of a function or an
            `Adapter`.

    Raises:
        ModelError: If the adapter cannot be imported.
    """
    if ":" not in target and target in built_in():
        try:
            made: Any = import_module(f"kfs.conformance.adapters.{target}").ADAPTER
        except ImportError as error:
            raise ModelError(
                f"{target} cannot be imported: {error}.", f"Install it; the kit has adapters for {built_in()}."
            ) from error
        return _checked(made, target)
    module, _, name = target.partition(":")
    try:
        made = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(
            f"{target!r} cannot be imported: {error}.", f"Name it as package.module:function, or use {built_in()}."
        ) from error
    return _checked(made, target)


def _checked(made: Any, target: str) -> Adapter:
    if isinstance(made, Adapter):
        return made
    if not callable(made):
        raise ModelError(
            f"{target!r} is a {type(made).__name__}.",
            "Pass the name of a function compute(model, loss, data, fisher, sharing), or of an Adapter.",
        )
    return Adapter(getattr(made, "__name__", target), made)


def read(answer: Any, model: nn.Module, tied: Mapping[str, str] | None = None, flattening: str = "rvec") -> Answer:
    """Convert the answer of an adapter to dense blocks.

    Args:
        answer: The return value of an adapter.
        model: The model of the answer.
        tied: For modules and parameters that share weights, the name to use instead.
        flattening: How parameters are flattened in a matrix.

    Raises:
        UnreadableError: If the answer is neither factors nor a matrix of the right size.
    """
    shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    if isinstance(answer, Tensor):
        return _read_matrix(_numbers(answer), shapes, flattening)
    if not isinstance(answer, Mapping) or not answer:
        raise UnreadableError(f"compute returned a {type(answer).__name__} instead of factors by layer, or a matrix.")
    blocks: dict[tuple[str, ...], Tensor] = {}
    for key, pairs in answer.items():
        name = (tied or {}).get(key, key)
        params = tuple(n for n in (name, f"{name}.weight", f"{name}.bias") if n in shapes)
        if not params:
            raise UnreadableError(f"{key!r} is neither a layer nor a parameter; there are {list(shapes)}.")
        A, B = _stacks(key, pairs)
        # Check the sizes of factors, and recognize the most common mistakes.
        weight = shapes[params[0]]
        d_out, d_in = weight[0], weight[1:].numel()
        if len(params) == 2 and A.shape[-1] == d_in:
            raise UnreadableError(f"The input-based factor of layer {key!r} has no row for the bias.")
        sizes = {"input": A.shape[-1], "gradient": B.shape[-1] * len(B)}
        expected = {"input": d_in + (len(params) == 2), "gradient": d_out}
        if sizes != expected:
            swapped = sizes == {"input": expected["gradient"], "gradient": expected["input"]}
            hint = ": they are swapped" if swapped else ""
            raise UnreadableError(f"The factors of layer {key!r} have sizes {sizes}, expected {expected}{hint}.")
        dense = torch.block_diag(*(torch.kron(b, a) for a, b in zip(A, B, strict=True)))
        dense = _weight_first(dense, d_out, d_in) if len(params) == 2 else dense
        blocks[params] = blocks[params] + dense if params in blocks else dense  # two layers with one weight
    return Answer(blocks)


def _stacks(key: str, factors: Any) -> tuple[Tensor, Tensor]:
    """Return the factors of all groups of a layer, `[G, d, d]` each."""
    expected = "expected a pair (A, B) of square matrices, a pair of stacks [G, d, d], or a list of pairs"
    try:
        is_pair = len(factors) == 2 and not isinstance(factors[0], tuple | list)
        # Unpacking checks that each item is a pair. Otherwise the rows of a matrix would pass as diagonals.
        pairs = [(A, B) for A, B in ([factors] if is_pair else factors)]
        sides = [[_square(pair[side]) for pair in pairs] for side in (0, 1)]
        A, B = (torch.cat(side) for side in sides)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, UnreadableError) as error:
        raise UnreadableError(f"The values for {key!r} are not factors ({error}): {expected}.") from error
    if len(A) != len(B) or not len(A):
        raise UnreadableError(f"There are {len(A)} input-based and {len(B)} gradient-based factors of {key!r}.")
    return A, B


def _square(factor: Tensor) -> Tensor:
    """Return a stack of matrices `[G, d, d]`, from a stack, a single matrix, or a diagonal."""
    factor = _numbers(factor)
    factor = torch.diag(factor) if factor.ndim == 1 else factor
    factor = factor.unsqueeze(0) if factor.ndim == 2 else factor
    if factor.ndim != 3 or factor.shape[1] != factor.shape[2]:
        raise UnreadableError(f"one has shape {list(factor.shape)}")
    return factor


def _numbers(t: Tensor) -> Tensor:
    """Return a tensor as a dense float64 tensor on the CPU."""
    if not isinstance(t, Tensor):
        raise UnreadableError(f"a {type(t).__name__} is not a tensor")
    if t.is_complex() or t.is_meta:
        kind = "complex" if t.is_complex() else "meta"
        raise UnreadableError(f"a {kind} tensor has no real numbers")
    return t.detach().to_dense().to("cpu", torch.float64)


def _read_matrix(matrix: Tensor, shapes: Mapping[str, torch.Size], flattening: str) -> Answer:
    """Split a matrix into blocks: a weight with its bias, or separate blocks if the entries between them are zero."""
    total = sum(shape.numel() for shape in shapes.values())
    if matrix.shape != (total, total):
        raise UnreadableError(f"The matrix has shape {list(matrix.shape)}, but there are {total} parameters.")
    # Positions of each parameter's entries, in the order of `rvec`.
    places, start = {}, 0
    for name, shape in shapes.items():
        index = torch.arange(start, start + shape.numel())
        places[name] = index if flattening == "rvec" else index.reshape(shape[::-1]).permute(*range(len(shape))[::-1])
        places[name] = places[name].flatten()
        start += shape.numel()
    blocks: dict[tuple[str, ...], Tensor] = {}
    for name in shapes:
        module, _, leaf = name.rpartition(".")
        bias = f"{module}.bias"
        if leaf == "weight" and bias in shapes and matrix[places[name]][:, places[bias]].any():
            index = torch.cat([places[name], places[bias]])
            blocks[name, bias] = matrix[index][:, index]
        elif not any(name in params for params in blocks):
            blocks[(name,)] = matrix[places[name]][:, places[name]]
    return Answer(blocks)


def _weight_first(dense: Tensor, d_out: int, d_in: int) -> Tensor:
    """Permute the block of `(W b)` to the order `W`, then `b`."""
    order = torch.arange(d_out * (d_in + 1)).reshape(d_out, d_in + 1)
    order = torch.cat([order[:, :-1].flatten(), order[:, -1]])
    return dense[order][:, order]
