"""Merging several models into one state dict using their curvature, with checks of models and curvatures."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import combinations
from math import isfinite
from operator import add
from time import perf_counter
from typing import Any, Literal, overload
from warnings import warn

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from kfs.display.describe import counted
from kfs.display.progress import show_progress
from kfs.display.suggestions import few
from kfs.errors import DtypeError, KfsError, KfsWarning, ModelError, ShapeError
from kfs.factors import Relative
from kfs.factors.blocks import BlockDiagonal, Damping, Method
from kfs.factors.match import check_parameters, computed_at, digest_for, warn_of_other_values
from kfs.merging.entries import all_equal, average, check_buffers, merged_buffer, not_saved, recomputed
from kfs.merging.systems import (
    Damped,
    DampedBlocks,
    DampedOperator,
    MergedBlock,
    MergeReport,
    Options,
    Source,
    approximation,
    solve_system,
    systems,
)
from kfs.operators import LinearOperator
from kfs.operators.space import Space
from kfs.problem.isolation import check_module
from kfs.problem.whole_parameters import refuse_sharded

_ONE_PROGRAM = "Build all models by the same code."


def check_models(models: object) -> list[nn.Module]:
    """Check that models is a list of different modules of the same architecture, in evaluation mode."""
    if isinstance(models, nn.Module) or not isinstance(models, Iterable):
        raise DtypeError(f"models is a {type(models).__name__}.", "Pass a list of modules.")
    found = list(models)
    for place, model in enumerate(found):
        if not isinstance(model, nn.Module):
            raise DtypeError(f"models[{place}] is a {type(model).__name__}.", "Pass modules, not their state dicts.")
    if len(found) < 2:
        raise ModelError(f"There is {counted(len(found), 'model')} to merge.", "Pass at least two.")
    for i, j in combinations(range(len(found)), 2):
        if found[i] is found[j]:
            raise ModelError(
                f"models[{i}] and models[{j}] are the same object.",
                "Pass models that were trained separately: copy.deepcopy(model) before training the next one.",
            )
    for place, model in enumerate(found):
        with naming(f"models[{place}]"):
            check_module(model)
            refuse_sharded(model)
            _check_values(model)
    for place, model in enumerate(found[1:], start=1):
        _check_same_architecture(found[0], model, place)
    return found


def _check_values(model: nn.Module) -> None:
    for name, t in model.named_parameters():
        if t.is_meta:
            raise ModelError(f"Parameter {name!r} is on the meta device, without values.", "Load its values first.")
        if not t.isfinite().all():
            raise ModelError(f"Parameter {name!r} contains NaN or infinity.", "Leave this model out.")


def _check_same_architecture(first: nn.Module, other: nn.Module, place: int) -> None:
    """Compare modules, their settings, entries of state dicts, shapes, dtypes and tied parameters."""
    mine, theirs = ({name: type(m).__qualname__ for name, m in model.named_modules()} for model in (first, other))
    for name in mine.keys() & theirs.keys():
        if mine[name] != theirs[name]:
            what = f"Module {name!r}" if name else "The model"
            raise ModelError(
                f"{what} is {mine[name]} in models[0] and {theirs[name]} in models[{place}].", _ONE_PROGRAM
            )
    entries, others = first.state_dict(), other.state_dict()
    for has, lacks, what in ((entries, others, f"models[{place}] lacks"), (others, entries, "models[0] lacks")):
        missing = [name for name in has if name not in lacks]
        if missing:
            raise ModelError(f"{what} the parameters or buffers {few(missing)} of another model.", _ONE_PROGRAM)
    for name, t in entries.items():
        _check_same_kind(name, t, others[name], place)
    if tied(first) != tied(other):
        raise ModelError(
            f"models[0] and models[{place}] do not tie the same parameters to each other.",
            "Tie them in all models, as after loading; copy.deepcopy(model) keeps parameters tied.",
        )
    _check_same_settings(first, other, place)


def _check_same_settings(first: nn.Module, other: nn.Module, place: int) -> None:
    """Compare modules without parameters, and settings such as strides and slopes."""
    modules, others = dict(first.named_modules()), dict(other.named_modules())
    extra = [name for name in (*modules, *others) if name not in modules or name not in others]
    if extra:
        raise ModelError(f"models[0] and models[{place}] do not both have the modules {few(extra)}.", _ONE_PROGRAM)
    for name, module in modules.items():
        # The text of other libraries' modules may depend on values. Dropout does nothing in evaluation mode.
        if not type(module).__module__.startswith("torch.nn.") or isinstance(module, _DropoutNd):
            continue
        mine, theirs = module.extra_repr(), others[name].extra_repr()
        if mine != theirs:
            raise ModelError(
                f"Module {name!r} ({type(module).__name__}) has different settings: {mine} in models[0], and {theirs} "
                f"in models[{place}].",
                _ONE_PROGRAM,
            )


def _check_same_kind(name: str, t: Any, other: Any, place: int) -> None:
    if not isinstance(t, Tensor) or not isinstance(other, Tensor):
        return  # extra state, which may be of any type
    if t.shape != other.shape:
        raise ShapeError(
            f"{name!r} has shape {list(t.shape)} in models[0] and {list(other.shape)} in models[{place}].",
            _ONE_PROGRAM,
        )
    if t.dtype != other.dtype:
        raise DtypeError(
            f"{name!r} is {t.dtype} in models[0] and {other.dtype} in models[{place}].",
            "Convert all models to one dtype: model.to(dtype).",
        )


def tied(model: nn.Module) -> dict[str, str]:
    """Return, for each name of a parameter, the first name of the same parameter."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def check_curvatures(curvatures: object, models: Sequence[nn.Module], what: str) -> list[LinearOperator]:
    """Check that the argument `what` is a list with one symmetric operator per model, on the model's parameters."""
    if isinstance(curvatures, LinearOperator) or not isinstance(curvatures, Iterable):
        raise DtypeError(f"{what} is a {type(curvatures).__name__}.", "Pass a list with one operator for each model.")
    found = list(curvatures)
    if len(found) != len(models):
        raise ModelError(
            f"{what} has {counted(len(found), 'operator')} for {counted(len(models), 'model')}.",
            "Pass one for each model, in the same order.",
        )
    for place, (C, model) in enumerate(zip(found, models, strict=True)):
        _check_operator(C, f"{what}[{place}]")
        check_parameters(C, dict(model.named_parameters()), what=f"{what}[{place}]", owner=f"models[{place}]")
    for place, C in enumerate(found[1:], start=1):
        _check_same_space(found[0], C, f"{what}[0]", f"{what}[{place}]")
    for place, C in enumerate(found):
        _check_order(C, models, place, what)
    return found


