"""The Jacobian of all predictions with respect to the parameters, and its transpose."""

import torch
from torch import Tensor

from kfs.distributed import Ranks, added_up
from kfs.errors import ShapeError
from kfs.exact_derivatives import explained
from kfs.operators.chunks import choose_chunk_size
from kfs.operators.curvature import parameter_space
from kfs.operators.derivatives import OneDerivative, leaves_and_rest, pull_back, push_forward
from kfs.operators.interface import LinearOperator
from kfs.operators.space import Columns, Space
from kfs.risk import EmpiricalRisk

PREDICTION = "prediction"


class Jacobian(LinearOperator):
    """The Jacobian of the predictions for all data, `[N, ...]` flattened by rows, with respect to the parameters.

    Args:
        risk: Model, data and parameters; of the loss nothing is used.
        chunk_size: How many columns are multiplied at once; by default as in `Curvature`.
        memory: About how many bytes the columns may take, as in `Curvature`.

    Example:
        >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(10, 3), torch.rand(10, 2)))
        >>> J = Jacobian(risk)
        >>> J.shape, (J.T @ torch.ones(20)).shape
        ((20, 8), torch.Size([8]))
    """

    shown = ("chunk_size",)

    def __init__(self, risk: EmpiricalRisk, *, chunk_size: int | None = None, memory: int | None = None) -> None:
        """Evaluate the model on one batch, to learn the predictions' shape."""
        domain = parameter_space(risk)
        with risk.together("Jacobian"):
            chunk_size = choose_chunk_size(risk, chunk_size, memory)
            risk.count()
            with risk.untouched(), torch.no_grad():
                batch = next(iter(risk.batches()), None)
                own = None if batch is None else risk.evaluate(batch).shape[1:]
            shape = next(one for one in risk.ranks.gather("shapes", own) if one is not None)
        super().__init__(domain, Space({PREDICTION: (risk.num_data, *shape)}, risk.dtype, risk.device))
        self.risk, self.chunk_size = risk, chunk_size
        self._one_derivative = OneDerivative()

    @property
    def _ranks(self) -> Ranks:
        return self.risk.ranks

    def multiply(self, columns: Columns) -> Columns:
        """Push columns forward, batch by batch."""
        some = next(iter(columns.values()))
        all_data = some.new_zeros(len(some), *self.codomain.shapes[PREDICTION])
        with self.risk.together("Jacobian", vectors=columns):
            with self.risk.untouched(), torch.enable_grad(), explained():
                leaves, rest = leaves_and_rest(self.risk, columns)
                # A sharded model may compute in another precision than its parameters have.
                columns = {name: t.to(self.risk.dtype) for name, t in columns.items()}
                for batch in self.risk.batches("Jacobian"):
                    self._one_derivative.check_first(self.risk, batch, leaves)
                    f, Jv = push_forward(self.risk, batch, leaves, rest, columns, self._one_derivative.forward_mode)
                    self._check_shape(f)
                    all_data[:, batch.first : batch.first + len(f)] = Jv
            # Each process has zeros where others have data.
            return added_up(self.risk.ranks, "Jacobian", {PREDICTION: all_data})

    def multiply_transposed(self, columns: Columns) -> Columns:
        """Pull columns back, batch by batch."""
        u = columns[PREDICTION]
        wide = self.risk.sum_dtype
        total = {name: u.new_zeros(len(u), *shape, dtype=wide) for name, shape in self.domain.shapes.items()}
        with self.risk.together("Jacobian.T", vectors=columns):
            with self.risk.untouched(), torch.enable_grad(), explained():
                leaves, rest = leaves_and_rest(self.risk, total)
                for batch in self.risk.batches("Jacobian.T"):
                    self._one_derivative.check_first(self.risk, batch, leaves)
                    f = self.risk.predict(leaves | rest, batch)
                    self.risk.finite(f.detach(), batch)
                    self._check_shape(f)
                    part = u[:, batch.first : batch.first + len(f)].to(f.dtype)
                    for name, t in pull_back(f, leaves, part).items():
                        total[name] += t
            total = added_up(self.risk.ranks, "Jacobian.T", total)
        return {name: t.to(self.domain.dtype) for name, t in total.items()}

    def _check_shape(self, f: Tensor) -> None:
        """Refuse batches whose predictions have another shape than those of the first batch."""
        expected = self.codomain.shapes[PREDICTION][1:]
        if f.shape[1:] != expected:
            raise ShapeError(
                f"Predictions have shape {list(f.shape[1:])} per datum in one batch, {list(expected)} in the first.",
                "Pad the data such that all predictions have one shape.",
            )
