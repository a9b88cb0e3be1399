"""The checks of the kit: factors where KFAC is exact, Monte Carlo convergence, relations, and the user's state.

The cases live in `kfs.conformance.cases`, the causes of failures in `kfs.conformance.diagnosis`.

- `exact` checks compare an implementation with the definitions where KFAC has no error.
- `draws` checks do so for the Monte Carlo Fisher.
- `relation` checks compare an implementation with itself.
- `state` checks verify that it leaves the user's state unchanged.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from kfs.conformance import tolerances
from kfs.conformance.adapter import Adapter, Answer, UnreadableError, read
from kfs.conformance.case import Case, Setting
from kfs.conformance.cases import APPROXIMATE, EXACT, PADDED
from kfs.conformance.diagnosis import Facts, diagnose, padding_counted, suspects
from kfs.conformance.exact import exact_empirical_fisher, exact_ggn

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
)


def fingerprint(model: nn.Module, with_random_state: bool) -> dict[str, Any]:
    """Return all state that a call must not change, by description."""
    modules, params = dict(model.named_modules()), dict(model.named_parameters())
    found: dict[str, Any] = {
        "modules (layers were wrapped or replaced)": {name: id(module) for name, module in modules.items()},
        "train and eval modes": {name: module.training for name, module in modules.items()},
        "hooks of modules": {name: [len(getattr(module, kind)) for kind in _HOOKS] for name, module in modules.items()},
        "hooks of parameters": {name: len(p._backward_hooks or ()) for name, p in params.items()},
        "requires_grad of parameters": {name: p.requires_grad for name, p in params.items()},
        "values of parameters": {name: _content(p) for name, p in params.items()},
        "values of buffers": {name: _content(b) for name, b in model.named_buffers()},
        "gradients": {name: None if p.grad is None else _content(p.grad) for name, p in params.items()},
        "attributes of modules": {name: sorted(vars(module)) for name, module in modules.items()},
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
    }
    if with_random_state:
        found["random state (nothing random was asked for)"] = _content(torch.get_rng_state())
    return found


def _content(t: torch.Tensor) -> Any:
    return t.detach().cpu().flatten().tolist()


class CheckError(Exception):
    """Raised if a check fails. The message says what is wrong, and the probable cause."""


@dataclass(frozen=True)
class Check:
    """A check of an implementation.

    Attributes:
        name: Unique name.
        tags: Tags for the kind of check, fisher, sharing, layer, loss, reduction, and the case.
        bug: The bug that a failure indicates.
        run: Runs the check. It raises `CheckError`, `UnreadableError`, or any error of the implementation.
    """

    name: str
    tags: frozenset[str]
    bug: str
    run: Callable[[Adapter], None]


def ask(adapter: Adapter, setting: Setting, fisher: str, sharing: str, case: Case | None = None) -> Answer:
    """Compute factors with an implementation, and convert them to dense blocks.

    Raises:
        UnreadableError: If the answer has an invalid format.
    """
    answer = adapter.compute(setting.model, setting.loss, setting.data, fisher, sharing)
    return read(answer, setting.model, None if case is None else case.tied, adapter.flattening)


def checks() -> list[Check]:
    """Return all checks."""
    return [*_exact_checks(), *_monte_carlo_checks(), *_relation_checks(), *_state_checks()]


def _exact_checks() -> Iterator[Check]:
    for case in EXACT:
        for loss in case.losses:
            for reduction in case.reductions:
                for fisher in case.fishers:
                    if fisher == "empirical" and loss == "mse":
                        continue  # the likelihood of the square loss is a convention, with a factor of two
                    for sharing in case.sharings:
                        yield Check(
                            f"exact: {case.name}, {loss} {reduction}, {fisher}, {sharing}",
                            frozenset({"exact", fisher, sharing, case.layer, loss, reduction, case.name}),
                            f"{case.why} Therefore KFAC equals the exact curvature here, but yours does not.",
                            partial(_is_exact, case, loss, reduction, fisher, sharing),
                        )


def _is_exact(case: Case, loss: str, reduction: str, fisher: str, sharing: str, adapter: Adapter) -> None:
    setting = case.setting(loss, reduction)
    try:
        answer = ask(adapter, setting, fisher, sharing, case)
    except (NotImplementedError, UnreadableError):
        raise
    except Exception:
        if case.may_refuse:
            return
        raise
    _all_there(answer, setting.model)
    for params, block in answer.blocks.items():
        expected = _exact(setting, params, fisher)
        block, expected = (_within_groups(t, params, setting, case.within_groups) for t in (block, expected))  # noqa: PLW2901
        facts = partial(_facts, case, setting, params, fisher, sharing)
        _compare(adapter, params, block, expected, tolerances.ROUND_OFF, facts)


def _monte_carlo_checks() -> Iterator[Check]:
    for name, loss in (("deep linear net", "mse"), ("one example", "ce")):
        case = next(c for c in EXACT if c.name == name)
        for sharing in case.sharings:
            yield Check(
                f"draws: {case.name}, {loss}, {sharing}",
                frozenset({"draws", "mc", sharing, case.layer, loss, "mean"}),
                "With many draws, the Monte Carlo Fisher converges to the type-II Fisher, but yours does not.",
                partial(_converges, case, loss, sharing),
            )


def _converges(case: Case, loss: str, sharing: str, adapter: Adapter) -> None:
    setting = case.setting(loss, "mean")
    X, y = (torch.cat(parts) for parts in zip(*setting.data, strict=True))
    # Repeat the data, so that labels are drawn many times.
    times = -(-tolerances.MC_REPEATS // len(X))
    many = replace(setting, data=[(torch.cat([X] * times), torch.cat([y] * times))])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        answer = ask(adapter, many, "mc", sharing)
    _all_there(answer, setting.model)
    for params, block in answer.blocks.items():
        expected = _exact(setting, params, "type-2")
        labels = "This is the empirical Fisher: the labels at hand were used where labels must be drawn from the model."
        others = {labels: _exact(setting, params, "empirical")}
        facts = partial(Facts, {"N": len(X) * times} | _outputs(case, setting.loss), others, tolerances.MC)
        _compare(adapter, params, block, expected, tolerances.MC, facts)


def _relation_checks() -> Iterator[Check]:
    relations: dict[str, tuple[Callable[..., None], str]] = {
        "mean and sum": (
            _mean_and_sum,
            "The curvature of a mean is the curvature of the sum divided by the number of terms. The reduction is "
            "probably ignored.",
        ),
        "split into batches": (
            _split,
            "Results must not depend on how data are split into batches. An average over batches is wrong if their "
            "sizes differ.",
        ),
        "order of data": (_order, "Results must not depend on the order of data."),
        "repeated data": (_repeated, "If the data are repeated, a mean stays the same, and a sum doubles."),
        "expand and reduce": (
            _no_sharing,
            "If no positions share a weight, both variants of weight sharing are the same.",
        ),
        "NaN": (_nan, "NaN in the data gives finite factors, so values are probably filtered or clamped."),
    }
    # These relations are checked with the case `APPROXIMATE`.
    for name, (function, bug) in relations.items():
        for fisher in ("type-2", "empirical"):
            tags = frozenset({"relation", fisher, "expand", "linear", name})
            tags |= {"reduce"} if name == "expand and reduce" else set()
            yield Check(f"relation: {name}, {fisher}", tags | {"ce"}, bug, partial(function, fisher))

    # Padding needs a case with sequences.
    for fisher in PADDED.fishers:
        yield Check(
            f"relation: {PADDED.name}, {fisher}",
            frozenset({"relation", fisher, "expand", PADDED.layer, PADDED.name, "ce"}),
            f"{PADDED.why} Therefore results must equal those of the same sequences without padding, one per batch.",
            partial(_padding, fisher),
        )


def _padding(fisher: str, adapter: Adapter) -> None:
    padded = PADDED.setting("ce, padding")
    short, long = (ask(adapter, setting, fisher, "expand") for setting in (padded.unpadded(), padded))
    _all_there(short, padded.model)
    for params, block in short.blocks.items():
        counts = {"N": PADDED.num_data, "S": PADDED.positions}
        facts = lambda p=params: Facts(counts, padding_counted(padded, p, fisher, "expand"))  # noqa: B023, E731
        _compare(adapter, params, long.blocks[params], block, tolerances.REORDERED, facts)


def _mean_and_sum(fisher: str, adapter: Adapter) -> None:
    for loss, terms in (("ce", APPROXIMATE.num_data), ("mse", APPROXIMATE.num_data * APPROXIMATE.outputs[0])):
        mean, total = (
            ask(adapter, APPROXIMATE.setting(loss, reduction), fisher, "expand") for reduction in ("mean", "sum")
        )
        for params, block in mean.blocks.items():
            same = {
                f"The reduction was ignored: factors of the mean and the sum of {loss} are the same.": block / terms
            }
            facts = partial(Facts, _scales(loss).counts, same)
            _compare(adapter, params, total.blocks[params] / terms, block, tolerances.ROUND_OFF, facts)


def _split(fisher: str, adapter: Adapter) -> None:
    setting = APPROXIMATE.setting("ce", "mean")
    uneven = replace(APPROXIMATE, batches=(1, 3, 2)).setting("ce", "mean")
    _agree(adapter, fisher, setting, uneven)


def _order(fisher: str, adapter: Adapter) -> None:
    setting = APPROXIMATE.setting("ce", "mean")
    _agree(adapter, fisher, setting, replace(setting, data=[(X.flip(0), y.flip(0)) for X, y in setting.data]))


def _repeated(fisher: str, adapter: Adapter) -> None:
    for reduction, factor in (("mean", 1.0), ("sum", 2.0)):
        setting = APPROXIMATE.setting("ce", reduction)
        twice = replace(setting, data=[(torch.cat([X, X]), torch.cat([y, y])) for X, y in setting.data])
        _agree(adapter, fisher, setting, twice, factor)


def _no_sharing(fisher: str, adapter: Adapter) -> None:
    setting = APPROXIMATE.setting("ce", "mean")
    one, other = (ask(adapter, setting, fisher, sharing) for sharing in ("expand", "reduce"))
    for params, block in one.blocks.items():
        _compare(adapter, params, other.blocks[params], block, tolerances.ROUND_OFF, _scales)


def _nan(fisher: str, adapter: Adapter) -> None:
    setting = APPROXIMATE.setting("ce", "mean")
    X, y = setting.data[0]
    X = X.clone()
    X[0, 0] = torch.nan
    try:
        answer = ask(adapter, replace(setting, data=[(X, y)]), fisher, "expand")
    except (NotImplementedError, UnreadableError):
        raise
    except Exception:  # noqa: BLE001 (an error is the best answer)
        return
    if all(block.isfinite().all() for block in answer.blocks.values()):
        raise CheckError("An input is NaN, but all factors are finite.")


def _agree(adapter: Adapter, fisher: str, one: Setting, other: Setting, factor: float = 1.0) -> None:
    """Compare answers for two settings, block by block."""
    first, second = (ask(adapter, setting, fisher, "expand") for setting in (one, other))
    for params, block in first.blocks.items():
        _compare(adapter, params, second.blocks[params], factor * block, tolerances.REORDERED, _scales)


def _state_checks() -> Iterator[Check]:
    for fisher in ("type-2", "mc", "empirical"):
        yield Check(
            f"state: untouched, {fisher}",
            frozenset({"state", fisher, "expand", "linear", "ce"}),
            "The call must not change the user's model or the global state, which the user's code relies on.",
            partial(_untouched, fisher),
        )


def _untouched(fisher: str, adapter: Adapter) -> None:
    setting = APPROXIMATE.setting("ce", "mean")
    model = setting.model
    model[0].weight.grad = torch.ones_like(model[0].weight)  # type: ignore[index]
    model[2].train()  # type: ignore[index]
    model[0].register_forward_hook(_hook)  # type: ignore[index]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.rand(3)  # advance the generator, so that `manual_seed` in the implementation is detected
        before = fingerprint(model, with_random_state=fisher != "mc")
        adapter.compute(model, setting.loss, setting.data, fisher, "expand")
        after = fingerprint(model, with_random_state=fisher != "mc")
    changed = [name for name, value in before.items() if after[name] != value]
    if changed:
        raise CheckError(f"Changed by the call: {', '.join(changed)}.")


def _hook(*_: Any) -> None:
    """Stand in for a hook of the user."""


def _exact(setting: Setting, params: Sequence[str], fisher: str) -> Tensor:
    """Return the exact block, computed from the definitions."""
    X, y = (torch.cat(parts) for parts in zip(*setting.data, strict=True))
    definition = exact_empirical_fisher if fisher == "empirical" else exact_ggn
    return definition(copy.deepcopy(setting.model), setting.loss, X, y, params)  # type: ignore[arg-type]


def _all_there(answer: Answer, model: nn.Module) -> None:
    """Raise `CheckError` if the answer lacks parameters."""
    there = {name for params in answer.blocks for name in params}
    missing = [name for name, p in model.named_parameters() if p.requires_grad and name not in there]
    if missing:
        raise CheckError(f"There is nothing about the parameters {missing}.")


def _within_groups(block: Tensor, params: Sequence[str], setting: Setting, groups: int) -> Tensor:
    """Set entries between different groups of channels to zero."""
    first = next(name for name, _ in setting.model.named_parameters())
    if groups == 1 or first not in params:
        return block
    group_of = []
    for name in params:
        p = setting.model.get_parameter(name)
        channel = torch.arange(len(p)).reshape(-1, *[1] * (p.ndim - 1)).expand_as(p)
        group_of.append((channel * groups // len(p)).flatten())
    index = torch.cat(group_of)
    return torch.where(index.unsqueeze(0) == index.unsqueeze(1), block, 0)


def _facts(case: Case, setting: Setting, params: Sequence[str], fisher: str, sharing: str) -> Facts:
    """Return facts and suspects for a diagnosis. Suspects take time, so this is only called after a failure."""
    num_data = sum(len(X) for X, _ in setting.data)
    counts = {"N": num_data, "S": case.positions} | _outputs(case, setting.loss)
    # Suspects are computed with our own KFAC, which raises an error for such a case.
    found = {} if case.may_refuse else suspects(case, setting, params, fisher, sharing)
    return Facts(counts, found)


def _outputs(case: Case, loss: nn.Module) -> dict[str, int]:
    """Return the terms per example that a mean divides by: outputs for a square loss, labels for a cross-entropy."""
    return {"C": prod(case.outputs)} if isinstance(loss, nn.MSELoss) else {"L": prod(case.outputs[1:])}


def _scales(loss: str = "ce") -> Facts:
    return Facts({"N": APPROXIMATE.num_data} | _outputs(APPROXIMATE, APPROXIMATE.setting(loss).loss))


def _compare(
    adapter: Adapter,
    params: Sequence[str],
    actual: Tensor,
    expected: Tensor,
    tolerance: float,
    facts: Callable[[], Facts],
) -> None:
    """Raise `CheckError` with a diagnosis if a block differs from the expected one."""
    tolerance = max(tolerance, tolerances.SINGLE) if adapter.single else tolerance
    error = float((actual - expected).norm() / expected.norm().clamp(min=1e-300))
    if not error <= tolerance:
        name = " and ".join(params)
        raise CheckError(f"{name}: relative error {error:.1e}. {diagnose(actual, expected, facts())}")
