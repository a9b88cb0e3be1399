r"""The linear systems of a merge, their solution, and the report of the merge.

The merged state dict and the checks of models live in `kfs.merging.models`.

$\sum_i w_i (\theta - \theta_i)^\top C_i (\theta - \theta_i)$, with damped curvatures $C_i$, is smallest where
$\sum_i w_i C_i (\theta - \bar\theta) = \sum_i w_i C_i (\theta_i - \bar\theta)$, for any $\bar\theta$; here it is the
average. Curvatures with blocks give one system for each block. Sums of blocks that keep their structure have an inverse
in closed form: diagonals, dense matrices, one or two Kronecker products. Other systems are solved by conjugate
gradients, preconditioned by the Kronecker products of all models in a common basis.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import torch
from torch import Tensor, nn

from kfs.display.describe import Described, Description, Table, counted
from kfs.display.suggestions import few
from kfs.errors import ModelError, SolverError
from kfs.factors import EKFAC, Relative
from kfs.factors.blocks import (
    METHODS,
    BlockDiagonal,
    Damping,
    IterativeInverse,
    KroneckerSum,
    Method,
    Stack,
    absolute_damping,
    damped,
    damping_by_name,
    stacked,
)
from kfs.operators import LinearOperator, solve, trace
from kfs.operators.space import Columns, Space
from kfs.runtime.precision import at_least_float32


@dataclass(frozen=True)
class MergedBlock:
    """Report on one linear system: parameters that are coupled by curvature.

    Attributes:
        name: The block's name; `"all parameters"` for operators without blocks.
        params: Names of its parameters.
        closed_form: Whether the system has a closed form.
        iterations: Iterations of conjugate gradients. Zero for a closed form, unless its round-off had to be reduced.
        residual: Norm of the residual, divided by the norm of the right-hand side.
        damping: Damping of the curvature of each model, by its index in `models`; the largest, if it differs within the
            block. Models with a weight of zero are omitted.
    """

    name: str
    params: tuple[str, ...]
    closed_form: bool
    iterations: int
    residual: float
    damping: Mapping[int, float]


@dataclass(frozen=True, repr=False)
class MergeReport(Described):
    """Report of a merge; printing it shows all blocks.

    Attributes:
        blocks: The linear systems, in the order of parameters.
        weights: Weight of each model.
        averaged: Parameters that no curvature covers, and that differ between models.
        buffers: How buffers (and other entries of state dicts) that differ were merged, by name.
        seconds: Duration of the merge.
        method: How curvature was damped.
    """

    blocks: tuple[MergedBlock, ...]
    weights: tuple[float, ...]
    averaged: tuple[str, ...] = ()
    buffers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    method: str = "exact"

    @property
    def iterations(self) -> int:
        """Total number of iterations of conjugate gradients."""
        return sum(block.iterations for block in self.blocks)

    @property
    def residual(self) -> float:
        """The largest residual of all blocks."""
        return max(block.residual for block in self.blocks)

    def describe(self) -> Description:
        """Describe how systems were solved, and which entries were averaged."""
        closed = sum(block.closed_form for block in self.blocks)
        title = f"Merge of {counted(len(self.weights), 'model')}: {counted(len(self.blocks), 'block')}"
        facts = [
            f"{closed} in closed form, {len(self.blocks) - closed} by conjugate gradients "
            f"({counted(self.iterations, 'iteration')}); largest residual {self.residual:.1e}; {self.seconds:.2g} s",
            f"weights: {', '.join(f'{weight:g}' for weight in self.weights)}; damping: {self.method}",
        ]
        if self.averaged:
            facts.append(f"averaged parameters, which no curvature covers: {few(self.averaged)}")
        for how in dict.fromkeys(self.buffers.values()):
            facts.append(f"{how}: {few([name for name, what in self.buffers.items() if what == how])}")
        rows = [
            (
                block.name,
                "closed form" if block.closed_form else "conjugate gradients",
                str(block.iterations),
                f"{block.residual:.1e}",
                ", ".join(f"{number:.2g}" for number in block.damping.values()),
            )
            for block in self.blocks
        ]
        columns = ("block", "solved by", "iterations", "residual", "damping")
        return Description(title, tuple(facts), (Table("blocks", columns, rows, ("iterations", "residual")),))


ALL = "all parameters"  # name of the only block of operators without blocks
_PRODUCTS = 60  # number of products for estimating the trace of such an operator
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Options:
    """How to damp curvature and to solve the systems: arguments of `merge`, which are checked here.

    Attributes:
        damping: Damping of each curvature.
        method: How Kronecker products are damped.
        tolerance: Largest residual, relative to the right-hand side; `None` for 1e-6 or the root of the precision,
            whichever is larger.
        max_iterations: Limit for conjugate gradients, for each system.
        progress: Whether to show progress.

    Raises:
        ModelError: If a setting is invalid.
    """

    damping: Damping
    method: Method
    tolerance: float | None
    max_iterations: int
    progress: bool | None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ModelError(f"method is {self.method!r}.", f"Choose from {', '.join(map(repr, METHODS))}.")
        if self.tolerance is not None and not (isinstance(self.tolerance, (int, float)) and 0 < self.tolerance < 1):
            raise ModelError(f"tolerance is {self.tolerance!r}.", "Use a number between 0 and 1, or leave it out.")
        if type(self.max_iterations) is not int or self.max_iterations < 1:
            raise ModelError(f"max_iterations is {self.max_iterations!r}.", "Use a positive integer.")


@dataclass(frozen=True)
class Source:
    """A model to merge.

    Attributes:
        model: The model.
        curvature: Its curvature.
        near: Blocks that approximate the curvature, for a preconditioner, as passed by the user; `None` if not given.
        weight: Its weight, positive.
    """

    model: nn.Module
    curvature: LinearOperator
    near: BlockDiagonal | None
    weight: float


class DampedBlocks:
    """Damped and weighted blocks of one model, computed when they are used.

    Args:
        K: An operator with blocks.
        damping: One damping for all blocks, or one for each, by name.
        method: How Kronecker products are damped; see `kfs.factors.blocks.damped`.
        weight: Weight of the model, positive.

    Attributes:
        damping: Damping by block, before weighting.

    Raises:
        SolverError: If damping is relative, and no block has curvature.
    """

    def __init__(self, K: BlockDiagonal, damping: Damping, method: Method | None, weight: float) -> None:
        numbers = damping_by_name(damping, set(K.structures))
        self.method = method
        self.weight = weight
        self.damping: dict[str, float] = {}
        self._parts: list[tuple[Stack, Tensor]] = []
        mean = K.mean_eigenvalue() if any(isinstance(d, Relative) for d in numbers.values()) else 0.0
        for stack in K.stacks:
            added = absolute_damping(stack, numbers, mean)
            for layout, part in stack.slices():
                self._parts.append((Stack((layout,), stack.structure[part]), added[part]))
                self.damping[layout.name] = float(added[part].amax())
        # Products of half precision are computed in float32, and intermediate results must not be rounded.
        self.dtype = at_least_float32(K.dtype)

    def on(self, space: Space) -> BlockDiagonal:
        """Return the operator on a subspace of the parameters."""
        chosen = [(stack, added) for stack, added in self._parts if stack.layouts[0].weight in space.shapes]
        made = [
            (stack.layouts[0], stack.apply(damped, added, self.method).scaled(self.weight)) for stack, added in chosen
        ]
        return BlockDiagonal(space, stacked(made))

    def params(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return the names of all blocks and their parameters."""
        return [(stack.layouts[0].name, stack.layouts[0].params) for stack, _ in self._parts]


