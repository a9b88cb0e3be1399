"""Language models of Hugging Face without changes: batches as mappings, logits in the output, shifted labels."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

from kfs import GGN, KFAC, EmpiricalRisk, Fisher, Hessian
from kfs.basics.ggn_product import ggnvp
from kfs.basics.hessian_product import mixed_hvp
from kfs.losses import TokenCrossEntropy
from tests.language_models import bert, gpt2


def batch(num_data: int) -> dict[str, Tensor]:
    tokens = torch.randint(11, (num_data, 5))
    mask = torch.ones_like(tokens)
    mask[0, -1] = 0
    labels = tokens.clone()
    labels[0, -1] = labels[-1, 2] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


@pytest.fixture(params=["gpt2", "bert"])
def problem(request: pytest.FixtureRequest) -> tuple[Any, TokenCrossEntropy, list[dict[str, Tensor]]]:
    causal = request.param == "gpt2"
    model = gpt2() if causal else bert()
    return model.double().eval(), TokenCrossEntropy(shift=causal), [batch(2), batch(1)]


def test_value_is_the_models_own(problem: Any) -> None:
    model, loss, batches = problem
    together = {key: torch.cat([b[key] for b in batches]) for key in batches[0]}
    # The models compute their loss in float32 for any dtype.
    assert EmpiricalRisk(model, loss, batches).value() == pytest.approx(model(**together).loss.item(), rel=1e-6)


def test_products_are_the_definitions(problem: Any) -> None:
    model, loss, batches = problem
    risk = EmpiricalRisk(model, loss, batches)
    H, G, F = Hessian(risk), GGN(risk), Fisher(risk, "type-1", mc_samples=2)
    v = {name: torch.randn_like(p) for name, p in risk.params.items()}

    # The vector has one parameter; the product's rows belong to another one, by definition, on all data at once.
    moved, watched = "attention.self.query.weight", "attention.self.value.bias"
    names = list(risk.params)
    if moved not in " ".join(names):
        moved, watched = "h.0.attn.c_attn.weight", "h.1.mlp.c_fc.bias"
    column, row = (next(name for name in names if part in name) for part in (moved, watched))
    together = {key: torch.cat([b[key] for b in batches]) for key in batches[0]}
    labels = together.pop("labels")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        logits = model(**together).logits
    value = risk.reduction_factor * loss.criterion(logits, labels).sum()
    p, q = model.get_parameter(column), model.get_parameter(row)
    product = H.submatrix([row], [column]) @ {column: v[column]}
    torch.testing.assert_close(product[row], mixed_hvp(value, q, p, v[column]), rtol=1e-9, atol=1e-12)
    product = G.submatrix([column]) @ {column: v[column]}
    torch.testing.assert_close(product[column], ggnvp(value, logits, p, v[column]), rtol=1e-9, atol=1e-12)

    for operator in (H, G, F):
        answer = operator @ v
        assert all(t.isfinite().all() for t in answer.values())
        w = {name: torch.randn_like(p) for name, p in risk.params.items()}
        one = sum((w[name] * answer[name]).sum() for name in w)
        other = sum((v[name] * t).sum() for name, t in (operator @ w).items())
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    positive = sum((v[name] * t).sum() for name, t in (F @ v).items())
    assert positive > 0


def test_speech_models_draw_numbers_that_they_do_not_use() -> None:
    """Wav2Vec2 draws a number for every layer to decide whether to skip it, even if layers are never skipped."""
    size: dict[str, Any] = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "conv_dim": (4, 4),
        "conv_stride": (2, 2),
        "conv_kernel": (3, 3),
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "classifier_proj_size": 6,
        "num_labels": 3,
    }
    model = Wav2Vec2ForSequenceClassification(Wav2Vec2Config(**size)).double().eval()
    sound, y = torch.randn(3, 40, dtype=torch.float64), torch.arange(3)
    names = ["projector.weight", "classifier.weight"]
    risk = EmpiricalRisk(model, torch.nn.CrossEntropyLoss(), [({"input_values": sound}, y)], params=names)
    value = torch.nn.CrossEntropyLoss()(model(input_values=sound).logits, y)
    assert risk.value() == pytest.approx(value.item(), rel=1e-12)
    expected = torch.autograd.grad(value, [model.get_parameter(name) for name in names])
    for found, exact in zip(risk.gradient().values(), expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)
    # For one example, KFAC is exact if a layer is used at one position.
    one = EmpiricalRisk(model, torch.nn.CrossEntropyLoss(), [({"input_values": sound[:1]}, y[:1])], params=names)
    classifier = GGN(one).submatrix("classifier.weight").to_dense()
    torch.testing.assert_close(KFAC(one).submatrix("classifier.weight").to_dense(), classifier, rtol=1e-9, atol=1e-15)
