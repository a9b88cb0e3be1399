"""The constants in the update rule: they are derived again from the problems whose optimum they are."""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog, minimize_scalar

from kfs.optim import update_rule

Numbers = NDArray[np.float64]


def closest_to_one(values: Numbers) -> tuple[Numbers, float]:
    """Return coefficients of columns such that their sum is as close to one as possible in every row.

    Args:
        values: `[points, functions]`.

    Returns:
        The coefficients, and the largest distance, by a linear program.
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
    """Each is the odd polynomial of degree five that is closest to one on the range of the polynomials before it.

    Then no other composition of as many such polynomials is closer (Amsel et al., 2025, theorem 3.1).
    """
    low, high = (1 + update_rule._LARGEST**2) ** -0.5, 1.0
    for coefficients in update_rule._QUINTICS:
        x = np.geomspace(low, high, 2_001)
        best, error = closest_to_one(np.stack([x, x**3, x**5], axis=1))
        # Points are 0.2 % apart, and errors are flat at their maxima: they change by the square of that.
        np.testing.assert_allclose(coefficients, best, rtol=1e-5)
        low, high = 1 - error, 1 + error
    assert 0.02 < error < 0.03


def test_composed_polynomials_are_good_to_three_percent() -> None:
    """Initial values of the iteration end close to one, including those between the points of a derivation."""
    x = np.geomspace((1 + update_rule._LARGEST**2) ** -0.5, 1, 10_007)
    for a, b, c in update_rule._QUINTICS:
        x = a * x + b * x**3 + c * x**5
    assert 0.026 < abs(x - 1).max() < 0.03


def test_one_inverse_is_the_closest_one() -> None:
    """No sum of a constant, a multiple and an inverse that is one at zero has a smaller error than 12.6 %."""
    x = np.hstack([0.0, np.geomspace(1e-2, update_rule._LARGEST**2, 1_000)])
    root = np.sqrt(1 + x)

    def errors(shift: float) -> tuple[Numbers, float]:
        """Return the best coefficients for a shift, and their relative error. Values at zero are given."""
        columns = np.stack([root, root * x, root / (x + shift)], axis=1)
        slack = -np.ones((len(x), 1))
        bounds = np.vstack([np.hstack([columns, slack]), np.hstack([-columns, slack])])
        ones = np.ones(len(x))
        at_zero = np.array([[1.0, 0.0, 1 / shift, 0.0]])
        found = linprog([0, 0, 0, 1], bounds, np.hstack([ones, -ones]), at_zero, [1.0], bounds=[(None, None)] * 4)
        assert found.success
        return found.x[:3], float(found.x[3])

    best = minimize_scalar(
        lambda shift: errors(shift)[1], bounds=(1.0, 10.0), method="bounded", options={"xatol": 1e-6}
    )
    a, b, c, d = update_rule._RATIONAL
    # Points are 1 % apart, and errors are flat at their maxima: they change by the square of that.
    np.testing.assert_allclose([a, b, c, d], [*errors(best.x)[0], best.x], rtol=2e-3)
    np.testing.assert_allclose(a + c / d, 1, rtol=1e-8)
    assert 0.12 < abs(root * (a + b * x + c / (x + d)) - 1).max() < 0.126
