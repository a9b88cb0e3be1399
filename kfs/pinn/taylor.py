r"""Derivatives of a network with respect to its input, in one forward pass: value, gradient, and second order.

`taylor` evaluates a network as it is, at a *jet* in place of the input: the value of every activation together with its
derivatives. An operation maps jets to jets. A linear layer multiplies each derivative with its weight, and adds its
bias to the value only. For an elementwise function $\sigma$ and a second-order operator
$D = \sum_i \lambda_i \partial_i^2$, the chain rule is

$$
\partial_i \sigma(z) = \sigma'(z)\, \partial_i z, \qquad
D \sigma(z) = \sigma'(z)\, D z + \sigma''(z) \sum_i \lambda_i (\partial_i z)^2 .
$$

This is the forward Laplacian (Li et al., 2023). A network needs no second derivative of any other kind, and the cost
grows with the number of directions, not with its square. An operator with a general symmetric matrix is diagonalized
first. Training with these derivatives lives in `kfs.pinn.problem`.

The derivatives share the weight of a linear layer: it is called once with the value, `[N, 1, features]`, and once with
all derivatives, `[N, derivatives, features]`. KFAC therefore sees all that multiplies the weight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import comb, pi
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from kfs.errors import DtypeError, ModelError, ShapeError, UnknownAttributeError

Network = Callable[[Any], Any]
# The derivatives of order 0 to `order` of an elementwise function at `z`.
Derivatives = Callable[[Tensor, int], list[Tensor]]
_WAY_OUT = (
    "Build the network of linear layers, smooth elementwise functions, sums, products, slices x[:, i:j] and torch.cat, "
    "or differentiate this one with torch.func."
)


@dataclass(frozen=True)
class Taylor:
    """Derivatives of a network with respect to its input.

    Attributes:
        value: Value of the network, `[N, out]`.
        gradient: First derivatives, `[N, d, out]`.
        second: The second-order operator, `[N, out]`; `None` if it was left out.
        directional: Derivatives of order 1, 2, ... in one direction, `[N, order, out]`; `None` without a direction.
        is_laplacian: Whether the second-order operator is the Laplacian.
    """

    value: Tensor
    gradient: Tensor
    second: Tensor | None
    directional: Tensor | None
    is_laplacian: bool

    @property
    def laplacian(self) -> Tensor:
        """The sum of second derivatives in all directions, `[N, out]`."""
        if self.second is None or not self.is_laplacian:
            computed = "first derivatives only" if self.second is None else "another second-order operator"
            raise ModelError(f"taylor() has computed {computed}, not the Laplacian.", "Leave out second=.")
        return self.second

    def along(self, order: int) -> Tensor:
        """Return the derivative of an order in the given direction, `[N, out]`."""
        highest = 0 if self.directional is None else self.directional.shape[1]
        if self.directional is None or not 1 <= order <= highest:
            raise ModelError(
                f"taylor() has computed {highest} derivatives in one direction, not order {order}.",
                f"Pass taylor(..., direction=v, order={max(order, 1)}).",
            )
        return self.directional[:, order - 1]


@dataclass(frozen=True)
class Space:
    """The derivatives that a jet has: in `d` directions, by one second-order operator, and along one direction.

    Attributes:
        d: Number of directions.
        weights: Coefficients of the second-order operator, which is diagonal in these directions: `[d, 1]` or
            `[N, d, 1]`. `None` if it is the Laplacian.
        has_second: Whether the second-order operator is computed.
        direction: Coefficients of one direction, `[d, 1]` or `[N, d, 1]`. `None` if there is none.
        order: Highest order along this direction.
    """

    d: int
    weights: Tensor | None
    has_second: bool
    direction: Tensor | None
    order: int

    @property
    def needs(self) -> int:
        """The highest derivative that is needed of elementwise functions."""
        return max(1 + self.has_second, self.order)

    def first(self, rest: Tensor) -> Tensor:
        """Return the first derivatives, `[N, d, features]`."""
        return rest[:, : self.d]

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the weighted inner product of two gradients, `[N, 1, features]`."""
        product = self.first(a) * self.first(b)
        weighted = product if self.weights is None else self.weights * product
        return weighted.sum(1, keepdim=True)

    def second(self, rest: Tensor) -> Tensor:
        """Return the second-order operator, `[N, 1, features]`, or nothing, `[N, 0, features]`."""
        return rest[:, self.d : self.d + self.has_second]

    def along(self, rest: Tensor) -> list[Tensor]:
        """Return the derivatives of order 1 to `order` along the direction, each `[N, 1, features]`."""
        if self.direction is None:
            return []
        slope = (self.direction * self.first(rest)).sum(1, keepdim=True)
        start = self.d + self.has_second
        return [slope, *rest[:, start:].split(1, dim=1)] if self.order > 1 else [slope]

    def rest(self, first: Tensor, second: Tensor, along: Sequence[Tensor]) -> Tensor:
        """Return all derivatives in one tensor, `[N, derivatives, features]`."""
        parts = [first, second, *along[1:]] if self.has_second else [first, *along[1:]]
        return torch.cat(parts, dim=1) if len(parts) > 1 else first


