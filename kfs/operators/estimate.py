r"""Estimates from matrix-vector products: trace, diagonal, Frobenius norm, eigenvalues and spectral density.

Exact diagonals of `GGN` and `Fisher` live in `kfs.operators.curvature`.

Trace, diagonal and Frobenius norm are estimated from a few products with random vectors, and have error bars:

- *Hutchinson* (1989): $\mathbb{E}\, \omega^\top A\, \omega = \mathrm{tr}\, A$ for random signs $\omega$. For the
  diagonal, the estimate is $\omega \odot A\, \omega$.
- *Hutch++* (Meyer et al., 2021): compute the trace on the range of a sketch exactly, and estimate only the remainder.
- *XTrace* (Epperly et al., 2024): do this for every test vector, with a sketch from all other ones, and average.
- *XDiag* (from the same paper): the same for the diagonal.

The last three need far fewer products if the eigenvalues decay, as those of curvature matrices do. Samples of XTrace
and XDiag share their sketches and are not independent. So their error bar is a guide (up to a factor of two) rather
than a standard error. Normal test vectors have a larger variance than signs: with signs, the diagonal contributes no
error.

For symmetric operators, `eigenvalues` computes the outermost eigenvalues accurately, and `spectral_density` estimates
the density of all of them. It uses stochastic Lanczos quadrature (Golub & Meurant, 2009; Ubaru et al., 2017): a few
Lanczos steps from a random vector give nodes and weights of a quadrature rule for the spectrum, and the average over
vectors approximates the density.
"""

from dataclasses import dataclass
from math import pi, sqrt
from numbers import Integral
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kfs.display.charts import draw_density
from kfs.display.describe import Described, Description, counted, kind, number, shaped
from kfs.display.progress import Line, show_progress
from kfs.errors import ShapeError, SolverError
from kfs.operators.linear_operator import LinearOperator
from kfs.operators.solve import product
from kfs.runtime.precision import at_least_float32

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Probes = Literal["rademacher", "normal"]


