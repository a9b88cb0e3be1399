"""Diagnosis of wrong factors: known bugs, and the factors that each of them would give.

The checks that need a diagnosis live in `kfs.conformance.checks`.

`suspects` computes the block that each known bug would give. `diagnose` compares the wrong block with these blocks, and
with the right block up to a scale or an order of its entries.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kfs.conformance.case import Case, Setting
from kfs.conformance.tolerances import SINGLE
from kfs.factors import KFAC, Block
from kfs.problem.risk import EmpiricalRisk


def suspects(case: Case, setting: Setting, params: Sequence[str], fisher: str, sharing: str) -> dict[str, Tensor]:
    """Return the wrong blocks that known bugs would give, by description of the bug."""
    found: dict[str, Tensor] = {}
    # The wrong kind of Fisher.
    right = _block(setting, params, fisher, sharing)
    others = {"type-2": "empirical", "empirical": "type-2"}
    words = {
        "empirical": "This is the empirical Fisher: labels at hand were used, where the loss's Hessian (or labels "
        "drawn from the model) belong.",
        "type-2": "This is the type-II Fisher, where gradients for the labels at hand belong.",
    }
    other = others[fisher]
    found[words[other]] = _block(setting, params, other, sharing)
    # The wrong kind of weight sharing.
    if case.positions > 1:
        another = "reduce" if sharing == "expand" else "expand"
        found[f"This is weight sharing '{another}', but '{sharing}' was asked for."] = _block(
            setting, params, fisher, another
        )
    found |= _other_reduction(setting, right)
    found |= _behind_activations_in_place(setting, params, fisher, sharing)
    if case.layer == "padding":
        found |= padding_counted(setting, params, fisher, sharing)
    elif isinstance(setting.loss, nn.CrossEntropyLoss):
        y = torch.cat([y for _, y in setting.data])
        counted = int((y != setting.loss.ignore_index).sum())
        if counted < y.numel():
            found["Data with ignored labels contribute as if their labels counted."] = right * y.numel() / counted
    shape = setting.model.get_parameter(params[0]).shape
    weights = shape.numel()
    # Mistakes with the bias.
    if len(params) == 2:
        without = right.clone()
        without[weights:], without[:, weights:] = 0, 0
        found["Entries of the bias are missing: no one was appended to the inputs."] = without
        apart = right.clone()
        apart[:weights, weights:], apart[weights:, :weights] = 0, 0
        found["Weight and bias are right, but nothing is between them, though they are in one block."] = apart
    # Mistakes with convolutions, and with the order of entries.
    if len(shape) > 2:
        found |= _convolution_suspects(case, setting, params, fisher, sharing, right, shape)
    if len(shape) == 2:
        order = torch.arange(weights).reshape(shape).T.flatten()
        order = torch.cat([order, torch.arange(weights, len(right))])
        found["Entries are flattened column by column, and not row by row."] = right[order][:, order]
    return found


def _other_reduction(setting: Setting, right: Tensor) -> dict[str, Tensor]:
    """Return the curvature of the mean if the loss is a sum, and the curvature of the sum if the loss is a mean."""
    loss = copy.deepcopy(setting.loss)
    is_mean = loss.reduction == "mean"
    loss.reduction = "sum" if is_mean else "mean"  # type: ignore[assignment]
    one_datum = sum(len(X) for X, _ in setting.data) == 1
    if isinstance(loss, nn.MSELoss) and is_mean and one_datum:
        return {}  # not distinguishable from a division by the number of examples instead of all entries
    factor = _risk(Setting(setting.model, loss, setting.data)).reduction_factor / _risk(setting).reduction_factor
    asked, other = ("mean", "summed") if is_mean else ("sum", "averaged")
    words = (
        f"The reduction was ignored: this is the curvature of the {other} loss, and reduction='{asked}' was asked for."
    )
    return {} if abs(factor - 1) < SINGLE else {words: factor * right}


def padding_counted(setting: Setting, params: Sequence[str], fisher: str, sharing: str) -> dict[str, Tensor]:
    """Return the blocks if inputs of padded positions are included, if padded positions are counted, or both.

    Padded positions receive no gradient. Hence the sum in the gradient-based factor is right, but it is divided by too
    many positions.
    """
    # Capture the inputs of the layer, with padded positions.
    name = params[0].rpartition(".")[0]
    inputs: list[Tensor] = []
    model = copy.deepcopy(setting.model)
    hook = model.get_submodule(name).register_forward_hook(lambda _, x, __: inputs.append(x[0].detach()))
    for X, _ in setting.data:
        model(X)
    hook.remove()
    short = setting.unpadded()
    joint = len(params) == 2
    K = KFAC(_risk(short), fisher, sharing, joint_bias=joint)  # type: ignore[arg-type]
    block = next(block for block in K.blocks.values() if block.layout.weight == params[0])
    # The input-based factor with padded positions.
    x = torch.cat(inputs)  # [batch, positions, features]
    x = torch.cat([x, torch.ones_like(x[..., :1])], 2) if joint else x
    x = x.sum(1) if sharing == "reduce" else x.flatten(0, 1)
    A = _risk(short).reduction_factor * x.T @ x
    # The gradient-based factor, divided by the number of all positions.
    lengths = torch.tensor([y.shape[1] for _, y in short.data])
    power = 2 if sharing == "reduce" else 1
    places = sum(X.shape[0] * X.shape[1] ** power for X, _ in setting.data)
    B = block.B * float((lengths**power).sum() / places)
    return {
        words: _weight_first(a.unsqueeze(0), b.unsqueeze(0), joint)
        for words, a, b in (
            (
                "Padded rows are counted: their inputs are in the input-based factor, and their number is in the "
                "gradient-based one.",
                A,
                B,
            ),
            ("Padded rows are counted: their inputs are in the input-based factor.", A, block.B),
            ("Padded rows are counted: their number is in the gradient-based factor.", block.A, B),
        )
    }


class _WithoutDerivative(nn.Module):
    """An activation with a derivative that is replaced by one."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.activation(x.clone())
        return x + (out - x).detach()