# What networks may ask about an activation; other attributes are methods of tensors, which run on jets.
_ATTRIBUTES = ("shape", "ndim", "dtype", "device", "size", "dim")


class Jet:
    """An activation with its derivatives; behaves like a tensor `[N, features]` in supported operations.

    Attributes:
        value: The activation, `[N, 1, features]`.
        rest: Its derivatives, `[N, derivatives, features]`; first, second and higher ones, as in `Space`.
        space: The derivatives that it has.
    """

    def __init__(self, value: Tensor, rest: Tensor, space: Space) -> None:
        self.value, self.rest, self.space = value, rest, space

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def __len__(self) -> int:
        return len(self.value)

    def __getattr__(self, name: str) -> Any:
        if name in _ATTRIBUTES:
            return getattr(self.value.squeeze(1), name)
        method = getattr(Tensor, name, None)
        if name.startswith("__") or not callable(method):
            raise UnknownAttributeError(
                f"Values with derivatives have no attribute {name!r}.", "Use attributes and methods of tensors."
            )
        return lambda *args, **kwargs: run(method, (self, *args), kwargs)

    def __getitem__(self, index: Any) -> Any:
        return run(Tensor.__getitem__, (self, index), {})


def _operator(name: str) -> Callable[..., Any]:
    """Return the method for a Python operator."""
    return lambda self, *other: run(getattr(Tensor, name), (self, *other), {})


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "neg", "matmul"):
    setattr(Jet, f"__{_name}__", _operator(f"__{_name}__"))
# These are refused. Without them, Python would run `x += y` as `x = x + y`, and compare identities in `x == y`.
for _name in ("iadd", "isub", "imul", "itruediv", "ipow", "setitem", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Jet, f"__{_name}__", _operator(f"__{_name}__"))


class Propagation(TorchFunctionMode):
    """Runs operations on jets. It is entered last, so that the modes of KFAC see operations on plain tensors only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation, on jets if there are any among its arguments."""
    flat = [part for arg in (*args, *kwargs.values()) for part in (arg if isinstance(arg, (tuple, list)) else (arg,))]
    if not any(isinstance(part, Jet) for part in flat):
        return func(*args, **kwargs)
    name = getattr(func, "__name__", type(func).__name__)
    plain = name.strip("_")
    in_place = kwargs.get("inplace") or (name.endswith("_") and not name.startswith("__")) or plain in _IN_PLACE
    if in_place:
        raise ModelError(
            f"taylor() does not support {plain} in place.", "Write x = f(x), with inplace=False, or x = x + y."
        )
    if plain in _ROUGH:
        raise ModelError(
            f"taylor() does not support {plain}: its second derivative is zero or does not exist.",
            "Use a smooth function, such as tanh, sin, SiLU, GELU or softplus.",
        )
    if plain in _ELEMENTWISE and isinstance(args[0], Jet):
        return _elementwise(args[0], _ELEMENTWISE[plain](args[1:], kwargs))
    if plain not in _OPERATIONS:
        raise ModelError(f"taylor() does not support {plain}.", _WAY_OUT)
    return _OPERATIONS[plain](*args, **kwargs)


# Operations on jets.


def _elementwise(z: Jet, derivatives: Derivatives) -> Jet:
    """Apply an elementwise function: the chain rule, with the formula of Faà di Bruno along the direction."""
    space = z.space
    f = derivatives(z.value, space.needs)
    scaled = f[1] * z.rest
    second = space.second(scaled)
    if space.has_second:
        second = second + f[2] * space.inner(z.rest, z.rest)
    along = _compositions(f, space.along(z.rest))
    return Jet(f[0], space.rest(space.first(scaled), second, along), space)


