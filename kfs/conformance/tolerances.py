"""Tolerances of the conformance kit. All errors are relative: the norm of the difference over the norm."""

# Float64 round-off of a few thousand operations per entry. A wrong scale or sign is larger by about ten orders of
# magnitude.
ROUND_OFF = 1e-9

# The same numbers, summed in another order (batches, permutations).
REORDERED = 1e-9

# For libraries that compute in float32 regardless of the model's dtype: eps = 1.2e-7, a few thousand operations.
SINGLE = 1e-4

# Number of repetitions of the data for the Monte Carlo Fisher. Each repetition draws new labels.
MC_REPEATS = 1500
# The relative error of a sum of n independent outer products in d dimensions is about sqrt(d / n). With d = 3 and
# n = 1500 it is 4 %, and the tolerance is five times that. The bugs that this check detects (labels instead of draws, a
# wrong number of draws) cause an error of at least 50 %.
MC = 0.2
