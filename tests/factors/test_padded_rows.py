"""Rows that do not affect any counted prediction do not change a factor: results are the same for any padding.

The oracle evaluates every sequence alone, without padding, and reads from the Jacobian of all counted predictions
whether they depend on a position.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.errors import DataError
from kfs.factors.audit import forget_audits
from kfs.losses import TokenCrossEntropy
from kfs.optim import KFAC
from tests.factors.definition import rows_that_count

F64 = torch.float64
WIDTH, CLASSES, TOKENS = 6, 4, 9
IGNORED = -100


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, h: Tensor, allowed: Tensor) -> Tensor:
        """Attend to allowed positions, `[N, S, S]`; a position without allowed ones attends to itself."""
        allowed = allowed | torch.eye(h.shape[1], dtype=torch.bool, device=h.device)
        q, k, v = (part(h).unflatten(2, (2, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        weights = (q @ k.mT).masked_fill(~allowed.unsqueeze(1), -torch.inf).softmax(-1)
        result: Tensor = self.o((weights @ v).transpose(1, 2).flatten(2))
        return result


class Transformer(nn.Module):
    """Two blocks; predictions for every token, for one token, or for the whole sequence."""

    def __init__(self, causal: bool, pooled: str = "", activation: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.causal, self.pooled = causal, pooled
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(16, WIDTH)
        self.attention = nn.ModuleList(Attention() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.up = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 5), activation(), nn.Linear(5, WIDTH)) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.double()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        length = input_ids.shape[1]
        there = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        allowed = (there != 0).unsqueeze(1).expand(-1, length, -1)
        if self.causal:
            allowed = allowed & torch.ones(length, length, dtype=torch.bool, device=allowed.device).tril()
        if documents is not None:  # packed: each document attends only to itself
            allowed = allowed & (documents.unsqueeze(1) == documents.unsqueeze(2))
        numbers = torch.arange(length, device=input_ids.device)
        places = numbers.expand_as(input_ids) if position_ids is None else position_ids
        h = self.tokens(input_ids) + self.places(places)
        for attention, norm, up in zip(self.attention, self.norms, self.up, strict=True):
            h = h + attention(norm(h), allowed)
            h = h + up(h)
        if self.pooled == "first":
            h = h[:, 0]
        elif self.pooled == "last":
            last = (there * (1 + numbers)).argmax(1)
            h = h[torch.arange(len(h), device=h.device), last]
        result: Tensor = self.head(h)
        return result


def sequences(lengths: Sequence[int] = (5, 2, 4, 3, 6), seed: int = 0, prompt: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and labels of some sequences. The first `prompt` labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in lengths:
        tokens = torch.randint(TOKENS, (length,), generator=generator)
        labels = torch.randint(CLASSES, (length,), generator=generator)
        labels[:prompt] = IGNORED
        found.append((tokens, labels))
    return found


def padded(data: Sequence[tuple[Tensor, Tensor]], left: int, right: int, inside: int = 0) -> dict[str, Tensor]:
    """Put padding on both sides of sequences, and between their first two tokens."""
    longest = max(len(tokens) for tokens, _ in data)
    rows: dict[str, list[Tensor]] = {"input_ids": [], "attention_mask": [], "position_ids": [], "labels": []}
    for tokens, labels in data:
        size = left + longest + inside + right
        there = torch.zeros(size, dtype=torch.bool)
        start = size - right - len(tokens) - inside if left else 0
        there[start] = True
        there[start + 1 + inside : start + inside + len(tokens)] = True
        for name, values, fill in (
            ("input_ids", tokens, 1),
            ("position_ids", torch.arange(len(tokens)), 0),
            ("labels", labels, IGNORED),
        ):
            rows[name].append(torch.full((size,), fill).masked_scatter(there, values))
        rows["attention_mask"].append(there.long())
    return {name: torch.stack(some) for name, some in rows.items()}


def oracle(
    model: nn.Module, layer: nn.Module, data: Sequence[tuple[Tensor, Tensor]], loss: TokenCrossEntropy, sharing: str
) -> tuple[Tensor, Tensor]:
    """Compute factors of a linear layer for the empirical Fisher, with loops over sequences and positions."""
    A, B, terms, count = torch.zeros(()), torch.zeros(()), 0, 0.0
    for tokens, labels in data:
        calls: list[tuple[Tensor, Tensor]] = []
        handle = layer.register_forward_hook(lambda _, args, out, calls=calls: calls.append((args[0], out)))
        f = model(tokens.unsqueeze(0))
        handle.remove()
        ((x, out),) = calls
        y = labels.unsqueeze(0)
        counted = loss.counted(y).expand_as(f)
        count += float(loss.count(y))
        rows = rows_that_count(f[counted], out)[0]
        if not rows.any():
            continue
        (g,) = torch.autograd.grad(loss.criterion(f, y).sum(), out)
        x = torch.cat([x[0], torch.ones(x.shape[1], 1, dtype=F64)], 1).detach()[rows]
        g = g[0][rows]
        if sharing == "reduce":
            x, g = x.sum(0, keepdim=True), g.mean(0, keepdim=True)
        A, B, terms = A + x.T @ x, B + g.T @ g, terms + len(x)
    return A / count, B / terms


LAYERS = (
    *("attention.0.q", "attention.0.k", "attention.0.v", "attention.0.o", "up.0.0"),
    *("attention.1.q", "attention.1.k", "attention.1.o", "up.1.2", "head"),
)
PADDINGS = {"right": (0, 6), "left": (5, 0), "both": (3, 2), "inside": (2, 1, 2)}


def difference(a: Tensor, b: Tensor) -> float:
    # Gradients of keys sum to zero over positions, so with `reduce` only round-off is left.
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-20))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("causal", [True, False])
def test_any_padding_gives_the_factors_of_sequences_alone(causal: bool, padding: str, sharing: Any) -> None:
    model, loss = Transformer(causal), TokenCrossEntropy(shift=causal)
    data = sequences(prompt=2)
    batch = padded(data, *PADDINGS[padding])
    K = kfs.KFAC(kfs.EmpiricalRisk(model, loss, batch), "empirical", sharing)
    for name in LAYERS:
        A, B = oracle(model, model.get_submodule(name), data, loss, sharing)
        assert difference(K.blocks[name].A, A) < 1e-12, name
        assert difference(K.blocks[name].B, B) < 1e-12, name
    assert "attention_mask says which positions of inputs are there" in str(K.audit)
    assert "measured" not in str(K.audit)  # masks explain all rows, so no vector is sent back to find them


def test_rows_of_padding_would_change_factors() -> None:
    # The wrong variant that these tests reject: all rows count.
    model, loss, data = Transformer(causal=True), TokenCrossEntropy(shift=True), sequences(prompt=2)
    K = kfs.KFAC(kfs.EmpiricalRisk(model, loss, padded(data, 0, 6)), "empirical", audit=False)
    A, B = oracle(model, model.get_submodule("up.0.0"), data, loss, "expand")
    assert difference(K.blocks["up.0.0"].A, A) > 0.1
    assert difference(K.blocks["up.0.0"].B, B) > 0.1


def test_expand_is_exact_with_different_numbers_of_positions() -> None:
    """In deep linear nets whose positions are independent of each other, as in `kfs.kfac_tests`, with padding."""

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            result: Tensor = self.last(self.first(x)) * attention_mask.unsqueeze(2)
            return result

    mask = torch.arange(5) < torch.tensor([2, 5, 1, 3]).unsqueeze(1)
    X, y = torch.randn(4, 5, 3, dtype=F64), torch.randn(4, 5, 2, dtype=F64)
    risk = kfs.EmpiricalRisk(Linear(), nn.MSELoss(reduction="sum"), {"x": X, "attention_mask": mask, "labels": y})
    K, G = kfs.KFAC(risk), kfs.GGN(risk)
    for block in K.blocks.values():
        names = list(block.layout.params)
        assert difference(K.submatrix(names).to_dense(), G.submatrix(names).to_dense()) < 1e-12
    everything = kfs.KFAC(risk, audit=False)  # the wrong variant: padding counts
    assert difference(everything.submatrix(names).to_dense(), G.submatrix(names).to_dense()) > 0.1


# EKFAC of singular factors, such as sums over positions of six examples, depends on the basis of their null space.
@pytest.mark.parametrize(("kind", "sharing"), [(kfs.KFAC, "expand"), (kfs.KFAC, "reduce"), (kfs.EKFAC, "expand")])
def test_batches_by_length_and_by_one(kind: Any, sharing: Any) -> None:
    model, loss, data = Transformer(causal=True), TokenCrossEntropy(shift=True), sequences((5, 2, 4, 2, 5, 4), prompt=1)
    together = kind(kfs.EmpiricalRisk(model, loss, padded(data, 2, 3)), "empirical", sharing)
    by_length = sorted(data, key=lambda one: len(one[0]))
    batches = [padded(by_length[start : start + 2], 0, 0) for start in (0, 2, 4)]
    v = torch.randn(together.shape[1], 3, dtype=F64)
    for other in (batches, [padded([one], 0, 0) for one in data]):
        K = kind(kfs.EmpiricalRisk(model, loss, other), "empirical", sharing)
        assert difference(K @ v, together @ v) < 1e-11


def test_packed_documents_count_as_if_they_were_alone() -> None:
    model, loss, data = Transformer(causal=True), TokenCrossEntropy(shift=True), sequences((3, 4, 2, 5))
    packs = [data[:2], data[2:]]
    first = [torch.cat([torch.tensor([IGNORED]), labels[1:]]) for _, labels in data]  # first tokens have no prediction
    unpacked = [(tokens, labels) for (tokens, _), labels in zip(data, first, strict=True)]
    batch = {
        "input_ids": torch.stack([torch.cat([tokens for tokens, _ in pack]) for pack in packs]),
        "position_ids": torch.stack([torch.cat([torch.arange(len(tokens)) for tokens, _ in pack]) for pack in packs]),
        "documents": torch.stack(
            [torch.cat([torch.full((len(t),), n) for n, (t, _) in enumerate(pack)]) for pack in packs]
        ),
        "labels": torch.stack([torch.cat(first[:2]), torch.cat(first[2:])]),
    }
    K = kfs.KFAC(kfs.EmpiricalRisk(model, loss, batch), "empirical")
    for name in LAYERS:
        A, B = oracle(model, model.get_submodule(name), unpacked, loss, "expand")
        assert difference(K.blocks[name].A, A) < 1e-12, name
        assert difference(K.blocks[name].B, B) < 1e-12, name
    assert "measured in every batch" in str(K.audit)  # documents are not part of any mask


@pytest.mark.parametrize("pooled", ["first", "last"])
def test_after_a_class_token_one_row_counts(pooled: str) -> None:
    model, loss = Transformer(causal=False, pooled=pooled), nn.CrossEntropyLoss()
    data = sequences()
    batch = padded(data, 0, 4) | {"labels": torch.tensor([0, 1, 2, 3, IGNORED])}
    K = kfs.KFAC(kfs.EmpiricalRisk(model, loss, batch), "empirical")
    assert K.blocks["up.1.0"].sums.terms == 4  # one row for each example whose label counts
    assert K.blocks["attention.1.v"].sums.terms == 5 + 2 + 4 + 3
    alone = [
        {"input_ids": tokens.unsqueeze(0), "labels": y.unsqueeze(0)}
        for (tokens, _), y in zip(data, batch["labels"], strict=True)
        if y != IGNORED
    ]
    other = kfs.KFAC(kfs.EmpiricalRisk(model, loss, alone), "empirical")
    for name in LAYERS:
        assert difference(K.blocks[name].A, other.blocks[name].A) < 1e-12, name
        assert difference(K.blocks[name].B, other.blocks[name].B) < 1e-12, name


@pytest.mark.parametrize("mask", ["there", lambda x: x["there"]])
def test_a_mask_of_another_name(mask: Any) -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Transformer(causal=False)

        def forward(self, input_ids: Tensor, there: Tensor, position_ids: Tensor) -> Tensor:
            result: Tensor = self.model(input_ids, there, position_ids)
            return result

    model, loss, data = Renamed(), TokenCrossEntropy(), sequences()
    batch = padded(data, 2, 4)
    batch["there"] = batch.pop("attention_mask")
    K = kfs.KFAC(kfs.EmpiricalRisk(model, loss, batch, mask=mask), "empirical")
    for name in LAYERS:
        A, B = oracle(model.model, model.get_submodule(f"model.{name}"), data, loss, "expand")
        assert difference(K.blocks[f"model.{name}"].A, A) < 1e-12, name
        assert difference(K.blocks[f"model.{name}"].B, B) < 1e-12, name
    # Without a name for the mask, counted rows are measured.
    K = kfs.KFAC(kfs.EmpiricalRisk(model, loss, batch), "empirical")
    assert "measured in every batch" in str(K.audit)
    A, _ = oracle(model.model, model.get_submodule("model.up.0.0"), data, loss, "expand")
    assert difference(K.blocks["model.up.0.0"].A, A) < 1e-12


@pytest.mark.parametrize(
    ("mask", "message"), [("there", "is None"), (lambda _: torch.ones(3), "has shape"), (lambda _: 1, "is 1")]
)
def test_a_mask_that_is_not_one(mask: Any, message: str) -> None:
    risk = kfs.EmpiricalRisk(Transformer(True), TokenCrossEntropy(shift=True), padded(sequences(), 0, 0), mask=mask)
    with pytest.raises(DataError, match=message):
        kfs.KFAC(risk)


class Pooled(nn.Module):
    """Rows without a gradient due to their values count: inactive ReLUs, and positions that lose a maximum."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = body, nn.Linear(2, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x).flatten(2).amax(2))
        return result


