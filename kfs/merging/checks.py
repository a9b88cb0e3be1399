"""What is refused before anything is computed: models and curvatures that do not belong together, bad settings."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from math import isfinite
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from kfs.describing import counted
from kfs.errors import DtypeError, KfsError, ModelError, ShapeError
from kfs.kfac.structures import METHODS, BlockDiagonal
from kfs.names import few
from kfs.operators import LinearOperator
from kfs.operators.computed_at import computed_at, digest_for, warn_of_other_values
from kfs.operators.same_parameters import check_parameters
from kfs.sharded import refuse_sharded
from kfs.state import check_module

_ONE_PROGRAM = "Build all models by the same code."


def check_models(models: object) -> list[nn.Module]:
    """Refuse what is not a list of different modules of one architecture, in evaluation mode.

    Raises:
        ModelError: If architecture, names, modes or values do not fit.
        ShapeError: If shapes differ.
        DtypeError: If dtypes differ, or these are no modules.
    """
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
            raise ModelError(f"Parameter {name!r} has NaN or infinity in it.", "Leave this model out.")


def _check_same_architecture(first: nn.Module, other: nn.Module, place: int) -> None:
    """Compare modules with their settings, entries of state dicts, shapes, dtypes, and which parameters are tied."""
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
    """Compare what no parameter shows: modules without any, and settings such as strides and slopes."""
    modules, others = dict(first.named_modules()), dict(other.named_modules())
    extra = [name for name in (*modules, *others) if name not in modules or name not in others]
    if extra:
        raise ModelError(f"models[0] and models[{place}] do not both have the modules {few(extra)}.", _ONE_PROGRAM)
    for name, module in modules.items():
        # What modules of other libraries print may depend on values. Dropout does nothing in evaluation mode.
        if not type(module).__module__.startswith("torch.nn.") or isinstance(module, _DropoutNd):
            continue
        mine, theirs = module.extra_repr(), others[name].extra_repr()
        if mine != theirs:
            raise ModelError(
                f"Module {name!r} ({type(module).__name__}) has other settings: {mine} in models[0], and {theirs} in "
                f"models[{place}].",
                _ONE_PROGRAM,
            )


def _check_same_kind(name: str, t: Any, other: Any, place: int) -> None:
    if not isinstance(t, Tensor) or not isinstance(other, Tensor):
        return  # an extra state, which may be anything
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
    """Return, for the names of all parameters, the first name of the same parameter."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def check_curvatures(curvatures: object, models: Sequence[nn.Module], what: str) -> list[LinearOperator]:
    """Refuse what is not one symmetric operator per model, on parameters of this model.

    Args:
        curvatures: As the user gave them.
        models: They were checked.
        what: What the argument is called.

    Raises:
        ModelError: If number or parameters do not fit, or a curvature belongs to another model.
        DtypeError: If these are no operators, or dtypes or devices differ.
    """
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
        shapes = {name: p.shape for name, p in model.named_parameters()}
        check_parameters(C, shapes, what=f"{what}[{place}]", owner=f"models[{place}]")
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
            f"{one} and {two} are curvatures of other parameters: {few(only) or 'none'} only in the first one, and "
            f"{few(extra) or 'none'} only in the second one. Both need the same ones, in the same order.",
            "Compute all of them with the same params=.",
        )
    if first.domain.dtype != other.domain.dtype or first.device != other.device:
        raise DtypeError(
            f"{one} is {first.dtype} on {first.device}, but {two} is {other.dtype} on {other.device}.",
            "Convert one of them: K.to(device, dtype), or compute it on the same device.",
        )


def _check_order(C: LinearOperator, models: Sequence[nn.Module], place: int, what: str) -> None:
    """Refuse a curvature that was computed at the parameters of another one of the models, if that is known."""
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
    """Return one weight for each model; refuse others than numbers that are not negative, and zeros alone.

    Raises:
        ModelError: If number, sign or sum do not fit.
        DtypeError: If these are no numbers.
    """
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


def check_settings(method: object, tolerance: object, max_iterations: object) -> None:
    """Refuse settings of the solver that make no sense.

    Raises:
        ModelError: If one of them is not allowed.
    """
    if method not in METHODS:
        raise ModelError(f"method is {method!r}.", f"Choose from {', '.join(map(repr, METHODS))}.")
    if tolerance is not None and not (isinstance(tolerance, (int, float)) and 0 < tolerance < 1):
        raise ModelError(f"tolerance is {tolerance!r}.", "Use a number between 0 and 1, or leave it out.")
    if type(max_iterations) is not int or max_iterations < 1:
        raise ModelError(f"max_iterations is {max_iterations!r}.", "Use a positive integer.")


def check_preconditioner(found: Sequence[LinearOperator], curvatures: Sequence[LinearOperator]) -> list[BlockDiagonal]:
    """Refuse preconditioners that cannot be inverted by blocks, or act on other parameters than curvatures do.

    Raises:
        ModelError: If one has no blocks, or other parameters.
    """
    blocks = [P for P in found if isinstance(P, BlockDiagonal)]
    if len(blocks) < len(found):
        raise ModelError("The preconditioner has operators without blocks.", "Pass a kfs.KFAC for each model.")
    _check_same_space(curvatures[0], blocks[0], "curvatures[0]", "preconditioner[0]")
    return blocks


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Put in front of the cause of an error in this context what it is about."""
    try:
        yield
    except KfsError as error:
        raise type(error)(f"{what}: {error.cause}", error.way_out) from error