def _check_operator(C: object, called: str) -> None:
    if not isinstance(C, LinearOperator):
        raise DtypeError(
            f"{called} is a {type(C).__name__}.", "Pass an operator: kfs.KFAC(risk), kfs.EKFAC(risk) or kfs.GGN(risk)."
        )
    if C.domain != C.codomain or not C.symmetric:
        raise ModelError(f"{called} is not symmetric.", "Pass a curvature matrix: kfs.KFAC(risk), kfs.GGN(risk), ...")


def _check_same_space(first: LinearOperator, other: LinearOperator, one: str, two: str) -> None:
    if list(first.domain.shapes) != list(other.domain.shapes):
        names, others = first.domain.shapes, other.domain.shapes
        only = [name for name in names if name not in others]
        extra = [name for name in others if name not in names]
        raise ModelError(
            f"{one} and {two} are curvatures of different parameters: {few(only) or 'none'} only in the first one, and "
            f"{few(extra) or 'none'} only in the second one. Both need the same ones, in the same order.",
            "Compute all of them with the same params=.",
        )
    if first.domain.dtype != other.domain.dtype or first.device != other.device:
        raise DtypeError(
            f"{one} is {first.dtype} on {first.device}, but {two} is {other.dtype} on {other.device}.",
            "Convert one of them: K.to(device, dtype), or compute it on the same device.",
        )


def _check_order(C: LinearOperator, models: Sequence[nn.Module], place: int, what: str) -> None:
    """Raise an error if a curvature was computed at the parameters of another one of the models, if that is known."""
    at = computed_at(C)
    if not at:
        return
    digests = [digest_for(C, dict(model.named_parameters())) for model in models]
    if at in digests and digests[place] != at:
        raise ModelError(
            f"{what}[{place}] is the curvature of models[{digests.index(at)}], not of models[{place}].",
            "Pass models and curvatures in the same order.",
        )
    params = dict(models[place].named_parameters())
    warn_of_other_values(C, params, what=f"{what}[{place}]", owner=f"models[{place}]", stacklevel=5)