def _behind_activations_in_place(
    setting: Setting, params: Sequence[str], fisher: str, sharing: str
) -> dict[str, Tensor]:
    """Return the block if the gradient is taken after an activation has overwritten the layer's output."""
    model = copy.deepcopy(setting.model)
    names = [name for name, _ in model.named_children()]
    layer = params[0].partition(".")[0]
    after = names[names.index(layer) + 1 :][:1] if layer in names and isinstance(model, nn.Sequential) else []
    if not after or not getattr(model.get_submodule(after[0]), "inplace", False):
        return {}
    setattr(model, after[0], _WithoutDerivative(model.get_submodule(after[0])))
    words = (
        "The activation behind the layer overwrites its output, and the gradient is that of what was written: the "
        "derivative of the activation is missing. Take the gradient of the output as it was before."
    )
    return {words: _block(Setting(model, setting.loss, setting.data), params, fisher, sharing)}


def _convolution_suspects(
    case: Case,
    setting: Setting,
    params: Sequence[str],
    fisher: str,
    sharing: str,
    right: Tensor,
    shape: torch.Size,
) -> dict[str, Tensor]:
    """Return the blocks that bugs with patches, groups and padding modes would give."""
    found = {}
    # Kernel positions before channels.
    weights, channels, kernel = shape.numel(), shape[1], shape[2:].numel()
    places = torch.arange(weights).reshape(shape[0], channels, kernel)
    order = torch.cat([places.transpose(1, 2).flatten(), torch.arange(weights, len(right))])
    found["Patches are unfolded in another order: kernel places come before channels, and not after them."] = right[
        order
    ][:, order]
    # Factors that are shared between groups of channels.
    if case.within_groups > 1:
        joint = len(params) == 2
        blocks = KFAC(_risk(setting), fisher, sharing, joint_bias=joint).blocks.values()  # type: ignore[arg-type]
        block = next(block for block in blocks if block.layout.weight == params[0])
        average = block.A.mean(0).expand_as(block.A)
        found["Input-based factors of different groups of channels are averaged; each group needs its own."] = (
            _weight_first(average, block.B, joint)
        )
        if joint:
            found["Inputs of different groups of channels are averaged; each group needs its own factor."] = (
                _weight_first(_of_average_input(block).expand_as(block.A), block.B, joint)
            )
    # Zeros in place of another padding mode.
    padded = copy.deepcopy(setting.model)
    circular = [m for m in padded.modules() if isinstance(m, nn.Conv2d) and m.padding_mode != "zeros"]
    for module in circular:
        module.padding_mode = "zeros"
    if circular:
        zeros = Setting(padded, setting.loss, setting.data)
        found["Images are padded with zeros, whatever padding_mode says."] = _block(zeros, params, fisher, sharing)
    return found


def _of_average_input(block: Block) -> Tensor:
    """Return the input-based factor of one example if every group had the mean of all groups' inputs."""
    # With one example, each group's factor has rank one, and its leading eigenvector is the input, up to sign.
    values, vectors = torch.linalg.eigh(block.A)
    inputs = vectors[..., -1] * values[:, -1:].sqrt()
    mean = (inputs * inputs[:, -1:].sign()).mean(0)  # the bias coordinate is positive
    return torch.outer(mean, mean)


def _weight_first(A: Tensor, B: Tensor, joint: bool) -> Tensor:
    """Return the dense block of all groups' factors, with the entries of the bias at the end."""
    dense: Tensor = torch.block_diag(*(torch.kron(b, a) for a, b in zip(A, B, strict=True)))
    index = torch.arange(len(dense)).reshape(B[..., 0].numel(), -1)
    order = torch.cat([index[:, :-1].flatten(), index[:, -1]]) if joint else index.flatten()
    return dense[order][:, order]


def _risk(setting: Setting) -> EmpiricalRisk:
    return EmpiricalRisk(copy.deepcopy(setting.model), setting.loss, setting.data)


