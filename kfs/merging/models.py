"""Merging: one state dict from several models, by their curvature."""

from collections.abc import Sequence
from functools import reduce
from operator import add
from time import perf_counter
from typing import Any, Literal, overload
from warnings import warn

from torch import Tensor, nn

from kfs.errors import KfsWarning, ModelError
from kfs.kfac import Relative
from kfs.kfac.structures import BlockDiagonal, Damping, Method
from kfs.merging.checks import (
    check_curvatures,
    check_models,
    check_preconditioner,
    check_settings,
    check_weights,
    naming,
    tied,
)
from kfs.merging.entries import all_equal, average, check_buffers, merged_buffer, not_saved, recomputed
from kfs.merging.report import MergedBlock, MergeReport
from kfs.merging.systems import (
    Damped,
    DampedBlocks,
    DampedOperator,
    Options,
    approximation,
    solve_system,
    systems,
)
from kfs.names import few
from kfs.operators import LinearOperator
from kfs.operators.space import Space
from kfs.progress import show_progress

_DAMPING = Relative(0.01)
Buffers = Literal["average", "recompute"]
State = dict[str, Any]


@overload
def merge(
    models: Sequence[nn.Module],
    curvatures: Sequence[LinearOperator],
    damping: Damping = _DAMPING,
    weights: Sequence[float] | Tensor | None = None,
    *,
    buffers: Buffers = "average",
    data: object = None,
    method: Method = "exact",
    preconditioner: Sequence[BlockDiagonal] | None = None,
    tolerance: float | None = None,
    max_iterations: int = 1000,
    progress: bool | None = None,
    report: Literal[False] = False,
) -> State: ...
@overload
def merge(
    models: Sequence[nn.Module],
    curvatures: Sequence[LinearOperator],
    damping: Damping = _DAMPING,
    weights: Sequence[float] | Tensor | None = None,
    *,
    buffers: Buffers = "average",
    data: object = None,
    method: Method = "exact",
    preconditioner: Sequence[BlockDiagonal] | None = None,
    tolerance: float | None = None,
    max_iterations: int = 1000,
    progress: bool | None = None,
    report: Literal[True],
) -> tuple[State, MergeReport]: ...
def merge(
    models: Sequence[nn.Module],
    curvatures: Sequence[LinearOperator],
    damping: Damping = _DAMPING,
    weights: Sequence[float] | Tensor | None = None,
    *,
    buffers: Buffers = "average",
    data: object = None,
    method: Method = "exact",
    preconditioner: Sequence[BlockDiagonal] | None = None,
    tolerance: float | None = None,
    max_iterations: int = 1000,
    progress: bool | None = None,
    report: bool = False,
) -> State | tuple[State, MergeReport]:
    r"""Merge models of one architecture: minimize the sum of the quadratic models of their losses.

    The result minimizes $\sum_i w_i (\theta - \theta_i)^\top (C_i + \delta_i I) (\theta - \theta_i)$, where $\theta_i$
    are the parameters of a model and $C_i$ is its curvature. So each parameter stays close to the models whose loss
    depends on it. With diagonal curvature (`kfs.kfac.exact_diagonal`) this is Fisher merging (Matena & Raffel, 2022);
    with `KFAC(risk, fisher="forward-only")`, it is RegMean (Jin et al., 2023).

    Blocks are solved one by one: in closed form, if curvature is diagonal or dense, a Kronecker product of which one
    factor is the identity (RegMean), or any Kronecker product for up to two models with `"factored"` damping; otherwise
    by conjugate gradients. The models are not changed.

    Args:
        models: At least two modules with the same architecture, in evaluation mode. They should have a common ancestor:
            models that were trained from different initial values have no path of low loss between them.
        curvatures: One symmetric operator for each model: `KFAC`, `EKFAC`, `GGN`, or any other one on its parameters,
            computed from the data that the model is good at. Curvatures of mean losses count all models equally; those
            of sums count data equally.
        damping: Added to each curvature: a number, `kfs.Relative` to the mean eigenvalue of each block (by default one
            percent of it), or one of these for each block, by name. An operator without blocks counts as one block,
            `"all parameters"`, whose trace is estimated.
        weights: How much each model counts: numbers that are not negative. By default, all count the same.
        buffers: What to do about buffers that differ between models. `"average"` averages them, and adds up numbers of
            batches. `"recompute"` computes the statistics of BatchNorm from `data`, and averages others.
        data: For `"recompute"`: batches of inputs, of pairs (inputs, targets) or of mappings; targets are not used.
        method: How curvature is damped, as in `K.inverse`. `"exact"` is the formula above, for every operator.
            `"factored"` and `"per-factor"` add to both factors of Kronecker products, which damps more than the formula
            does. Two models then have a closed form. Other blocks and operators cannot be damped so.
        preconditioner: For operators without blocks: a `KFAC` for each model, which makes conjugate gradients faster.
            `KFAC` and `EKFAC` have one by themselves.
        tolerance: Largest residual of a block, relative to its right-hand side. By default 1e-6 in float64, and the
            root of the precision otherwise: 3.5e-4 in float32.
        max_iterations: Limit for conjugate gradients, for each block.
        progress: Whether to show how far it is. By default, if it takes longer than two seconds.
        report: Whether to return also how blocks were solved.

    Returns:
        A state dict with all entries of that of the first model, on its devices. Parameters that no curvature covers
        are averaged; a warning names those that differ between models. With `report`, a `MergeReport` in addition.

    Raises:
        ModelError: If models differ in architecture or are in training mode, if curvatures belong to other parameters
            or to another model, or if an argument does not fit.
        ShapeError: If shapes differ.
        DtypeError: If dtypes differ, or an argument has a wrong type.
        SolverError: If conjugate gradients do not converge, or if curvature is singular and not damped.

    Example:
        >>> import torch
        >>> from kfs import KFAC, EmpiricalRisk
        >>> _ = torch.manual_seed(0)
        >>> models = [nn.Linear(3, 2).eval() for _ in range(2)]
        >>> data = [(torch.rand(9, 3), torch.rand(9, 2)) for _ in models]
        >>> curvatures = [KFAC(EmpiricalRisk(m, nn.MSELoss(), d)) for m, d in zip(models, data)]
        >>> state, report = merge(models, curvatures, report=True)
        >>> models[0].load_state_dict(state)
        <All keys matched successfully>
        >>> report  # doctest: +ELLIPSIS
        Merge of 2 models: 1 block
          1 in closed form, 0 by conjugate gradients (0 iterations); largest residual ...; ... s
          weights: 1, 1; damping: exact
    """
    began = perf_counter()
    given = check_models(models)
    operators = check_curvatures(curvatures, given, "curvatures")
    numbers = check_weights(weights, len(given))
    check_settings(method, tolerance, max_iterations)
    check_buffers(buffers, data, given)
    near: Sequence[BlockDiagonal | None] = [None] * len(given)
    if preconditioner is not None:
        near = check_preconditioner(check_curvatures(preconditioner, given, "preconditioner"), operators)

    # A model with a weight of zero has no say. Without it, fewer terms have to be added up.
    used = [i for i, weight in enumerate(numbers) if weight > 0]
    options = Options(tolerance, max_iterations, progress)
    found, blocks = _merged_parameters(
        {i: given[i] for i in used},
        {i: operators[i] for i in used},
        {i: near[i] for i in used},
        {i: numbers[i] for i in used},
        (damping, method),
        options,
    )
    state, averaged, done = _state_dict(given, numbers, found)
    if data is not None:
        statistics, names = recomputed(given[0], state, data, progress)
        state.update(statistics)
        done |= dict.fromkeys(names, "recomputed")
    if averaged:
        warn(
            f"No curvature covers the parameters {few(averaged)}, which differ between models. They are averaged.",
            KfsWarning,
            stacklevel=2,
        )
    unsaved = not_saved(given)
    if unsaved:
        warn(
            f"The buffers {few(unsaved)} differ between models, and are in no state dict (persistent=False). A model "
            "that loads the result keeps its own. Give them the same values, unless the models compute them anew.",
            KfsWarning,
            stacklevel=2,
        )
    made = MergeReport(tuple(blocks), tuple(numbers), tuple(averaged), done, perf_counter() - began, method)
    return (state, made) if report else state


