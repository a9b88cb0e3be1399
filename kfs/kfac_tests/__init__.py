"""Settings in which KFAC is exact, as runnable files: the paper's two tests, and their
variants with weight sharing.

Each file states which matrices must be equal, and which must differ, and checks it in
float64 against the definitions of `kfs.basics`.
"""

CONTENTS = (
    "mlp_batch_size_1",
    "deep_linear_regression",
    "weight_sharing_expand",
    "weight_sharing_reduce",
)

# The relative error of a Monte Carlo estimate is about sqrt(2 / 400) = 7 percent. Four times that is allowed, which is
# still much less than the error of a wrong scale. More draws would take most of the tour's time.
MC_SAMPLES = 400
MC_TOLERANCE = 0.3
