"""The definitions of the paper's chapter 2, one file each: dense and literal.

Every file runs (`python kfs/basics/ggns.py`), checks itself, and is the oracle of the
tests of everything else. Read them in the order of `CONTENTS`. Files that start with an
underscore contain no definitions, but code that several definitions share.
"""

from typing import Final

CONTENTS: Final[dict[str, tuple[str, ...]]] = {
    "Empirical risk and neural networks": (
        "reduction_factors",
        "forward_pass",
        "label_sampling",
    ),
    "Flattening and Jacobians": (
        "flattening",
        "kronecker_algebra",
        "jacobian_products",
        "jacobians",
        "jacobians_linear_layer",
        "jacobians_shared_linear_layer",
    ),
    "Hessians": ("hessian_product", "hessians", "hessian_ce_loss", "hessian_mse_loss"),
    "Partial linearization and the GGN": (
        "linearization",
        "ggn_rosenbrock",
        "ggn_product",
        "ggns",
        "ggns_linear_regression",
        "hessian_factorizations",
    ),
    "Fisher matrices": (
        "mc_fishers",
        "mc_fisher_product",
        "would_be_gradients",
        "exact_fishers",
        "fisher_kl_metric",
        "mc_fisher_convergence",
        "emp_fishers",
        "emp_fisher_product",
    ),
}
