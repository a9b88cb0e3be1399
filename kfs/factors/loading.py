"""Loading of operators from files written by `save`."""

from pathlib import Path

import torch

from kfs import files
from kfs.distributed import Group, Ranks
from kfs.errors import StorageError
from kfs.factors.blocks.block_diagonal import BlockDiagonal
from kfs.factors.ekfac import EKFAC
from kfs.factors.kfac import KFAC
from kfs.factors.settings import check_device
from kfs.files import UnfitError
from kfs.operators.space import Space

_CLASSES: dict[str, type[BlockDiagonal]] = {"BlockDiagonal": BlockDiagonal, "KFAC": KFAC, "EKFAC": EKFAC}


def load(path: str | Path, device: str | torch.device = "cpu", group: Group | None = None) -> BlockDiagonal:
    """Read a `KFAC`, an `EKFAC`, or an operator made from them (such as an inverse) from a file.

    No code from the file is executed.

    Args:
        path: A file written by `save`.
        device: Device for all tensors.
        group: Processes that own blocks, as with `KFAC(..., placement="owner")`: each reads its own blocks. By default,
            this process reads all of them. Any number of processes can read a file, independent of how many wrote it.

    Returns:
        An object of the same class that equals the saved one to the last bit. More data can be added to it.

    Raises:
        StorageError: If the file does not exist, was not written by kfs, or is damaged.
        ModelError: If the device does not exist.

    Example:
        >>> import tempfile
        >>> from kfs import EmpiricalRisk
        >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(9, 3), torch.rand(9, 2)))
        >>> K = KFAC(risk)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     K.save(f"{folder}/k.safetensors")
        ...     again = load(f"{folder}/k.safetensors")
        >>> bool((again.to_dense() == K.to_dense()).all())
        True
    """
    check_device(device)
    ranks = Ranks(group)
    with ranks.agreed("load"):
        return _read(path, device, ranks)


def _read(path: str | Path, device: str | torch.device, ranks: Ranks) -> BlockDiagonal:
    """Read an operator from a file. Tensors that are not needed stay in the file."""
    header, state = files.read(path, "cpu" if ranks.are_several else device)
    cls = _CLASSES.get(header.get("kind", ""))
    if cls is None:
        raise StorageError(
            f"{path} holds a {header.get('kind')}.",
            "Pass a file written by K.save(...). To resume a checkpoint, use KFAC(risk, checkpoint=...).",
        )
    with files.require_valid(path):
        shapes = {str(name): tuple(map(int, shape)) for name, shape in state["space"]["shapes"]}
        dtype = getattr(torch, state["space"]["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise UnfitError(f"{dtype} is no dtype")
        own = {
            name: (getattr(torch, kind), torch.device(device)) for name, kind in state["space"].get("own", {}).items()
        }
        made = cls._from_state(state, Space(shapes, dtype, torch.device(device), own), ranks)
    return made.to(device) if ranks.are_several else made
