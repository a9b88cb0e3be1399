r"""The covariance of the outputs of a linearized network, block by block, without Jacobians if possible.

With the posterior covariance $(K + \delta I)^{-1}$, the outputs $f_c$ of an example have the covariance

$$
\Sigma_{cd} = \sum_{\text{blocks}} \mathrm{vec}(J_c)^\top (K + \delta I)^{-1}\, \mathrm{vec}(J_d),
\qquad J_c = g_c\, x^\top \text{ for one position.}
$$

In the eigenbasis of the block, with $\tilde g_c = Q_B^\top g_c$ and $\tilde x = Q_A^\top x$, this is
$\sum_i \tilde g_{c,i}\, \tilde g_{d,i} \sum_j \Lambda_{ij} \tilde x_j^2$. This needs rotated vectors, but no Jacobian.
With several positions, the Jacobian of a block is formed, for a few examples at a time.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from kfs.errors import DataError
from kfs.factors.accumulate import PlainVectors
from kfs.factors.blocks import BlockDiagonal, Structure
from kfs.factors.per_example import Basis, BlockGradients, per_datum_columns, sides_of
from kfs.losses import Custom
from kfs.problem.risk import EmpiricalRisk
from kfs.runtime.nested import tensors_in

# Approximate number of entries of the Jacobians that are formed at once.
_NUMBERS = 2**24
# Placeholder for a loss: inputs without targets have none.
NO_LOSS = Custom(lambda f, _: f.sum())


def unit_vectors(f: Tensor, y: Tensor) -> Iterator[Tensor]:  # noqa: ARG001 (there are no targets)
    """Yield a unit vector for each output, `[1, *f.shape]`."""
    num_outputs = prod(f.shape[1:])
    for output in range(num_outputs):
        # Fill in the flat vector before the reshape: predictions may have another memory layout.
        v = f.new_zeros(len(f), num_outputs)
        v[:, output] = 1
        yield v.reshape(1, *f.shape)


def risk_of_inputs(risk: EmpiricalRisk, X: Any, batch_size: int) -> EmpiricalRisk:
    """Return a risk with the same model and parameters, other inputs, and no targets.

    Args:
        risk: Provides model and parameters. Its data are not used.
        X: Inputs.
        batch_size: Number of examples per batch.
    """
    return EmpiricalRisk(risk.model, NO_LOSS, _batches(X, batch_size), risk.params, progress=risk.progress)


def output_mean(inputs: EmpiricalRisk) -> Tensor:
    """Return the model's outputs for every example at the current parameters, `[n, *outputs]`.

    Raises:
        DataError: If an output is not finite.
    """
    found = []
    with inputs.untouched(), torch.no_grad():
        for batch in inputs.batches("outputs"):
            inputs.finite(f := inputs.evaluate(batch), batch)
            found.append(f.to(inputs.sum_dtype))
    return torch.cat(found)


def output_covariance(K: BlockDiagonal, covariance: BlockDiagonal, inputs: EmpiricalRisk) -> Tensor:
    """Return the covariance of the outputs of every example, `[n, outputs, outputs]`.

    Args:
        K: The curvature, which provides blocks and settings.
        covariance: The covariance of the posterior, with the same blocks.
        inputs: Model, parameters and inputs.
    """
    structures = {name: s.to(inputs.device, inputs.sum_dtype) for name, s in covariance.structures.items()}
    found = []
    for columns in per_datum_columns(inputs, unit_vectors, blocks=K):
        parts = [
            block_covariance(structures[name], [column.blocks[name] for column in columns])
            for name in columns[0].blocks
        ]
        found.append(torch.stack(parts).sum(0))
    return torch.cat(found)


def _batches(X: Any, batch_size: int) -> list[tuple[Any, Tensor]]:
    """Split inputs into batches with zeros as targets. Inputs that are not a single tensor form one batch.

    Raises:
        DataError: If there are no inputs.
    """
    tensors = list(tensors_in(X))
    if not tensors or not tensors[0].ndim or not len(tensors[0]):
        raise DataError("There are no inputs.", "Pass inputs as the model takes them, with the batch axis first.")
    if isinstance(X, Tensor):
        return [(x, x.new_zeros(len(x), dtype=torch.float32)) for x in X.split(batch_size)]
    return [(X, tensors[0].new_zeros(len(tensors[0]), dtype=torch.float32))]


def block_covariance(structure: Structure, outputs: Sequence[BlockGradients]) -> Tensor:
    """Return `<J_c, S J_d>` for every example and all pairs of outputs, `[n, outputs, outputs]`.

    Args:
        structure: `S`, the block of the posterior's covariance.
        outputs: For each output, its gradients with respect to the block's parameters.
    """
    if isinstance(structure, Basis) and not outputs[0].keeps_rows(structure):
        if _is_outer_product(outputs[0]):
            return _by_vectors(structure, outputs)
        return _by_matrices(structure, outputs)
    products = [gradients.multiplied(structure) for gradients in outputs]
    rows = [torch.stack([product.inner_within(other) for other in outputs], 1) for product in products]
    return torch.stack(rows, 1)


def _is_outer_product(gradients: BlockGradients) -> bool:
    """Return whether the gradient of each example is a single outer product of plain vectors."""
    if gradients.whole is not None or len(gradients.uses) != 1 or gradients.shared != 1:
        return False
    part = gradients.parts[0]
    return isinstance(part.x, PlainVectors) and isinstance(part.g, PlainVectors)


def _by_vectors(structure: Basis, outputs: Sequence[BlockGradients]) -> Tensor:
    """Compute the covariance from rotated vectors, without Jacobians; see the module docstring."""
    Q_A, Q_B = sides_of(structure)
    inputs = outputs[0].parts[0].x
    x = (inputs if Q_A is None else inputs.times(Q_A)).dense().squeeze(2)  # [groups, n, d_A]
    g = torch.cat([gradients.parts[0].g.dense() for gradients in outputs], 2)  # [groups, n, outputs, d_B]
    g = g if Q_B is None else g @ Q_B.unsqueeze(1)
    weights = x.square() @ structure.values.transpose(1, 2)  # [groups, n, d_B]
    return ((g * weights.unsqueeze(2)) @ g.transpose(2, 3)).sum(0)


def _by_matrices(structure: Basis, outputs: Sequence[BlockGradients]) -> Tensor:
    """Compute the covariance from rotated Jacobians, which are formed for a few examples at a time."""
    Q_A, Q_B = sides_of(structure)
    J = torch.stack([gradients.dense() for gradients in outputs], 1)  # [n, outputs, groups, d_B, d_A]
    found = []
    for some in J.split(max(1, _NUMBERS // max(1, J[0].numel()))):
        rotated = some if Q_A is None else some @ Q_A
        rotated = rotated if Q_B is None else Q_B.transpose(1, 2) @ rotated
        weighted = (rotated * structure.values).flatten(2)
        found.append(weighted @ rotated.flatten(2).transpose(1, 2))
    return torch.cat(found)