@pytest.mark.parametrize(
    "body",
    [
        lambda: nn.Conv2d(1, 2, 3),
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2)),
        lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 1)),
    ],
)
def test_rows_without_gradient_because_of_their_values_count(body: Callable[[], nn.Module]) -> None:
    forget_audits()
    model = Pooled(body())
    X, y = torch.randn(6, 1, 6, 6, dtype=F64), torch.arange(6) % CLASSES
    K = kfs.KFAC(kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y)), "empirical")
    name, block = next(iter(K.blocks.items()))
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Conv2d)
    assert block.sums.terms == 6 * (6 - layer.weight.shape[2] + 1) ** 2


@pytest.mark.parametrize(
    "options",
    [{"fisher": "empirical"}, {"fisher": "type-2"}, {"fisher": "empirical", "sharing": "reduce"}],
)
def test_training_does_not_depend_on_padding(options: dict[str, Any]) -> None:
    data = sequences(prompt=1)

    def trained(batch: dict[str, Tensor]) -> Tensor:
        model, loss = Transformer(causal=True), TokenCrossEntropy(shift=True)
        optimizer = KFAC(model, loss, lr=0.3, **options)
        inputs = {name: t for name, t in batch.items() if name != "labels"}
        for _ in range(3):
            optimizer.zero_grad()
            loss(model(**inputs), batch["labels"]).backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    short, long = trained(padded(data, 0, 0)), trained(padded(data, 3, 9))
    assert difference(long, short) < 1e-9  # inverses amplify round-off


