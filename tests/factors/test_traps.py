"""Cases in which KFAC code is often silently wrong, each against an equivalent safe model."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from kfs.basics.reduction_factors import reduction_factor
from kfs.errors import DataError, ModelError
from kfs.factors import KFAC, inspect
from kfs.operators import GGN, Fisher
from kfs.problem.risk import EmpiricalRisk
from tests.factors.definition import definition
from tests.factors.models import Apply
from tests.operators.contract import close

SHARING = ("expand", "reduce")


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def same(K: KFAC, L: KFAC, names: dict[str, str] | None = None) -> None:
    """Compare all blocks of two approximations; `names` maps blocks of the first one to those of the second."""
    assert len(K.blocks) == len(L.blocks)
    for name, block in K.blocks.items():
        other = L.blocks[(names or {}).get(name, name)]
        close(block.A, other.A)
        close(block.B, other.B)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()


class Tied(nn.Module):
    """Two layers that share one weight, each with a bias of its own."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.one.bias = self.two.bias = None  # type: ignore[assignment]
        self.tied = tied
        if tied:
            self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x).tanh()
        x = (self.two if self.tied else self.one)(x).tanh()
        result: Tensor = self.head(x)
        return result


@pytest.mark.parametrize("sharing", SHARING)
def test_two_modules_that_share_a_weight_are_one_module_called_twice(sharing: Any) -> None:
    torch.manual_seed(0)
    tied = Tied(True).double()
    twice = Tied(False).double()
    twice.load_state_dict(tied.state_dict(), strict=False)
    twice.two = nn.Identity()  # type: ignore[assignment]
    X, y = normal(5, 3), torch.randint(2, (5,))
    one, other = (KFAC(EmpiricalRisk(m, nn.CrossEntropyLoss(), (X, y)), sharing=sharing) for m in (tied, twice))
    same(one, other)


class Checkpointed(nn.Module):
    def __init__(self, model: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.model:  # type: ignore[attr-defined]
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def test_activation_checkpointing() -> None:
    model = mlp()
    X, y = normal(5, 3), torch.randint(2, (5,))
    plain = KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y)))
    names = {"model." + name: name for name in plain.blocks}
    saving = KFAC(EmpiricalRisk(Checkpointed(model, False), nn.CrossEntropyLoss(), (X, y)))
    same(saving, plain, names)
    with pytest.raises(ModelError, match="use_reentrant=False"):
        KFAC(EmpiricalRisk(Checkpointed(model, True), nn.CrossEntropyLoss(), (X, y)))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("fisher", ["empirical", "mc", "type-2"])
def test_weights_and_ignored_labels(fisher: Any, reduction: str) -> None:
    """With one example, KFAC is exact; many examples with equal inputs are equivalent to one."""
    model = mlp()
    loss = nn.CrossEntropyLoss(torch.tensor([0.3, 2.0], dtype=torch.float64), ignore_index=0, reduction=reduction)
    X = normal(1, 3).expand(4, 3)
    y = torch.tensor([0, 1, 1, 1])
    risk = EmpiricalRisk(model, loss, (X, y))
    K = KFAC(risk, fisher)
    kind: Any = {"mc": "type-1"}.get(fisher, fisher)
    for block in K.blocks.values():
        close(K.submatrix(block.layout.params).to_dense(), Fisher(risk, kind).submatrix(block.layout.params).to_dense())
    wrong = KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(reduction=reduction), (X, y)), fisher)
    equal = fisher == "type-2" and reduction == "mean"  # a mean of equal matrices, for any weights
    assert torch.allclose(wrong.to_dense(), K.to_dense()) == equal


class Once:
    """An iterable that can be iterated only once."""

    def __init__(self, data: list[Any]) -> None:
        self.iterator = iter(data)

    def __iter__(self) -> Iterator[Any]:
        return self.iterator