def _compositions(f: list[Tensor], inner: list[Tensor]) -> list[Tensor]:
    """Return the derivatives of a composition, given those of the outer function and of the inner one."""
    # bell[k][j] is the partial Bell polynomial of the inner derivatives.
    bell: list[dict[int, Tensor]] = [{}]
    for k in range(1, len(inner) + 1):
        bell.append({1: inner[k - 1]})
        for j in range(2, k + 1):
            terms = [comb(k - 1, i - 1) * inner[i - 1] * bell[k - i][j - 1] for i in range(1, k - j + 2)]
            bell[k][j] = sum(terms[1:], terms[0])
    return [_total(f[j] * polynomial for j, polynomial in bell[k].items()) for k in range(1, len(inner) + 1)]


def _total(terms: Any) -> Tensor:
    first, *others = terms
    total: Tensor = sum(others, first)
    return total


def _multiply(a: Any, b: Any) -> Jet:
    """Multiply two jets by the product rule, or a jet with a constant."""
    if not isinstance(a, Jet):
        a, b = b, a
    if not isinstance(b, Jet):
        c = _constant(b)
        return Jet(a.value * c, a.rest * c, a.space)
    space = a.space
    # Only one of two widths may be one, so that products have the same width.
    mixed = b.value * a.rest + a.value * b.rest
    second = space.second(mixed)
    if space.has_second:
        second = second + 2 * space.inner(a.rest, b.rest)
    # Leibniz' rule; the derivative of order 0 is the value.
    u, v = [a.value, *space.along(a.rest)], [b.value, *space.along(b.rest)]
    along = [_total(comb(k, i) * u[i] * v[k - i] for i in range(k + 1)) for k in range(1, len(u))]
    return Jet(a.value * b.value, space.rest(space.first(mixed), second, along), space)


def _add(a: Any, b: Any, *, alpha: float = 1) -> Jet:
    """Add jets, or a constant to the value of a jet."""
    b = b if alpha == 1 else b * alpha
    if not isinstance(a, Jet):
        a, b = b, a
    if isinstance(b, Jet):
        return Jet(a.value + b.value, a.rest + b.rest, a.space)
    value = a.value + _constant(b)
    return Jet(value, a.rest.expand(*a.rest.shape[:2], value.shape[2]), a.space)


def _constant(c: Any) -> Any:
    """Return a number or a tensor that does not depend on the input, in a shape that fits values of jets."""
    if not isinstance(c, Tensor) or c.ndim < 2:
        return c
    if c.ndim > 2:
        raise ModelError(f"taylor() does not support a product or sum with shape {list(c.shape)}.", _WAY_OUT)
    return c.unsqueeze(1)


def _linear(x: Jet, weight: Tensor, bias: Tensor | None = None) -> Jet:
    """Multiply value and derivatives with a weight; only the value has a bias."""
    return Jet(F.linear(x.value, weight, bias), F.linear(x.rest, weight), x.space)


def _matmul(x: Any, weight: Any) -> Jet:
    """Multiply a jet with a matrix."""
    if not isinstance(x, Jet) or not isinstance(weight, Tensor) or weight.ndim != 2:
        raise ModelError("taylor() supports matrix products only of an activation with a matrix.", _WAY_OUT)
    return Jet(x.value @ weight, x.rest @ weight, x.space)


def _power(x: Any, exponent: Any) -> Jet:
    """Raise a jet to a constant power."""
    if not isinstance(x, Jet) or not isinstance(exponent, (int, float)):
        raise ModelError("taylor() supports powers with a number as the exponent only.", _WAY_OUT)
    return _elementwise(x, partial(_powers, exponent))


def _concatenate(tensors: Sequence[Any], dim: int = 0, **kwargs: Any) -> Jet:
    """Concatenate the features of jets and constants."""
    if kwargs.get("axis", dim) not in {1, -1}:
        raise ModelError("taylor() supports concatenation of features only.", "Use torch.cat(..., dim=1).")
    space = next(t.space for t in tensors if isinstance(t, Jet))
    rows = max(t.rest.shape[0] for t in tensors if isinstance(t, Jet))
    jets = []
    for t in tensors:
        if isinstance(t, Jet):
            jets.append(t)
        else:
            slots = next(t.rest.shape[1] for t in tensors if isinstance(t, Jet))
            jets.append(Jet(t.unsqueeze(1), t.new_zeros(rows, slots, t.shape[1]), space))
    rest = [jet.rest.expand(rows, -1, -1) for jet in jets]
    return Jet(torch.cat([jet.value for jet in jets], 2), torch.cat(rest, 2), space)