def test_draws_belong_to_positions() -> None:
    # Labels are drawn by example and position, so padding on the right does not change them.
    model, loss, data = Transformer(causal=True), TokenCrossEntropy(shift=True), sequences()
    K, padded_K = (kfs.KFAC(kfs.EmpiricalRisk(model, loss, padded(data, 0, n)), "mc", seed=1) for n in (0, 7))
    assert difference(padded_K.blocks["up.0.0"].B, K.blocks["up.0.0"].B) < 1e-12


class Hidden(nn.Module):
    """Recognizes padding by its tokens: no input is a mask."""

    def __init__(self, pooled: str = "") -> None:
        super().__init__()
        self.model = Transformer(causal=False, pooled=pooled)

    def forward(self, input_ids: Tensor) -> Tensor:
        result: Tensor = self.model(input_ids, (input_ids != TOKENS - 1).long())
        return result


def hidden(lengths: Sequence[int], width: int, seed: int = 0) -> dict[str, Tensor]:
    """Return sequences whose padding is a special token."""
    data = [(tokens.clamp(max=TOKENS - 2), labels) for tokens, labels in sequences(lengths, seed)]
    batch = padded(data, 0, width - max(lengths))
    ids = torch.where(batch["attention_mask"] > 0, batch["input_ids"], TOKENS - 1)
    return {"input_ids": ids, "labels": batch["labels"]}


