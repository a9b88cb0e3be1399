"""Inputs of models: arguments, keyword arguments, one mapping. Mappings and named tuples keep their type.

The oracle is the model itself, called by hand.
"""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs import GGN, KFAC, EmpiricalRisk, inspect
from kfs.errors import DataError
from kfs.optim import KFAC as Optimizer  # noqa: N811 (both are called KFAC)
from kfs.problem.data import arguments, to_device
from kfs.runtime.nested import mapped, plain, with_values
from tests.operators.contract import close

LOSS = nn.MSELoss()
CPU = torch.device("cpu")


def r(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


class Layers(nn.Module):
    """Two linear maps. Subclasses define the arguments of `forward`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()

    def combine(self, x: Tensor, z: Tensor) -> Tensor:
        result: Tensor = self.first(x).tanh() + self.second(z)
        return result


class Separate(Layers):
    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.combine(x, z)


class KeywordsOnly(Layers):
    def forward(self, **kwargs: Tensor) -> Tensor:
        return self.combine(kwargs["x"], kwargs["z"])


class OneMapping(Layers):
    def forward(self, batch: Any) -> Tensor:
        return self.combine(batch["x"], batch["z"])


class MappingAndOption(Layers):
    def forward(self, batch: Any, scale: float = 1.0) -> Tensor:
        return scale * self.combine(batch["x"], batch["z"])


class Positional(Layers):
    def forward(self, *args: Any) -> Tensor:
        return self.combine(args[0]["x"], args[0]["z"])


class SameName(Layers):
    """Its only argument has the name of one of the keys."""

    def forward(self, x: Any) -> Tensor:
        return self.combine(x["x"], x["z"])


class Wrapper(nn.Module):
    """Passes all arguments on, as `DataParallel` does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


MODELS = (Separate, KeywordsOnly, OneMapping, MappingAndOption, Positional, SameName)


@pytest.mark.parametrize("wrap", [lambda model: model, Wrapper], ids=["plain", "wrapped"])
@pytest.mark.parametrize("kind", MODELS)
def test_mappings_are_keyword_arguments_or_one_argument(
    kind: Callable[[], Layers], wrap: Callable[[nn.Module], nn.Module]
) -> None:
    x, z, y = r(5, 3), r(5, 3), r(5, 2)
    model = wrap(kind())
    by_hand, batch = kind().combine(x, z), {"x": x, "z": z}
    risk = EmpiricalRisk(model, LOSS, [(batch, y)])
    assert risk.value() == pytest.approx(LOSS(by_hand, y).item(), rel=1e-14)
    labelled = EmpiricalRisk(model, LOSS, [{**batch, "labels": y}])
    assert labelled.value() == risk.value()
    separate = EmpiricalRisk(Separate(), LOSS, [((x, z), y)])
    close(KFAC(risk).to_dense(), KFAC(separate).to_dense())
    for size in (1, 4):
        close(GGN(risk, chunk_size=size).to_dense(), GGN(separate).to_dense())
    assert [row.A for row in inspect(model, batch).rows] == [row.A for row in inspect(Separate(), (x, z)).rows]


def test_unpack_decides_if_it_returns_arguments() -> None:
    """A tuple contains the arguments; one of them may be a mapping whose keys are also names of arguments."""

    class Nested(Layers):
        def forward(self, x: Any, z: Any = None) -> Tensor:
            assert z is None
            return self.combine(x["x"], x["z"])

    x, z, y = r(5, 3), r(5, 3), r(5, 2)
    risk = EmpiricalRisk(Nested(), LOSS, [({"x": x, "z": z}, y)], unpack=lambda batch: ((batch[0],), batch[1]))
    assert risk.value() == pytest.approx(LOSS(Nested().combine(x, z), y).item(), rel=1e-14)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("x",), r"missing a required argument: 'z'"),
        (("x", "z", "mask"), r"unexpected keyword argument 'mask'"),
        (("a", "b"), r"missing a required argument: 'x'"),
        ((1, 2), r"keywords must be strings"),
    ],
)
def test_mappings_that_fit_in_neither_way_are_refused(keys: tuple[Any, ...], message: str) -> None:
    batch = {key: r(5, 3) for key in keys}
    risk = EmpiricalRisk(Separate(), LOSS, [(batch, r(5, 2))])
    for call in (risk.value, risk.gradient, lambda: GGN(risk).to_dense(), lambda: KFAC(risk)):
        with pytest.raises(DataError, match=rf"keys \[.*forward\(x:.*{message}.*Rename the keys to .*unpack="):
            call()