def _select(x: Jet, index: Any) -> Jet:
    """Select features: `x[:, i:j]`, `x[..., i:j]` or `x[:, [i, j]]`."""
    parts = index if isinstance(index, tuple) else (index,)
    everything = parts[0] is Ellipsis or parts[0] == slice(None)
    if len(parts) != 2 or not everything or not isinstance(parts[1], (slice, list, Tensor)):
        raise ModelError(
            f"taylor() does not support the index {index!r}.", "Select features as slices: x[:, i : i + 1]."
        )
    return Jet(x.value[:, :, parts[1]], x.rest[:, :, parts[1]], x.space)


def _split(x: Jet, size: int | Sequence[int], dim: int = 0) -> tuple[Jet, ...]:
    """Split the features of a jet."""
    if dim not in {1, -1}:
        raise ModelError("taylor() supports splits of features only.", "Use x.split(size, dim=1).")
    values, rests = x.value.split(size, 2), x.rest.split(size, 2)
    return tuple(Jet(value, rest, x.space) for value, rest in zip(values, rests, strict=True))


def _sum(x: Jet, dim: Any = None, keepdim: bool = False) -> Jet:
    """Sum over features, which keeps their axis."""
    if dim not in (1, -1, (1,), (-1,), [1], [-1]):
        raise ModelError("taylor() supports sums over features only.", "Use x.sum(1, keepdim=True).")
    if not keepdim:
        raise ModelError("taylor() needs the axis of features after a sum.", "Use x.sum(1, keepdim=True).")
    return Jet(x.value.sum(2, keepdim=True), x.rest.sum(2, keepdim=True), x.space)


def _dropout(x: Jet, p: float = 0.5, training: bool = True, **_: Any) -> Jet:
    """Return the input: dropout does nothing in evaluation mode."""
    if training and p > 0:
        raise ModelError("taylor() does not support dropout in training mode.", "Call model.eval() first.")
    return x


# Derivatives of elementwise functions. Each takes a value and an order, and returns derivatives from order 0.


def _by_slope(function: Callable[[Tensor], Tensor], slope: Sequence[int], z: Tensor, order: int) -> list[Tensor]:
    """Return derivatives of a function whose derivative is a polynomial `w` of its value, `slope` by powers."""
    value = function(z)
    first = _polynomial(slope, value)
    found = [value, first]
    # The derivative of order k is w Q_k, where Q_1 = 1 and Q_{k + 1} = Q_k' w + Q_k w'.
    Q = [1]
    for _ in range(order - 1):
        terms = [0] * (len(Q) + len(slope))
        for i, q in enumerate(Q):
            for j, w in enumerate(slope):
                if i + j > 0:
                    terms[i + j - 1] += (i + j) * q * w
        while terms[-1] == 0:
            terms.pop()
        Q = terms
        found.append(first * _polynomial(Q, value))
    return found


def _polynomial(coefficients: Sequence[int], t: Tensor) -> Tensor:
    """Return the value of a polynomial, by Horner's rule; odd and even ones have half of the operations."""
    *lower, highest = coefficients
    if not any(coefficients[::2]) and len(coefficients) > 2:
        return t * _polynomial(coefficients[1:], t)
    if not any(coefficients[1::2]) and len(coefficients) > 2:
        return _polynomial(coefficients[::2], t * t)
    total: Tensor = highest * t if lower else torch.full_like(t, highest)
    for c in reversed(lower[1:]):
        total = (total + c) * t
    return total + lower[0] if lower and lower[0] else total


def _sine(shift: int, z: Tensor, order: int) -> list[Tensor]:
    """Return derivatives of the sine, from the one of order `shift` on."""
    sin, cos = z.sin(), z.cos()
    return [(sin, cos, -sin, -cos)[(shift + k) % 4] for k in range(order + 1)]


def _exponential(z: Tensor, order: int) -> list[Tensor]:
    return [z.exp()] * (order + 1)


def _powers(exponent: float, z: Tensor, order: int) -> list[Tensor]:
    """Return derivatives of a power."""
    found = []
    factor = 1.0
    for k in range(order + 1):
        found.append(factor * z.pow(exponent - k) if factor else torch.zeros_like(z))
        factor *= exponent - k
    return found


