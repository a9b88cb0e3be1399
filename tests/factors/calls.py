"""Calls of every operation that has a rule, with all arguments by name: cases of `test_keyword_arguments`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tests.factors.models import Function

N = 3
WIDTH = 90
# Returns random data of a shape, `[N, *shape]`.
Data = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """A call of an operation.

    Attributes:
        name: Its name in tests.
        func: The operation.
        params: Shapes of all parameters.
        make: Takes a module with the parameters, and data. Returns arguments by their documented names, in their order.
        unnamed: Number of arguments without a name: the tensor of a method.
        keyword_only: Names of keyword-only arguments.
        read: Takes the result, and data. Returns a result whose first axis is the batch axis.
        dtype: The precision of parameters and data.
        precision: The precision of the result, if it is lower.
    """

    name: str
    func: Any
    params: Mapping[str, tuple[int, ...]]
    make: Callable[[Any, Data], dict[str, Any]]
    unnamed: int = 0
    keyword_only: tuple[str, ...] = ()
    read: Callable[[Any, Data], Tensor] = field(default=lambda out, _: out)
    dtype: torch.dtype = torch.float64
    precision: torch.dtype | None = None

    def __str__(self) -> str:
        return self.name

    def names(self) -> list[str]:
        """Return the names of all arguments."""
        model, data = self.model(), lambda *shape: torch.ones(N, *shape, dtype=self.dtype)
        return list(self.make(model, data))

    def variants(self) -> Iterator[tuple[list[str], list[str]]]:
        """Generate calls with every number of positional arguments, and the others by name in several orders."""
        names = self.names()
        for count in range(self.unnamed, len(names) - len(self.keyword_only) + 1):
            by_name = names[count:]
            for order in (by_name, by_name[::-1], [*by_name[1:], *by_name[:1]]):
                yield names[:count], order

    def model(self, positional: list[str] | None = None, by_name: list[str] | None = None) -> nn.Module:
        """Make a model; unless stated otherwise, as many arguments as possible are positional."""

        def run(m: Any, x: Tensor) -> Tensor:
            def data(*shape: int) -> Tensor:
                return x[:, : prod(shape)].reshape(len(x), *shape)

            given = self.make(m, data)
            first = [name for name in given if name not in self.keyword_only] if positional is None else positional
            named = self.keyword_only if by_name is None else by_name
            out = self.func(*(given[name] for name in first), **{name: given[name] for name in named})
            return self.read(out, data).flatten(1).tanh()

        torch.manual_seed(1)
        params = {name: torch.rand(shape) + 0.5 for name, shape in self.params.items()}
        return Function(run, **params).to(self.dtype)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets."""
        X = torch.rand(N, WIDTH, generator=torch.Generator().manual_seed(2), dtype=self.dtype) + 0.1
        return X, torch.zeros_like(self.model()(X).detach())

    def close(self, actual: Tensor, expected: Tensor) -> None:
        """Compare up to round-off."""
        tolerance = 1e3 * torch.finfo(self.dtype).eps if self.precision is None else torch.finfo(self.precision).eps
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def binary(owner: Any, name: str, **more: Any) -> list[Case]:
    """Return cases for an operation with two operands, either of which is the parameter."""
    changes = name.strip("_").startswith("i") or (name.endswith("_") and not name.startswith("_"))
    label = f"{owner.__name__}.{name}{', '.join(['', *more])}"

    def second(m: Any, x: Data) -> dict[str, Any]:
        return {"input": x(5, 4) + 0, "other": m.w, **more}

    def first(m: Any, x: Data) -> dict[str, Any]:
        return {"input": m.w, "other": x(5, 4), **more}

    makes = {"second": second} if changes else {"second": second, "first": first}
    settings: Any = {"unnamed": int(owner is Tensor), "keyword_only": tuple(more)}
    return [
        Case(f"{label}, parameter {place}", getattr(owner, name), {"w": (4,)}, make, **settings)
        for place, make in makes.items()
    ]


