"""A batch of one example: its gradients through normalizations, and its factors, equal those in a larger batch.

On the CPU, PyTorch misreads gradients with some strides there. Permuted axes, as in vision transformers, cause them.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from kfs import EKFAC, GGN, KFAC, EmpiricalRisk, Hessian, Jacobian
from kfs.factors import exact_blocks
from kfs.factors.audit import forget_audits
from kfs.problem.torch_fixes import ExactDerivatives, RightGradients, has_instance_norms
from tests.operators.contract import close

N, CHANNELS = 3, 4


class Pixels(nn.Module):
    """Convolution, normalization, and a layer for all pixels, whose positions are moved to the front."""

    def __init__(self, norm: nn.Module, dimensions: int = 2, checkpointed: bool = False) -> None:
        super().__init__()
        convolution = {2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
        self.first, self.norm, self.head = convolution(2, CHANNELS, 1), norm, nn.Linear(CHANNELS, 2)
        self.places = range(2, 2 + dimensions)
        self.checkpointed = checkpointed

    def pixels(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.first(x)).permute(*self.places, 0, 1).contiguous()
        return result

    def forward(self, x: Tensor) -> Tensor:
        pixels = checkpoint(self.pixels, x, use_reentrant=False) if self.checkpointed else self.pixels(x)
        result: Tensor = self.head(pixels).tanh().flatten(0, -3).mean(0)
        return result


class Functional(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


MEAN = torch.linspace(-1, 1, CHANNELS, dtype=torch.float64)
VARIANCE = torch.linspace(0.5, 2, CHANNELS, dtype=torch.float64)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: Pixels(nn.BatchNorm2d(CHANNELS)),
    "batch norm without scale": lambda: Pixels(nn.BatchNorm2d(CHANNELS, affine=False)),
    "batch norm in 3d": lambda: Pixels(nn.BatchNorm3d(CHANNELS, eps=0.5), dimensions=3),
    "frozen batch norm": lambda: Pixels(nn.BatchNorm2d(CHANNELS).requires_grad_(False)),
    "function": lambda: Pixels(Functional(lambda x: F.batch_norm(x, MEAN, VARIANCE, bias=MEAN, eps=0.3))),
    "instance norm": lambda: Pixels(nn.InstanceNorm2d(CHANNELS, affine=True, eps=0.1)),
    "instance norm without scale": lambda: Pixels(nn.InstanceNorm2d(CHANNELS)),
    "instance norm by running statistics": lambda: Pixels(
        nn.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=True)
    ),
    "checkpointed": lambda: Pixels(nn.BatchNorm2d(CHANNELS), checkpointed=True),
}


def model_and_data(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model with random parameters and buffers, and data."""
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    for t in (*model.parameters(), *model.buffers()):
        if t.is_floating_point():
            t.data = 0.5 + torch.rand_like(t)
    shape = (5, 4, 3) if "3d" in name else (5, 4)
    return model, torch.randn(N, 2, *shape, dtype=torch.float64), torch.randn(N, 2, dtype=torch.float64)


def whole_and_single(name: str, **options: Any) -> tuple[EmpiricalRisk, EmpiricalRisk]:
    """Return the risk for all examples at once, and for single examples."""
    model, X, y = model_and_data(name)
    singles = list(zip(X.split(1), y.split(1), strict=True))
    return EmpiricalRisk(model, nn.MSELoss(), (X, y), **options), EmpiricalRisk(model, nn.MSELoss(), singles, **options)


@pytest.mark.parametrize("name", MODELS)
def test_operators(name: str) -> None:
    whole, single = whole_and_single(name)
    for parameter, g in single.gradient().items():
        close(g, whole.gradient()[parameter])
    for kind in (GGN, Hessian):
        close(kind(single).to_dense(), kind(whole).to_dense())
        one_column = torch.ones(kind(whole).shape[0], dtype=torch.float64)
        close(kind(single) @ one_column, kind(whole) @ one_column)
    J = Jacobian(single)
    close(J.T.to_dense().T, J.to_dense())
    close(J.to_dense(), Jacobian(whole).to_dense())


