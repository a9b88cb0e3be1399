"""The listings of `kfs/kfac` against the literal definition; edited copies of them, which must fail when run."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.basics.reduction_factors import reduction_factor
from kfs.conformance.models import Pool
from kfs.kfac import backpropagated_vectors as vectors
from kfs.kfac import expand_Conv, expand_Linear, reduce_Conv, reduce_Linear, scaffold
from kfs.kfac.backpropagated_vectors import backpropagated_vectors, send_back
from kfs.kfac.expand_Conv import Window, patches
from kfs.tour.run import run_definition
from tests.factors.definition import definition
from tests.operators.contract import close

LINEAR = {"expand": expand_Linear, "reduce": reduce_Linear}
CONV = {"expand": expand_Conv, "reduce": reduce_Conv}
SHARING = ("expand", "reduce")
WINDOWS = {
    "3x3": Window((3, 3)),
    "1x1": Window((1, 1)),
    "padded": Window((3, 2), padding=(2, 1)),
    "strided": Window((2, 3), stride=(3, 2), padding=(1, 0)),
    "dilated": Window((2, 3), dilation=(3, 1)),
    "everything": Window((2, 3), (2, 1), (1, 2), (3, 2)),
}


def targets(loss: nn.Module, num_data: int) -> Tensor:
    if isinstance(loss, nn.CrossEntropyLoss):
        return torch.randint(2, (num_data,))
    return torch.randn(num_data, 2, dtype=torch.float64)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss(reduction="sum")], ids=str)
@pytest.mark.parametrize("sharing", SHARING)
def test_linear(sharing: str, loss: Any, bias: bool) -> None:
    torch.manual_seed(0)
    listing = LINEAR[sharing]
    layer = nn.Linear(3, 4, bias=bias).double()
    rest = nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(20, 2)).double()
    X, y = torch.randn(3, 5, 3, dtype=torch.float64), targets(loss, 3)
    R = reduction_factor(loss, y)
    z = layer(X)
    f = rest(z)
    g = send_back(backpropagated_vectors(loss, f, y), f, z)
    A, B = definition(nn.Sequential(layer, rest), loss, X, y, layer, sharing, R)
    close(listing.input_factor(X, R, bias), A[0])
    close(listing.gradient_factor(g), B[0])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("sharing", SHARING)
def test_convolution(sharing: str, window: str, groups: int, bias: bool) -> None:
    """Every group of channels is a convolution of its own."""
    torch.manual_seed(0)
    listing, loss = CONV[sharing], nn.CrossEntropyLoss()
    layer = nn.Conv2d(4, 6, *WINDOWS[window], groups=groups, bias=bias).double()
    X, y = torch.randn(2, 4, 5, 6, dtype=torch.float64), targets(loss, 2)
    z = layer(X)
    rest = nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(z[0].numel(), 2)).double()
    f = rest(z)
    g = send_back(backpropagated_vectors(loss, f, y), f, z)
    R = reduction_factor(loss, y)
    A, B = definition(nn.Sequential(layer, rest), loss, X, y, layer, sharing, R)
    for k, (image, g_k) in enumerate(zip(X.chunk(groups, 1), g.chunk(groups, 2), strict=True)):
        close(listing.input_factor(image, WINDOWS[window], R, bias), A[k])
        close(listing.gradient_factor(g_k), B[k])


@pytest.mark.parametrize("window", WINDOWS)
def test_patches_are_those_of_unfold(window: str) -> None:
    X = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    kernel_size, stride, padding, dilation = WINDOWS[window]
    expected = nn.functional.unfold(X, kernel_size, dilation, padding, stride).mT
    assert torch.equal(patches(X, WINDOWS[window]), expected)
    close(reduce_Conv.summed_patches(X, WINDOWS[window]), expected.sum(1))


@pytest.mark.parametrize("kind", ["sum", "mean"])
def test_vectors_at_an_output(kind: str) -> None:
    """Gradients of a sum over positions are the columns of the identity at every position, for the square loss."""
    z = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    f = Pool(kind, (1,))(z)
    g = send_back(backpropagated_vectors(nn.MSELoss(), f, torch.zeros_like(f)), f, z)
    assert g.shape == (2, 3, 4, 2)
    close(g, torch.eye(2, dtype=torch.float64).reshape(2, 1, 1, 2).expand_as(g) / (1 if kind == "sum" else 4))


NO_BIAS = "append_one(x[n, s]) - append_one(0 * x[n, s]) if"  # the appended one becomes zero
# What to replace in which listing, and the first claim that is then false.
WRONG: dict[str, tuple[ModuleType, str, str, str]] = {
    "scaffold: no reduction factor": (scaffold, "(R * A[name], ", "(A[name], ", "computes the same A"),
    "scaffold: no bias": (scaffold, "bias=layer.bias is not None", "bias=False", "equals the GGN's block"),
    "scaffold: no weight sharing": (scaffold, "RULES[sharing]", 'RULES["expand"]', "if positions are summed"),
    "vectors: rows": (vectors, "flatten(f_n.ndim).movedim(-1, 0)", "flatten(f_n.ndim)", "factor of the criterion's"),
    "vectors: draws are summed": (vectors, " / sqrt(mc_samples)", "", "drawn labels converge"),
    "vectors: true label": (vectors, "(loss, f_n, label)[0]", "(loss, f_n, y_n)[0]", "drawn labels converge"),
    "expand: not averaged over data": (expand_Linear, "B / (N * S)", "B / S", "the same gradient-based factor"),
    "expand: summed over positions": (expand_Linear, "B / (N * S)", "B / N", "the same gradient-based factor"),
    "expand: one vector only": (expand_Linear, "for c in range(C)", "for c in range(1)", "the same gradient-based"),
    "expand: no bias": (expand_Linear, "append_one(x[n, s]) if", NO_BIAS, "the same input-based factor"),
    "expand: no reduction factor": (expand_Linear, "return reduction_factor * A", "return A", "input-based factor"),
    "expand: factors swapped": (expand_Linear, "vec is cvec else", "vec is not cvec else", "equals the GGN"),
    "reduce: divided once": (reduce_Linear, "S**2", "S", "the same gradient-based factor"),
    "reduce: not averaged over data": (reduce_Linear, "(N * S**2)", "S**2", "the same gradient-based factor"),
    "reduce: inputs averaged": (reduce_Linear, "outer(x_n, x_n)", "outer(x_n / S, x_n / S)", "input-based factor"),
    "reduce: no bias": (reduce_Linear, "append_one(x[n, s]) if", NO_BIAS, "the same input-based factor"),
    "expand: kernel transposed": (expand_Conv, "x[:, s, :, i, j]", "x[:, s, :, -1 - i, j]", "multiplies patches"),
    "expand: no dilation": (expand_Conv, "left + j * window.dilation[1]", "left + j", "multiplies patches"),
    "expand: no padding": (expand_Conv, "range(-p, size + p - ", "range(0, size - ", "multiplies patches"),
    "expand: no stride": (expand_Conv, "d * (k - 1), stride)", "d * (k - 1), 1)", "multiplies patches"),
    "expand: channels last": (expand_Conv, "g.flatten(3).movedim(2, 3)", "g.flatten(3)", "gradient-based factor"),
    "reduce: bias without positions": (reduce_Conv, "(len(x), 1), S)", "(len(x), 1), 1)", "input-based factor"),
    "reduce: channels last": (reduce_Conv, "g.flatten(3).movedim(2, 3)", "g.flatten(3)", "gradient-based factor"),
    "reduce: places swapped": (reduce_Conv, "x[:, :, i, j] +=", "x[:, :, -1 - i, j] +=", "sums of patches"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_listing_is_rejected(name: str, tmp_path: Path) -> None:
    listing, right, wrong, claim = WRONG[name]
    file = Path(str(listing.__file__))
    source = file.read_text(encoding="utf-8")
    assert source.count(right) == 1
    copy = tmp_path / file.name
    copy.write_text(source.replace(right, wrong), encoding="utf-8")
    failure = run_definition(copy).failure or ""
    assert failure.startswith("False: "), failure
    assert claim in failure
