"""Attention, recurrent networks and Hugging Face models agree with the same model written with single linear layers."""

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pack_sequence

from kfs.errors import ModelError
from kfs.factors import KFAC, inspect
from kfs.factors.accumulate import FactorSums
from kfs.factors.capture import forward
from kfs.factors.rules import new_trace
from kfs.factors.settings import Settings
from kfs.losses import TokenCrossEntropy
from kfs.problem.risk import EmpiricalRisk
from tests.factors.definition import definition
from tests.operators.contract import close

SHARING = ("expand", "reduce")


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def same_predictions(risk: EmpiricalRisk) -> None:
    """Taps and replacements do not change the predictions of a model."""
    (batch,) = risk.batches()
    with torch.enable_grad():
        f, _ = forward(risk, batch, new_trace(risk.params), [FactorSums(Settings())])
    with torch.no_grad(), risk.untouched():
        close(f.detach(), risk.predict(risk.params, batch))


class Recurrent(nn.Module):
    def __init__(self, rnn: nn.RNNBase, state: bool = False) -> None:
        super().__init__()
        self.rnn, self.state = rnn, state
        width = (rnn.proj_size or rnn.hidden_size) * (2 if rnn.bidirectional else 1)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.rnn.batch_first else x.transpose(0, 1)
        h = torch.ones(self.rnn.num_layers, len(x), self.rnn.hidden_size, dtype=x.dtype) if self.state else None
        states, _ = self.rnn(x, h) if self.state else self.rnn(x)
        states = states if self.rnn.batch_first else states.transpose(0, 1)
        result: Tensor = self.head(states[:, -1])
        return result


class ByHand(nn.Module):
    """One layer of a recurrent network, written with linear layers."""

    def __init__(self, kind: str, cell: Any) -> None:
        super().__init__()
        self.kind, self.hidden = kind, cell.weight_hh.shape[1]
        self.ih, self.hh = nn.Linear(*cell.weight_ih.T.shape), nn.Linear(*cell.weight_hh.T.shape)
        self.head = nn.Linear(self.hidden, 2)
        with torch.no_grad():
            for mine, name in ((self.ih, "ih"), (self.hh, "hh")):
                mine.weight.copy_(getattr(cell, f"weight_{name}"))
                mine.bias.copy_(getattr(cell, f"bias_{name}"))

    def forward(self, x: Tensor) -> Tensor:
        h = c = 0 * x[:, 0, :1].expand(-1, self.hidden)
        for t in range(x.shape[1]):
            a, b = self.ih(x[:, t]), self.hh(h)
            if self.kind == "lstm":
                i, f, g, o = (a + b).chunk(4, 1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
            elif self.kind == "gru":
                (ra, za, na), (rb, zb, nb) = a.chunk(3, 1), b.chunk(3, 1)
                z = (za + zb).sigmoid()
                h = (1 - z) * (na + (ra + rb).sigmoid() * nb).tanh() + z * h
            else:
                h = (a + b).tanh() if self.kind == "tanh" else (a + b).relu()
        result: Tensor = self.head(h)
        return result


class Cells(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = None
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        result: Tensor = self.head(h[0] if isinstance(h, tuple) else h)
        return result


CELLS: dict[str, Any] = {
    "lstm": (nn.LSTM(3, 4, batch_first=True), nn.LSTMCell(3, 4)),
    "gru": (nn.GRU(3, 4), nn.GRUCell(3, 4)),
    "tanh": (nn.RNN(3, 4), nn.RNNCell(3, 4)),
    "relu": (nn.RNN(3, 4, nonlinearity="relu"), nn.RNNCell(3, 4, nonlinearity="relu")),
}


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("kind", CELLS)
def test_recurrent_networks_are_linear_layers_in_time(kind: str, sharing: Any) -> None:
    torch.manual_seed(0)
    network, cell = CELLS[kind]
    cell.load_state_dict({name.removesuffix("_l0"): p for name, p in network.state_dict().items()})
    by_hand = ByHand(kind, cell).double()
    models = [Recurrent(network).double(), Cells(cell).double(), by_hand]
    for model in models:
        model.get_submodule("head").load_state_dict(by_hand.head.state_dict())
    X, y = normal(3, 5, 3), normal(3, 2)
    risks = [EmpiricalRisk(model, nn.MSELoss(), (X, y)) for model in models]
    Ks = [KFAC(risk, sharing=sharing) for risk in risks]
    for risk, K, prefix, suffix in zip(risks, Ks, ("rnn", "cell"), ("_l0", ""), strict=False):
        same_predictions(risk)
        for name in ("ih", "hh"):
            block, other = K.blocks[f"{prefix}.weight_{name}{suffix}"], Ks[2].blocks[name]
            if sharing == "expand" or name == "hh" or prefix == "cell":
                close(block.A, other.A)
                close(block.B, other.B)
        close(K.blocks["head"].B, Ks[2].blocks["head"].B)


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_no_layer_reads(seed: int) -> None:
    """A stride leaves out the same positions of all examples, whatever else the values switch off."""
    torch.manual_seed(seed)
    layers = nn.Conv2d(2, 5, 3, padding=1), nn.GroupNorm(1, 5), nn.Tanh(), nn.Conv2d(5, 4, 3, stride=2), nn.ReLU()
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, 4)).double()
    K = KFAC(EmpiricalRisk(net, nn.CrossEntropyLoss(), (normal(8, 2, 8, 8), torch.randint(4, (8,)))))
    assert K.audit is not None
    rows = {use.rows for use in K.audit.uses if use.parameter.startswith("1.")}
    assert len(rows) == 1
    assert "49 of 64 rows of an example count" in rows.pop()


