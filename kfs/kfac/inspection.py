"""What KFAC covers, with what factors, at what cost: shown before any factor is computed."""

from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import Module

from kfs.data import tensors_in
from kfs.errors import DataError
from kfs.kfac.blocks import Block
from kfs.kfac.capture.uses import Uses
from kfs.kfac.scaffold import backward, forward, not_covered
from kfs.kfac.settings import Settings
from kfs.risk import EmpiricalRisk


@dataclass(frozen=True)
class Row:
    """One parameter.

    Attributes:
        parameter: Its name.
        shape: Its shape.
        operations: What uses it.
        block: The block's name; empty if it is not covered.
        A: Kind and size of the input-based factor.
        B: Kind and size of the gradient-based factor.
        nbytes: Bytes of both factors; zero for a bias that shares its weight's block.
        why_not: Why it is not covered; empty if it is.
    """

    parameter: str
    shape: tuple[int, ...]
    operations: tuple[str, ...]
    block: str
    A: str
    B: str
    nbytes: int
    why_not: str


@dataclass(frozen=True)
class Inspection:
    """A table of all parameters; printing it shows it.

    Attributes:
        rows: One per parameter and block.
    """

    rows: tuple[Row, ...]

    @property
    def uncovered(self) -> dict[str, str]:
        """Parameters that are not covered, and why."""
        return {row.parameter: row.why_not for row in self.rows if row.why_not}

    @property
    def nbytes(self) -> int:
        """Bytes of all factors."""
        return sum(row.nbytes for row in self.rows)

    def table(self) -> Table:
        """Return the table for `rich`."""
        table = Table(title=f"KFAC: {len(self.rows)} rows, {readable_size(self.nbytes)} of factors")
        for column in ("parameter", "shape", "operations", "block", "A", "B"):
            table.add_column(column, overflow="fold")
        table.add_column("bytes", justify="right")
        table.add_column("not covered because", overflow="fold")
        for row in self.rows:
            shape = "x".join(map(str, row.shape))
            table.add_row(
                row.parameter,
                shape,
                ", ".join(row.operations),
                row.block,
                row.A,
                row.B,
                readable_size(row.nbytes),
                row.why_not,
            )
        return table

    def __str__(self) -> str:
        """Return the table as text."""
        console = Console(width=160)
        with console.capture() as text:
            console.print(self.table())
        return text.get()


def inspect(
    model: Any,
    sample: Any,
    params: Any = None,
    *,
    sharing: Any = "expand",
    joint_bias: bool = True,
    max_dim: int | None = None,
    batch_axis: int | None = None,
) -> Inspection:
    """Find out what KFAC covers, with one forward and one backward pass, without computing any factor.

    Args:
        model: A module, or a function `f(params, x)`.
        sample: A batch of inputs: what the model takes. Two data or more are better than one, since batch and other
            axes of length one look the same.
        params: Which parameters, as in `EmpiricalRisk`.
        sharing: As in `KFAC`.
        joint_bias: As in `KFAC`.
        max_dim: As in `KFAC`.
        batch_axis: As in `KFAC`.

    Returns:
        A table with one row per parameter (per part of it, if parts have factors of their own).

    Example:
        >>> print(inspect(torch.nn.Linear(3, 2), torch.rand(5, 3)).rows[0].A)
        dense 4x4
    """
    tensors = tensors_in(sample)
    if not tensors or tensors[0].ndim == 0:
        raise DataError(
            "The sample holds no tensor with a batch axis.", "Pass a batch of inputs, as the model takes it."
        )
    if params is None and isinstance(model, Module) and not any(p.requires_grad for p in model.parameters()):
        params = [name for name, _ in model.named_parameters()]
    targets = torch.zeros(len(tensors[0]), device=tensors[0].device)
    risk = EmpiricalRisk(model, _anything, [(sample, targets)], params=params)
    settings = Settings(sharing=sharing, joint_bias=joint_bias, max_dim=max_dim, batch_axis=batch_axis)
    uses = Uses(settings, dry=True)
    with risk.untouched(first_order=True), torch.enable_grad():
        for batch in risk.batches():
            f, capture = forward(risk, batch, uses)
            backward(f, capture, torch.ones_like(f).unsqueeze(0))
    why_not = not_covered(risk.params, uses.blocks.values(), capture.unexplained, uses.conflicts)
    rows = []
    for name, p in risk.params.items():
        blocks = [block for block in uses.blocks.values() if name in block.layout.params and name not in why_not]
        rows += [_row(name, p, block) for block in blocks]
        if not blocks:
            rows.append(Row(name, tuple(p.shape), (), "", "", "", 0, why_not[name]))
    return Inspection(tuple(rows))


def _anything(f: Tensor, y: Tensor) -> Tensor:
    """Stand in for a loss: its value does not matter."""
    return f.sum() + y


def _row(name: str, p: Tensor, block: Block) -> Row:
    kinds = {
        side: f"{'diagonal' if diagonal else 'dense'} {'x'.join(map(str, _shape(block, side, diagonal)))}"
        for side, diagonal in block.diagonal.items()
    }
    first = name == block.layout.weight
    return Row(
        name,
        tuple(p.shape),
        tuple(sorted(block.operations)),
        block.name,
        kinds["A"],
        kinds["B"],
        block.nbytes if first else 0,
        "",
    )


def _shape(block: Block, side: Any, diagonal: bool) -> list[int]:
    """Return the shape of a factor; of its diagonal, if it has nothing else."""
    pairs = block.pairs
    moments = [(p.input if place == side else p.gradient) for place, p in pairs.items()]
    moment = next((m for m in moments if m.diagonal == diagonal), moments[0])
    return list(moment.total.shape)


def readable_size(nbytes: float) -> str:
    """Write a number of bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"