def rademacher(size: int, num: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Return `num` columns of independent random signs, `[size, num]`. The global random state is not changed."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (num, size), generator=generator).T
    return (2 * signs - 1).to(device, dtype)


def normal(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return a vector of independent standard normal numbers on the CPU. The global random state is not changed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, dtype=torch.float64, generator=generator).to(dtype)


def random_columns(probes: Probes, size: int, num: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Return `num` columns of independent numbers with mean zero and variance one, `[size, num]`.

    Args:
        probes: `"rademacher"` for signs, `"normal"` for standard normal numbers.
        size: Number of rows.
        num: Number of columns.
        dtype: Dtype of the result.
        device: Device of the result.
        seed: Equal seeds give equal columns.

    Raises:
        ShapeError: If `probes` is none of the two options.
    """
    if probes == "rademacher":
        return rademacher(size, num, dtype, device, seed)
    if probes == "normal":
        return normal(num * size, dtype, seed).reshape(num, size).T.to(device)
    raise ShapeError(f"probes is {probes!r}.", "Choose 'rademacher' or 'normal'.")


# Number of rounds of products for each method. The columns of a round depend on the results of the round before.
_ROUNDS = {"hutchinson": 1, "hutch++": 3, "xtrace": 2, "xdiag": 2}


@dataclass(frozen=True, repr=False)
class Estimate(Described):
    """An estimate with its standard error.

    Attributes:
        value: The estimate: a scalar, or a flat vector.
        error: Its standard error, estimated from the variance over random vectors. It has the shape of `value`.
        products: Number of products with the operator.
    """

    value: Tensor
    error: Tensor
    products: int

    def describe(self) -> Description:
        """Describe a number with its error. Only the size is shown for vectors and for tensors on an accelerator."""
        if self.value.ndim or self.value.device.type != "cpu":
            value = f"{shaped(self.value)}, with an error for each number"
        else:
            value = f"{number(self.value)} +- {number(self.error)}"
        return Description(f"Estimate: {value} ({counted(self.products, 'product')})")


def trace(
    A: LinearOperator,
    *,
    method: Literal["hutchinson", "hutch++", "xtrace"] = "xtrace",
    products: int = 60,
    probes: Probes = "rademacher",
    seed: int = 0,
    progress: bool | None = None,
) -> Estimate:
    """Estimate the trace of an operator.

    Args:
        A: A square operator.
        method: `"hutchinson"`, `"hutch++"` or `"xtrace"`.
        products: Number of products with `A`, at least 6. If there is one for every column, the trace is exact.
        probes: Test vectors: `"rademacher"` for random signs, or `"normal"`.
        seed: Equal seeds give equal results.
        progress: Whether to show progress. If not given, it is shown after two seconds.

    Returns:
        The estimate with its standard error.

    Raises:
        ShapeError: If the operator is not square, the method is unknown, or `products` is too small.

    Example:
        >>> from kfs import EmpiricalRisk, GGN
        >>> _ = torch.manual_seed(0)
        >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(10, 3), torch.rand(10, 2)))
        >>> G = GGN(risk)
        >>> estimate = trace(G, products=6)
        >>> bool(abs(estimate.value - G.to_dense().trace()) < 4 * estimate.error)
        True
        >>> estimate  # doctest: +ELLIPSIS
        Estimate: ... +- ... (6 products)
        >>> diagonal(G, products=6)
        Estimate: 8, float32 on cpu, with an error for each number (6 products)
    """
    methods = {"hutchinson": _hutchinson, "hutch++": _hutch_plus_plus, "xtrace": _xtrace}
    with A._ranks.agreed("trace"):
        _check(A, products)
        if method not in methods:
            raise ShapeError(f"method is {method!r}.", f"Choose from {list(methods)}.")
    num = {"hutchinson": products, "hutch++": 2 * (products // 3), "xtrace": products // 2}[method]
    with show_progress("trace", _ROUNDS[method], progress, "round") as line:
        if products >= A.shape[0]:  # enough for every column
            exact = _wide_dense(A).trace()
            return Estimate(exact, torch.zeros_like(exact), A.shape[0])
        return methods[method](A, _probes(A, num, probes, seed), line)


def diagonal(
    A: LinearOperator,
    *,
    method: Literal["hutchinson", "xdiag"] = "hutchinson",
    products: int = 60,
    probes: Probes = "rademacher",
    seed: int = 0,
    progress: bool | None = None,
) -> Estimate:
    """Estimate the diagonal of an operator as a flat vector. `GGN` and `Fisher` have an exact method `diagonal`.

    Args:
        A: A square operator.
        method: `"hutchinson"` (Bekas et al., 2007), or `"xdiag"`, which needs fewer products if eigenvalues decay.
        products: Number of products with `A` or its transpose, at least 6. If there is one for every column, `"xdiag"`
            is exact.
        probes: Test vectors: `"rademacher"` for random signs, or `"normal"`.
        seed: Equal seeds give equal results.
        progress: Whether to show progress. If not given, it is shown after two seconds.

    Returns:
        The estimate with a standard error for every entry.

    Raises:
        ShapeError: If the operator is not square, the method is unknown, or `products` is too small.

    Example:
        >>> from kfs import EmpiricalRisk, GGN
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(30, 1).double()
        >>> X, y = torch.rand(4, 30).double(), torch.rand(4, 1).double()
        >>> G = GGN(EmpiricalRisk(model, torch.nn.MSELoss(), (X, y)))
        >>> torch.allclose(diagonal(G, method="xdiag", products=12).value, G.diagonal())  # its rank is four
        True
    """
    with A._ranks.agreed("diagonal"):
        _check(A, products)
        if method not in {"hutchinson", "xdiag"}:
            raise ShapeError(f"method is {method!r}.", "Choose from ['hutchinson', 'xdiag'].")
    with show_progress("diagonal", _ROUNDS[method], progress, "round") as line:
        if method == "hutchinson":
            omega = _probes(A, products, probes, seed)
            samples = omega * _product(A, omega, line)
            return Estimate(samples.mean(1), _standard_error(samples), products)
        if products >= A.shape[0]:  # enough for every column
            exact = _wide_dense(A).diagonal().clone()
            return Estimate(exact, torch.zeros_like(exact), A.shape[0])
        return _xdiag(A, _probes(A, products // 2, probes, seed), line)


def squared_frobenius_norm(
    A: LinearOperator,
    *,
    products: int = 60,
    probes: Probes = "rademacher",
    seed: int = 0,
    progress: bool | None = None,
) -> Estimate:
    """Estimate the squared Frobenius norm of an operator, the sum of all squared entries.

    Args:
        A: An operator.
        products: Number of products with `A`, at least 6.
        probes: Test vectors: `"rademacher"` for random signs, or `"normal"`.
        seed: Equal seeds give equal results.
        progress: Whether to show progress. If not given, it is shown after two seconds.

    Returns:
        The estimate with its standard error.
    """
    with A._ranks.agreed("Frobenius norm"):
        _check(A, products, square=False)
    with show_progress("Frobenius norm", 1, progress, "round") as line:
        samples = (_product(A, _probes(A, products, probes, seed), line) ** 2).sum(0)
    return Estimate(samples.mean(), _standard_error(samples), products)


def _hutchinson(A: LinearOperator, omega: Tensor, line: Line) -> Estimate:
    samples = (omega * _product(A, omega, line)).sum(0)
    return Estimate(samples.mean(), _standard_error(samples), omega.shape[1])


def _hutch_plus_plus(A: LinearOperator, omega: Tensor, line: Line) -> Estimate:
    """Estimate the trace by Hutch++ (Meyer et al., 2021), with three products for each pair of test vectors."""
    num = omega.shape[1] // 2
    # Half of the test vectors span the range of a sketch, where the trace is exact.
    Q, _ = torch.linalg.qr(_product(A, omega[:, :num], line))
    G = omega[:, num:]
    # The other half estimates the trace on the complement.
    G = G - Q @ (Q.T @ G)
    exact = (Q * _product(A, Q, line)).sum()
    samples = (G * _product(A, G, line)).sum(0)
    return Estimate(exact + samples.mean(), _standard_error(samples), 3 * num)


def _xtrace(A: LinearOperator, omega: Tensor, line: Line) -> Estimate:
    """Estimate the trace by XTrace (Epperly et al., 2024): each test vector is left out of the sketch in turn."""
    num = omega.shape[1]
    Y = _product(A, omega, line)
    size = Y.abs().max()
    if size == 0:
        return Estimate(size, size, num)
    Y = Y / size  # products of tiny or huge numbers would leave the range of float32
    Q, R = torch.linalg.qr(Y)
    Z = _product(A, Q, line) / size
    H, W = Q.T @ Z, Q.T @ omega
    S = _left_out(R)
    coefficients = W - S * (S * W).sum(0)
    X, AX = omega - Q @ coefficients, Y - Z @ coefficients
    samples = H.trace() - (S * (H @ S)).sum(0) + (X * AX).sum(0)
    return Estimate(size * samples.mean(), size * _standard_error(samples), 2 * num)


def _xdiag(A: LinearOperator, omega: Tensor, line: Line) -> Estimate:
    num = omega.shape[1]
    Y = _product(A, omega, line)
    size = Y.abs().max()
    if size == 0:
        zeros = torch.zeros_like(Y[:, 0])
        return Estimate(zeros, zeros, num)
    Q, R = torch.linalg.qr(Y / size)
    Z = _product(A.T, Q, line) / size
    S = _left_out(R)
    QS = Q @ S
    # Without test vector i, the range of the sketch lacks the direction Q s_i. Therefore the exact part lacks its
    # contribution, and the product with test vector i has no other component outside of the range.
    exact = (Q * Z).sum(1, keepdim=True) - QS * (Z @ S)
    samples = exact + omega * QS * (S * R).sum(0)
    return Estimate(size * samples.mean(1), size * _standard_error(samples), 2 * num)


def _left_out(R: Tensor) -> Tensor:
    """Return unit vectors `s_i` such that a sketch `Q R` without test vector `i` lacks the direction `Q s_i`."""
    noise = torch.finfo(R.dtype).eps * R.abs().max()
    S = torch.linalg.inv(R + noise * torch.eye(len(R), dtype=R.dtype, device=R.device)).T
    directions: Tensor = S / S.norm(dim=0)
    return directions


def _product(A: LinearOperator, V: Tensor, line: Line) -> Tensor:
    """Multiply columns, and advance the progress bar by one round."""
    result = product(A, V)
    line.advance()
    return result


def _wide_dense(A: LinearOperator) -> Tensor:
    """Return the dense matrix in at least float32, because sums in half precision lose digits."""
    return A.to_dense().to(at_least_float32(A.dtype))


def _probes(A: LinearOperator, num: int, probes: Probes, seed: int) -> Tensor:
    """Return test vectors in at least float32, because PyTorch has no decompositions in half precision."""
    with A._ranks.agreed("random vectors", is_short=True):
        return random_columns(probes, A.shape[1], num, at_least_float32(A.dtype), A.device, seed)


def _standard_error(samples: Tensor) -> Tensor:
    return samples.std(-1).div(samples.shape[-1] ** 0.5)


def _check(A: LinearOperator, products: int, square: bool = True) -> None:
    if square and A.domain != A.codomain:
        raise ShapeError(f"The operator has shape {list(A.shape)}.", "Pass one that maps a space to itself.")
    if products < 6:
        raise ShapeError(f"products is {products}, too few for an error bar.", "Spend at least 6.")


def eigenvalues(
    A: LinearOperator,
    k: int = 6,
    *,
    largest: bool = True,
    by: Literal["value", "magnitude"] = "value",
    tolerance: float = 0.0,
    seed: int = 0,
    progress: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute some eigenvalues and eigenvectors by the Lanczos method (SciPy's `eigsh`).

    Args:
        A: A symmetric operator.
        k: Number of eigenvalues, less than the number of rows.
        largest: Whether to compute the largest eigenvalues or the smallest ones.
        by: Sort key: the `"value"`, or its `"magnitude"` regardless of the sign. The smallest magnitudes converge
            slowly.
        tolerance: Relative accuracy; 0 for machine precision.
        seed: Seed for the start vector.
        progress: Whether to show the number of products and the time per product. If not given, they are shown after
            two seconds. The total number of products is not known in advance.

    Returns:
        The eigenvalues in descending order of their values, `[k]`, and the eigenvectors as columns, `[D, k]`.

    Raises:
        ShapeError: If `k` is not between 1 and the number of rows minus 1, or if the operator is not symmetric.
        SolverError: If the iteration fails.

    Example:
        >>> from kfs.operators import Dense
        >>> values, vectors = eigenvalues(Dense(torch.diag(torch.tensor([5.0, 1.0, 3.0, 2.0]))), k=2)
        >>> values, vectors.shape
        (tensor([5.0000, 3.0000]), torch.Size([4, 2]))
    """
    from scipy.sparse.linalg import ArpackError, eigsh  # noqa: PLC0415 (slow to import)

    with A._ranks.agreed("eigenvalues"):
        _check_symmetric(A)
        is_integer = isinstance(k, Integral)
        if not is_integer or not 1 <= k < A.shape[0]:
            raise ShapeError(
                f"k is {k} for {A.shape[0]} rows.",
                "Choose an integer 1 <= k < rows, or use to_dense() for all of them.",
            )
        if by not in {"value", "magnitude"}:
            raise ShapeError(f"by is {by!r}.", "Choose 'value' or 'magnitude'.")
    which = ("L" if largest else "S") + ("A" if by == "value" else "M")  # ARPACK's names
    wide = at_least_float32(A.dtype)
    start = normal(A.shape[0], wide, seed).numpy()  # not signs, which may be orthogonal to an eigenvector
    num_vectors = min(max(2 * k + 1, 20), A.shape[0])  # SciPy's default
    try:
        with show_progress("eigenvalues", None, progress, "product") as line:
            # ARPACK does not report how close it is to convergence. It needs at least one product for each vector.
            line.at_least = num_vectors
            options = {"k": k, "which": which, "v0": start, "tol": tolerance, "ncv": num_vectors}
            values, vectors = eigsh(A.to_scipy(line.advance), **options)
    except ArpackError as error:
        raise SolverError(
            f"The Lanczos method failed: {error}.",
            "Ask for fewer eigenvalues or less accuracy. The method cannot handle an operator that is zero.",
        ) from error
    # ARPACK does not return values in descending order.
    order = torch.from_numpy(values).argsort(descending=True)
    to = {"dtype": A.dtype, "device": A.device}
    return torch.from_numpy(values)[order].to(**to), torch.from_numpy(vectors)[:, order].to(**to)  # type: ignore[call-overload]


