"""Curvature for laplace-torch: `Laplace(model, "classification", backend=kfs.laplace.Backend)`.

That library is needed only where the backend is used. It asks for the curvature of one batch after the other, and adds
them up. Its `Kron` holds one Kronecker product for each parameter, of rows and of all other axes.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from kfs.errors import ModelError
from kfs.kfac.block import Block
from kfs.kfac.block_gradients import BlockGradients
from kfs.kfac.datum_gradients import GradientBatch
from kfs.kfac.settings import Fisher, Settings
from kfs.laplace.batchwise import ByBatch, ColumnsByBatch, FactorsByBatch

_WAY_OUT = "Use kfs.laplace.posterior(kfs.KFAC(risk), risk, prior_precision), which needs no laplace-torch."


class BackendMethods:
    """What laplace-torch asks a backend for, with curvature of this library.

    It is combined with `laplace.curvature.GGNInterface`, which has Jacobians and the constructor. Factors come from the
    exact Fisher, or from labels that are drawn, `backend_kwargs={"stochastic": True, "num_samples": 1}`.
    """

    # What GGNInterface sets.
    model: nn.Module
    lossfunc: nn.Module
    factor: float
    params: list[nn.Parameter]
    params_dict: dict[str, nn.Parameter]
    last_layer: bool
    subnetwork_indices: Tensor | None
    stochastic: bool
    num_samples: int
    _factors: FactorsByBatch | None = None
    _gradients: ColumnsByBatch | None = None

    def kron(self, x: Any, y: Tensor, N: int, **settings: Any) -> tuple[Tensor, Any]:
        """Return the loss of a batch, and its Kronecker factors.

        Args:
            x: Inputs.
            y: Targets.
            N: Number of all data.
            **settings: Those of `kfs.KFAC`, such as `sharing`, from `asdl_fisher_kwargs` of laplace-torch.

        Raises:
            ModelError: If a parameter is not covered, or its curvature is not one Kronecker product.
        """
        fisher: Fisher = "mc" if self.stochastic else "type-2"
        chosen = Settings(fisher=fisher, mc_samples=self.num_samples, joint_bias=False, replay=False, **settings)
        if self._factors is None or self._factors.settings != chosen:
            self._factors = FactorsByBatch(self.model, self.lossfunc, self._names(), chosen)
        blocks = self._factors.blocks(x, y)
        factors = [_kron_factors(name, blocks, len(y), self.factor, N) for name in self._factors.names]
        return self._loss(self._factors, y), import_module("laplace.utils").Kron(factors)

    def diag(self, x: Any, y: Tensor, **ignored: Any) -> tuple[Tensor, Tensor]:
        """Return the loss of a batch, and the exact diagonal of its GGN, or of an estimate by labels that are drawn."""
        gradients = self._by_column()
        columns, scale = self._columns(gradients, x, y)
        first = next(iter(columns[0].blocks.values()))
        total = {
            name: torch.zeros(1, *shape, dtype=first.dtype, device=first.device)
            for name, shape in columns[0].shapes.items()
        }
        for name, block in columns[0].blocks.items():
            block.layout.write(_sum_of_squares([column.blocks[name] for column in columns]), total)
        flat = torch.cat([t.flatten() for t in total.values()])
        return self._loss(gradients, y), self._chosen(scale * flat).to(self.params[0].dtype)

    def full(self, x: Any, y: Tensor, **ignored: Any) -> tuple[Tensor, Tensor]:
        """Return the loss of a batch, and its GGN, or an estimate by labels that are drawn."""
        gradients = self._by_column()
        columns, scale = self._columns(gradients, x, y)
        total: Tensor | None = None
        for column in columns:
            J = self._chosen(torch.cat([t.flatten(1) for t in column.tensors().values()], 1))
            total = J.T @ J if total is None else total.addmm_(J.T, J)
        assert total is not None  # noqa: S101 (predictions have at least one number)
        return self._loss(gradients, y), (scale * total).to(self.params[0].dtype)

    def _names(self) -> list[str]:
        """Return the names of the parameters that are asked for, in their order."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        return [names[id(p)] for p in self.params]

    def _by_column(self) -> ColumnsByBatch:
        """Return what computes gradients of vectors."""
        settings = Settings(fisher="mc" if self.stochastic else "type-2", mc_samples=self.num_samples)
        if self._gradients is None or self._gradients.settings != settings:
            self._gradients = ColumnsByBatch(self.model, self.lossfunc, self._names(), settings)
        return self._gradients

    def _columns(self, gradients: ColumnsByBatch, x: Any, y: Tensor) -> tuple[list[GradientBatch], float]:
        """Return gradients of vectors for one column after the other, and what their outer products are scaled with."""
        # Their library divides the square loss by two.
        return gradients.columns(x, y), self.factor * gradients.scale(y)

    def _chosen(self, t: Tensor) -> Tensor:
        """Return the parameters of a subnetwork, on the last axis; all if none is chosen."""
        return t if self.subnetwork_indices is None else t[..., self.subnetwork_indices]

    def _loss(self, seen: ByBatch, y: Tensor) -> Tensor:
        """Return the negative log-likelihood of the last batch, for noise of one."""
        return self.factor * seen.loss(self.lossfunc, y)


