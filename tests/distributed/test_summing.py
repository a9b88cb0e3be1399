"""Sums of tensors over ranks: whole tensors, triangles, and checksums that tell tensors apart."""

import pytest
import torch
import torch.distributed as dist

from kfs.distributed import Ranks, add_up, added_up, checksum, checksums, collectives
from kfs.distributed.collectives import fill_lower_triangle, upper_triangle
from kfs.errors import DistributedError
from tests.distributed.pool import Pool
from tests.distributed.problems import bits


def tensors(rank: int) -> list[torch.Tensor]:
    """Return tensors of several kinds, with values that depend on the rank."""
    generator = torch.Generator().manual_seed(rank)
    double = torch.randn(3, 4, dtype=torch.float64, generator=generator)
    single = torch.randn(50, 7, generator=generator)
    return [double, single.T, single.new_full((), rank), torch.arange(5) + rank, double.new_zeros(0, 2)]


def sums(bucket_bytes: int) -> str:
    everybody = Ranks(dist.group.WORLD)
    before = collectives.BUCKET_BYTES
    collectives.BUCKET_BYTES = bucket_bytes
    try:
        found = tensors(everybody.rank)
        add_up(everybody, "tensors", iter(found))
    finally:
        collectives.BUCKET_BYTES = before
    for t, *of_ranks in zip(found, *(tensors(rank) for rank in range(everybody.size)), strict=True):
        torch.testing.assert_close(t, torch.stack(of_ranks).sum(0))
    return bits(found)


@pytest.mark.parametrize("bucket_bytes", [1, 100, 2**25])
def test_sums(ranks: Pool, bucket_bytes: int) -> None:
    """All ranks have the same bits, for buckets of any size."""
    assert len(set(ranks(3, sums, bucket_bytes))) == 1


def copies() -> None:
    everybody = Ranks(dist.group.WORLD)
    shared = torch.ones(2).expand(3, 2)
    found = added_up(everybody, "copies", {"one": shared, "two": shared})
    assert torch.equal(shared, torch.ones(3, 2))
    assert all(torch.equal(t, torch.full((3, 2), 2.0)) for t in found.values())


def test_copies(ranks: Pool) -> None:
    """Arguments may share memory, and are not changed."""
    ranks(2, copies)


def other_shapes() -> str:
    everybody = Ranks(dist.group.WORLD)
    with pytest.raises(DistributedError) as caught:
        add_up(everybody, "tensors", [torch.ones(2, 3 + everybody.rank)])
    return str(caught.value)


def test_other_shapes(ranks: Pool) -> None:
    one, other = ranks(2, other_shapes)
    assert one == other
    assert one.startswith("The tensors of tensors differ between processes")


@pytest.mark.parametrize("size", [1, 5, 32, 33, 100])
def test_triangles(size: int) -> None:
    """Panels have all entries above the diagonal, and few below."""
    matrices = torch.randn(2, size, size)
    symmetric = matrices + matrices.mT
    panels = list(upper_triangle(symmetric))
    assert sum(panel.numel() for panel in panels) <= 2 * (size * (size + 1) / 2 + size**2 / 32)
    given = torch.full_like(symmetric, torch.nan)
    for panel, values in zip(upper_triangle(given), panels, strict=True):
        panel.copy_(values)
    fill_lower_triangle(given)
    assert torch.equal(given, symmetric)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_checksums(dtype: torch.dtype) -> None:
    """A changed bit, order or sign changes the checksum."""
    t = torch.arange(-20, 21, 2).to(dtype)
    one_bit = t.clone()
    one_bit.view(torch.uint8)[3] ^= 1
    two_signs = t.clone()
    two_signs[:2] = -two_signs[:2]  # the highest bits of two numbers, which cancel each other in a sum
    variants = [t, t.flip(0), t.roll(1), one_bit, two_signs, t.clone().fill_(0)]
    assert len({checksum(variant) for variant in variants}) == len(variants)
    assert checksum(t) == checksum(t.reshape(3, 7).T.contiguous().T) == checksum(t.clone())
    assert checksum(t[:0]) == 0


def test_checksums_of_special_tensors() -> None:
    """For tensors without plain storage, only shapes are compared."""
    special = [torch.eye(3).to_sparse(), torch.empty(3, 3, device="meta")]
    assert checksums([special, [*special, torch.ones(2)]]) == [0, checksum(torch.ones(2))]
    assert (
        checksum(torch.tensor([1 + 2j])) != checksum(torch.tensor([1 - 2j])) == checksum(torch.tensor([1 + 2j]).conj())
    )


def test_checksums_of_many_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of rows and of buckets matters, too."""
    t = torch.randn(3 * collectives._ROW + 5)
    assert len({checksum(t), checksum(t.roll(collectives._ROW)), checksum(-t), checksum(t.flip(0))}) == 4
    monkeypatch.setattr(collectives, "BUCKET_BYTES", 64)
    some = list(t[:64].split(8))
    assert len(set(checksums([some, some[::-1], some[1:], [*some[1:], some[0]], []]))) == 5