def elementwise() -> Iterator[Case]:
    """Generate cases for all operations that broadcast."""
    names = ("add", "sub", "mul", "div", "subtract", "multiply", "divide", "true_divide")
    more: dict[str, dict[str, Any]] = {"add": {"alpha": 2.0}, "sub": {"alpha": 0.5}, "div": {"rounding_mode": None}}
    for owner, name in product((torch, Tensor), names):
        yield from binary(owner, name)
        if name in more:
            yield from binary(owner, name, **more[name])
    yield from binary(torch, "rsub")
    for name in names:
        yield from binary(Tensor, f"{name}_")
    for name in ("add", "sub", "mul", "truediv"):
        for kind in ("", "r", "i"):
            yield from binary(Tensor, f"__{kind}{name}__")
    yield Case(
        "where, parameter last",
        torch.where,
        {"w": (4,)},
        lambda m, x: {"condition": x(5, 4) > 0.5, "input": x(5, 4), "other": m.w},
    )
    yield Case(
        "where, parameter in the middle",
        torch.where,
        {"w": (4,)},
        lambda m, x: {"condition": x(5, 4) > 0.5, "input": m.w, "other": x(5, 4)},
    )


def copies() -> Iterator[Case]:
    """Generate cases for copies of a weight, which a product uses afterwards."""
    arguments: dict[str, dict[str, Any]] = {
        "clone": {"memory_format": torch.preserve_format},
        "contiguous": {"memory_format": torch.contiguous_format},
        "to": {"dtype": torch.float64, "copy": True},
        "type": {"dtype": torch.float64},
        "type_as": {"other": torch.zeros((), dtype=torch.float64)},
        "double": {"memory_format": torch.preserve_format},
        "float": {"memory_format": torch.preserve_format},
        "half": {"memory_format": torch.preserve_format},
        "bfloat16": {"memory_format": torch.preserve_format},
    }
    precisions = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}

    def case(func: Any, name: str, more: dict[str, Any], unnamed: int) -> Case:
        return Case(
            name,
            func,
            {"w": (2, 4)},
            lambda m, _: {"input": m.w, **more},
            unnamed,
            keyword_only=tuple(more),
            read=lambda out, x: F.linear(x(4).to(out.dtype), out).double(),
            precision=precisions.get(func.__name__),
        )

    for name, more in arguments.items():
        yield case(getattr(Tensor, name), f"Tensor.{name}", more, unnamed=1)
    yield case(torch.clone, "torch.clone", arguments["clone"], unnamed=0)


def joins() -> Iterator[Case]:
    """Generate cases for a class token that is joined to data."""
    for name in ("cat", "concat", "concatenate", "stack", "hstack"):
        shape = (1, 4) if name != "stack" else (4,)

        def make(m: Any, x: Data, name: str = name, shape: tuple[int, ...] = shape) -> dict[str, Any]:
            found: dict[str, Any] = {"tensors": (m.t.expand(N, *shape), x(*shape))}
            return found if name == "hstack" else {**found, "dim": 1}

        yield Case(f"torch.{name}", getattr(torch, name), {"t": (1, *shape)}, make)


def convolutions() -> Iterator[Case]:
    """Generate cases for convolutions, with all settings that differ from their defaults."""
    for dims in (1, 2, 3):
        data = (2, *(4,) * dims) if dims < 3 else (2, 3, 3, 3)

        def make(m: Any, x: Data, data: tuple[int, ...] = data) -> dict[str, Any]:
            tensors = {"input": x(*data), "weight": m.W, "bias": m.b}
            return {**tensors, "stride": 2, "padding": 1, "dilation": 1, "groups": 2}

        def transposed(m: Any, x: Data, data: tuple[int, ...] = data) -> dict[str, Any]:
            tensors = {"input": x(*data), "weight": m.W, "bias": m.b}
            return {**tensors, "stride": 2, "padding": 1, "output_padding": 1, "groups": 2, "dilation": 1}

        kernel = (2,) * dims
        yield Case(f"conv{dims}d", getattr(F, f"conv{dims}d"), {"W": (4, 1, *kernel), "b": (4,)}, make)
        name = f"conv_transpose{dims}d"
        yield Case(name, getattr(F, name), {"W": (2, 2, *kernel), "b": (4,)}, transposed)