@dataclass(frozen=True, repr=False)
class Density(Described):
    """A spectral density as a sum of point masses, which can be smoothed.

    Several plots, with different grids and widths or on a logarithmic axis, need no further products with the operator.

    Attributes:
        nodes: Locations of the point masses, `[M]`.
        weights: Weights of the point masses, `[M]`. They sum to one.
        axis: The variable of the density: `"eigenvalue"`, or `"log10 |eigenvalue|"` for the result of `log10`.

    Example:
        >>> density = Density(torch.tensor([1e-4, 1e-2, 1e2]), torch.tensor([0.5, 0.25, 0.25]))
        >>> density
        Density: 3 point masses, float32 on cpu
          eigenvalues from 0.0001 to 100
        >>> density.log10(floor=1e-6)
        Density of log10 |eigenvalue|: 3 point masses, float32 on cpu
          from -3.996 to 2
        >>> grid = torch.linspace(-6, 4, 101)
        >>> peaks = grid[density.log10().on(grid, width=0.3).topk(1).indices]
        >>> round(float(peaks), 1)
        -4.0
    """

    nodes: Tensor
    weights: Tensor
    axis: Literal["eigenvalue", "log10 |eigenvalue|"] = "eigenvalue"

    def describe(self) -> Description:
        """Describe the range of the point masses. It is left out if reading it would synchronize an accelerator."""
        of = "" if self.axis == "eigenvalue" else f" of {self.axis}"
        title = f"Density{of}: {counted(len(self.nodes), 'point mass')}, {kind(self.nodes.dtype, self.nodes.device)}"
        if self.nodes.device.type != "cpu":
            return Description(title)
        noun = "" if of else "eigenvalues "
        return Description(title, (f"{noun}from {number(self.nodes.min())} to {number(self.nodes.max())}",))

    def plot(self, width: float | None = None, *, axes: "Axes | None" = None) -> "Axes":
        """Draw the smoothed density on a log axis.

        Args:
            width: Width of the normal density used for smoothing. The default is a hundredth of the range of nodes.
            axes: Matplotlib axes to draw into. If not given, a new figure is created.

        Returns:
            The matplotlib axes.
        """
        nodes = self.nodes.cpu().double()
        first, last = float(nodes.min()), float(nodes.max())
        if width is None:
            width = 0.01 * ((last - first) or abs(last) or 1.0)
        grid = torch.linspace(first - 5 * width, last + 5 * width, 800, dtype=torch.float64)
        smooth = Density(nodes, self.weights.cpu().double()).on(grid, width)
        return draw_density(grid, smooth, nodes, self.axis, axes)

    def on(self, grid: Tensor, width: float) -> Tensor:
        """Smooth the density with a normal density of the given width, and evaluate it on a grid."""
        distance = (grid.unsqueeze(1) - self.nodes) / width
        kernel = torch.exp(-0.5 * distance**2) / (width * sqrt(2 * pi))
        density: Tensor = kernel @ self.weights
        return density

    def log10(self, floor: float | None = None) -> "Density":
        """Return the density of `log10(|eigenvalue| + floor)`.

        Args:
            floor: Number added to magnitudes, so that zero has a logarithm. The default is the size of round-off: the
                machine precision times the largest magnitude.

        Raises:
            ShapeError: If the floor is not positive.
        """
        magnitudes = self.nodes.abs()
        if floor is None:
            info = torch.finfo(magnitudes.dtype)
            floor = max(float(magnitudes.max()) * info.eps, info.tiny)
        if not floor > 0:
            raise ShapeError(f"floor is {floor!r}.", "Use a positive number: zero has no logarithm.")
        return Density((magnitudes + floor).log10(), self.weights, "log10 |eigenvalue|")

    def expectation(self, power: int) -> float:
        """Return the mean of a power of the eigenvalues, `trace(A^power) / rows`."""
        return float((self.weights * self.nodes**power).sum())