@pytest.mark.parametrize("seed", [105, 271])
def test_rows_that_values_switch_off(seed: int) -> None:
    """All units are off at some times, also in the first repetitions of the audit: the positions count nevertheless."""
    torch.manual_seed(seed)
    net = Recurrent(nn.RNN(3, 4, nonlinearity="relu", batch_first=True)).double()
    X, y = torch.randn(3, 5, 3).double(), torch.randn(3, 2).double()
    A = KFAC(EmpiricalRisk(net, nn.MSELoss(), (X, y))).blocks["rnn.weight_ih_l0"].A
    expected = X.flatten(0, 1).T @ X.flatten(0, 1)
    close(A[:3, :3] / A[0, 0], expected / expected[0, 0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True),
        lambda: nn.LSTM(3, 4, proj_size=2, num_layers=2),
        lambda: nn.GRU(3, 4, num_layers=2, bidirectional=True, bias=False),
        lambda: nn.RNN(3, 4, num_layers=2, batch_first=True),
    ],
)
def test_layers_directions_and_projections(make: Any) -> None:
    torch.manual_seed(0)
    model = Recurrent(make()).double()
    X, y = normal(3, 5, 3), normal(3, 2)
    risk = EmpiricalRisk(model, nn.MSELoss(), (X, y))
    same_predictions(risk)
    for sharing in SHARING:
        assert KFAC(risk, "mc", sharing).domain.size == sum(p.numel() for p in model.parameters())  # type: ignore[arg-type]


def test_given_states_and_packed_sequences() -> None:
    torch.manual_seed(0)
    model = Recurrent(nn.GRU(3, 4, batch_first=True), state=True).double()
    risk = EmpiricalRisk(model, nn.MSELoss(), (normal(3, 5, 3), normal(3, 2)))
    same_predictions(risk)
    KFAC(risk)

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            _, last = self.rnn(pack_sequence(list(x)))
            result: Tensor = self.head(last[0])
            return result

    packed = EmpiricalRisk(Packed().double(), nn.MSELoss(), (normal(3, 5, 3), normal(3, 2)))
    with pytest.raises(ModelError, match=r"'rnn\.weight_ih_l0': it is used by gru with arguments that the rule"):
        KFAC(packed)
    assert list(KFAC(packed, uncovered="skip").blocks) == ["head"]


