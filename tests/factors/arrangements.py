"""Models with data along all kinds of axes: folded, interleaved, sorted, sent to experts, ragged.

A `Problem` makes the inputs of each example separately, and joins them to a batch, so the rows of an example are known.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs.problem.risk import EmpiricalRisk
from kfs.runtime.nested import mapped, tensors_in
from tests.factors.models import Function


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def joined(parts: Sequence[Any]) -> Any:
    """Join the inputs of some data: tensors along their first axes."""
    columns = zip(*map(tensors_in, parts), strict=True)
    batched = iter([torch.cat(column) for column in columns])
    return mapped(parts[0], lambda _: next(batched))


@dataclass(frozen=True)
class Problem:
    """A model, and inputs of its data.

    Attributes:
        name: Its name in tests.
        make: Makes the model.
        example: Makes the inputs of the example with this index, as a batch of one.
        join: Makes a batch of several inputs.
    """

    name: str
    make: Callable[[], nn.Module]
    datum: Callable[[int], Any]
    join: Callable[[Sequence[Any]], Any] = joined

    def __str__(self) -> str:
        return self.name

    def instance(self, num_data: int) -> "Instance":
        """Make the model and some data, the same in every call."""
        torch.manual_seed(0)
        model = self.make().double().eval()
        xs = [self.datum(n) for n in range(num_data)]
        with torch.no_grad():
            f = model(*_arguments(xs[0]))  # lazy layers learn their size
        if f.ndim == 2 and f.shape[1] > 1:
            classes = f.shape[1]
            return Instance(model, xs, [torch.tensor([n % classes]) for n in range(num_data)], self.join)
        return Instance(model, xs, [normal(*f.shape) for _ in range(num_data)], self.join)


@dataclass(frozen=True)
class Instance:
    """A model with separate examples.

    Attributes:
        model: The model, in float64.
        xs: Inputs; each is a batch of one.
        ys: Targets, likewise.
        join: Makes a batch of inputs.
    """

    model: nn.Module
    xs: list[Any]
    ys: list[Tensor]
    join: Callable[[Sequence[Any]], Any] = joined

    @property
    def loss(self) -> nn.MSELoss | nn.CrossEntropyLoss:
        """A loss for the targets."""
        return nn.MSELoss() if self.ys[0].is_floating_point() else nn.CrossEntropyLoss()

    def predict(self, n: int) -> Tensor:
        """Return the prediction for one example alone, without batch axis."""
        prediction: Tensor = self.model(*_arguments(self.xs[n])).squeeze(0)
        return prediction

    def risk(self, *batches: Sequence[int], params: Any = None) -> EmpiricalRisk:
        """Return the risk for batches, given by the indices of their examples; by default, all are in one batch."""
        chosen = batches or [range(len(self.xs))]
        data = [(self.join([self.xs[n] for n in ns]), torch.cat([self.ys[n] for n in ns])) for ns in chosen]
        return EmpiricalRisk(self.model, self.loss, data, params=params)


def _arguments(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


class Net(nn.Module):
    """An encoder `f`, a head `o`, and a function of both and of the inputs."""

    def __init__(self, function: Callable[..., Tensor], f: nn.Module, o: nn.Module | None = None) -> None:
        super().__init__()
        self.function = function
        self.f = f
        self.o = o or nn.Linear(4, 3)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def encoder() -> nn.Module:
    return nn.Linear(3, 4)


def siamese(m: Any, a: Tensor, b: Tensor) -> Tensor:
    u, v = m.f(torch.cat([a, b])).tanh().chunk(2)
    return m.o((u - v).abs())  # type: ignore[no-any-return]


def two_views(m: Any, x: Tensor) -> Tensor:
    """Two augmentations, side by side along the batch axis; predictions are those for both of them."""
    z = m.f(torch.cat([x * 2, x.flip(1)])).tanh()
    z = m.o(F.normalize(z, dim=1))
    return torch.cat(z.split(len(x)), 1)


def views_of_a_datum_together(m: Any, x: Tensor) -> Tensor:
    z = m.f(torch.stack([x * 2, x.flip(1), x.tanh()], 1).flatten(0, 1)).tanh()
    return m.o(z.unflatten(0, (-1, 3)).prod(1))  # type: ignore[no-any-return]


def time_major(m: Any, x: Tensor) -> Tensor:
    n, t, d = x.shape
    return m.o(m.f(x.transpose(0, 1).reshape(t * n, d)).tanh().view(t, n, -1).sum(0))  # type: ignore[no-any-return]


def channel_major(m: Any, x: Tensor) -> Tensor:
    """One forecast per channel, by one convolution."""
    n, t, d = x.shape
    z = m.f(x.permute(2, 0, 1).reshape(d * n, 1, t)).tanh().mean(-1)
    return m.o(z.view(d, n, -1).mean(0))  # type: ignore[no-any-return]


def sequence_first(m: Any, x: Tensor) -> Tensor:
    return m.o(m.f(x.transpose(0, 1)).mean(0))  # type: ignore[no-any-return]


def attend(layer: nn.Module, x: Tensor) -> Tensor:
    """Let positions of `[batch, positions, C]` attend to each other."""
    x = layer(x)
    return F.scaled_dot_product_attention(x, x, x)


def in_windows(m: Any, x: Tensor) -> Tensor:
    """Attention within windows, as in Swin transformers: `[N, 4, 4, C]` to `[N * 4, 4, C]`."""
    n, c = len(x), x.shape[-1]
    windows = x.view(n, 2, 2, 2, 2, c).transpose(2, 3).reshape(n * 4, 4, c)
    z = attend(m.f, windows).view(n, 2, 2, 2, 2, c).transpose(2, 3).reshape(n, 16, c)
    return m.o(z.tanh().mean(1))  # type: ignore[no-any-return]


def along_both_axes(m: Any, x: Tensor) -> Tensor:
    """Attention along rows, then along columns, with columns before data: `[W, N, H, C]`."""
    n, h, w, c = x.shape
    x = attend(m.f, x.reshape(n * h, w, c)).view(n, h, w, c)
    x = attend(m.f, x.permute(2, 0, 1, 3).reshape(w * n, h, c)).view(w, n, h, c)
    return m.o(x.tanh().mean((0, 2)))  # type: ignore[no-any-return]


def in_spatial_axis(m: Any, x: Tensor) -> Tensor:
    """A convolution with kernel size one, with data along the spatial axis."""
    return m.o(m.f(x.T.unsqueeze(0)).squeeze(0).T.tanh())  # type: ignore[no-any-return]


def repeated_together(m: Any, x: Tensor) -> Tensor:
    z = m.f(x.repeat_interleave(3, 0) * torch.arange(1, 4).repeat(len(x)).unsqueeze(1)).tanh()
    return m.o(z.view(len(x), 3, -1).mean(1))  # type: ignore[no-any-return]


def repeated_one_after_the_other(m: Any, x: Tensor) -> Tensor:
    z = m.f(x.repeat(3, 1) * torch.arange(1, 4).repeat_interleave(len(x)).unsqueeze(1)).tanh()
    return m.o(z.view(3, len(x), -1).mean(0))  # type: ignore[no-any-return]


def backwards(m: Any, x: Tensor) -> Tensor:
    return m.o(m.f(x.flip(0)).tanh().flip(0))  # type: ignore[no-any-return]


def in_halves(m: Any, x: Tensor) -> Tensor:
    """Micro-batches: a layer is called for the first half of the data, and again for the other one."""
    half = (len(x) + 1) // 2
    return torch.cat([m.o(m.f(part).tanh()) for part in (x[:half], x[half:])])


def one_by_one(m: Any, x: Tensor) -> Tensor:
    return torch.stack([m.o(m.f(row).tanh()) for row in x])


def sorted_by_value(m: Any, x: Tensor) -> Tensor:
    """Sort examples, as sequences are sorted by their lengths, and undo it."""
    order = x[:, 0].argsort()
    return m.o(m.f(x[order]).tanh()[order.argsort()])  # type: ignore[no-any-return]


def some_only(m: Any, x: Tensor) -> Tensor:
    """Only some examples pass through a layer."""
    chosen = x[:, 0] > 0
    z = torch.zeros(len(x), 4, dtype=x.dtype)
    z[chosen] = m.f(x[chosen]).tanh()
    return m.o(z + F.pad(x, (0, 1)))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Three experts for tokens `[N, T, 3]`.

    Args:
        how: `"argsort"` sends tokens to experts by their rank within an example, so that every expert gets as many
            tokens as there are data if `T` is three. `"masks"` sends them to one expert, and `"topk"` to two, by their
            values.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.experts = nn.ModuleList(nn.Linear(3, 4) for _ in range(3))
        self.o = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        tokens = x.reshape(-1, d)
        out = tokens.new_zeros(len(tokens), 4)
        if self.how == "argsort":
            order = x[..., 0].argsort(1) + t * torch.arange(n).unsqueeze(1)
            for place, expert in enumerate(self.experts):
                chosen = order[:, place::3].T.flatten()
                out = out.index_add(0, chosen, expert(tokens[chosen]))
        elif self.how == "masks":
            best = tokens.argmax(1)
            for place, expert in enumerate(self.experts):
                out[best == place] = expert(tokens[best == place])
        else:
            scores, best = tokens.softmax(1).topk(2)
            for place, expert in enumerate(self.experts):
                token, rank = (best == place).nonzero(as_tuple=True)
                out = out.index_add(0, token, expert(tokens[token]) * scores[token, rank].unsqueeze(1))
        return self.o(out.tanh().view(n, t, -1).mean(1))  # type: ignore[no-any-return]


class Graphs(nn.Module):
    """Nodes of several graphs along one axis; sums over the nodes of each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.b = nn.Linear(4, 4)
        self.o = nn.Linear(4, 3)

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor, empty: Tensor) -> Tensor:
        """Predict for nodes `[nodes, 3]`, pairs of nodes `[edges, 2]`, the graph of each node, and `[graphs]`."""
        h = self.a(x).tanh()
        messages = self.b(h[edges[:, 0]] * h[edges[:, 1]])
        h = h + torch.zeros_like(h).index_add(0, edges[:, 1], messages)
        return self.o(h.new_zeros(len(empty), 4).index_add(0, batch, h).tanh())  # type: ignore[no-any-return]