def test_keys_of_further_arguments_mean_keyword_arguments() -> None:
    """A mapping with an additional key is not passed as first argument, since the model's error would be misleading."""

    class Optional(Layers):
        def forward(self, x: Tensor, mask: Any = None) -> Tensor:
            raise NotImplementedError

    with pytest.raises(DataError, match=r"unexpected keyword argument 'more'"):
        arguments({"x": r(2), "mask": r(2), "more": r(2)}, Optional())


def test_modules_without_signature_get_keyword_arguments() -> None:
    x, z = r(2, 3), r(2, 3)
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.trace"):
        traced = torch.jit.trace(Separate(), (x, z))
    assert arguments({"x": x, "z": z}, traced) == ((), {"x": x, "z": z})


def test_compiled_modules_are_looked_into() -> None:
    compiled: Any = torch.compile(OneMapping(), backend="eager")
    batch = {"x": r(2, 3), "z": r(2, 3)}
    assert arguments(batch, compiled) == ((batch,), {})


class Attributes(dict[str, Any]):
    """Items are attributes: a common idiom."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.__dict__ = self


class BothWays(OrderedDict[str, Any]):
    """Items are also attributes, as in outputs of Hugging Face."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Holder(Mapping[str, Any]):
    """An immutable mapping that stores its items in an attribute."""

    def __init__(self, items: Any, *, source: str) -> None:
        self.source, self._items, self._more = source, dict(items), {"x": 3}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Changeable(Holder, MutableMapping[str, Any]):
    """A mutable mapping; a shallow copy of it shares its items."""

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]


class Slots(MutableMapping[str, Any]):
    """Has no attributes to inspect, but a method `copy`, as `TensorDict` has."""

    __slots__ = ("_items", "source")

    def __init__(self, items: Any, source: str) -> None:
        self._items, self.source = dict(items), source

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def copy(self) -> "Slots":
        return Slots(self._items, self.source)


def with_source(mapping: Any) -> Any:
    mapping.source = "here"
    return mapping


class Encoding(UserDict[str, Any]):
    """A mapping with an attribute, like `BatchEncoding`."""

    def __init__(self, items: Any, source: str | None = None) -> None:
        super().__init__(items)
        self.source = source


TYPES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "defaultdict": lambda items: defaultdict(list, items),
    "UserDict": lambda items: with_source(UserDict(items)),
    "encoding": lambda items: Encoding(items, "here"),
    "attributes": Attributes,
    "both ways": BothWays,
    "holder": lambda items: Holder(items, source="here"),
    "changeable": lambda items: Changeable(items, source="here"),
    "slots": lambda items: Slots(items, "here"),
    "proxy": MappingProxyType,
}


@pytest.mark.parametrize("make", TYPES.values(), ids=TYPES)
def test_mappings_keep_their_type_and_attributes(make: Callable[[dict[str, Any]], Any]) -> None:
    items = {"x": r(2, 3), "n": 3, "inner": make({"z": r(2)}), "list": [r(2), "text"], "pair": (r(2), None)}
    mine = make(dict(items))
    for new in (mapped(mine, lambda t: 2 * t), with_values(mine, {**items, "x": 2 * items["x"]})):
        assert type(new) is type(mine)
        assert list(new) == list(mine)
        close(new["x"], 2 * items["x"])
        assert new["n"] == 3
        assert getattr(new, "source", None) == getattr(mine, "source", None)
        if isinstance(mine, (Attributes, BothWays)):
            assert new.x is new["x"]
    new = mapped(mine, lambda t: 2 * t)
    assert type(new["inner"]) is type(mine)
    close(new["inner"]["z"], 2 * items["inner"]["z"])
    assert type(new["list"]) is list
    assert type(new["pair"]) is tuple
    close(new["list"][0], 2 * items["list"][0])
    moved = to_device(mine, CPU)
    assert type(moved) is type(mine)
    assert moved is not mine
    assert moved["x"] is items["x"]
    without = with_values(mine, {"n": 4})
    assert type(without) is type(mine)
    assert dict(without) == {"n": 4}
    # The user's own mapping has not changed.
    assert list(mine) == list(items)
    assert all(mine[key] is items[key] for key in items)