def normalizations() -> Iterator[Case]:
    """Generate cases for scales and shifts."""
    vectors = {"w": (4,), "b": (4,)}

    def layer(m: Any, x: Data) -> dict[str, Any]:
        return {"input": x(5, 4), "normalized_shape": (4,), "weight": m.w, "bias": m.b, "eps": 0.1}

    def group(m: Any, x: Data) -> dict[str, Any]:
        return {"input": x(4, 5), "num_groups": 2, "weight": m.w, "bias": m.b, "eps": 0.1}

    def root_mean_square(m: Any, x: Data) -> dict[str, Any]:
        return {"input": x(5, 4), "normalized_shape": (4,), "weight": m.w, "eps": 0.1}

    yield Case("F.layer_norm", F.layer_norm, vectors, layer)
    yield Case("torch.layer_norm", torch.layer_norm, vectors, lambda m, x: {**layer(m, x), "cudnn_enable": True})
    yield Case("F.group_norm", F.group_norm, vectors, group)
    yield Case("torch.group_norm", torch.group_norm, vectors, lambda m, x: {**group(m, x), "cudnn_enabled": True})
    yield Case("F.rms_norm", F.rms_norm, {"w": (4,)}, root_mean_square)
    yield Case("torch.rms_norm", torch.rms_norm, {"w": (4,)}, root_mean_square)

    def with_statistics(m: Any, x: Data, **more: Any) -> dict[str, Any]:
        mean, variance = torch.arange(4.0, dtype=torch.float64), torch.arange(1.0, 5.0, dtype=torch.float64)
        tensors = {"input": x(4, 5), "running_mean": mean, "running_var": variance, "weight": m.w, "bias": m.b}
        return {**tensors, **more, "momentum": 0.2, "eps": 0.1}

    yield Case("F.batch_norm", F.batch_norm, vectors, lambda m, x: with_statistics(m, x, training=False))
    yield Case("F.instance_norm", F.instance_norm, vectors, lambda m, x: with_statistics(m, x, use_input_stats=False))
    yield Case("F.prelu", F.prelu, {"w": (4,)}, lambda m, x: {"input": x(4, 5) - 0.6, "weight": m.w})


def products() -> Iterator[Case]:
    """Generate cases for linear operations."""
    matrix, both = {"W": (4, 2)}, {"W": (4, 2), "b": (2,)}
    yield Case(
        "F.linear", F.linear, {"W": (2, 4), "b": (2,)}, lambda m, x: {"input": x(5, 4), "weight": m.W, "bias": m.b}
    )
    yield Case(
        "F.bilinear",
        F.bilinear,
        {"W": (2, 4, 3), "b": (2,)},
        lambda m, x: {"input1": x(4), "input2": x(3), "weight": m.W, "bias": m.b},
    )
    for owner in (torch, Tensor):
        unnamed = int(owner is Tensor)
        label = owner.__name__
        yield Case(
            f"{label}.addmm",
            owner.addmm,
            both,
            lambda m, x: {"input": m.b, "mat1": x(4), "mat2": m.W, "beta": 1, "alpha": 1},
            unnamed,
            ("beta", "alpha"),
        )
        right = lambda m, x: {"input": x(5, 4), "other": m.W}  # noqa: E731
        left = lambda m, x: {"input": m.W, "other": x(2, 5)}  # noqa: E731
        yield Case(f"{label}.matmul", owner.matmul, matrix, right, unnamed)
        yield Case(f"{label}.matmul from the left", owner.matmul, matrix, left, unnamed)
        yield Case(f"{label}.mm", owner.mm, matrix, lambda m, x: {"input": x(4), "mat2": m.W}, unnamed)
        stack = {"W": (5, 4, 2)}
        swap = lambda out, _: out.transpose(0, 1)  # noqa: E731
        yield Case(
            f"{label}.bmm",
            owner.bmm,
            stack,
            lambda m, x: {"input": x(5, 4).transpose(0, 1), "mat2": m.W},
            unnamed,
            read=swap,
        )
        yield Case(
            f"{label}.baddbmm",
            owner.baddbmm,
            {**stack, "b": (5, 1, 2)},
            lambda m, x: {"input": m.b, "batch1": x(5, 4).transpose(0, 1), "batch2": m.W, "beta": 1, "alpha": 1},
            unnamed,
            ("beta", "alpha"),
            swap,
        )
    yield Case("Tensor.__matmul__", Tensor.__matmul__, matrix, lambda m, x: {"input": x(5, 4), "other": m.W}, 1)
    yield Case("Tensor.__rmatmul__", Tensor.__rmatmul__, matrix, lambda m, x: {"input": m.W, "other": x(5, 4)}, 1)
    yield Case(
        "torch.einsum", torch.einsum, matrix, lambda m, x: {"equation": "nsi,io->nso", "x": x(5, 4), "W": m.W}, 3
    )
    yield Case(
        "torch.einsum, a list", torch.einsum, matrix, lambda m, x: {"equation": "ni,io->no", "operands": [x(4), m.W]}, 2
    )
    yield Case(
        "torch._grouped_mm",
        torch._grouped_mm,
        {"W": (2, 4, 4)},
        lambda m, x: {
            "input": x(2, 4).transpose(0, 1).reshape(2 * N, 4),
            "mat2": m.W,
            "offs": N * torch.arange(1, 3, dtype=torch.int32),
            "bias": None,
            "out_dtype": None,
        },
        0,
        ("offs", "bias", "out_dtype"),
        lambda out, _: out.reshape(2, N, 4).transpose(0, 1),
        torch.float32,
    )
    yield Case(
        "F.embedding",
        F.embedding,
        {"W": (4, 2)},
        lambda m, x: {
            "input": (3 * x(5)).long(),
            "weight": m.W,
            "padding_idx": 1,
            "max_norm": None,
            "norm_type": 2.0,
            "scale_grad_by_freq": False,
            "sparse": False,
        },
    )
    for owner in (torch, Tensor):
        yield Case(
            f"{owner.__name__}.index_copy",
            owner.index_copy,
            {"W": (2, 3)},
            lambda m, _: {
                "input": torch.ones(7, 3, dtype=torch.float64),
                "dim": 0,
                "index": torch.tensor([4, 1]),
                "source": m.W,
            },
            int(owner is Tensor),
            read=lambda out, x: F.embedding((6 * x(5)).long(), out),
        )
    yield Case(
        "F.embedding_bag",
        F.embedding_bag,
        {"W": (4, 2)},
        lambda m, x: {
            "input": (3 * x(5)).long(),
            "weight": m.W,
            "offsets": None,
            "max_norm": None,
            "norm_type": 2,
            "scale_grad_by_freq": False,
            "mode": "sum",
            "sparse": False,
            "per_sample_weights": x(5),
            "include_last_offset": False,
            "padding_idx": 1,
        },
    )


