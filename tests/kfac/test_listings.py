"""The listings of `kfs/kfac` against the literal definition, and their form. `test_edits` tests mistakes in them."""

import ast
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad

from kfs import kfac, kfac_tests
from kfs.basics.reduction_factors import reduction_factor
from kfs.conformance.models import Pool
from kfs.kfac import backpropagated_vectors as vectors
from kfs.kfac import expand_Conv, expand_Linear, reduce_Conv, reduce_Linear
from kfs.kfac.backpropagated_vectors import backpropagated_vectors, send_back
from kfs.kfac.expand_Conv import Window, patches
from kfs.kfac.scaffold import kfac as scaffold
from kfs.tour.run import LISTINGS
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
    (g,) = send_back(backpropagated_vectors(loss, f, y), f, [z])
    A, B = definition(nn.Sequential(layer, rest), loss, X, y, layer, sharing, R)
    close(listing.input_factor(X, R, bias), A[0])
    close(listing.gradient_factor(g), B[0])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("sharing", SHARING)
def test_convolution(sharing: str, window: str, groups: int, bias: bool) -> None:
    """Every group of channels is a separate convolution."""
    torch.manual_seed(0)
    listing, loss = CONV[sharing], nn.CrossEntropyLoss()
    layer = nn.Conv2d(4, 6, *WINDOWS[window], groups=groups, bias=bias).double()
    X, y = torch.randn(2, 4, 5, 6, dtype=torch.float64), targets(loss, 2)
    z = layer(X)
    rest = nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(z[0].numel(), 2)).double()
    f = rest(z)
    (g,) = send_back(backpropagated_vectors(loss, f, y), f, [z])
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
    """For the square loss, gradients of a sum over positions are the columns of the identity at every position."""
    z = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    f = Pool(kind, (1,))(z)
    (g,) = send_back(backpropagated_vectors(nn.MSELoss(), f, torch.zeros_like(f)), f, [z])
    assert g.shape == (2, 3, 4, 2)
    close(g, torch.eye(2, dtype=torch.float64).reshape(2, 1, 1, 2).expand_as(g) / (1 if kind == "sum" else 4))


def test_scaffold_sends_each_vector_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five layers and four outputs: four passes, each of which returns gradients for all layers."""
    widths = (3, 5, 4, 6, 5, 4)
    layers = [nn.Linear(*pair) for pair in pairwise(widths)]
    model = nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh()))).double()
    X, y = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    returned = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        gradients = grad(*args, **kwargs)
        returned.append(len(gradients))
        return gradients

    monkeypatch.setattr(vectors, "grad", counting)
    factors = scaffold(model, nn.MSELoss(), X, y)
    assert returned == [5] * 4
    assert [len(B) for _, B in factors.values()] == list(widths[1:])


FOLDERS = [Path(str(package.__file__)).parent for package in (kfac, kfac_tests)]


@pytest.mark.parametrize("file", [file for folder in FOLDERS for file in sorted(folder.glob("*.py"))], ids=str)
def test_lines_fit_the_column_of_the_book(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    assert max(map(len, lines)) <= 88


def test_all_listings_are_run() -> None:
    assert {file.stem for file in FOLDERS[0].glob("[a-z]*.py")} == set(LISTINGS)


@pytest.mark.parametrize("name", LISTINGS)
def test_functions_call_no_part_of_the_engine(name: str) -> None:
    """Except for its own check, a listing uses only PyTorch, definitions, and other listings."""
    source = (FOLDERS[0] / f"{name}.py").read_text(encoding="utf-8")
    top = [node.module or "" for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
    ours = [module for module in top if module.startswith("kfs")]
    assert all(module == "kfs.kfac" or module.startswith(("kfs.basics.", "kfs.kfac.")) for module in ours), ours
