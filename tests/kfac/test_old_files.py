"""Files that an earlier version wrote, in `files_of_0_x`, still load and hold the same matrices.

`python -m tests.kfac.test_old_files` wrote them, once. Do not write them again: a change of the format must read them.
`expected.safetensors` has their dense matrices, computed when they were written. Parameters and data are multiples of
1/8, the same to the last bit on every machine, since a checkpoint has digests of them.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import kfs
from kfs.errors import StorageError
from kfs.kfac import EKFAC, KFAC, BlockDiagonal, Checkpoint, exact_blocks
from kfs.operators import GGN
from kfs.risk import EmpiricalRisk
from tests.operators.contract import close

FOLDER = Path(__file__).parent / "files_of_0_x"


class Tied(nn.Module):
    """An embedding that also computes the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.table(tokens)) @ self.table.weight.T


def eighths(*shape: int, step: int = 5) -> Tensor:
    """Return multiples of 1/8 between -1 and 1 that look irregular."""
    count = torch.Size(shape).numel()
    return ((step * torch.arange(count) ** 2 + 3 * torch.arange(count)) % 17 - 8).double().reshape(shape) / 8


def risk_of(model: nn.Module, X: Tensor, classes: int) -> EmpiricalRisk:
    model = model.double()
    with torch.no_grad():
        for place, p in enumerate(model.parameters()):
            p.copy_(eighths(*p.shape, step=place + 2))
    return EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, torch.arange(len(X)) % classes))


def mlp(num_data: int = 6) -> EmpiricalRisk:
    """Two layers of one size, whose blocks are stored together, and a third one."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 3, bias=False))
    return risk_of(model, eighths(num_data, 2), classes=3)


def grouped() -> EmpiricalRisk:
    return risk_of(nn.Sequential(nn.Conv1d(2, 2, 2, groups=2), nn.Flatten()), eighths(4, 2, 2), classes=2)


def tied() -> EmpiricalRisk:
    return risk_of(Tied(), torch.arange(5) % 3, classes=3)


def in_batches(fail: bool) -> EmpiricalRisk:
    """Return two batches; the second one fails, or not."""

    class Batches:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            yield eighths(4, 2), torch.arange(4) % 3
            if fail:
                raise KeyboardInterrupt
            yield eighths(3, 2, step=7), torch.arange(3) % 3

    risk = mlp()
    return EmpiricalRisk(risk.model, nn.CrossEntropyLoss(), Batches())


MAKERS: dict[str, Callable[[], BlockDiagonal]] = {
    "kfac": lambda: KFAC(mlp()),
    "kfac_reduce_diagonal_bfloat16": lambda: KFAC(
        mlp(), sharing="reduce", max_dim=2, joint_bias=False, factor_dtype=torch.bfloat16
    ),
    "kfac_grouped": lambda: KFAC(grouped()),
    "kfac_tied": lambda: KFAC(tied()),
    "kfac_forward_only": lambda: KFAC(mlp(), "forward-only"),
    "ekfac": lambda: EKFAC(mlp()),
    "ekfac_grouped": lambda: EKFAC(grouped()),
    "ekfac_tied": lambda: EKFAC(tied()),
    "inverse": lambda: KFAC(mlp()).inverse(0.1),
    "inverse_factored": lambda: KFAC(mlp()).inverse(0.1, "factored"),
    "inverse_factored_grouped": lambda: KFAC(grouped()).inverse(0.1, "factored"),
    "inverse_factored_diagonal": lambda: KFAC(mlp(), max_dim=2).inverse(0.1, "factored"),
    "inverse_factored_forward_only": lambda: KFAC(mlp(), "forward-only").inverse(0.1, "factored"),
    "inverse_ekfac": lambda: EKFAC(grouped()).inverse(0.1),
    "not_symmetric": lambda: KFAC(mlp()) @ KFAC(mlp()),  # type: ignore[dict-item, return-value]
    "exact_blocks": lambda: exact_blocks(mlp()),
    "exact_blocks_grouped": lambda: exact_blocks(grouped()),
}


@pytest.mark.parametrize("name", MAKERS)
def test_old_files_load(name: str) -> None:
    K = kfs.load(FOLDER / f"{name}.safetensors")
    close(K.to_dense(), load_file(FOLDER / "expected.safetensors")[name])


def test_old_exact_blocks_are_those_of_the_ggn() -> None:
    K, G = kfs.load(FOLDER / "exact_blocks_grouped.safetensors"), GGN(grouped())
    close(K.to_dense(), G.to_dense())


def test_more_data_can_be_added_to_old_files() -> None:
    K = kfs.load(FOLDER / "kfac.safetensors")
    assert isinstance(K, KFAC)
    close(K.update(mlp()).to_dense(), KFAC(mlp()).update(mlp()).to_dense())


def test_an_old_checkpoint_is_resumed(tmp_path: Path) -> None:
    """It has the first of two batches. If it did not fit, it would be refused."""
    path = Path(copy(FOLDER / "checkpoint", tmp_path))
    resumed = KFAC(in_batches(fail=False), checkpoint=Checkpoint(path, batches=1))
    close(resumed.to_dense(), KFAC(in_batches(fail=False)).to_dense())


def test_an_old_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    path = Path(copy(FOLDER / "checkpoint", tmp_path))
    risk = in_batches(fail=False)
    risk._data = [(x + 1, y) for x, y in risk._data]
    with pytest.raises(StorageError, match="The data differ"):
        KFAC(risk, checkpoint=Checkpoint(path, batches=1))


@pytest.mark.parametrize("name", ["kfac", "inverse_ekfac"])
def test_damaged_old_files_are_refused(name: str, tmp_path: Path) -> None:
    """They have a digest of all bytes in a row, and do not name how it was computed."""
    whole = (FOLDER / f"{name}.safetensors").read_bytes()
    assert b"digest_scheme" not in whole
    header = 8 + int.from_bytes(whole[:8], "little")
    path = tmp_path / "k"
    for place in (whole.index(b"kfs_version") + 20, header, (header + len(whole)) // 2, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(StorageError, match="damaged"):
            kfs.load(path)
    path.write_bytes(whole[:-1])
    with pytest.raises(StorageError, match="damaged"):
        kfs.load(path)
    path.write_bytes(whole)
    kfs.load(path)


def write(folder: Path) -> None:
    """Write all files."""
    expected = {}
    for name, make in MAKERS.items():
        K = make()
        K.save(folder / f"{name}.safetensors")
        expected[name] = K.to_dense()
    save_file(expected, folder / "expected.safetensors")
    with contextlib.suppress(KeyboardInterrupt):
        KFAC(in_batches(fail=True), checkpoint=Checkpoint(folder / "checkpoint", batches=1))


if __name__ == "__main__":
    write(FOLDER)