def test_data_that_can_be_iterated_once() -> None:
    """KFAC needs exactly one pass over the data."""
    model, (X, y) = mlp(), (normal(6, 3), torch.randint(2, (6,)))
    batches = list(zip(X.split(2), y.split(2), strict=True))
    one, other = (KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), data)) for data in (Once(batches), batches))
    same(one, other)
    with pytest.raises(DataError, match="only once"):
        EmpiricalRisk(model, nn.CrossEntropyLoss(), iter(batches))


@pytest.mark.parametrize("fisher", ["type-2", "mc", "empirical"])
@pytest.mark.parametrize("sharing", SHARING)
def test_batch_split_and_order(sharing: Any, fisher: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), Apply(lambda f: f.mean(1))).double()
    X, y = normal(7, 5, 3), torch.randint(2, (7,))
    splits = [[7], [3, 4], [1, 2, 4], [0, 5, 2]]
    results = [
        KFAC(
            EmpiricalRisk(model, nn.CrossEntropyLoss(), list(zip(X.split(s), y.split(s), strict=True))), fisher, sharing
        )
        for s in splits
    ]
    for other in results[1:]:
        same(results[0], other)
    loader = DataLoader(TensorDataset(X, y), batch_size=2)
    same(results[0], KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), loader), fisher, sharing))
    if fisher != "mc":  # draws belong to an example's index
        order = torch.randperm(7)
        same(results[0], KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), (X[order], y[order])), fisher, sharing))


@pytest.mark.parametrize("sharing", SHARING)
def test_mean_and_sum_differ_by_their_reduction_factor(sharing: Any) -> None:
    model, (X, y) = mlp(), (normal(5, 3), torch.tensor([0, 1, -100, 1, 0]))
    mean, total = (
        KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(reduction=r), (X, y)), sharing=sharing) for r in ("mean", "sum")
    )
    R = reduction_factor(nn.CrossEntropyLoss(), y)
    for name, block in mean.blocks.items():
        close(block.A, R * total.blocks[name].A)
        close(block.B, total.blocks[name].B)


class Scaled(nn.Linear):
    """A layer that does not resemble `nn.Linear`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 2 * F.linear(input, self.weight, self.bias) if self.training else F.linear(input / 2, self.weight)


def test_a_subclass_is_what_it_does() -> None:
    torch.manual_seed(0)
    X, y = normal(1, 3), normal(1, 2)
    layer = Scaled(3, 2).double()
    for mode in (True, False):
        risk = EmpiricalRisk(layer.train(mode), nn.MSELoss(), (X, y), params=None if mode else ["weight"])
        close(KFAC(risk).to_dense(), GGN(risk).to_dense())
    unused = EmpiricalRisk(layer, nn.MSELoss(), (X, y))
    close(KFAC(unused).to_dense(), GGN(unused).to_dense())


@pytest.mark.parametrize("sharing", SHARING)
def test_strides_do_not_matter(sharing: Any) -> None:
    model, (X, y) = mlp(), (normal(3, 5).T, torch.randint(2, (5,)))
    image = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 2)).double()
    pixels = normal(4, 2, 4, 4)
    last = copy.deepcopy(image).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    cases: list[Any] = [
        (model, X, model, X.contiguous(), y),
        (image, pixels, last, pixels.to(memory_format=torch.channels_last), y[:4]),
        (image, pixels, image, pixels.repeat_interleave(2, 3)[..., ::2], y[:4]),
    ]
    for one, x, other, z, targets in cases:
        same(
            KFAC(EmpiricalRisk(one, nn.CrossEntropyLoss(), (x, targets)), sharing=sharing),
            KFAC(EmpiricalRisk(other, nn.CrossEntropyLoss(), (z, targets)), sharing=sharing),
        )


def test_sequence_lengths_that_vary() -> None:
    """With expand, all positions are counted; with reduce, each example is divided by its own number of positions."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 4)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 2), Apply(lambda f: f.sum(1))).double()
    parts = [(normal(3, 5, 3), torch.randint(2, (3,))), (normal(2, 2, 3), torch.randint(2, (2,)))]
    for sharing in SHARING:
        K = KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(reduction="sum"), parts), sharing=sharing)  # type: ignore[arg-type]
        each = [definition(model, nn.CrossEntropyLoss(reduction="sum"), X, y, layer, sharing, 1.0) for X, y in parts]
        close(K.blocks["0"].A, (each[0][0] + each[1][0])[0])
        terms = [15, 4] if sharing == "expand" else [3, 2]
        close(K.blocks["0"].B, (terms[0] * each[0][1] + terms[1] * each[1][1])[0] / sum(terms))