@pytest.mark.parametrize(
    "lengths",
    [
        [[6, 6, 6, 6, 6], [2, 5, 3, 4]],  # the first batch has no padding
        [[2, 3, 6, 6, 6, 6]],  # the audited examples have none
        [[3, 3, 3, 3, 3], [6, 5, 2, 4]],  # all have the same length
        [[3], [6], [2]],  # two copies of an example are indistinguishable
        [[7, 7, 7, 7], [6, 6, 6, 6], [5, 8, 3, 4]],  # rules of one length are applied to others, until padding occurs
    ],
)
def test_padding_that_the_audited_data_do_not_show(lengths: list[list[int]]) -> None:
    forget_audits()
    model, loss = Hidden(), TokenCrossEntropy()
    batches = [hidden(some, max(6, *some), seed) for seed, some in enumerate(lengths)]
    K = kfs.KFAC(kfs.EmpiricalRisk(model, loss, batches), "empirical")
    alone = [
        {"input_ids": ids[ids != TOKENS - 1].unsqueeze(0), "labels": labels[labels != IGNORED].unsqueeze(0)}
        for batch in batches
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]
    forget_audits()
    other = kfs.KFAC(kfs.EmpiricalRisk(model, loss, alone), "empirical")
    for name, block in K.blocks.items():
        assert block.sums.terms == other.blocks[name].sums.terms, name
        assert difference(block.A, other.blocks[name].A) < 1e-12, name
        assert difference(block.B, other.blocks[name].B) < 1e-12, name