def test_copies_that_keep_their_items_also_keep_later_ones_as_attributes() -> None:
    new = mapped(Attributes({"x": r(2)}), lambda t: t + 1)
    new["z"] = 5
    assert new.z == 5


class Elsewhere(Mapping[str, Any]):
    """A mapping that hides its items, and cannot be rebuilt."""

    def __init__(self, items: dict[str, Any], more: int) -> None:
        self._parts = [items, more]

    def __getitem__(self, key: str) -> Any:
        return self._parts[0][key]  # type: ignore[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts[0])  # type: ignore[call-overload, no-any-return]

    def __len__(self) -> int:
        return len(self._parts[0])  # type: ignore[arg-type]


class Converts(UserDict[str, Any]):
    """Changes its input."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, (value, value))


def test_mappings_that_cannot_be_made_again_become_dictionaries() -> None:
    for mine in (Elsewhere({"x": r(2)}, 3), Converts({"x": r(2)})):
        before = mine["x"]
        values = {"x": r(2)}
        assert with_values(mine, values) is values
        assert mine["x"] is before


Point = namedtuple("Point", ["x", "z", "name"])


def test_named_tuples_are_one_argument() -> None:
    class Takes(Layers):
        def forward(self, point: Any) -> Tensor:
            assert type(point) is Point
            return self.combine(point.x, point.z)

    x, z, y = r(5, 3), r(5, 3), r(5, 2)
    point = Point(x, z, "name")
    moved = to_device(point, CPU)
    assert type(moved) is Point
    assert moved.name == "name"
    doubled = mapped(point, lambda t: 2 * t)
    close(doubled.z, 2 * z)
    on_meta = to_device(point, torch.device("meta"))
    assert on_meta.x.is_meta
    assert on_meta.z.is_meta
    risk = EmpiricalRisk(Takes(), LOSS, [(point, y)])
    assert risk.value() == pytest.approx(LOSS(Takes().combine(x, z), y).item(), rel=1e-14)
    # Results are marked as dependent on data: KFAC equals that of separate arguments.
    close(KFAC(risk).to_dense(), KFAC(EmpiricalRisk(Separate(), LOSS, [((x, z), y)])).to_dense())


@pytest.mark.parametrize("kind", [KFAC, Optimizer], ids=["risk", "optimizer"])
def test_models_see_their_own_type(kind: Any) -> None:
    """In a captured pass, which replaces all tensors, the model gets arguments of the user's types."""
    seen = []

    class Takes(Layers):
        def forward(self, batch: Any) -> Tensor:
            seen.append((type(batch), batch.source))
            return self.combine(batch["x"], batch["z"])

    x, z, y = r(5, 3), r(5, 3), r(5, 2)
    batch, model = Encoding({"x": x, "z": z}, "here"), Takes()
    if kind is KFAC:
        K = KFAC(EmpiricalRisk(model, LOSS, [(batch, y)]))
        close(K.to_dense(), KFAC(EmpiricalRisk(Separate(), LOSS, [((x, z), y)])).to_dense())
    else:
        optimizer = Optimizer(model, LOSS)
        LOSS(model(batch), y).backward()
        optimizer.step()
    assert set(seen) == {(Encoding, "here")}
    assert batch["x"] is x


def test_inputs_without_their_tensors() -> None:
    """The structure is equal for all types, so that checkpoints do not depend on the type."""
    t = torch.empty(0)
    for make in TYPES.values():
        found = plain(make({"x": r(3), "n": 3, "parts": [r(2), Point(r(1), r(2), "name")]}))
        assert repr(found) == repr({"x": t, "n": 3, "parts": (t, (t, t, "name"))})