@pytest.mark.parametrize("columns_at_once", [None, 2])
@pytest.mark.parametrize("name", MODELS)
def test_factors(name: str, columns_at_once: int | None) -> None:
    """Factors of all parameters, and of those before the normalization alone."""
    settings: dict[str, Any] = {"columns_at_once": columns_at_once}
    for params in (None, ["first.weight", "first.bias"]):
        whole, single = whole_and_single(name, params=params)
        close(KFAC(single, **settings).to_dense(), KFAC(whole, **settings).to_dense())
    for sharing in ("expand", "reduce"):
        close(
            EKFAC(single, sharing=sharing, **settings).to_dense(),
            EKFAC(whole, sharing=sharing, **settings).to_dense(),
        )


def elementary(name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Normalize each example and each channel in a loop."""
    out = []
    for datum in x:
        channels = []
        for c, channel in enumerate(datum):
            if name == "instance":
                mean, variance = channel.mean(), channel.var(correction=0)
            else:
                mean, variance = MEAN[c], VARIANCE[c]
            normalized = (channel - mean) / (variance + eps).sqrt()
            normalized = normalized if weight is None else weight[c] * normalized
            channels.append(normalized if bias is None else normalized + bias[c])
        out.append(torch.stack(channels))
    return torch.stack(out)


CALLS: dict[str, Callable[..., Tensor]] = {
    "batch": lambda x, w, b, eps: F.batch_norm(x, MEAN, VARIANCE, w, b, eps=eps),
    "batch, by name": lambda x, w, b, eps: F.batch_norm(
        input=x, running_var=VARIANCE, running_mean=MEAN, bias=b, weight=w, eps=eps
    ),
    "instance": lambda x, w, b, eps: F.instance_norm(x, None, None, w, b, eps=eps),
    "instance by running statistics": lambda x, w, b, eps: F.instance_norm(
        x, MEAN, VARIANCE, w, b, use_input_stats=False, eps=eps
    ),
}


def misread(g: Tensor) -> Tensor:
    """Return the same gradient with another memory order: position, example, channel."""
    return g.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)


@pytest.mark.parametrize("affine", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("mode", [ExactDerivatives, RightGradients])
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients(name: str, mode: Any, affine: tuple[bool, bool]) -> None:
    x = torch.randn(1, CHANNELS, 4, 3, dtype=torch.float64, requires_grad=True)
    w, b = (torch.rand(CHANNELS, dtype=torch.float64, requires_grad=True) if one else None for one in affine)
    expected = elementary("instance" if name == "instance" else "batch", x, w, b, 0.2)
    inputs = [t for t in (x, w, b) if t is not None]
    with mode():
        actual = CALLS[name](x, w, b, 0.2)
    close(actual, expected)
    g = torch.randn_like(actual)
    for one, other in zip(
        torch.autograd.grad(actual, inputs, misread(g)), torch.autograd.grad(expected, inputs, g), strict=True
    ):
        close(one, other)


@pytest.mark.parametrize("name", CALLS)
def test_pytorch_is_wrong(name: str) -> None:
    """If this test fails, PyTorch has fixed the error; the replacements can go with the last affected version."""
    x = torch.randn(1, CHANNELS, 4, 3, dtype=torch.float64, requires_grad=True)
    out = CALLS[name](x, None, None, 0.2)
    g = torch.randn_like(out)
    wrong, right = (torch.autograd.grad(out, x, t, retain_graph=True)[0] for t in (misread(g), g))
    assert (wrong - right).norm() > 0.1 * right.norm()


@pytest.mark.parametrize("mode", [ExactDerivatives, RightGradients])
def test_what_is_left_alone(mode: Any) -> None:
    """For larger batches, other shapes and updated statistics, results are PyTorch's to the last bit."""
    eps = 0.2
    for shape in ((2, CHANNELS, 4, 3), (1, CHANNELS, 5), (1, CHANNELS)):
        x = torch.randn(shape, dtype=torch.float64)
        with mode():
            actual = F.batch_norm(x, MEAN, VARIANCE, eps=eps)
        assert torch.equal(actual, F.batch_norm(x, MEAN, VARIANCE, eps=eps))
    x = torch.randn(1, CHANNELS, 4, 3, dtype=torch.float64)
    for norm in (F.batch_norm, F.instance_norm):
        results = []
        for context in (mode(), torch.enable_grad()):
            statistics = MEAN.clone(), VARIANCE.clone()
            with context:
                out = norm(x, *statistics, training=True) if norm is F.batch_norm else norm(x, *statistics)
            results.append((out, *statistics))
        assert all(map(torch.equal, *results))
        assert not torch.equal(results[0][1], MEAN)
    half = x.bfloat16()
    with mode():
        assert F.batch_norm(half, MEAN.float(), VARIANCE.float()).dtype == torch.bfloat16


def test_where_instance_norms_are_looked_for() -> None:
    assert has_instance_norms(nn.Sequential(nn.Sequential(nn.InstanceNorm1d(3))))
    assert not has_instance_norms(nn.BatchNorm2d(3))
    assert not has_instance_norms(torch.tanh)


class Perceiver(nn.Module):
    """Learned latents that are repeated over the batch and attend to a sequence."""

    def __init__(self, repeat: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, 4))
        self.embed, self.norm, self.head = nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)
        self.query, self.key, self.value = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.repeat = repeat

    def forward(self, x: Tensor) -> Tensor:
        z, h = self.repeat(self.latents, len(x)), self.embed(x)
        weights = (self.query(self.norm(z)) @ self.key(h).transpose(1, 2)).softmax(2)
        f: Tensor = self.head((z + weights @ self.value(h)).tanh().mean(1))
        return f


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("repeat", [lambda t, n: t.expand(n, -1, -1), lambda t, n: t.repeat(n, 1, 1)])
def test_latents_that_are_repeated_over_a_batch_of_one(sharing: Any, repeat: Any) -> None:
    torch.manual_seed(0)
    model = Perceiver(repeat).double()
    X, y = torch.randn(4, 6, 5, dtype=torch.float64), torch.arange(4) % 3
    results = []
    for sizes in ([4], [1, 1, 1, 1], [1, 3]):
        forget_audits()
        data = list(zip(X.split(sizes), y.split(sizes), strict=True))
        K = KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), data), sharing=sharing)
        results.append(K.to_dense())
        assert K.audit is not None
        assert K.audit.num_data == min(sizes)  # the smallest number of audited examples
    close(results[1], results[0])
    close(results[2], results[0])