class DampedOperator:
    """The damped and weighted curvature of one model, as one block; only products with it are needed.

    Args:
        C: The operator.
        damping: A number, or relative to the mean eigenvalue, for which the trace is estimated.
        weight: Weight of the model, positive.
        progress: Whether to show the progress of the estimate.

    Attributes:
        damping: Damping by block, before weighting.

    Raises:
        SolverError: If damping is relative, and the operator's trace is not positive.
    """

    def __init__(self, C: LinearOperator, damping: Damping, weight: float, progress: bool | None) -> None:
        delta = damping_by_name(damping, {ALL})[ALL]
        if isinstance(delta, Relative):
            if isinstance(C, BlockDiagonal):
                total = float(C.trace())
            else:
                total = float(trace(C, products=_PRODUCTS, progress=progress).value)
            if not total > 0:
                raise SolverError(
                    f"The curvature has a trace of {total:.1e}, so relative damping is not positive.",
                    "Pass a number as damping.",
                )
            delta = delta.fraction * total / C.shape[0]
        self.damping = {ALL: float(delta)}
        self.dtype = C.dtype
        self._operator = weight * C.shift(float(delta))

    def on(self, space: Space) -> LinearOperator:
        """Return the operator. Its only block contains all parameters, so the space is not used."""
        return self._operator

    def params(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return the name of the block and its parameters."""
        return [(ALL, tuple(self._operator.domain.shapes))]


Damped = DampedBlocks | DampedOperator


def approximation(source: Source, of: Damped) -> DampedBlocks | None:
    """Return blocks that approximate a model's damped curvature, for a preconditioner; `None` if there are none."""
    C, near = source.curvature, source.near
    if near is None:
        near = C.factors if isinstance(C, EKFAC) else C if isinstance(C, BlockDiagonal) else None
    if near is None:
        return None
    # The names of blocks may differ. A block with another name gets the largest damping, since this is only an
    # approximation.
    largest = max(of.damping.values())
    return DampedBlocks(near, {name: of.damping.get(name, largest) for name in near.structures}, None, source.weight)


def systems(curvatures: Sequence[Damped], space: Space) -> list[tuple[str, Space]]:
    """Return the linear systems, with name and parameters, in the order of the space.

    Blocks with a parameter in common belong to the same system. They may be blocks of different models, or blocks of
    one model with different rows of the parameter.
    """
    # Union-find over the names of parameters.
    first: dict[str, str] = {name: name for name in space.shapes}

    def root(name: str) -> str:
        while first[name] != name:
            name = first[name]
        return name

    blocks = [block for C in curvatures for block in C.params()]
    for _, params in blocks:
        for name in params:
            first[root(name)] = root(params[0])
    groups: dict[str, list[str]] = {}
    for name in space.shapes:
        groups.setdefault(root(name), []).append(name)
    result = []
    for names in groups.values():
        called = {block for block, params in blocks if params[0] in names}
        result.append((called.pop() if len(called) == 1 else ", ".join(names), space.subspace(names)))
    return result


def solve_system(
    name: str,
    space: Space,
    curvatures: Mapping[int, Damped],
    near: Sequence[DampedBlocks | None],
    models: Mapping[int, Tensors],
    average: Tensors,
    options: Options,
) -> tuple[Tensors, MergedBlock]:
    """Return the merged parameters of one system, and a report of their computation.

    Args:
        name: The block's name.
        space: Its parameters.
        curvatures: Damped curvatures, by index of the model.
        near: Their approximations.
        models: Parameters of the models, by index.
        average: The average of all models' parameters, the start of the iteration.
        options: Settings of the solver.

    Raises:
        SolverError: If the iteration has not converged, or if a closed form fails because curvature is singular.
    """
    # Solve for the change from the average: it is small, which keeps round-off small.
    start = {key: average[key] for key in space.shapes}
    operators = {i: C.on(space) for i, C in curvatures.items()}
    total = reduce(add, operators.values())
    products = [C @ {key: models[i][key] - start[key] for key in start} for i, C in operators.items()]
    b = {key: reduce(add, [product[key] for product in products]) for key in start}
    added = {i: _largest(C.damping, C.params(), space) for i, C in curvatures.items()}
    # Residuals below the root of the precision are often unreachable, and do not change predictions.
    tolerance = options.tolerance or max(1e-6, torch.finfo(space.dtype).eps ** 0.5)

    # A closed form suffices unless round-off is too large. Then, it is the start and the preconditioner of an
    # iteration.
    inverse = _closed_form(total)
    first = None
    if inverse is not None:
        first = inverse @ b
        residual = _residual(total, first, b)
        if residual <= tolerance:
            found = {key: start[key] + first[key] for key in start}
            return found, MergedBlock(name, tuple(start), True, 0, residual, added)
    elif not any(added.values()):
        raise SolverError(
            f"Block {name!r} is not damped, so its curvature may be singular, which conjugate gradients cannot detect.",
            "Pass a positive damping.",
        )
    solution = solve(
        total,
        b,
        preconditioner=_preconditioner(near, space) if inverse is None else inverse,
        start=first,
        tolerance=tolerance,
        max_iterations=options.max_iterations,
        progress=options.progress,
    )
    if not solution.converged:
        raise SolverError(
            f"Merging has not converged in block {name!r}: after {solution.iterations} iterations, the residual is "
            f"{solution.residuals[-1]:.1e} of the right-hand side; the tolerance is {tolerance:.1e}.",
            "Use more damping, allow more iterations (max_iterations=) or a larger tolerance, or compute in float64. "
            "Operators without blocks converge faster with preconditioner=[kfs.KFAC(risk), ...], one for each model.",
        )
    found = {key: start[key] + solution.x[key] for key in start}
    residual = solution.residuals[-1] if solution.residuals else 0.0
    return found, MergedBlock(name, tuple(start), inverse is not None, solution.iterations, residual, added)


def _largest(damping: Mapping[str, float], blocks: Sequence[tuple[str, tuple[str, ...]]], space: Space) -> float:
    """Return the largest damping of the blocks in a system."""
    return max(damping[block] for block, params in blocks if params[0] in space.shapes)


def _residual(A: LinearOperator, x: Tensors, b: Tensors) -> float:
    """Return the norm of the residual, divided by the norm of the right-hand side."""
    product = A @ x
    rest = torch.cat([(b[key] - product[key]).flatten() for key in b]).norm()
    size = torch.cat([t.flatten() for t in b.values()]).norm()
    return float(rest / size.clamp(min=torch.finfo(size.dtype).tiny))


def _closed_form(total: LinearOperator) -> BlockDiagonal | None:
    """Return the inverse of a sum if all of its blocks have inverses in closed form, otherwise `None`."""
    if not isinstance(total, BlockDiagonal):
        return None
    sums = [stack.structure for stack in total.stacks if isinstance(stack.structure, KroneckerSum)]
    return None if any(len(structure.terms) > 2 for structure in sums) else total.inverse()


def _preconditioner(near: Sequence[DampedBlocks | None], space: Space) -> LinearOperator | None:
    """Return a preconditioner from the sum of approximations; `None` if a model has no approximation.

    The sum is inverted in a common basis, or by its diagonal if no structure can store the sum.
    """
    known = [K.on(space) for K in near if K is not None]
    if len(known) < len(near):
        return None
    total = reduce(add, known)
    if not isinstance(total, BlockDiagonal):
        return _Diagonal(space, 1 / sum((K.diagonal() for K in known), torch.zeros(())))
    # Inverses that need an iteration are replaced by their approximations.
    found = [(stack.layouts, stack.structure) for stack in total.inverse().stacks]
    return BlockDiagonal(space, [Stack(to, s.near if isinstance(s, IterativeInverse) else s) for to, s in found])


class _Diagonal(LinearOperator):
    """A diagonal matrix, for a preconditioner."""

    symmetric = True

    def __init__(self, space: Space, entries: Tensor) -> None:
        super().__init__(space, space)
        self.entries = space.unflatten(entries.unsqueeze(0))

    def multiply(self, columns: Columns) -> Columns:
        return {name: self.entries[name] * t for name, t in columns.items()}

    multiply_transposed = multiply  # diagonal matrices are symmetric