def check_weights(weights: object, count: int) -> list[float]:
    """Return one weight for each model, after checking that they are not negative, and not all zero."""
    if weights is None:
        return [1.0] * count
    if isinstance(weights, Tensor):
        weights = weights.tolist()
    if not isinstance(weights, Iterable):
        raise DtypeError(f"weights is a {type(weights).__name__}.", "Pass a list with one number for each model.")
    found = list(weights)
    for place, weight in enumerate(found):
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not isfinite(weight):
            raise DtypeError(f"weights[{place}] is {weight!r}.", "Pass finite numbers.")
    if len(found) != count:
        raise ModelError(f"There are {counted(len(found), 'weight')} for {count} models.", "Pass one for each model.")
    if min(found) < 0:
        raise ModelError(
            f"weights[{found.index(min(found))}] is {min(found):g}.", "Pass numbers that are not negative."
        )
    if max(found) == 0:
        raise ModelError("All weights are zero.", "Give at least one model a positive weight.")
    return [float(weight) for weight in found]


def check_preconditioner(found: Sequence[LinearOperator], curvatures: Sequence[LinearOperator]) -> list[BlockDiagonal]:
    """Return the preconditioners, after checking that they have blocks and act on the curvatures' parameters."""
    blocks = [P for P in found if isinstance(P, BlockDiagonal)]
    if len(blocks) < len(found):
        raise ModelError("The preconditioner has operators without blocks.", "Pass a kfs.KFAC for each model.")
    _check_same_space(curvatures[0], blocks[0], "curvatures[0]", "preconditioner[0]")
    return blocks


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Context that prefixes the cause of an error with its subject."""
    try:
        yield
    except KfsError as error:
        raise type(error)(f"{what}: {error.cause}", error.way_out) from error


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
    r"""Merge models of the same architecture, by minimizing the sum of the quadratic models of their losses.

    The result minimizes $\sum_i w_i (\theta - \theta_i)^\top (C_i + \delta_i I) (\theta - \theta_i)$, where $\theta_i$
    are the parameters of a model and $C_i$ is its curvature. So each parameter stays close to its value in the models
    whose losses depend on it. With diagonal curvature (`kfs.factors.exact_diagonal`) this is Fisher merging (Matena &
    Raffel, 2022); with `KFAC(risk, fisher="forward-only")`, it is RegMean (Jin et al., 2023).

    Blocks are solved one by one. There is a closed form if curvature is diagonal or dense, or a Kronecker product with
    an identity factor (RegMean). For up to two models with `"factored"` damping, there is one for any Kronecker
    product. Other systems are solved using conjugate gradients. The models are not changed.

    Args:
        models: At least two modules with the same architecture, in evaluation mode. They should have a common ancestor:
            models that were trained from different initial values have no path of low loss between them.
        curvatures: One symmetric operator for each model: `KFAC`, `EKFAC`, `GGN`, or any other one on its parameters,
            computed on the data that the model is good at. Curvatures of mean losses weight all models equally;
            curvatures of sums weight all examples equally.
        damping: Damping to add to each curvature: a number, `kfs.Relative` to the mean eigenvalue of each block (by
            default one percent of it), or one of these for each block, by name. An operator without blocks counts as
            one block, `"all parameters"`; its trace is estimated.
        weights: Weight of each model, not negative. By default, all weights are equal.
        buffers: How to merge buffers that differ between models. `"average"` averages them, and adds up numbers of
            batches. `"recompute"` computes the statistics of BatchNorm from `data`, and averages all other buffers.
        data: For `"recompute"`: batches of inputs, of pairs (inputs, targets) or of mappings; targets are not used.
        method: How curvature is damped, as in `K.inverse`. `"exact"` is the formula above, for every operator.
            `"factored"` and `"per-factor"` add damping to both factors of Kronecker products, which damps more than the
            formula. For two models, there is a closed form then. Other blocks and operators do not support them.
        preconditioner: For operators without blocks: a `KFAC` for each model, which makes conjugate gradients faster.
            `KFAC` and `EKFAC` provide their own preconditioner.
        tolerance: Largest residual of a block, relative to its right-hand side. By default 1e-6 in float64, and the
            root of the precision otherwise: 3.5e-4 in float32.
        max_iterations: Limit for conjugate gradients, for each block.
        progress: Whether to show progress. By default, it is shown if merging takes longer than two seconds.
        report: Whether to return a report, too.

    Returns:
        A state dict with all entries of the first model's state dict, on its devices. Parameters that no curvature
        covers are averaged; a warning names the ones that differ between models. With `report`, also a `MergeReport`.

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
    # Check all arguments before the first computation.
    began = perf_counter()
    given = check_models(models)
    operators = check_curvatures(curvatures, given, "curvatures")
    numbers = check_weights(weights, len(given))
    options = Options(damping, method, tolerance, max_iterations, progress)
    check_buffers(buffers, data, given)
    near: Sequence[BlockDiagonal | None] = [None] * len(given)
    if preconditioner is not None:
        near = check_preconditioner(check_curvatures(preconditioner, given, "preconditioner"), operators)

    # Omit models with a weight of zero, so that sums have fewer terms.
    sources = {i: Source(given[i], operators[i], near[i], weight) for i, weight in enumerate(numbers) if weight > 0}
    found, blocks = _merged_parameters(sources, options)
    # Complete the state dict with entries that are not determined by curvature.
    state, averaged, done = _state_dict(given, numbers, found)
    if data is not None:
        statistics = recomputed(given[0], state, data, progress)
        state.update(statistics)
        done |= dict.fromkeys(statistics, "recomputed")
    # Warn about entries that the merge cannot determine.
    if averaged:
        warn(
            f"No curvature covers the parameters {few(averaged)}, which differ between models. They are averaged.",
            KfsWarning,
            stacklevel=2,
        )
    unsaved = not_saved(given)
    if unsaved:
        warn(
            f"The buffers {few(unsaved)} differ between models, and are not in the state dict (persistent=False). A "
            "model that loads the result keeps its own values. Use equal values, unless the models recompute them.",
            KfsWarning,
            stacklevel=2,
        )
    made = MergeReport(tuple(blocks), tuple(numbers), tuple(averaged), done, perf_counter() - began, method)
    return (state, made) if report else state


