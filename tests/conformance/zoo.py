"""Wrong implementations of KFAC, each with one bug, and for each the check and the hint that must report it."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kfs.conformance.adapters.kfs import compute as right
from kfs.conformance.models import Hidden, Ragged, Rows
from kfs.factors import KFAC
from kfs.problem.risk import EmpiricalRisk

Pairs = dict[str, Any]


@dataclass(frozen=True)
class Wrong:
    """An implementation with a bug.

    Attributes:
        compute: The implementation.
        check: Part of the name of a check that must reject it.
        hint: A part of its hint.
        fine: Part of the name of a check that it must still pass.
        status: The status that the check must report.
    """

    compute: Callable[..., Any]
    check: str
    hint: str
    fine: str | None = None
    status: str = "silently wrong"


def num_data(data: Any) -> int:
    return sum(len(X) for X, _ in data)


def scaled(factor: Callable[..., float]) -> Callable[..., Any]:
    """Scale gradient-based factors by a number that depends on the setting."""

    def compute(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
        answer = right(model, loss, data, fisher, sharing)
        c = factor(model, loss, data)
        return {
            name: [(A, c * B) for A, B in pair] if isinstance(pair, list) else (pair[0], c * pair[1])
            for name, pair in answer.items()
        }

    return compute


def positions(_: Any, __: Any, data: Any) -> float:
    X = data[0][0]
    return float(X.shape[1]) if X.ndim == 3 else 1.0


def swapped(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
    return {name: pair[::-1] for name, pair in right(model, loss, data, fisher, sharing).items()}


def without_bias(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
    answer = {}
    for name, (A, B) in right(model, loss, data, fisher, sharing).items():
        A = A.clone()  # noqa: PLW2901
        if not name.endswith(".weight"):  # there is a bias
            A[-1], A[:, -1] = 0, 0
        answer[name] = A, B
    return answer


def bias_forgotten(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
    answer = right(model, loss, data, fisher, sharing)
    return {n: (A, B) if n.endswith(".weight") else (A[:-1, :-1], B) for n, (A, B) in answer.items()}


def sum_for_mean(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
    loss = copy.deepcopy(loss)
    loss.reduction = "sum"
    return right(model, loss, data, fisher, sharing)  # type: ignore[no-any-return]


def mean_for_sum(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
    """`reduction="sum"` of the cross-entropy is ignored."""
    if isinstance(loss, nn.CrossEntropyLoss):
        loss = copy.deepcopy(loss)
        loss.reduction = "mean"
    return right(model, loss, data, fisher, sharing)  # type: ignore[no-any-return]


def by_hooks(model: Any, loss: Any, data: Any, fisher: str, _: str) -> Pairs:
    """A plain KFAC with hooks that treats all rows of a layer as examples, and keeps its outputs for differentiation.

    If activations work in place, some outputs have been overwritten by then. And rows may be padding.
    """
    kept: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda __, inputs, output: kept.update({name: (inputs[0].detach(), output)})

    risk = EmpiricalRisk(model, loss, data)
    hooks = [m.register_forward_hook(keep(name)) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    try:
        sums: dict[str, list[Any]] = {}
        for X, y in data:
            f = model(X)
            if fisher == "empirical":
                vectors = risk.loss.gradient(f.detach(), y).unsqueeze(0)
            else:
                vectors = risk.loss.hessian_factor(f.detach(), y)
            for name, (x, z) in kept.items():
                G = torch.stack([torch.autograd.grad(f, z, v, retain_graph=True)[0] for v in vectors]).flatten(0, -2)
                x = torch.cat([x, torch.ones_like(x[..., :1])], -1).flatten(0, -2)  # noqa: PLW2901
                A, B, rows = sums.get(name, [0.0, 0.0, 0])
                sums[name] = [A + x.T @ x, B + G.T @ G, rows + len(x)]
    finally:
        for hook in hooks:
            hook.remove()
    return {name: (risk.reduction_factor * A, B / rows) for name, (A, B, rows) in sums.items()}


def full_backward_hooks(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
    """PyTorch does not allow overwriting the output of a module with a full backward hook."""
    hooks = [m.register_full_backward_hook(lambda *_: None) for m in model.modules() if isinstance(m, nn.Linear)]
    try:
        for X, y in data:
            loss(model(X.clone().requires_grad_()), y)
    finally:
        for hook in hooks:
            hook.remove()
    return right(model, loss, data, fisher, sharing)  # type: ignore[no-any-return]


def gradients_of_a_mean(_: Any, loss: Any, data: Any) -> float:
    """The mean loss was differentiated, and its factor 1/N was not undone."""
    return 1 / num_data(data) if loss.reduction == "mean" else 1.0


def labels_for_draws(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
    return right(model, loss, data, "empirical" if fisher == "mc" else fisher, sharing)  # type: ignore[no-any-return]


def uncorrected_draws(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Any:
    """Two draws for every example are summed up, not averaged."""
    K = KFAC(EmpiricalRisk(model, loss, data), fisher, sharing, mc_samples=2)  # type: ignore[arg-type]
    twice = 2.0 if fisher == "mc" else 1.0
    answer: dict[str, Any] = {}
    for name, b in K.blocks.items():
        answer[name] = (b.A, twice * b.B) if b.layout.groups == 1 else list(zip(b.A, b.B, strict=True))
    return answer


def unfolded_wrongly(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
    """Kernel places before channels."""
    answer = right(model, loss, data, fisher, sharing)
    for name, pair in answer.items():
        weight = model.get_submodule(name).weight
        if weight.ndim > 2 and not isinstance(pair, list):
            A, B = pair
            order = torch.arange(weight[0].numel()).reshape(weight.shape[1], -1).T.flatten()
            order = torch.cat([order, torch.arange(len(order), len(A))])
            answer[name] = A[order][:, order], B
    return answer  # type: ignore[no-any-return]


def groups_averaged(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
    answer = right(model, loss, data, fisher, sharing)
    for name, pair in answer.items():
        if isinstance(pair, list):
            average = torch.stack([A for A, _ in pair]).mean(0)
            answer[name] = [(average, B) for _, B in pair]
    return answer  # type: ignore[no-any-return]


def zero_padding(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
    """Factors of the model as if all convolutions were padded with zeros."""
    other = copy.deepcopy(model)
    for module in other.modules():
        if isinstance(module, nn.Conv2d):
            module.padding_mode = "zeros"
    return right(other, loss, data, fisher, sharing)  # type: ignore[no-any-return]


def ignored_labels_count(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
    """Ignored labels are replaced by others, though a mean divides by the number of labels that count."""
    if getattr(loss, "ignore_index", -100) != -1:
        return right(model, loss, data, fisher, sharing)  # type: ignore[no-any-return]
    counted = sum(int((y != -1).sum()) for _, y in data)
    R = 1 / counted if loss.reduction == "mean" else 1.0
    summed = nn.CrossEntropyLoss(reduction="sum")
    label = next(int(y[y != -1][0]) for _, y in data if (y != -1).any())
    answer = right(model, summed, [(X, torch.where(y == -1, label, y)) for X, y in data], fisher, sharing)
    return {name: (R * A, B) for name, (A, B) in answer.items()}


def always_expand(model: Any, loss: Any, data: Any, fisher: str, _: str) -> Pairs:
    return right(model, loss, data, fisher, "expand")  # type: ignore[no-any-return]


def last_call_only(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
    """A hook overwrites the inputs of an earlier call: half of the positions are lost."""
    answer = right(model, loss, data, fisher, sharing)
    if any(name.startswith("first") for name, _ in model.named_parameters()):
        answer = {name: (A - torch.diag(A.diagonal()) / 2, B) for name, (A, B) in answer.items()}
    return answer  # type: ignore[no-any-return]


def mean_of_batches(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
    parts = [right(model, loss, [batch], fisher, sharing) for batch in data]
    return {name: tuple(sum(part[name][side] for part in parts) / len(parts) for side in (0, 1)) for name in parts[0]}


def cleans_nan(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
    return right(model, loss, [(X.nan_to_num(), y) for X, y in data], fisher, sharing)  # type: ignore[no-any-return]


def leaves_eval_mode(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
    model.eval()
    return right(model, loss, data, fisher, sharing)  # type: ignore[no-any-return]


def leaves_gradients(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
    for X, y in data:
        loss(model(X), y).backward()
    return right(model, loss, data, fisher, sharing)  # type: ignore[no-any-return]


def leaves_hooks(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
    next(model.children()).register_forward_pre_hook(lambda *_: None)
    return right(model, loss, data, fisher, sharing)  # type: ignore[no-any-return]


def seeds(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
    torch.manual_seed(42)
    return right(model, loss, data, fisher, sharing)  # type: ignore[no-any-return]


def first_layer_only(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
    name, pair = next(iter(right(model, loss, data, fisher, sharing).items()))
    return {name: pair}


def rows_are_data(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
    """A hook that sees a matrix of rows treats every row as an example, so there are no positions to sum over."""
    sees_rows = isinstance(model, Rows | Ragged)
    return right(model, loss, data, fisher, "expand" if sees_rows else sharing)  # type: ignore[no-any-return]


def padding_counts(model: Any, __: Any, data: Any) -> float:
    """The mean over positions divides by the padded length, and so counts positions that an example does not have."""
    if not isinstance(model, Ragged):
        return 1.0
    X = torch.cat([X for X, _ in data])
    return float((X[..., -1] > 0).double().mean())


def mixed_up(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
    """The first rows are assigned to the first example, although rows may have any order."""
    if not isinstance(model, Rows) or model.order != "mixed" or sharing == "expand":
        return right(model, loss, data, fisher, sharing)  # type: ignore[no-any-return]
    others = [(X.flatten(0, 1)[mixed_order(X)].unflatten(0, X.shape[:2]), y) for X, y in data]
    other = copy.deepcopy(model)
    other.order = "folded"
    return right(other, loss, others, fisher, sharing)  # type: ignore[no-any-return]


def mixed_order(X: Tensor) -> Tensor:
    return torch.arange(X.shape[0] * X.shape[1]).reshape(X.shape[:2]).T.flatten().flip(0)


def axes_are_data(model: Any, _: Any, data: Any) -> float:
    """A further axis of the prediction is treated as further examples, and averaged."""
    last = list(model.children())[-1]
    return 1 / data[0][1].shape[1] if isinstance(last, nn.Unflatten) else 1.0


def copies_are_parameters(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
    """Every example has a table of its own, and the curvature of the tables is averaged."""
    answer = right(model, loss, data, fisher, sharing)
    return answer | {n: (A / num_data(data), B) for n, (A, B) in answer.items() if n == "table"}  # type: ignore[no-any-return]


def hidden_use_ignored(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
    """Uses that no hook sees are left out without a warning."""
    if isinstance(model, Hidden):
        layer = nn.Sequential(copy.deepcopy(model.linear))
        answer = right(layer, loss, [(X[:, :4], y) for X, y in data], fisher, sharing)
        return {name.replace("0.", "linear."): pair for name, pair in answer.items()}
    return right(model, loss, data, fisher, sharing)  # type: ignore[no-any-return]


def columns(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Tensor:
    """The matrix, with every weight flattened column by column."""
    return KFAC(EmpiricalRisk(model, loss, data), fisher, sharing).to_dense("cvec")  # type: ignore[arg-type]


ZOO: dict[str, Wrong] = {
    "scaled by N": Wrong(
        scaled(lambda _, __, data: num_data(data)),
        "exact: deep linear net, mse mean",
        "too large by N = 5",
        "exact: one example, mse",
    ),
    "scaled by S": Wrong(
        scaled(positions), "exact: independent positions, mse mean", "too large by S = 7", "exact: one example, mse"
    ),
    "swapped": Wrong(swapped, "exact: one example, mse", "they are swapped", status="unreadable"),
    "bias entries zero": Wrong(
        without_bias, "exact: one example, mse", "Entries of the bias are missing", "exact: one example, no bias"
    ),
    "bias forgotten": Wrong(
        bias_forgotten,
        "exact: one example, mse",
        "no row for the bias",
        "exact: one example, no bias",
        status="unreadable",
    ),
    "sum for mean": Wrong(
        sum_for_mean,
        "exact: deep linear net, mse mean",
        "this is the curvature of the summed loss, and reduction='mean' was asked for",
        "exact: deep linear net, mse sum",
    ),
    "mean for sum, several labels": Wrong(
        mean_for_sum,
        "exact: sum over positions, several labels, ce sum",
        "this is the curvature of the averaged loss, and reduction='sum' was asked for",
        "exact: sum over positions, several labels, ce mean",
    ),
    "mean for sum, class weights": Wrong(
        mean_for_sum,
        "exact: one example, class weights, ce, class weights sum",
        "this is the curvature of the averaged loss, and reduction='sum' was asked for",
        "exact: deep linear net, mse sum",
    ),
    "mean for sum, relation": Wrong(
        mean_for_sum,
        "relation: mean and sum",
        "factors of the mean and the sum of ce are the same",
        "relation: order of data",
    ),
    "outputs that are overwritten": Wrong(
        by_hooks,
        "exact: one example, activations in place",
        "the derivative of the activation is missing",
        "exact: one example, mse mean",
    ),
    "hooks that refuse to be overwritten": Wrong(
        full_backward_hooks,
        "exact: one example, activations in place",
        "is being modified inplace",
        "exact: one example, mse mean",
        status="failed",
    ),
    "averaged loss": Wrong(
        scaled(gradients_of_a_mean),
        "exact: deep linear net, mse mean",
        "too small by N = 5: the number of examples. An averaged loss was differentiated",
    ),
    "labels instead of draws": Wrong(
        labels_for_draws,
        "draws: one example, ce",
        "the labels at hand were used where labels must be drawn",
        "exact: one example, ce mean, type-2",
    ),
    "uncorrected draws": Wrong(
        uncorrected_draws, "draws: deep linear net", "too large by 2", "exact: one example, ce mean, type-2"
    ),
    "unfolded wrongly": Wrong(
        unfolded_wrongly, "exact: convolution, mse", "kernel places come before channels", "exact: one example, mse"
    ),
    "groups averaged": Wrong(
        groups_averaged, "exact: groups of channels", "each group needs its own", "exact: convolution, mse"
    ),
    "zero padding": Wrong(
        zero_padding,
        "exact: circular padding",
        "padded with zeros, whatever padding_mode says",
        "exact: convolution, averaged",
    ),
    "expand for reduce": Wrong(
        always_expand,
        "exact: sum over positions at the end",
        "This is weight sharing 'expand'",
        "exact: independent positions",
    ),
    "ignored labels": Wrong(
        ignored_labels_count, "exact: one example that counts", "ignored labels contribute", "exact: one example, ce"
    ),
    "last call only": Wrong(last_call_only, "exact: called twice, results added", "not a known mistake"),
    "mean of batches": Wrong(
        mean_of_batches, "relation: split into batches", "relative error", "exact: one example, ce"
    ),
    "NaN is cleaned": Wrong(cleans_nan, "relation: NaN", "all factors are finite", "exact: one example, ce"),
    "eval mode": Wrong(leaves_eval_mode, "state: untouched", "train and eval modes", "exact: one example, ce"),
    "gradients": Wrong(leaves_gradients, "state: untouched", "gradients", "exact: one example, ce"),
    "hooks": Wrong(leaves_hooks, "state: untouched", "hooks of modules", "exact: one example, ce"),
    "seeds": Wrong(seeds, "state: untouched, type-2", "random state", "exact: one example, ce"),
    "padding is data": Wrong(
        by_hooks,
        "exact: one position, padded, ce, padding sum, type-2, expand",
        "Padded rows are counted: their inputs are in the input-based factor, and their number",
        "exact: one example, ce",
    ),
    "padding is data, several sequences": Wrong(
        by_hooks,
        "relation: padded sequences",
        "Padded rows are counted: their inputs are in the input-based factor, and their number",
        "exact: one example, ce",
    ),
    "a layer missing": Wrong(first_layer_only, "exact: one example, ce", "nothing about the parameters"),
    "rows are data": Wrong(
        rows_are_data,
        "exact: folded positions, summed up",
        "This is weight sharing 'expand'",
        "exact: folded positions, mse",
    ),
    "ragged rows are data": Wrong(
        rows_are_data,
        "exact: ragged data, summed up",
        "This is weight sharing 'expand'",
        "exact: sum over positions at the end",
    ),
    "mixed up": Wrong(
        mixed_up, "exact: rows of mixed data, summed up", "relative error", "exact: folded positions, summed up"
    ),
    "padding counts": Wrong(
        scaled(padding_counts), "exact: ragged data, mse", "right up to a scale of 0.", "exact: independent positions"
    ),
    "output axes are data": Wrong(
        scaled(axes_are_data),
        "exact: sum over positions, two output axes",
        "too small by 2",
        "exact: sum over positions at the end",
    ),
    "copies are parameters": Wrong(
        copies_are_parameters, "exact: a repeated table", "too small by N = 5", "exact: independent positions"
    ),
    "hidden use ignored": Wrong(
        hidden_use_ignored, "exact: a use in a custom function", "relative error", "exact: two modules with one weight"
    ),
    "other flattening": Wrong(columns, "exact: one example, no bias, mse", "column by column"),
}


def compute_or_refuse(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Pairs:
    """Not a wrong implementation: it reports the settings that it does not support."""
    if isinstance(loss, nn.MSELoss):
        raise NotImplementedError("no square loss")
    return right(model, loss, data, fisher, sharing)  # type: ignore[no-any-return]