def spectral_density(
    A: LinearOperator,
    *,
    num_vectors: int = 10,
    num_steps: int = 30,
    probes: Probes = "rademacher",
    seed: int = 0,
    progress: bool | None = None,
) -> Density:
    """Estimate the density of all eigenvalues by stochastic Lanczos quadrature.

    Args:
        A: A symmetric operator.
        num_vectors: Number of random vectors to average over.
        num_steps: Lanczos steps per vector. The quadrature integrates polynomials up to twice this degree.
        probes: Random vectors: `"rademacher"` for random signs, or `"normal"`.
        seed: Equal seeds give equal results.
        progress: Whether to show the number of products. If not given, it is shown after two seconds.

    Returns:
        The density. Use it for several plots: `on` evaluates it on a grid, `log10` changes to a logarithmic axis.

    Example:
        >>> from kfs import GGN, EmpiricalRisk
        >>> _ = torch.manual_seed(0)
        >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(10, 3), torch.rand(10, 2)))
        >>> spectral_density(GGN(risk), num_vectors=2, num_steps=3)  # doctest: +ELLIPSIS
        Density: 6 point masses, float32 on cpu
          eigenvalues from ... to ...
    """
    # Half precision would lose orthogonality, and has no decompositions.
    wide = at_least_float32(A.dtype)
    with A._ranks.agreed("spectral density"):
        _check_symmetric(A)
        V = random_columns(probes, A.shape[0], num_vectors, wide, A.device, seed)
    steps = min(num_steps, A.shape[0])
    with show_progress("spectral density", num_vectors * steps, progress, "product") as line:
        nodes, weights = zip(*(_quadrature(A, v / v.norm(), steps, line) for v in V.T), strict=True)
    return Density(torch.cat(nodes), torch.cat(weights) / num_vectors)