class Attention(nn.Module):
    """Attention of a sequence to a longer one; written with PyTorch's module, or by hand."""

    def __init__(self, by_hand: bool, batch_first: bool, separate: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        dims = {"kdim": 3, "vdim": 3} if separate else {}
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first, **dims)
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(dims.get("kdim", 4), 4), nn.Linear(dims.get("vdim", 4), 4)
        self.out, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        a = self.attention
        with torch.no_grad():
            parts = (a.q_proj_weight, a.k_proj_weight, a.v_proj_weight) if separate else a.in_proj_weight.chunk(3)
            for layer, W, b in zip((self.q, self.k, self.v), parts, a.in_proj_bias.normal_().chunk(3), strict=True):
                layer.weight.copy_(W)
                layer.bias.copy_(b)
            self.out.load_state_dict(a.out_proj.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        q, kv = x[:, :3], x if self.k.in_features == 4 else x[..., :3]
        if self.by_hand:
            q, k, v = self.q(q), self.k(kv), self.v(kv)
            q, k, v = (t.unflatten(2, (2, 2)).transpose(1, 2) for t in (q, k, v))
            mask = torch.ones(3, x.shape[1], dtype=torch.bool).tril()
            out = self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))
        else:
            mask = torch.ones(3, x.shape[1], dtype=torch.bool).triu(1)
            first = self.attention.batch_first
            q, kv = (t if first else t.transpose(0, 1) for t in (q, kv))
            out = self.attention(q, kv, kv, attn_mask=mask, need_weights=not first)[0]
            out = out if first else out.transpose(0, 1)
        result: Tensor = self.head(out.tanh()).mean(1)
        return result


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_is_linear_layers(batch_first: bool, separate: bool, sharing: Any) -> None:
    """Three examples, three positions: the batch axis is known, not guessed."""
    Ks = []
    X, y = normal(3, 5, 4), normal(3, 2)
    for by_hand in (True, False):
        torch.manual_seed(0)
        model = Attention(by_hand, batch_first, separate).double()
        used = {"q", "k", "v", "out", "head"} if by_hand else {"attention", "head"}
        names = [name for name, _ in model.named_parameters() if name.split(".")[0] in used]
        risk = EmpiricalRisk(model, nn.MSELoss(), (X, y), params=names)
        same_predictions(risk)
        Ks.append(KFAC(risk, sharing=sharing))
    hand, module = Ks
    both = "in_proj_weight[4:12]"  # keys and values come from the same input, so PyTorch multiplies them together
    packed = {"q": ("in_proj_weight[0:4]", 0), "k": (both, 0), "v": (both, 4)}
    own = {"q": ("q_proj_weight", 0), "k": ("k_proj_weight", 0), "v": ("v_proj_weight", 0)}
    for name, (theirs, start) in {**(own if separate else packed), "out": ("out_proj", 0)}.items():
        block, other = hand.blocks[name], module.blocks[f"attention.{theirs}"]
        columns = slice(None, -1) if other.A.shape != block.A.shape else slice(None)
        close(block.A[columns, columns], other.A)
        close(block.B, other.B[start : start + 4, start : start + 4])


def test_self_attention_is_one_block() -> None:
    model = nn.Sequential(
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), nn.Flatten(), nn.Linear(12, 2)
    )
    model = model.double().eval()
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), (normal(5, 3, 4), torch.randint(2, (5,))))
    same_predictions(risk)
    K = KFAC(risk, "mc")
    assert K.blocks["0.self_attn.in_proj_weight"].B.shape == (12, 12)
    assert K.domain.size == sum(p.numel() for p in model.parameters())


def test_learned_keys_and_whole_transformers() -> None:
    class Model(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.head = inner, nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out = self.inner(x, x, x)[0] if isinstance(self.inner, nn.MultiheadAttention) else self.inner(x, x)
            result: Tensor = self.head(out).mean(1)
            return result

    data = (normal(5, 3, 4), torch.randint(2, (5,)))
    for inner in (
        nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True),
        nn.Transformer(4, 2, 1, 1, 8, dropout=0.0, batch_first=True),
    ):
        risk = EmpiricalRisk(Model(inner).double().eval(), nn.CrossEntropyLoss(), data)
        same_predictions(risk)
        assert not inspect(risk.model, data[0]).uncovered
        KFAC(risk, "mc", "reduce")


def hugging_face(name: str) -> tuple[nn.Module, dict[str, Tensor], Tensor, Any]:
    t: Any = import_module("transformers")  # slow, and with very detailed types
    ids = torch.randint(1, 11, (6, 6))  # as many examples as positions, to notice mixed-up axes
    tiny: dict[str, Any] = {"vocab_size": 11}
    bert = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    if name == "gpt2":
        config = t.GPT2Config(n_positions=8, n_embd=8, n_layer=1, n_head=2, **tiny, **ends)
        return t.GPT2LMHeadModel(config), {"input_ids": ids}, ids, TokenCrossEntropy(shift=True)
    if name == "llama":
        config = t.LlamaConfig(num_key_value_heads=1, max_position_embeddings=16, **bert, **tiny)
        return t.LlamaForCausalLM(config), {"input_ids": ids}, ids, TokenCrossEntropy(shift=True)
    if name == "bert":
        config = t.BertConfig(max_position_embeddings=8, **bert, **tiny)
        return t.BertForMaskedLM(config), {"input_ids": ids}, ids, TokenCrossEntropy()
    if name == "t5":
        config = t.T5Config(d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, decoder_start_token_id=0, **tiny)
        inputs = {"input_ids": ids, "decoder_input_ids": ids[:, :4]}
        return t.T5ForConditionalGeneration(config), inputs, ids[:, :4], TokenCrossEntropy()
    if name == "whisper":  # positions of the decoder are looked up by indices that are repeated over the batch
        config = t.WhisperConfig(
            num_mel_bins=4,
            d_model=8,
            max_source_positions=4,
            max_target_positions=8,
            encoder_layers=1,
            encoder_attention_heads=2,
            encoder_ffn_dim=6,
            decoder_layers=1,
            decoder_attention_heads=2,
            decoder_ffn_dim=6,
            pad_token_id=0,
            decoder_start_token_id=1,
            **tiny,
            **ends,
        )
        sound = torch.randn(6, 4, 8, dtype=torch.float64)
        inputs = {"input_features": sound, "decoder_input_ids": ids[:, :4]}
        return t.WhisperForConditionalGeneration(config), inputs, ids[:, :4], TokenCrossEntropy()
    model, inputs = classifier(name, t, bert)
    return model, inputs or {"input_ids": ids[:5]}, torch.randint(3, (5,)), nn.CrossEntropyLoss()