def _softplus(z: Tensor, order: int, beta: float = 1.0, threshold: float = 20.0) -> list[Tensor]:
    """Return derivatives of softplus: its slope is a sigmoid, or one from the threshold on."""
    slopes = _sigmoid(beta * z, order - 1)
    linear = beta * z > threshold
    higher = [torch.where(linear, float(k == 0), beta**k * slope) for k, slope in enumerate(slopes)]
    return [F.softplus(z, beta, threshold), *higher]


def _tanh(z: Tensor, order: int) -> list[Tensor]:
    return _by_slope(torch.tanh, (1, 0, -1), z, order)


def _sigmoid(z: Tensor, order: int) -> list[Tensor]:
    return _by_slope(torch.sigmoid, (0, 1, -1), z, order)


def _times_input(factor: Derivatives, z: Tensor, order: int) -> list[Tensor]:
    """Return derivatives of `z f(z)`."""
    f = factor(z, order)
    return [z * f[0], *(z * f[k] + k * f[k - 1] for k in range(1, order + 1))]


def _normal(z: Tensor, order: int) -> list[Tensor]:
    """Return derivatives of the cumulative distribution function of the normal distribution."""
    density = torch.exp(-0.5 * z * z) / (2 * pi) ** 0.5
    # Hermite polynomials: He_{k + 1} = z He_k - k He_{k - 1}.
    hermite = [torch.ones_like(z), z]
    for k in range(1, order):
        hermite.append(z * hermite[k] - k * hermite[k - 1])
    found = [(-1) ** k * hermite[k] * density for k in range(order)]
    return [0.5 * (1 + torch.erf(z / 2**0.5)), *found]


def _by_autograd(function: Callable[[Tensor], Tensor], z: Tensor, order: int) -> list[Tensor]:
    """Return derivatives of any elementwise function, by differentiating it."""
    found = [function]
    for _ in range(order):
        found.append(torch.func.grad(lambda z, f=found[-1]: f(z).sum()))  # type: ignore[misc]
    return [f(z) for f in found]


def _gelu(args: Any, kwargs: Any) -> Derivatives:
    if "tanh" in (*args, *kwargs.values()):
        return partial(_by_autograd, partial(F.gelu, approximate="tanh"))
    return partial(_times_input, _normal)


def _fixed(derivatives: Derivatives) -> Callable[[Any, Any], Derivatives]:
    return lambda *_: derivatives


def _generic(function: Callable[..., Tensor]) -> Callable[[Any, Any], Derivatives]:
    return lambda args, kwargs: partial(_by_autograd, lambda z: function(z, *args, **kwargs))


_SMOOTH = (
    *("erf", "erfc", "erfinv", "atan", "arctan", "sinh", "cosh", "asinh", "tan", "expm1", "log1p", "exp2", "sinc"),
    *("asin", "acos", "acosh", "atanh", "log2", "log10", "i0", "lgamma", "digamma"),
)
_ELEMENTWISE: dict[str, Callable[[Any, Any], Derivatives]] = {
    **{name: _generic(getattr(torch, name)) for name in _SMOOTH},
    **{name: _generic(getattr(F, name)) for name in ("mish", "tanhshrink")},
    "log_sigmoid": _generic(F.logsigmoid),
    "log": _generic(torch.log),
    "tanh": _fixed(_tanh),
    "sigmoid": _fixed(_sigmoid),
    "expit": _fixed(_sigmoid),
    "sin": _fixed(partial(_sine, 0)),
    "cos": _fixed(partial(_sine, 1)),
    "exp": _fixed(_exponential),
    "silu": _fixed(partial(_times_input, _sigmoid)),
    "gelu": _gelu,
    "softplus": lambda args, kwargs: lambda z, order: _softplus(z, order, *args, **kwargs),
    "square": _fixed(partial(_powers, 2)),
    "sqrt": _fixed(partial(_powers, 0.5)),
    "rsqrt": _fixed(partial(_powers, -0.5)),
    "reciprocal": _fixed(partial(_powers, -1)),
}
_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "idiv", "ipow", "setitem")
_ROUGH = frozenset({
    *("relu", "relu6", "leaky_relu", "prelu", "rrelu", "elu", "selu", "celu", "hardtanh", "hardswish", "hardsigmoid"),
    *("threshold", "softshrink", "hardshrink", "softsign", "abs", "clamp", "sign", "round", "floor", "ceil"),
    *("maximum", "minimum", "where", "glu_relu"),
})  # fmt: skip
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "matmul": _matmul,
    "mm": _matmul,
    "add": _add,
    "radd": _add,
    "sub": lambda a, b, *, alpha=1: _add(a, _multiply(b, -alpha) if isinstance(b, Jet) else -alpha * b),
    "subtract": lambda a, b: _add(a, _multiply(b, -1) if isinstance(b, Jet) else -b),
    "rsub": lambda a, b: _add(_multiply(a, -1), b),
    "mul": _multiply,
    "multiply": _multiply,
    "rmul": _multiply,
    "neg": lambda a: _multiply(a, -1),
    "pow": _power,
    "cat": _concatenate,
    "concat": _concatenate,
    "getitem": _select,
    "split": _split,
    "sum": _sum,
    "dropout": _dropout,
}


