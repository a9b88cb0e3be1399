"""The patch covariance by shifts along the first axis, as on accelerators, against loops over patches."""

from itertools import product

import pytest
import torch
from torch import Tensor

from kfs.factors.accumulate import patches
from kfs.factors.accumulate.outer_products import OuterProductSum
from kfs.factors.accumulate.patches import Patches

SPATIAL = (5, 6, 4)


def written_down(x: Tensor, P: Patches) -> Tensor:
    """Return all patches, `[positions, channels * kernel]`, by a loop over entries; zeros outside the image."""
    found = []
    for image, p in product(x, product(*map(range, P.out))):
        for channel in image:
            for offset in product(*map(range, P.kernel)):
                terms = zip(p, P.stride, offset, P.dilation, P.padding, strict=True)
                place = tuple(n * s + k * d - pad[0] for n, s, k, d, pad in terms)
                inside = all(0 <= i < n for i, n in zip(place, channel.shape, strict=True))
                found.append(float(channel[place]) if inside else 0.0)
    return torch.tensor(found, dtype=x.dtype).reshape(-1, P.size)


@pytest.fixture(autouse=True)
def _accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as an accelerator, and shifts as cheap."""
    monkeypatch.setattr("kfs.runtime.sync.is_asynchronous", lambda _: True)
    monkeypatch.setattr(Patches, "_rows_pay", lambda P: P.stride[0] == 1)


@pytest.mark.parametrize("padding", [(0, 0), (1, 1), (2, 0), (0, 3)])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("kernel", [(1,), (3,), (2, 3), (3, 3), (5, 1), (2, 1, 3)])
@pytest.mark.parametrize("limit", [1, 2**20])
def test_covariance(
    kernel: tuple[int, ...], dilation: int, padding: tuple[int, int], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches, "_PATCH_BYTES", {False: limit, True: limit})
    axes = len(kernel)
    shape = (3, 2, *SPATIAL[:axes])
    stride = (1, 2, 1)[:axes]
    P = Patches(shape, kernel, stride, (padding,) * axes, (dilation,) * axes, 1)
    if min(P.out) < 1:
        pytest.skip("the kernel is larger than the image")
    x = torch.randn(shape, dtype=torch.float64)
    total = OuterProductSum.zeros(P.size, 1, False, True, torch.float64, "cpu")
    assert P.add_to(total, x, ones=True) == 3 * P.out[0] * torch.Size(P.out[1:]).numel()
    total.complete()
    vectors = written_down(x, P)
    vectors = torch.cat([vectors, torch.ones_like(vectors[:, :1])], 1)
    torch.testing.assert_close(total.total[0], vectors.T @ vectors, rtol=1e-12, atol=1e-12)


def test_border_matters() -> None:
    """Without subtracting the rows at the border, the result would be wrong."""
    P = Patches((2, 1, 4), (3,), (1,), ((1, 1),), (1,), 1)
    x = torch.randn(2, 1, 4, dtype=torch.float64)
    total = OuterProductSum.zeros(3, 1, False, False, torch.float64, "cpu")
    P.add_to(total, x, ones=False)
    assert not torch.isclose(total.total[0, 0, 0], x.square().sum())
    assert torch.isclose(total.total[0, 1, 1], x.square().sum())
    assert torch.isclose(total.total[0, 0, 0], x[:, :, :-1].square().sum())


@pytest.mark.parametrize(
    ("kernel", "stride", "height", "padding", "pays"),
    [(3, 1, 8, 1, True), (3, 2, 8, 1, False), (1, 1, 8, 0, False), (3, 1, 3, 0, False), (2, 1, 8, 0, True)],
)
def test_when_it_pays(
    kernel: int, stride: int, height: int, padding: int, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    P = Patches((2, 1, height, 8), (kernel, 3), (stride, 1), ((padding, padding), (1, 1)), (1, 1), 1)
    assert P._rows_pay() == pays


@pytest.mark.parametrize(("kernel", "padding"), [(3, 2), (7, 3)])
def test_kernel_higher_than_image(kernel: int, padding: int) -> None:
    """No row has a partner at the distance of the kernel's outermost rows, some of which read only zeros."""
    P = Patches((2, 1, 2), (kernel,), (1,), ((padding, padding),), (1,), 1)
    x = torch.randn(2, 1, 2, dtype=torch.float64)
    total = OuterProductSum.zeros(kernel, 1, False, False, torch.float64, "cpu")
    P.add_to(total, x, ones=False)
    total.complete()
    vectors = written_down(x, P)
    torch.testing.assert_close(total.total[0], vectors.T @ vectors)
