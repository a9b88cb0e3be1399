"""Forward-only curvature: `B` is the multiple of the identity for which KFAC is exact."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs import GGN, KFAC, EmpiricalRisk
from kfs.factors import Checkpoint
from kfs.optim import KFAC as Optimizer  # noqa: N811 (both have this name)
from tests.factors.models import Apply
from tests.operators.contract import close
from tests.optim.training import train


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def eighths(*shape: int, step: int = 5) -> Tensor:
    """Return multiples of 1/8 between -1 and 1 that look irregular."""
    count = torch.Size(shape).numel()
    return ((step * torch.arange(count) ** 2 + 3 * torch.arange(count)) % 17 - 8).double().reshape(shape) / 8


def pooled(layer: nn.Module, axes: Any = 1) -> nn.Module:
    """A layer, and the mean over its positions."""
    return nn.Sequential(layer, Apply(lambda x: x.mean(axes))).double()


EXACT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one position": (lambda: pooled(nn.Linear(4, 3)), (6, 1, 4)),
    "five positions": (lambda: pooled(nn.Linear(4, 3)), (6, 5, 4)),
    "two axes": (lambda: pooled(nn.Linear(4, 3, bias=False), (1, 2)), (6, 3, 2, 4)),
    "convolution": (lambda: pooled(nn.Conv2d(2, 3, 2, stride=2), (2, 3)), (6, 2, 4, 6)),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", EXACT)
def test_reduce_is_exact_for_mean_pooling(name: str, reduction: str) -> None:
    """With expand, `B` is the identity at every position. Blocks are then too large by the number of positions."""
    make, shape = EXACT[name]
    risk = EmpiricalRisk(make(), nn.MSELoss(reduction=reduction), (normal(*shape), normal(shape[0], 3)))
    exact = GGN(risk).to_dense()
    close(KFAC(risk, "forward-only", "reduce").to_dense(), exact)
    expanded = KFAC(risk, "forward-only", "expand")
    (block,) = expanded.blocks.values()
    assert torch.equal(block.B, torch.ones(3, dtype=torch.float64))
    if name != "one position":
        assert expanded.to_dense().norm() > 2 * exact.norm()


class MeanOfWords(nn.Module):
    """The mean embedding of all words except for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 3, padding_idx=0)

    def forward(self, words: Tensor) -> Tensor:
        result: Tensor = self.table(words).sum(1) / (words > 0).sum(1, keepdim=True).clamp(min=1)
        return result


def words_of_lengths(*lengths: int) -> Tensor:
    rows = [torch.cat([torch.randint(1, 6, (n,)), torch.zeros(max(lengths) - n, dtype=torch.long)]) for n in lengths]
    return torch.stack(rows)


def test_data_with_different_numbers_of_positions() -> None:
    """`B` is the mean of one over the squared number of positions, as that of type-2 is."""
    lengths = (1, 2, 5, 5, 4, 0)
    risk = EmpiricalRisk(MeanOfWords().double(), nn.MSELoss(), (words_of_lengths(*lengths), normal(6, 3)))
    B = KFAC(risk, "forward-only", "reduce").blocks["table.weight"].B
    expected = sum(1 / n**2 for n in lengths if n) / 5  # an example without words does not count
    close(B, torch.full((3,), expected, dtype=torch.float64))
    close(torch.diag(B), KFAC(risk, "type-2", "reduce").blocks["table.weight"].B)
    wrong = 1 / (sum(lengths) / 6) ** 2
    assert abs(wrong - expected) > 0.1


def sequences(*lengths: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of two sequences each; lengths differ between batches."""
    return [(eighths(2, length, 2, step=length), eighths(2, 3, step=length + 1)) for length in lengths]


def of_sequences(batches: Any) -> EmpiricalRisk:
    model = pooled(nn.Linear(2, 3))
    with torch.no_grad():
        for place, p in enumerate(model.parameters()):
            p.copy_(eighths(*p.shape, step=place + 2))
    return EmpiricalRisk(model, nn.MSELoss(), batches)


def test_more_data(tmp_path: Path) -> None:
    """Adding data, merging, files and checkpoints preserve the numbers of positions."""
    batches = sequences(4, 2, 3)
    settings: dict[str, Any] = {"fisher": "forward-only", "sharing": "reduce"}
    whole = KFAC(of_sequences(batches), **settings)
    close(whole.blocks["0"].B, torch.full((3,), (1 / 16 + 1 / 4 + 1 / 9) / 3, dtype=torch.float64))
    close(KFAC(of_sequences(batches[:1]), **settings).update(of_sequences(batches[1:])).to_dense(), whole.to_dense())
    first, rest = (KFAC(of_sequences(part), **settings) for part in (batches[:2], batches[2:]))
    first.save(tmp_path / "first")
    loaded = kfs.load(tmp_path / "first")
    assert isinstance(loaded, KFAC)
    close(loaded.to_dense(), first.to_dense())
    close(loaded.merge(rest).to_dense(), whole.to_dense())
    torch.testing.assert_close(whole.shared().to(dtype=torch.float32).to_dense(), whole.to_dense().float())

    class Interrupted:
        def __iter__(self) -> Any:
            yield from batches[:2]
            raise KeyboardInterrupt

    checkpoint = Checkpoint(tmp_path / "run", batches=1)
    with pytest.raises(KeyboardInterrupt):
        KFAC(of_sequences(Interrupted()), **settings, checkpoint=checkpoint)
    close(KFAC(of_sequences(batches), **settings, checkpoint=checkpoint).to_dense(), whole.to_dense())


def test_the_optimizer_averages_numbers_of_positions() -> None:
    """Averages over steps have no bias from their start, and equal numbers do not change."""
    decay, lengths = 0.7, (4, 4, 2, 3)
    model = pooled(nn.Linear(2, 3))
    options: dict[str, Any] = {"fisher": "forward-only", "decay": decay, "factors_every": 1, "lr": 0.0}
    optimizer = Optimizer(model, nn.MSELoss(), sharing="reduce", **options)
    expected = weight = 0.0
    for batch, length in zip(sequences(*lengths), lengths, strict=True):
        train(model, optimizer, [batch], nn.MSELoss())
        expected = decay * expected + (1 - decay) / length**2
        weight = decay * weight + 1 - decay
        (average,) = optimizer.preconditioner.curvature.averages.values()
        close(average.factors.B.scale, torch.tensor([expected / weight], dtype=torch.float64))
    assert abs(expected / weight - expected) > 0.01
    model = pooled(nn.Linear(2, 3))
    optimizer = Optimizer(model, nn.MSELoss(), sharing="expand", **options)
    train(model, optimizer, sequences(*lengths), nn.MSELoss())
    (average,) = optimizer.preconditioner.curvature.averages.values()
    assert torch.equal(average.factors.B.scale, torch.ones(1, dtype=torch.float64))