def classifier(name: str, t: Any, bert: dict[str, Any]) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a classifier of five images, or one of sentences."""
    if name.startswith("deberta"):  # keys and queries are computed from positions
        positions = {"relative_attention": True, "pos_att_type": "c2p|p2c", "position_biased_input": False}
        if name == "deberta-v2":
            positions |= {"position_buckets": 4, "norm_rel_ebd": "layer_norm", "share_att_key": True}
        kind = "DebertaV2" if name == "deberta-v2" else "Deberta"
        size: dict[str, Any] = {"num_labels": 3, "max_position_embeddings": 8, "vocab_size": 11}
        return getattr(t, f"{kind}ForSequenceClassification")(
            getattr(t, f"{kind}Config")(**size, **positions, **bert)
        ), {}
    size = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3}
    if name == "swinv2":  # a network of positions computes a bias of attention
        size |= {"patch_size": 2, "embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 2}
    else:
        size |= bert
    if name == "beit":  # a bias of attention is looked up, and joined
        size |= {"use_relative_position_bias": True}
    if name == "dinov2":  # the token for masks is not used
        size |= {"mlp_ratio": 1}
    kind = {"vit": "ViT"}.get(name, name.capitalize())
    config = getattr(t, f"{kind}Config")(**size)
    pixels = {"pixel_values": torch.randn(5, 1, 8, 8, dtype=torch.float64)}
    return getattr(t, f"{kind}ForImageClassification")(config), pixels


MODELS = ["gpt2", "llama", "bert", "t5", "vit", "whisper", "beit", "swinv2", "dinov2", "deberta", "deberta-v2"]


@pytest.mark.parametrize("name", MODELS)
def test_hugging_face(name: str) -> None:
    """All parameters are covered, and each operation has the factors of its definition: sums over single examples."""
    torch.manual_seed(0)
    model, inputs, y, loss = hugging_face(name)
    model = model.double().eval()
    risk = EmpiricalRisk(model, loss, [(inputs, y)])
    assert not inspect(model, inputs).uncovered
    same_predictions(risk)
    singles = [({key: t[n : n + 1] for key, t in inputs.items()}, y[n : n + 1]) for n in range(len(y))]
    for sharing in SHARING:
        K = KFAC(risk, "empirical", sharing)  # type: ignore[arg-type]
        L = KFAC(EmpiricalRisk(model, loss, singles), "empirical", sharing)  # type: ignore[arg-type]
        assert K.domain.size == sum(p.numel() for p in model.parameters() if p.requires_grad)
        for block, other in zip(K.blocks.values(), L.blocks.values(), strict=True):
            close(block.A, other.A)
            close(block.B, other.B)


class Logits(nn.Module):
    """A language model that takes tokens and returns logits with classes along the second axis."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.model(ids).logits.transpose(1, 2)
        return result


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_hugging_face_layers_by_definition(name: str, sharing: str) -> None:
    """Every linear layer has the factors of the literal definition, by hooks and loops over examples and vectors."""
    torch.manual_seed(0)
    model = Logits(hugging_face(name)[0]).double().eval()
    X = torch.randint(1, 11, (2, 3))
    y = torch.tensor([[1, 4, -100], [2, -100, 3]])
    loss = nn.CrossEntropyLoss()
    K = KFAC(EmpiricalRisk(model, loss, (X, y)), sharing=sharing)  # type: ignore[arg-type]
    checked = 0
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and path + ("" if layer.bias is not None else ".weight") in K.blocks:
            block = K.blocks[path + ("" if layer.bias is not None else ".weight")]
            A, B = definition(model, loss, X, y, layer, sharing, 0.25, every=False)
            close(block.A, A[0])
            close(block.B, B[0])
            checked += 1
    assert checked >= 6