def _sum_of_squares(columns: Sequence[BlockGradients]) -> Tensor:
    """Sum squared gradients of all columns over data, `[1, groups, d_B, d_A]`."""
    first = columns[0]
    if len(first.uses) == 1 and first.whole is None and first.shared == 1:
        # The square of an outer product is the outer product of squares, and columns have the same inputs.
        x = first.parts[0].x.dense().squeeze(2).square()
        g = sum(column.parts[0].g.dense().squeeze(2).square() for column in columns)
        assert isinstance(g, Tensor)  # noqa: S101 (there are columns)
        return (g.transpose(1, 2) @ x).unsqueeze(0)
    total = first.dense().square().sum(0, keepdim=True)
    for column in columns[1:]:
        total += column.dense().square().sum(0, keepdim=True)
    return total


def _kron_factors(
    name: str, blocks: Mapping[str, Block], num_data: int, factor: float, num_all_data: int
) -> list[Tensor]:
    """Return the factors of a parameter as laplace-torch's `Kron` has them: for rows, and for all other axes.

    Kron adds the factors of all batches. So the first one has a sum over data, and the second one is divided by the
    number of all data.

    Args:
        name: Name of the parameter.
        blocks: Blocks of the batch, by name.
        num_data: Number of data in the batch.
        factor: What their library multiplies the loss with.
        num_all_data: Number of all data.

    Raises:
        ModelError: If the curvature of the parameter is not one such product.
    """
    block = blocks.get(name)
    if block is None:
        raise ModelError(f"Rows of {name!r} have Kronecker products of their own, and Kron holds one.", _WAY_OUT)
    layout = block.layout
    if layout.groups > 1:
        raise ModelError(
            f"{name!r} has {layout.groups} groups of channels, each with a Kronecker product of its own, and Kron "
            "holds one for all.",
            _WAY_OUT,
        )
    # `A` is a sum over data, and `B` an average. Numbers are multiplied before factors are, which may be large.
    A, B = (_dense(block.sums.side_total("A")), _dense(block.sums.side_total("B")))
    scale_A = block.scale("A")
    scale_B = factor * block.scale("B")
    axes = len(layout.shape)
    if axes == 1:
        return [A * (scale_A * scale_B * B)]
    if layout.split == 1 and layout.order == tuple(range(axes)):
        return [num_data * scale_B * B, scale_A / num_all_data * A]
    if axes == 2:  # a transposed weight, as embeddings and Conv1D of transformers have it
        return [scale_A * A, num_data * scale_B / num_all_data * B]
    raise ModelError(
        f"{name!r} has a Kronecker product whose sides are not its rows and the rest, as Kron has it.", _WAY_OUT
    )


def _dense(total: Tensor) -> Tensor:
    """Return a factor without its groups, of which there is one, as a matrix."""
    return torch.diag(total[0]) if total.ndim == 2 else total[0]


def make_backend() -> type:
    """Return the class for `backend=` of laplace-torch.

    Raises:
        ModelError: If laplace-torch is not installed.
    """
    try:
        interface = import_module("laplace.curvature").GGNInterface
    except ModuleNotFoundError as error:
        raise ModelError(
            f"kfs.laplace.Backend is for laplace-torch, which cannot be imported: {error}.",
            f"Install it with `pip install laplace-torch`. {_WAY_OUT}",
        ) from error
    return type(
        "Backend", (BackendMethods, interface), {"__module__": "kfs.laplace", "__doc__": BackendMethods.__doc__}
    )