def _block(setting: Setting, params: Sequence[str], fisher: str, sharing: str) -> Tensor:
    """Return the dense block of our own KFAC."""
    return KFAC(_risk(setting), fisher, sharing).submatrix(params).to_dense()  # type: ignore[arg-type]


@dataclass(frozen=True)
class Facts:
    """Facts about a setting that a diagnosis uses.

    Attributes:
        counts: Numbers by which a scale may be wrong: `"N"` examples, `"S"` positions, `"C"` outputs of a square loss,
            `"L"` labels per example.
        suspects: Wrong blocks by description of the bug.
        tolerance: Largest relative error at which two blocks count as equal.
    """

    counts: Mapping[str, float]
    suspects: Mapping[str, Tensor] = field(default_factory=dict)
    tolerance: float = SINGLE


_MEANING = {
    "N": "the number of examples. An averaged loss was differentiated and the mean not undone, or a mean over data is "
    "missing or taken twice",
    "N^2": "the number of examples, squared. Both factors were averaged, or none was",
    "S": "the number of shared positions. A mean over positions is missing or taken twice",
    "S^2": "the number of shared positions, squared. `reduce` divides gradients by it once too often, or not at all",
    "N S": "the number of examples times the number of shared positions. A sum over all was taken for a mean, or "
    "the other way round",
    "C": "the number of outputs. `MSELoss` with mean divides by all entries, not by the number of examples",
    "L": "the number of labels of an example. A mean divides by all labels, not by the number of examples",
    "N C": "the number of examples times the number of outputs, by which the mean divides. The reduction was ignored",
    "2": "two. The Hessian of the square loss is two times the identity",
}


def diagnose(actual: Tensor, expected: Tensor, facts: Facts) -> str:
    """Return the probable cause of a wrong block.

    Args:
        actual: The block of the implementation.
        expected: The right block.
        facts: Facts about the setting.

    Returns:
        One or two sentences for the author of the implementation.
    """
    if not actual.isfinite().all():
        return "It contains NaN or infinity."
    if not actual.any():
        return "It is zero: the layer's inputs or gradients were never seen."
    guesses = (*_suspects(actual, facts, scaled=False), *_scale(actual, expected, facts))
    guesses = guesses or (*_suspects(actual, facts, scaled=True), *_places(actual, expected, facts))
    return next(iter(guesses), "This is not a known mistake; compare factors one by one.")


def _suspects(actual: Tensor, facts: Facts, scaled: bool) -> Iterator[str]:
    """Yield the bugs that give this block, up to a scale if `scaled` is set."""
    for bug, suspect in facts.suspects.items():
        factor = _best_scale(actual, suspect) if scaled else 1.0
        if factor and _same(actual, factor * suspect, facts):
            yield f"{bug} Besides, the scale is wrong by {factor:.4g}." if scaled else bug


def _scale(actual: Tensor, expected: Tensor, facts: Facts) -> Iterator[str]:
    """Yield a message if only the scale is wrong."""
    scale = _best_scale(actual, expected)
    if scale and _same(actual, scale * expected, facts):
        yield _wrong_scale(scale, facts)


def _places(actual: Tensor, expected: Tensor, facts: Facts) -> Iterator[str]:
    """Yield messages if entries are at wrong positions."""
    if _same(actual.diagonal(), expected.diagonal(), facts):
        yield "Its diagonal is right, but other entries are not: they are dropped, or have wrong signs or positions."
    one, other = (torch.linalg.eigvalsh((t + t.T) / 2) for t in (actual, expected))
    if _same(one, other, facts):
        yield "It has the right eigenvalues, but entries are permuted by another flattening or another order of inputs."


def _best_scale(actual: Tensor, other: Tensor) -> float:
    return float((actual * other).sum() / other.square().sum()) if other.any() else 0.0


def _wrong_scale(scale: float, facts: Facts) -> str:
    """Return a message with the number by which a scale is too large or too small."""
    for name, value in _products(facts.counts):
        for factor, words in ((value, "too large"), (1 / value, "too small")):
            if value != 1 and abs(scale / factor - 1) < facts.tolerance:
                return f"It is {words} by {name} = {value:g}: {_MEANING[name]}."
    return f"It is right up to a scale of {scale:.6g}."


def _products(counts: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield the numbers by which a scale may be wrong, the simplest numbers first."""
    N, S = (counts.get(name, 1.0) for name in ("N", "S"))
    yield from {"N": N, "S": S}.items()
    if "C" in counts:  # these explanations apply to the square loss only
        yield from {"C": counts["C"], "2": 2.0, "N C": N * counts["C"]}.items()
    yield from {"L": counts.get("L", 1.0), "N S": N * S, "N^2": N**2, "S^2": S**2}.items()


def _same(one: Tensor, other: Tensor, facts: Facts) -> bool:
    return one.shape == other.shape and bool((one - other).norm() <= facts.tolerance * other.norm())