def test_models_that_take_one_datum_only() -> None:
    """Their audit cannot use two copies of it."""
    linear = nn.Linear(3, 2).double()

    class OneByOne(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Tensor) -> Tensor:
            assert len(x) == 1
            f: Tensor = self.linear(x.reshape(1, 3))
            return f

    X, y = torch.randn(4, 3, dtype=torch.float64), torch.arange(4) % 2
    singles = list(zip(X.split(1), y.split(1), strict=True))
    K = KFAC(EmpiricalRisk(OneByOne(), nn.CrossEntropyLoss(), singles))
    close(K.to_dense(), KFAC(EmpiricalRisk(linear, nn.CrossEntropyLoss(), (X, y))).to_dense())


def test_constants_of_the_last_batch() -> None:
    """A use of parameters with constants (as in DoRA) does not count, whether or not a batch has one example."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.A, self.B, self.size = nn.Linear(6, 2, bias=False), nn.Linear(2, 5), nn.Parameter(torch.rand(5))

        def forward(self, x: Tensor) -> Tensor:
            norm = self.B(self.A(torch.eye(6, dtype=x.dtype))).T.detach().norm(dim=1)
            result: Tensor = self.size / norm * self.B(self.A(x))
            return result

    torch.manual_seed(0)
    model, X, Y = Scaled().double(), torch.randn(5, 6).double(), torch.randn(5, 5).double()
    batches = [(X[:4], Y[:4]), (X[4:], Y[4:])]
    last, whole = (KFAC(EmpiricalRisk(model, nn.MSELoss(), data)).to_dense() for data in (batches, (X, Y)))
    close(last, whole)
    one = EmpiricalRisk(model, nn.MSELoss(), (X[:1], Y[:1]))
    close(KFAC(one).to_dense(), exact_blocks(one).to_dense())
