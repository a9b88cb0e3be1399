"""Operators whose dense value is known."""

import torch
from torch import Tensor

from kfs.operators import LinearOperator
from kfs.operators.space import Columns, Space


class Dense(LinearOperator):
    """A given matrix on a space of two tensors."""

    def __init__(self, matrix: Tensor, symmetric: bool = True) -> None:
        size = len(matrix)
        space = Space({"a": (2, 2), "b": (size - 4,)}, matrix.dtype, matrix.device)
        super().__init__(space, space)
        self.matrix, self.symmetric = matrix, symmetric

    def multiply(self, columns: Columns) -> Columns:
        return self.domain.unflatten(self.domain.flatten(columns) @ self.matrix.T)

    def multiply_transposed(self, columns: Columns) -> Columns:
        return self.domain.unflatten(self.domain.flatten(columns) @ self.matrix)


def with_spectrum(spectrum: Tensor) -> Dense:
    Q, _ = torch.linalg.qr(torch.randn(len(spectrum), len(spectrum), dtype=torch.float64))
    return Dense(Q @ torch.diag(spectrum.double()) @ Q.T)


POSITIVE = torch.linspace(0.5, 3, 12)
DECAYING = 0.5 ** torch.arange(40)