def graph_of(sizes: Sequence[int]) -> Callable[[int], Any]:
    """Return a function that makes rings of nodes, with the numbers of nodes in `sizes`."""

    def datum(n: int) -> Any:
        size = sizes[n % len(sizes)]
        ring = torch.arange(size)
        edges = torch.stack([ring, ring.roll(1)], 1)
        return normal(size, 3), edges, torch.zeros(size, dtype=torch.long), torch.zeros(1)

    return datum


def join_graphs(parts: Sequence[Any]) -> Any:
    """Put nodes one after the other, as PyTorch Geometric does."""
    starts = torch.tensor([0] + [len(x) for x, *_ in parts]).cumsum(0)
    x = torch.cat([x for x, *_ in parts])
    edges = torch.cat([edges + start for (_, edges, *_), start in zip(parts, starts, strict=False)])
    batch = torch.cat([batch + place for place, (_, _, batch, _) in enumerate(parts)])
    return x, edges, batch, torch.zeros(len(parts))


def vector(_: int) -> Tensor:
    return normal(1, 3)


class Sets(nn.Module):
    """Sums over the elements of several sets along one axis, written in many ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.a = nn.Linear(3, 4)
        self.o = nn.Linear(4, 3)

    def forward(self, x: Tensor, owner: Tensor, empty: Tensor) -> Tensor:
        """Predict for elements `[elements, 3]`, the set of each element, and `[sets]`."""
        h, n = self.a(x).tanh(), len(empty)
        zeros = h.new_zeros(n, 4)
        sums: dict[str, Callable[[], Tensor]] = {
            "index_add": lambda: zeros.index_add(0, owner, h),
            "index_add_": lambda: zeros.index_add_(0, owner, h),
            "scatter_add": lambda: zeros.scatter_add(0, owner.unsqueeze(1).expand(-1, 4), h),
            "scatter_reduce": lambda: zeros.scatter_reduce(0, owner.unsqueeze(1).expand(-1, 4), h, "sum"),
            "index_put": lambda: zeros.index_put((owner,), h, accumulate=True),
            "one_hot": lambda: F.one_hot(owner, n).to(h.dtype).T @ h,
            "segment_reduce": lambda: torch.segment_reduce(h, "sum", lengths=owner.bincount(minlength=n), axis=0),
            "split": lambda: torch.stack([part.sum(0) for part in h.split(owner.bincount(minlength=n).tolist())]),
            "masks": lambda: torch.stack([h[owner == place].sum(0) for place in range(n)]),
            "items": lambda: torch.stack([_part(h, owner, place).sum(0) for place in range(n)]),
        }
        return self.o(sums[self.how]().tanh())  # type: ignore[no-any-return]


def _part(h: Tensor, owner: Tensor, place: int) -> Tensor:
    """Return the rows of one set, given that sets stand one after the other."""
    start = int((owner < place).sum())
    return h[start : start + int((owner == place).sum())]


SUMS = (
    *("index_add", "index_add_", "scatter_add", "scatter_reduce", "index_put", "one_hot", "segment_reduce"),
    *("split", "masks", "items"),
)


def set_of(sizes: Sequence[int]) -> Callable[[int], Any]:
    """Return a function that makes sets, with the numbers of elements in `sizes`."""

    def datum(n: int) -> Any:
        return normal(sizes[n], 3), torch.zeros(sizes[n], dtype=torch.long), torch.zeros(1)

    return datum


def join_sets(parts: Sequence[Any]) -> Any:
    owner = torch.cat([torch.full((len(x),), place) for place, (x, *_) in enumerate(parts)])
    return torch.cat([x for x, *_ in parts]), owner, torch.zeros(len(parts))


def with_negatives(m: Any, x: Tensor, negatives: Tensor) -> Tensor:
    """Encode an example together with its negatives: `[N]` rows, then three for each example."""
    z = m.f(torch.cat([x, negatives.flatten(0, 1)])).tanh()
    return m.o(z[: len(x)] * z[len(x) :].view(len(x), 3, -1).mean(1))  # type: ignore[no-any-return]


def pair(_: int) -> tuple[Tensor, Tensor]:
    return normal(1, 3), normal(1, 3)


def sequence(length: int, width: int = 3) -> Callable[[int], Tensor]:
    return lambda _: normal(1, length, width)


def attention_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=False)


def scaled(m: Any, x: Tensor) -> Tensor:
    """Scale features of sequences by a derived parameter, and by a parameter, with data along the second axis."""
    return ((x.transpose(0, 1) * (1 + m.w)).tanh() * m.s + m.b).mean(0)  # type: ignore[no-any-return]


N = 4  # number of examples, unless given
ARRANGEMENTS = (
    Problem("siamese", lambda: Net(siamese, encoder()), pair),
    Problem("two views", lambda: Net(two_views, encoder()), vector),
    Problem("views of an example together", lambda: Net(views_of_a_datum_together, encoder()), vector),
    Problem("time-major", lambda: Net(time_major, encoder()), sequence(5)),
    Problem("time-major, as long as the batch", lambda: Net(time_major, encoder()), sequence(N)),
    Problem("channel-major", lambda: Net(channel_major, nn.Conv1d(1, 2, 3), nn.Linear(2, 3)), sequence(6)),
    Problem("sequence first", lambda: Net(sequence_first, attention_layer()), sequence(5, 4)),
    Problem("sequence first, as long as the batch", lambda: Net(sequence_first, attention_layer()), sequence(N, 4)),
    Problem("scales, sequence first", lambda: Function(scaled, w=normal(3), s=normal(3), b=normal(3)), sequence(N)),
    Problem("windows", lambda: Net(in_windows, nn.Linear(4, 4)), lambda _: normal(1, 4, 4, 4)),
    Problem("both axes", lambda: Net(along_both_axes, nn.Linear(4, 4)), lambda _: normal(1, 2, 3, 4)),
    Problem("spatial axis", lambda: Net(in_spatial_axis, nn.Conv1d(3, 4, 1)), vector),
    Problem("repeated together", lambda: Net(repeated_together, encoder()), vector),
    Problem("repeated one after the other", lambda: Net(repeated_one_after_the_other, encoder()), vector),
    Problem("backwards", lambda: Net(backwards, encoder()), vector),
    Problem("in halves", lambda: Net(in_halves, encoder()), vector),
    Problem("one by one", lambda: Net(one_by_one, encoder()), vector),
    Problem("sorted", lambda: Net(sorted_by_value, encoder()), vector),
    Problem("some only", lambda: Net(some_only, encoder()), vector),
    Problem("negatives", lambda: Net(with_negatives, encoder()), lambda _: (normal(1, 3), normal(1, 3, 3))),
    Problem("experts, argsort", lambda: Experts("argsort"), sequence(3)),
    Problem("experts, masks", lambda: Experts("masks"), sequence(5)),
    Problem("experts, topk", lambda: Experts("topk"), sequence(5)),
    Problem("graphs, as many nodes as data", Graphs, graph_of([1, 2, 0, 1]), join_graphs),
    Problem("graphs, a multiple", Graphs, graph_of([2, 3, 1, 2]), join_graphs),
    Problem("graphs, all of one size", Graphs, graph_of([3]), join_graphs),
    Problem("graphs, no multiple", Graphs, graph_of([2, 3, 1, 4]), join_graphs),
)