def _divide(a: Any, b: Any) -> Jet:
    return _multiply(a, _elementwise(b, partial(_powers, -1)) if isinstance(b, Jet) else 1 / b)


_OPERATIONS |= {"div": _divide, "divide": _divide, "truediv": _divide, "rdiv": lambda a, b: _divide(b, a)}


# The function that users call.


def taylor(
    model: Network,
    x: Tensor,
    *,
    second: Tensor | str | None = "laplacian",
    direction: Tensor | Sequence[float] | None = None,
    order: int = 2,
) -> Taylor:
    """Evaluate a network and its derivatives with respect to its input, in one forward pass.

    Supported are linear layers and smooth elementwise functions, and sums, products, slices and concatenations of
    them, as in residual networks, learned scales and hard boundary conditions. Results are differentiable with respect
    to parameters, and KFAC sees all uses of a parameter. The model is called as it is, with its hooks.

    Args:
        model: A module, or another function of points `[N, d]`, that returns `[N, out]`.
        x: Points, `[N, d]`.
        second: The second-order operator. `"laplacian"`; or the symmetric coefficient matrix `C` of
            `sum_ij C_ij d_i d_j`, `[d, d]`, or `[N, d, d]` with one for each point; or `None` to leave it out.
        direction: A vector `[d]` for derivatives of higher order, such as `(0.0, 1.0)` if time is the second input.
        order: The highest order of derivatives in this direction.

    Returns:
        Value, gradient, second-order operator, and derivatives in the direction.

    Raises:
        ModelError: If the network has an operation that is not supported; the message names its module.
        ShapeError: If points, coefficients or the direction have the wrong shape.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        >>> u = taylor(net, torch.rand(5, 2))
        >>> u.value.shape, u.gradient.shape, u.laplacian.shape
        (torch.Size([5, 1]), torch.Size([5, 2, 1]), torch.Size([5, 1]))
        >>> heat = taylor(net, torch.rand(5, 2), second=torch.tensor([[0.0, 0.0], [0.0, 1.0]]))  # time is the first
        >>> (heat.gradient[:, 0] - heat.second).shape
        torch.Size([5, 1])
        >>> taylor(net, torch.rand(5, 2), direction=(0.0, 1.0), order=4).along(4).shape
        torch.Size([5, 1])
    """
    _check_points(x)
    weights, basis = _diagonalized(x, second)
    along = None if direction is None else _checked_direction(x, direction, order, basis)
    space = Space(x.shape[1], weights, second is not None, along, 0 if along is None else order)
    out = _called(model, _start(x, space, basis))
    if not isinstance(out, Jet):
        raise ModelError(
            f"The model returned a {type(out).__name__} that is not made of its input.",
            "Return the prediction as one tensor [N, out], and do not detach or copy it.",
        )
    first = space.first(out.rest)
    gradient = first if basis is None else basis @ first
    # Derivatives of a linear network are the same for all points, and have one row.
    points, higher = len(x), space.along(out.rest)
    return Taylor(
        out.value.squeeze(1),
        gradient.expand(points, -1, -1),
        space.second(out.rest).squeeze(1).expand(points, -1) if space.has_second else None,
        torch.cat(higher, 1).expand(points, -1, -1) if higher else None,
        isinstance(second, str),
    )


