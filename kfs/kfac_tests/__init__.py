"""Settings in which KFAC is exact, as runnable files: the paper's tests, and variants.

The variants are those with weight sharing. Each file states which matrices must be
equal, and which must differ. It checks this in float64 against the definitions of
`kfs.basics`: first for the KFAC of the listings in `kfs.kfac`, then for the engine's.
"""

CONTENTS = (
    "mlp_batch_size_1",
    "deep_linear_regression",
    "weight_sharing_expand",
    "weight_sharing_reduce",
)
