"""Settings in which KFAC is exact, as runnable files: the document's two tests, and their variants with weight sharing.

Each file states what must be equal, and what must not, and checks it in float64 against the definitions of
`kfs.basics`.
"""

CONTENTS = ("mlp_batch_size_1", "deep_linear_regression", "weight_sharing_expand", "weight_sharing_reduce")