def _check_points(x: Tensor) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise DtypeError(f"Points are {kind}.", "Pass a tensor [N, d] of a floating-point dtype.")
    if x.ndim != 2 or 0 in x.shape:
        raise ShapeError(f"Points have shape {list(x.shape)}.", "Pass at least one point, [N, d].")


def _diagonalized(x: Tensor, second: Tensor | str | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the eigenvalues of a second-order operator, and its eigenvectors as columns, each if they are needed."""
    if second is None or (isinstance(second, str) and second == "laplacian"):
        return None, None
    d = x.shape[1]
    if not isinstance(second, Tensor) or second.shape not in {(d, d), (len(x), d, d)}:
        shape = list(second.shape) if isinstance(second, Tensor) else repr(second)
        raise ShapeError(
            f"second is {shape} for points of shape {list(x.shape)}.",
            f"Pass 'laplacian', None, or coefficients [{d}, {d}] or [{len(x)}, {d}, {d}].",
        )
    if second.requires_grad:
        raise ModelError(
            "The coefficients of the second-order operator require gradients, which taylor() does not compute.",
            "Pass C.detach(), or multiply learned factors with the second derivatives for fixed coefficients.",
        )
    C = second.detach().to(x.device, x.dtype)
    if _anywhere(C.mT != C):
        raise ModelError(
            "The coefficients of the second-order operator are not symmetric.", "Pass C = (C + C.mT) / 2, the same."
        )
    if not _anywhere(torch.diag_embed(C.diagonal(dim1=-2, dim2=-1)) != C):
        return C.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) if C.ndim > 2 else C.diagonal().unsqueeze(-1), None
    eigenvalues, vectors = torch.linalg.eigh(C)
    return eigenvalues.unsqueeze(-1), vectors


def _anywhere(condition: Tensor) -> bool:
    """Return whether a condition holds anywhere, and for any point if `vmap` maps over points."""
    found = condition.any()
    while is_functorch_wrapped_tensor(found):
        found = get_unwrapped(found)
    return bool(found.any())


def _checked_direction(x: Tensor, direction: Any, order: int, basis: Tensor | None) -> Tensor:
    """Return the direction in terms of the basis, `[d, 1]` or `[N, d, 1]`."""
    d = x.shape[1]
    v = torch.as_tensor(direction, dtype=x.dtype, device=x.device)
    if v.shape != (d,):
        raise ShapeError(f"direction has shape {list(v.shape)} for points [N, {d}].", f"Pass a vector [{d}].")
    if isinstance(order, bool) or not isinstance(order, int) or order < 1:
        raise ModelError(f"order is {order!r}.", "Pass an integer from 1.")
    return v.unsqueeze(-1) if basis is None else basis.mT @ v.unsqueeze(-1)


def _start(x: Tensor, space: Space, basis: Tensor | None) -> Jet:
    """Return the jet of the input: its derivatives are the directions, and zeros."""
    d = x.shape[1]
    directions = torch.eye(d, dtype=x.dtype, device=x.device) if basis is None else basis.mT
    directions = directions if directions.ndim == 3 else directions.unsqueeze(0)
    zeros = directions.new_zeros(len(directions), space.has_second + max(space.order - 1, 0), d)
    rest = torch.cat([directions, zeros], 1)
    value = x.unsqueeze(1)
    if _get_current_function_mode() is None:
        return Jet(value, rest, space)  # one row of directions serves all points
    # KFAC, whose passes are modes, needs a row for every point, which it recognizes as data.
    both = torch.cat([value, rest.expand(len(x), -1, -1)], 1)
    return Jet(both[:, :1], both[:, 1:], space)


def _called(model: Network, start: Jet) -> Any:
    """Call the model, and name the module in errors."""
    try:
        with Propagation():
            return model(start)
    except ModelError as error:
        place = _innermost(model, error)
        raise type(error)(f"{place}{error.cause}", error.way_out) from error


def _innermost(model: Network, error: BaseException) -> str:
    """Return the name of the innermost module that was running when an error was raised, for a message."""
    names = {id(m): (name, m) for name, m in model.named_modules()} if isinstance(model, nn.Module) else {}
    found, frame = "", error.__traceback__
    while frame is not None:
        name, module = names.get(id(frame.tb_frame.f_locals.get("self")), ("", None))
        if module is not None:
            found = f"Module {name!r} ({type(module).__name__}): " if name else f"{type(module).__name__}: "
        frame = frame.tb_next
    return found
