"""The numbers in `rule`: they are computed again here, from what they are to be best at."""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog, minimize

from kfs.optim import rule

Numbers = NDArray[np.float64]


def closest_to_one(values: Numbers) -> tuple[Numbers, float]:
    """Return coefficients for columns, such that their sum is as close to one as possible in every row.

    Args:
        values: `[points, functions]`.

    Returns:
        The coefficients, and the largest distance: a linear program finds both.
    """
    points, functions = values.shape
    slack = -np.ones((points, 1))
    above, below = np.hstack([values, slack]), np.hstack([-values, slack])
    ones = np.ones(points)
    cost = [0.0] * functions + [1.0]
    found = linprog(cost, np.vstack([above, below]), np.hstack([ones, -ones]), bounds=[(None, None)] * len(cost))
    assert found.success
    return found.x[:-1], float(found.x[-1])


def test_polynomials_are_the_closest_ones() -> None:
    """Each is the odd polynomial of degree five that is closest to one, on what the polynomials before it return.

    No other composition of as many of them is closer then (Amsel et al., 2025, theorem 3.1).
    """
    low, high = (1 + rule._LARGEST**2) ** -0.5, 1.0
    for coefficients in rule._QUINTICS:
        x = np.geomspace(low, high, 2_001)
        best, error = closest_to_one(np.stack([x, x**3, x**5], axis=1))
        # Points are 0.2 % apart, and errors are flat where they are largest: they change by the square of that.
        np.testing.assert_allclose(coefficients, best, rtol=1e-5)
        low, high = 1 - error, 1 + error
    assert 0.02 < error < 0.03


def test_composed_polynomials_are_good_to_three_percent() -> None:
    """Numbers that the iteration starts with end close to one, also those between the points of a derivation."""
    x = np.geomspace((1 + rule._LARGEST**2) ** -0.5, 1, 10_007)
    for a, b, c in rule._QUINTICS:
        x = a * x + b * x**3 + c * x**5
    assert 0.026 < abs(x - 1).max() < 0.03


def test_two_inverses_are_the_closest_ones() -> None:
    """Among sums of two inverses that are one at zero, none has a smaller relative error than 7.6 %."""
    x = np.hstack([0.0, np.geomspace(1e-2, rule._LARGEST**2, 500)])

    def errors(unknowns: Numbers) -> Numbers:
        """Return relative errors, given logarithms of both shifts, and what the first inverse is at zero."""
        *logarithms, first = unknowns[:3]
        shifts = np.exp(logarithms)
        weights = shifts * [first, 1 - first]
        found: Numbers = (weights / (x[:, None] + shifts)).sum(axis=1) * np.sqrt(1 + x) - 1
        return found

    bounds = {"type": "ineq", "fun": lambda u: np.hstack([u[3] - errors(u), u[3] + errors(u)])}
    start = np.array([0.0, 4.0, 0.5, 1.0])  # nowhere near
    best = minimize(lambda u: u[3], start, constraints=bounds, method="SLSQP", options={"ftol": 1e-12, "maxiter": 500})
    assert best.success
    first, second = rule._TERMS
    np.testing.assert_allclose(first[0] / first[1] + second[0] / second[1], 1, rtol=1e-8)
    mine = np.array([np.log(first[1]), np.log(second[1]), first[0] / first[1]])
    # Points are 2 % apart: here, too, the largest errors are known up to the square of that.
    np.testing.assert_allclose(mine, best.x[:3], rtol=1e-3)
    assert 0.07 < abs(errors(mine)).max() < 0.08
