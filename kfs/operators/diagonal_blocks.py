"""Which parameters share a block, if an operator keeps only blocks on the diagonal."""

from typing import Literal

from kfs.errors import ModelError

Blocks = bool | Literal["parameter", "layer"]


def diagonal_blocks(names: list[str], block_diagonal: Blocks) -> list[list[str]]:
    """Group the parameters whose mutual derivatives are kept."""
    if block_diagonal is False:
        return [names]
    if block_diagonal is True or block_diagonal == "parameter":
        return [[name] for name in names]
    if block_diagonal == "layer":
        layers: dict[str, list[str]] = {}
        for name in names:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
        return list(layers.values())
    raise ModelError(
        f"block_diagonal is {block_diagonal!r}.", "Choose False, 'parameter' (the same as True) or 'layer'."
    )
