r"""Eigenvalues of symmetric operators: the outermost ones exactly, and the density of all of them.

The density comes from stochastic Lanczos quadrature (Golub & Meurant, 2009; Ubaru et al., 2017): a few Lanczos
steps from a random vector give nodes and weights of a quadrature rule for the spectrum, and the average over
vectors approximates all of it.
"""

from dataclasses import dataclass
from math import pi, sqrt
from numbers import Integral
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kfs.charts import draw_density
from kfs.describing import Described, Description, counted, kind, number
from kfs.errors import ShapeError, SolverError
from kfs.operators.interface import LinearOperator
from kfs.operators.probes import Probes, normal, random_columns
from kfs.operators.solve import product
from kfs.precision import at_least_float32
from kfs.progress import Line, show_progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        k: How many, fewer than rows.
        largest: Whether the largest ones are wanted, or the smallest.
        by: What is compared: the `"value"`, or its `"magnitude"`, whatever the sign. The smallest magnitudes converge
            slowly.
        tolerance: Relative accuracy; 0 for machine precision.
        seed: Seed for the start vector.
        progress: Whether to show the number of products meanwhile, and how long one takes. By default, if it takes
            longer than two seconds. How many will be needed is not known before they are done.

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
    which = ("L" if largest else "S") + ("A" if by == "value" else "M")  # as ARPACK calls them
    wide = at_least_float32(A.dtype)
    start = normal(A.shape[0], wide, seed).numpy()  # signs may be orthogonal to an eigenvector of signs
    num_vectors = min(max(2 * k + 1, 20), A.shape[0])  # SciPy's default
    try:
        with show_progress("eigenvalues", None, progress, "product") as line:
            # ARPACK does not say how far from convergence it is. It needs a product for each of its vectors, at least.
            line.at_least = num_vectors
            options = {"k": k, "which": which, "v0": start, "tol": tolerance, "ncv": num_vectors}
            values, vectors = eigsh(A.to_scipy(line.advance), **options)
    except ArpackError as error:
        raise SolverError(
            f"The Lanczos method failed: {error}.",
            "Ask for fewer eigenvalues or less accuracy; a zero operator has none to find.",
        ) from error
    order = torch.from_numpy(values).argsort(descending=True)
    to = {"dtype": A.dtype, "device": A.device}
    return torch.from_numpy(values)[order].to(**to), torch.from_numpy(vectors)[:, order].to(**to)  # type: ignore[call-overload]


@dataclass(frozen=True, repr=False)
class Density(Described):
    """A spectral density: point masses that can be smoothed.

    It has all that several plots need, with other grids and widths or on a logarithmic axis: none of them takes another
    product with the operator.

    Attributes:
        nodes: Where the masses are, `[M]`.
        weights: How large they are, `[M]`; they sum up to one.
        axis: What it is a density of: an `"eigenvalue"`, or `"log10 |eigenvalue|"`, as `log10` returns it.

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
        """Describe where the masses are, unless an accelerator would have to say it."""
        of = "" if self.axis == "eigenvalue" else f" of {self.axis}"
        title = f"Density{of}: {counted(len(self.nodes), 'point mass')}, {kind(self.nodes.dtype, self.nodes.device)}"
        if self.nodes.device.type != "cpu":
            return Description(title)
        noun = "" if of else "eigenvalues "
        return Description(title, (f"{noun}from {number(self.nodes.min())} to {number(self.nodes.max())}",))

    def plot(self, width: float | None = None, *, axes: "Axes | None" = None) -> "Axes":
        """Draw the density, smoothed, on a log axis.

        Args:
            width: Width of the normal density that smooths it. By default a hundredth of the range of point masses.
            axes: Where to draw; by default in a new figure.

        Returns:
            Axes of matplotlib.
        """
        nodes = self.nodes.cpu().double()
        first, last = float(nodes.min()), float(nodes.max())
        if width is None:
            width = 0.01 * ((last - first) or abs(last) or 1.0)
        grid = torch.linspace(first - 5 * width, last + 5 * width, 800, dtype=torch.float64)
        smooth = Density(nodes, self.weights.cpu().double()).on(grid, width)
        return draw_density(grid, smooth, nodes, self.axis, axes)

    def on(self, grid: Tensor, width: float) -> Tensor:
        """Smooth with a normal density of the given width and evaluate on a grid."""
        distance = (grid.unsqueeze(1) - self.nodes) / width
        kernel = torch.exp(-0.5 * distance**2) / (width * sqrt(2 * pi))
        density: Tensor = kernel @ self.weights
        return density

    def log10(self, floor: float | None = None) -> "Density":
        """Return the density of the eigenvalues' magnitudes on a logarithmic axis: of `log10(|eigenvalue| + floor)`.

        Args:
            floor: What is added, so that zero has a logarithm. By default what round-off makes of zero: the precision
                times the largest magnitude.

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
        num_vectors: Random vectors to average over.
        num_steps: Lanczos steps per vector; it integrates polynomials up to twice this degree.
        probes: Random vectors: `"rademacher"` for random signs, or `"normal"`.
        seed: Equal seeds give equal results.
        progress: Whether to show the number of products meanwhile. By default, if it takes longer than two seconds.

    Returns:
        The density. Keep it for several plots: `on` a grid, and `log10()` for a logarithmic axis.

    Example:
        >>> from kfs import GGN, EmpiricalRisk
        >>> _ = torch.manual_seed(0)
        >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(10, 3), torch.rand(10, 2)))
        >>> spectral_density(GGN(risk), num_vectors=2, num_steps=3)  # doctest: +ELLIPSIS
        Density: 6 point masses, float32 on cpu
          eigenvalues from ... to ...
    """
    # Half precision would not keep directions orthogonal, and has no decompositions.
    wide = at_least_float32(A.dtype)
    with A._ranks.agreed("spectral density"):
        _check_symmetric(A)
        V = random_columns(probes, A.shape[0], num_vectors, wide, A.device, seed)
    steps = min(num_steps, A.shape[0])
    with show_progress("spectral density", num_vectors * steps, progress, "product") as line:
        nodes, weights = zip(*(_quadrature(A, v / v.norm(), steps, line) for v in V.T), strict=True)
    return Density(torch.cat(nodes), torch.cat(weights) / num_vectors)


def _quadrature(A: LinearOperator, v: Tensor, num_steps: int, line: Line) -> tuple[Tensor, Tensor]:
    """Run Lanczos from a unit vector, with full reorthogonalization, and return nodes and weights."""
    basis, alphas, betas = [v], [], []
    while True:
        w = product(A, basis[-1])
        line.advance()
        alphas.append(basis[-1] @ w)
        Q = torch.stack(basis, 1)
        for _ in range(2):  # once is not enough in finite precision (Giraud et al., 2005)
            w = w - Q @ (Q.T @ w)
        beta = w.norm()
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