def attention() -> Iterator[Case]:
    """Generate cases for attention."""
    yield Case(
        "F.scaled_dot_product_attention",
        F.scaled_dot_product_attention,
        {"bias": (2, 5, 5)},
        lambda m, x: {
            "query": x(2, 5, 4),
            "key": x(2, 5, 4).flip(2),
            "value": x(2, 5, 4) ** 2,
            "attn_mask": m.bias,
            "dropout_p": 0.0,
            "is_causal": False,
            "scale": 0.7,
            "enable_gqa": False,
        },
        keyword_only=("scale", "enable_gqa"),
    )
    yield Case(
        "F.multi_head_attention_forward",
        F.multi_head_attention_forward,
        {"W": (12, 4), "b": (12,), "V": (4, 4), "c": (4,)},
        lambda m, x: {
            "query": x(5, 4).transpose(0, 1),
            "key": x(5, 4).transpose(0, 1),
            "value": x(5, 4).transpose(0, 1) ** 2,
            "embed_dim_to_check": 4,
            "num_heads": 2,
            "in_proj_weight": m.W,
            "in_proj_bias": m.b,
            "bias_k": None,
            "bias_v": None,
            "add_zero_attn": False,
            "dropout_p": 0.0,
            "out_proj_weight": m.V,
            "out_proj_bias": m.c,
            "training": False,
            "key_padding_mask": None,
            "need_weights": False,
        },
        read=lambda out, _: out[0].transpose(0, 1),
    )


def recurrent() -> Iterator[Case]:
    """Generate cases for recurrent networks and cells."""
    for name, gates in {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}.items():
        shapes = {"W": (gates * 2, 4), "V": (gates * 2, 2), "b": (gates * 2,), "c": (gates * 2,)}

        def states(x: Data, *leading: int, name: str = name) -> Any:
            zeros = x(4).new_zeros(*leading, N, 2)
            return (zeros, zeros.clone()) if name == "lstm" else zeros

        def network(m: Any, x: Data, states: Callable[..., Any] = states) -> dict[str, Any]:
            settings = {"has_biases": True, "num_layers": 1, "dropout": 0.0, "train": False}
            more = {"bidirectional": False, "batch_first": True}
            return {"input": x(5, 4), "hx": states(x, 1), "params": [m.W, m.V, m.b, m.c], **settings, **more}

        def cell(m: Any, x: Data, states: Callable[..., Any] = states) -> dict[str, Any]:
            return {"input": x(4), "hx": states(x), "w_ih": m.W, "w_hh": m.V, "b_ih": m.b, "b_hh": m.c}

        yield Case(f"torch.{name}", getattr(torch, name), shapes, network, read=lambda out, _: out[0])
        hidden = (lambda out, _: out[0]) if name == "lstm" else (lambda out, _: out)
        yield Case(f"torch.{name}_cell", getattr(torch, f"{name}_cell"), shapes, cell, read=hidden)


CASES = [
    *elementwise(),
    *copies(),
    *joins(),
    *convolutions(),
    *normalizations(),
    *products(),
    *attention(),
    *recurrent(),
]