def _quadrature(A: LinearOperator, v: Tensor, num_steps: int, line: Line) -> tuple[Tensor, Tensor]:
    """Run the Lanczos method from a unit vector with full reorthogonalization, and return nodes and weights."""
    basis, alphas, betas = [v], [], []
    while True:
        w = product(A, basis[-1])
        line.advance()
        alphas.append(basis[-1] @ w)
        Q = torch.stack(basis, 1)
        for _ in range(2):  # once is not enough in finite precision (Giraud et al., 2005)
            w = w - Q @ (Q.T @ w)
        beta = w.norm()
        # Stop early if the Krylov space is exhausted: what remains is round-off.
        if len(alphas) == num_steps or beta <= 10 * torch.finfo(w.dtype).eps * abs(alphas[0]):
            break
        betas.append(beta)
        basis.append(w / beta)
    T = torch.diag(torch.stack(alphas))
    if betas:
        off = torch.diag(torch.stack(betas), 1)
        T = T + off + off.T
    nodes, vectors = torch.linalg.eigh(T)
    return nodes, vectors[0] ** 2


def _check_symmetric(A: LinearOperator) -> None:
    if not A.symmetric:
        raise ShapeError(f"An operator of shape {list(A.shape)} is not known to be symmetric.", "Pass a symmetric one.")