def _merged_parameters(sources: Mapping[int, Source], options: Options) -> tuple[dict[str, Tensor], list[MergedBlock]]:
    """Return the solutions of all systems, given the models by index."""
    with show_progress("merging", None, options.progress, "block") as line:
        curvatures = _damped(sources, options)
        close = [approximation(source, curvatures[i]) for i, source in sources.items()]
        domain = next(iter(sources.values())).curvature.domain
        space = Space(domain.shapes, next(iter(curvatures.values())).dtype, domain.device)
        values = {i: _values(source.model, space) for i, source in sources.items()}
        total = sum(source.weight for source in sources.values())
        share = {i: source.weight / total for i, source in sources.items()}
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


def _damped(sources: Mapping[int, Source], options: Options) -> dict[int, Damped]:
    """Return damped and weighted curvatures: block by block, if all of them have blocks."""
    have_blocks = all(isinstance(source.curvature, BlockDiagonal) for source in sources.values())
    result: dict[int, Damped] = {}
    for i, source in sources.items():
        C = source.curvature
        with naming(f"curvatures[{i}]"):
            if have_blocks and isinstance(C, BlockDiagonal):
                result[i] = DampedBlocks(C, options.damping, options.method, source.weight)
            elif options.method != "exact":
                raise ModelError(
                    f"method is {options.method!r}, but not all curvatures have blocks, so there are no factors to "
                    "damp.",
                    "Use method='exact', the default.",
                )
            else:
                result[i] = DampedOperator(C, options.damping, source.weight, options.progress)
    return result


def _values(model: nn.Module, space: Space) -> dict[str, Tensor]:
    """Return the parameters that curvature covers, with its dtype and device."""
    params = dict(model.named_parameters())
    return {name: params[name].detach().to(space.device, space.dtype) for name in space.shapes}


def _state_dict(
    models: Sequence[nn.Module], weights: Sequence[float], found: dict[str, Tensor]
) -> tuple[State, list[str], dict[str, str]]:
    """Return the merged state dict, the parameters that were averaged, and how buffers were merged."""
    states = [model.state_dict() for model in models]
    first_names = tied(models[0])
    state = models[0].state_dict()  # keeps PyTorch's metadata about versions
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
