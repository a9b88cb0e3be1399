"""Settings in which KFAC is exact, as runnable files: the paper's two tests, and their variants with weight sharing.

Each file states what must be equal, and what must not, and checks it in float64 against the definitions of
`kfs.basics`.
"""

CONTENTS = ("mlp_batch_size_1", "deep_linear_regression", "weight_sharing_expand", "weight_sharing_reduce")

# A Monte Carlo estimate errs by about sqrt(2 / 400) = 7 percent of its size. Four times that is allowed, which is still
# much less than what a wrong scale gives. More draws would take most of the tour's time.
MC_SAMPLES = 400
MC_TOLERANCE = 0.3