def test_in_place_activations() -> None:
    torch.manual_seed(0)
    results = []
    for in_place in (True, False):
        torch.manual_seed(0)
        layers = [
            nn.Conv2d(1, 2, 3),
            nn.ReLU(in_place),
            nn.Flatten(),
            nn.Linear(8, 4),
            nn.SiLU(in_place),
            nn.Linear(4, 2),
        ]
        model = nn.Sequential(*layers).double()
        data = (torch.arange(48.0).reshape(3, 1, 4, 4).double() / 9, torch.tensor([0, 1, 1]))
        results.append(KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), data)))
    same(results[0], results[1])


def test_functions_and_modules_agree() -> None:
    model = mlp()
    X, y = normal(5, 3), torch.randint(2, (5,))
    params = {name: p.detach() for name, p in model.named_parameters()}

    def f(params: dict[str, Tensor], x: Tensor) -> Tensor:
        x = torch.tanh(x @ params["0.weight"].T + params["0.bias"])
        x = F.linear(x, params["2.weight"], params["2.bias"]).relu()
        return torch.func.functional_call(model[-1], {"weight": params["4.weight"], "bias": params["4.bias"]}, (x,))  # type: ignore[index, no-any-return]

    K = KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y)))
    L = KFAC(EmpiricalRisk(f, nn.CrossEntropyLoss(), (X, y), params=params))
    for name in ("2", "4"):
        close(K.blocks[name].A, L.blocks[name].A)
        close(K.blocks[name].B, L.blocks[name].B)
    close(K.blocks["0"].A[:-1, :-1], L.blocks["0.weight"].A)
    close(K.blocks["0"].B, L.blocks["0.weight"].B)
    other = KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y), params={n: p + 1 for n, p in params.items()}))
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for p in moved.parameters():
            p.add_(1)
    same(other, KFAC(EmpiricalRisk(moved, nn.CrossEntropyLoss(), (X, y))))


def test_frozen_models_and_subsets() -> None:
    model, (X, y) = mlp(), (normal(5, 3), torch.randint(2, (5,)))
    whole = KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y)))
    part = KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y), params=["2.weight", "4.weight", "4.bias"]))
    close(part.blocks["4"].A, whole.blocks["4"].A)
    close(part.blocks["2.weight"].A, whole.blocks["2"].A[:-1, :-1])
    model.requires_grad_(False)
    frozen = EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y), params=list(dict(model.named_parameters())))
    same(KFAC(frozen), whole)
    assert not inspect(model, X).uncovered


def test_compiled_models() -> None:
    model, (X, y) = mlp(), (normal(5, 3), torch.randint(2, (5,)))
    compiled = torch.compile(model, backend="eager")
    compiled(X)
    K, L = (KFAC(EmpiricalRisk(m, nn.CrossEntropyLoss(), (X, y))) for m in (compiled, model))
    same(K, L, {"_orig_mod." + name: name for name in L.blocks})