def _merged_parameters(
    models: dict[int, nn.Module],
    operators: dict[int, LinearOperator],
    near: dict[int, BlockDiagonal | None],
    weights: dict[int, float],
    damping: tuple[Damping, Method],
    options: Options,
) -> tuple[dict[str, Tensor], list[MergedBlock]]:
    """Solve all systems. Everything is given by the numbers of models."""
    with show_progress("merging", None, options.progress, "block") as line:
        curvatures = _damped(operators, weights, damping, options)
        close = [approximation(C, near[i], curvatures[i], weights[i]) for i, C in operators.items()]
        domain = next(iter(operators.values())).domain
        space = Space(domain.shapes, next(iter(curvatures.values())).dtype, domain.device)
        values = {i: _values(model, space) for i, model in models.items()}
        share = {i: weight / sum(weights.values()) for i, weight in weights.items()}
        mean = {name: reduce(add, [share[i] * values[i][name] for i in values]) for name in space.shapes}
        found: dict[str, Tensor] = {}
        blocks = []
        parts = systems(list(curvatures.values()), space)
        line.total = len(parts)
        for name, part in parts:
            solution, block = solve_system(name, part, curvatures, close, values, mean, options)
            found |= solution
            blocks.append(block)
            line.advance(note=name)
    return found, blocks