class Translation(nn.Module):
    """An encoder with a mask of its own, and one prediction per position."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.source, self.target = nn.Embedding(TOKENS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.encoder, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        there = attention_mask.unsqueeze(2)
        encoded = (self.encoder(self.source(input_ids)).tanh() * there).sum(1, keepdim=True) / there.sum(
            1, keepdim=True
        )
        result: Tensor = self.head((self.target(decoder_input_ids) + encoded).tanh())
        return result


def test_encoders_are_not_masked_by_targets_of_decoders() -> None:
    batch = padded(sequences((2, 4, 3, 5)), 0, 1)
    targets = padded(sequences((6, 2, 5, 4), seed=1), 0, 0)
    batch |= {"decoder_input_ids": targets["input_ids"], "labels": targets["labels"]}
    del batch["position_ids"]
    K = kfs.KFAC(kfs.EmpiricalRisk(Translation(), TokenCrossEntropy(), batch), "empirical")
    assert K.blocks["encoder"].sums.terms == 2 + 4 + 3 + 5
    assert K.blocks["head"].sums.terms == 6 + 2 + 5 + 4


def test_attention_that_ends_in_nan_without_keys() -> None:
    """The attention returns NaN for masks that a user would not pass."""

    class Strict(Attention):
        def forward(self, h: Tensor, allowed: Tensor) -> Tensor:
            scores = (self.q(h) @ self.k(h).mT).masked_fill(~allowed, -torch.inf)
            result: Tensor = self.o(scores.softmax(-1) @ self.v(h))
            return result

    model, loss, data = Transformer(causal=True), TokenCrossEntropy(shift=True), sequences(prompt=1)
    model.attention = nn.ModuleList(Strict() for _ in range(2)).double()
    K = kfs.KFAC(kfs.EmpiricalRisk(model, loss, padded(data, 0, 6)), "empirical")
    for name in LAYERS:
        A, B = oracle(model, model.get_submodule(name), data, loss, "expand")
        assert difference(K.blocks[name].A, A) < 1e-12, name
        assert difference(K.blocks[name].B, B) < 1e-12, name


@pytest.mark.parametrize("scale", [1, 3])
def test_class_tokens_and_peaked_attention(scale: int) -> None:
    model = Transformer(causal=False, pooled="first")
    for attention in model.attention:
        for p in (*attention.q.parameters(), *attention.k.parameters()):  # type: ignore[union-attr]
            p.data *= scale
    batch = padded(sequences(), 0, 4) | {"labels": torch.arange(5) % CLASSES}
    del batch["position_ids"]
    K = kfs.KFAC(kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), batch), "empirical")
    for name in ("tokens.weight", "places.weight", "attention.0.q", "attention.1.v", "up.0.0"):
        assert K.blocks[name].sums.terms == 5 + 2 + 4 + 3 + 6, name


def test_a_mask_without_any_position_is_none() -> None:
    model, loss, data = Transformer(causal=True), TokenCrossEntropy(shift=True), sequences((5, 5, 5, 5))
    batch = padded(data, 0, 0)
    ids = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
    K = kfs.KFAC(kfs.EmpiricalRisk(model, loss, ids), "empirical")
    wrong = kfs.KFAC(kfs.EmpiricalRisk(model, loss, ids, mask=lambda x: torch.zeros_like(x["input_ids"])), "empirical")
    for name, block in K.blocks.items():
        assert difference(wrong.blocks[name].A, block.A) < 1e-12, name
