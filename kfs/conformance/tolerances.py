"""Tolerances of the conformance kit, each with its reason. All errors are relative: norms of differences over norms."""

# Float64 round-off of a few thousand operations per entry. A mistake in a scale or a sign is larger by ten orders.
ROUND_OFF = 1e-9

# Same numbers, summed up in another order (batches, permutations).
REORDERED = 1e-9

# Libraries that compute in float32, whatever the model's precision is: eps = 1.2e-7, some thousand operations.
SINGLE = 1e-4

# Data repeated for the Monte Carlo Fisher: each repetition is a further draw.
MC_REPEATS = 1500
# The relative error of a sum of n independent outer products in d dimensions is about sqrt(d / n); with d = 3 and
# n = 1500 it is 4 %. Five times that. The mistakes that are looked for (labels instead of draws, a wrong count) make an
# error of 50 % or more.
MC = 0.2