def _damped(
    operators: dict[int, LinearOperator],
    weights: dict[int, float],
    damping: tuple[Damping, Method],
    options: Options,
) -> dict[int, Damped]:
    """Damp and weight curvatures: block by block, if all of them have blocks."""
    have_blocks = all(isinstance(C, BlockDiagonal) for C in operators.values())
    result: dict[int, Damped] = {}
    for i, C in operators.items():
        with naming(f"curvatures[{i}]"):
            if have_blocks and isinstance(C, BlockDiagonal):
                result[i] = DampedBlocks(C, *damping, weights[i])
            elif damping[1] != "exact":
                raise ModelError(
                    f"method is {damping[1]!r}, but not all curvatures have blocks, so there are no factors to damp.",
                    "Use method='exact', the default.",
                )
            else:
                result[i] = DampedOperator(C, damping[0], weights[i], options.progress)
    return result


def _values(model: nn.Module, space: Space) -> dict[str, Tensor]:
    """Return the parameters that curvature covers, in its precision and on its device."""
    params = dict(model.named_parameters())
    return {name: params[name].detach().to(space.device, space.dtype) for name in space.shapes}


def _state_dict(
    models: Sequence[nn.Module], weights: Sequence[float], found: dict[str, Tensor]
) -> tuple[State, list[str], dict[str, str]]:
    """Put a state dict together.

    Returns:
        The state dict, the parameters that were averaged, and what was done to buffers.
    """
    states = [model.state_dict() for model in models]
    first_names = tied(models[0])
    state = models[0].state_dict()  # keeps what PyTorch notes about versions
    params: dict[str, Tensor] = {}
    averaged = []
    done: dict[str, str] = {}
    for name in state:
        values = [s[name] for s in states]
        first = first_names.get(name)
        if first is None:
            state[name], what = merged_buffer(name, values, weights)
            done |= {name: what} if what else {}
        elif first in params:
            state[name] = params[first]  # tied: one tensor under two names
        else:
            params[first] = found[first].to(values[0]) if first in found else average(values, weights)
            state[name] = params[first]
            if first not in found and not all_equal(values):
                averaged.append(first)
    return state, averaged, done
