"""Adapter for curvlinops (`KFACLinearOperator`)."""

from importlib.metadata import version

import curvlinops
import torch
from torch import Tensor, nn

from kfs.conformance.adapter import Adapter


def compute(
    model: nn.Module, loss: nn.Module, data: list[tuple[Tensor, Tensor]], fisher: str, sharing: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return curvlinops' factors by layer, or by parameter if only the weight or only the bias is trained.

    According to its documentation, the operator is the curvature of the given loss on all data, so no factor is scaled.

    Raises:
        NotImplementedError: If curvlinops does not support the loss, a layer or the data.
    """
    try:
        operator = curvlinops.KFACLinearOperator(
            model,
            loss,
            [p for p in model.parameters() if p.requires_grad],
            data,
            check_deterministic=False,
            # curvlinops has its own random generator.
            seed=int(torch.randint(2**31, ())) if fisher == "mc" else 0,
            fisher_type=fisher,
            kfac_approx=sharing,
            separate_weight_and_bias=False,
        )
        operator.compute_kronecker_factors()
    except ValueError as error:  # raised for everything unsupported, except layers
        raise NotImplementedError(str(error)) from error
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for layer, trained in operator._mapping.items():
        A, B = operator._input_covariances.get(layer), operator._gradient_covariances[layer]
        if A is None:
            factors[f"{layer}.bias"] = B.new_ones(1, 1), B
        else:
            factors[layer if "bias" in trained else f"{layer}.weight"] = A, B
    return factors


# Known failures of the version in benchmarks/peers.txt.
KNOWN = {
    "exact: one example that counts, ce, ignored labels mean, empirical": "Ignored labels are counted in the mean.",
    "exact: one example that counts, ce, ignored labels sum, type-2": "Ignored labels are counted.",
    "exact: one example, class weights, ce, class weights mean, empirical": "A mean divides by all labels, and "
    "not by their weights.",
    "exact: one example, class weights, ce, class weights sum, type-2": "The Hessian of the loss has no class weights.",
    "exact: one position, padded": "Padded rows and ignored labels are counted.",
    "relation: padded sequences": "Padded rows and ignored labels are counted.",
    "exact: circular padding": "Patches are padded with zeros, whatever padding_mode says.",
    "exact: groups of channels": "There is one factor pair for all groups.",
    "exact: called twice": "Calls of one layer are added as if they were data.",
    "exact: two modules with one weight": "Modules with one weight have factors of their own.",
    "exact: sum over positions, two output axes": "Further output axes are wrong with 'reduce'.",
    "exact: sum over positions, several labels, ce mean, type-2": "Further output axes are wrong with 'reduce'.",
    "exact: sum over positions, several labels, ce sum, type-2": "Further output axes are wrong with 'reduce'.",
    "exact: folded positions": "Rows of a matrix are taken for data.",
    "exact: rows of mixed data": "Rows of a matrix are taken for data.",
    "exact: ragged data": "Rows of a matrix are taken for data.",
    "exact: a use in a custom function": "A use that hooks do not see is left out.",
}
ADAPTER = Adapter("curvlinops", compute, expected_failures=KNOWN, version=version("curvlinops-for-pytorch"))