class Cosine(nn.Linear):
    """A classifier by the angles between features and one vector for each class."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(x), F.normalize(self.weight), self.bias)


COMPUTED: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
    "old weight norm": lambda: nn.utils.weight_norm(nn.Linear(3, 4)),
    "weight norm of a convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 1)), nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 1), dim=2), nn.Flatten()
    ),
    "cosine": lambda: Cosine(3, 4),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", COMPUTED)
def test_computed_weights_are_refused_with_advice(kind: str) -> None:
    """The advice in the error works; the bias, which is not computed, is always covered."""
    torch.manual_seed(0)
    model, data = (
        nn.Sequential(COMPUTED[kind](), nn.Tanh(), nn.Linear(4, 2)).double(),
        (normal(5, 3), torch.arange(5) % 2),
    )
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data)
    way_out = r"uncovered='diagonal'.*remove_parametrizations or torch.nn.utils.remove_weight_norm"
    with pytest.raises(ModelError, match=way_out) as error:
        KFAC(risk)
    bias = next(name for name in risk.params if name.endswith("bias"))
    of_weight = [name for name in risk.params if "weight" in name and not name.startswith("2.")]
    assert all(repr(name) in str(error.value) for name in of_weight)
    skipping = KFAC(risk, uncovered="skip")
    assert list(skipping.blocks) == [bias, "2"]
    diagonal = KFAC(risk, uncovered="diagonal")
    for name in of_weight:
        close(diagonal.submatrix(name).to_dense(), GGN(risk).submatrix(name).to_dense().diagonal().diag())
    if kind == "weight norm":
        nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    if kind == "old weight norm":
        nn.utils.remove_weight_norm(model[0])
    if kind.endswith("weight norm"):
        assert list(KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), data)).blocks) == ["0", "2"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Factors are accumulated in float32."""
    torch.manual_seed(0)
    model = mlp().to(dtype)
    X, y = torch.randn(64, 3).to(dtype), torch.randint(2, (64,))
    K = KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y)), "empirical")
    L = KFAC(EmpiricalRisk(model.float(), nn.CrossEntropyLoss(), (X.float(), y)), "empirical")
    assert K.blocks["0"].A.dtype == torch.float32
    torch.testing.assert_close(K.blocks["0"].A, L.blocks["0"].A)  # inputs are the same numbers
    for name in K.blocks:  # gradients were computed in half precision: 8 or 11 bits
        torch.testing.assert_close(K.blocks[name].B, L.blocks[name].B, rtol=0.1, atol=1e-3)


def test_autocast() -> None:
    """Operations run in bfloat16, but factors are in float32."""
    torch.manual_seed(0)
    model, X, y = mlp().float(), torch.randn(64, 3), torch.randint(2, (64,))
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y))
    L = KFAC(risk, "empirical")
    with torch.autocast("cpu", torch.bfloat16):
        K = KFAC(risk, "empirical")
    for name in K.blocks:  # bfloat16 has 8 bits, and errors of several layers add up
        assert K.blocks[name].A.dtype == K.blocks[name].B.dtype == torch.float32
        torch.testing.assert_close(K.blocks[name].A, L.blocks[name].A, rtol=0.05, atol=0.02)
        torch.testing.assert_close(K.blocks[name].B, L.blocks[name].B, rtol=0.1, atol=5e-3)


@pytest.mark.parametrize("fails", ["in the forward pass", "at predictions that are not finite", "nowhere"])
def test_what_a_model_has_kept_can_be_differentiated_afterwards(fails: str) -> None:
    """Taps do not pass gradients on any more, even after an error."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
            self.kept: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.first(x)
            if fails == "in the forward pass":
                raise ValueError("stop")
            out: Tensor = self.second(self.kept)
            return out * torch.inf if fails == "at predictions that are not finite" else out

    model = Keeps()
    risk = EmpiricalRisk(model, nn.MSELoss(), (normal(5, 3), normal(5, 2)))
    try:
        KFAC(risk)
    except (ValueError, DataError):
        assert fails != "nowhere"
    assert model.kept is not None
    (g,) = torch.autograd.grad(model.kept.sum(), model.first.bias)
    close(g, torch.full((4,), 5.0, dtype=torch.float64))
