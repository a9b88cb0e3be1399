"""Adapters of PEFT, and quantized models: factors are exact where KFAC is exact, and everything else runs.

With one example of one token, every parameter is used once. Then KFAC is exact for any network: its oracle is the GGN.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import peft
import pytest
import torch
from torch import Tensor, nn
from torchao import quantization
from transformers import LlamaConfig, LlamaForSequenceClassification, MixtralConfig, MixtralForCausalLM

import kfs
from docs import blocks
from kfs.errors import ModelError
from tests.operators.contract import close

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SOME = ["q_proj", "o_proj"]
METHODS: dict[str, Callable[..., Any]] = {
    "LoRA": lambda **k: peft.LoraConfig(r=2, target_modules=ALL, **k),
    "LoRA with biases": lambda **k: peft.LoraConfig(r=2, target_modules=SOME, lora_bias=True, bias="all", **k),
    "rsLoRA": lambda **k: peft.LoraConfig(r=2, use_rslora=True, target_modules=SOME, **k),
    "DoRA": lambda **k: peft.LoraConfig(r=2, use_dora=True, target_modules=ALL, **k),
    "LoRA on embeddings": lambda **k: peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"], **k),
    "modules to save": lambda **k: peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["o_proj"], **k),
    "trained tokens": lambda **k: peft.LoraConfig(r=2, target_modules=SOME, trainable_token_indices=[3, 15, 5], **k),
    "IA3": lambda **k: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **k),
    "VeRA": lambda **k: peft.VeraConfig(r=4, target_modules=SOME, **k),
    "prefix": lambda **k: peft.PrefixTuningConfig(num_virtual_tokens=1, **k),
    "prefix, projected": lambda **k: peft.PrefixTuningConfig(
        num_virtual_tokens=1, prefix_projection=True, encoder_hidden_size=6, **k
    ),
    "prompt": lambda **k: peft.PromptTuningConfig(num_virtual_tokens=1, **k),
}


def llama(size: int = 8, vocabulary: int = 23, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    settings: dict[str, Any] = dict(  # noqa: C408
        vocab_size=vocabulary,
        hidden_size=size,
        intermediate_size=size,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        num_labels=3,
        pad_token_id=0,
        initializer_range=0.3,
    )
    model: Any = LlamaForSequenceClassification(LlamaConfig(**settings))
    result: nn.Module = model.to(dtype)
    return result


def adapted(base: nn.Module, config: Any) -> nn.Module:
    """Return a model with random adapters; those of PEFT start at zero."""
    model: nn.Module = peft.get_peft_model(base, config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.3 * torch.randn(p.shape).to(p.dtype))
    return model


def reviews(num_data: int, length: int) -> dict[str, Tensor]:
    torch.manual_seed(2)
    tokens, mask = torch.randint(1, 23, (num_data, length)), torch.ones(num_data, length, dtype=torch.long)
    if length > 2:
        tokens[1, -2:], mask[1, -2:] = 0, 0
    tokens[0, 0] = 15
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.randint(3, (num_data,))}


def trained(model: nn.Module, batch: dict[str, Tensor]) -> list[float]:
    """Return the losses of a few steps."""
    optimizer, losses = kfs.optim.KFAC(model, nn.CrossEntropyLoss(), lr=0.3), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", METHODS)
def test_methods(method: str) -> None:
    model = adapted(llama(), METHODS[method](task_type="SEQ_CLS")).double()
    one = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), reviews(1, 1))
    close(kfs.KFAC(one).to_dense(), kfs.factors.exact_blocks(one).to_dense())
    batch = reviews(5, 4)
    risk = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), batch)
    assert abs(risk.value() - model(**batch).loss.item()) < 1e-6
    E = kfs.EKFAC(risk)
    close(E.trace(), kfs.GGN(risk).diagonal().sum())
    parts = [{key: t[rows] for key, t in batch.items()} for rows in (slice(4), slice(4, 5))]
    close(kfs.KFAC(kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), parts)).to_dense(), kfs.KFAC(risk).to_dense())
    assert kfs.Influence(E, damping=kfs.Relative(0.1)).scores(risk, risk).isfinite().all()
    belief = kfs.laplace.posterior(E, risk, prior_precision=1.0)
    predicted: Any = belief.predict({key: t for key, t in batch.items() if key != "labels"})
    close(predicted.sum(1), torch.ones(5).double())
    losses = trained(model.float(), batch)
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore")
def test_experts() -> None:
    """Adapters of all experts at once are factors of weights: their exact diagonal is known, but no factors."""
    torch.manual_seed(0)
    settings: dict[str, Any] = dict(  # noqa: C408
        vocab_size=23,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
        experts_implementation="eager",
    )
    lora = peft.LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    )
    model = adapted(MixtralForCausalLM(MixtralConfig(**settings)), lora)
    batch = reviews(3, 5)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    risk = kfs.EmpiricalRisk(model, kfs.losses.TokenCrossEntropy(shift=True), batch)
    with pytest.raises(
        ModelError, match=r"experts\.lora_A\.default\.weight': it is used by linear before it meets the batch"
    ):
        kfs.KFAC(risk)
    K = kfs.KFAC(risk, uncovered="diagonal")
    torch.testing.assert_close(K.diagonal()[-8 * 6 :], kfs.GGN(risk).diagonal()[-8 * 6 :], rtol=1e-3, atol=1e-5)


def replaced(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """Replace all linear layers except the head."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "score":
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, make(module))
    return model


def four_bit(layer: nn.Linear) -> nn.Module:
    made = bnb.nn.Linear4bit(
        layer.in_features, layer.out_features, bias=False, compute_dtype=layer.weight.dtype, quant_type="nf4"
    )
    made.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
    return made.to("cpu")  # type: ignore[no-any-return]


def eight_bit(layer: nn.Linear) -> nn.Module:
    made = bnb.nn.Linear8bitLt(layer.in_features, layer.out_features, bias=False, has_fp16_weights=False)
    made.weight = bnb.nn.Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False)
    return made.to("cpu")  # type: ignore[no-any-return]


def torchao(model: nn.Module, config: str) -> nn.Module:
    chosen = getattr(quantization, config)()
    quantization.quantize_(model, chosen, filter_fn=lambda m, name: isinstance(m, nn.Linear) and name != "score")
    return model


BASES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "as it is": lambda model: model,
    "bitsandbytes, 4 bit": lambda model: replaced(model, four_bit),
    "bitsandbytes, 8 bit": lambda model: replaced(model, eight_bit),
    "torchao, weights": lambda model: torchao(model, "Int8WeightOnlyConfig"),
    "torchao, weights and activations": lambda model: torchao(model, "Int8DynamicActivationInt8WeightConfig"),
    "torchao, 8 bit floats": lambda model: torchao(model, "Float8WeightOnlyConfig"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
)
@pytest.mark.parametrize("base", BASES)
def test_bases(base: str, dtype: torch.dtype) -> None:
    """The head is in the precision of the base, and adapters are in float32: parameters of two dtypes."""
    if dtype == torch.float16 and base != "as it is":
        pytest.skip("not on a CPU")
    model = adapted(BASES[base](llama(64, dtype=dtype)), peft.LoraConfig(r=2, target_modules=SOME, task_type="SEQ_CLS"))
    risk, one = (kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), reviews(*sizes)) for sizes in ((5, 4), (1, 1)))
    assert {p.dtype for p in risk.params.values()} == {torch.float32, dtype}
    K, C = kfs.KFAC(one).to_dense(), kfs.factors.exact_blocks(one).to_dense()
    assert float((K - C).norm() / C.norm()) < (1e-4 if dtype == torch.float32 else 2e-2)
    ratio = float(kfs.EKFAC(risk).trace() / kfs.GGN(risk).diagonal().sum())
    assert abs(ratio - 1) < (1e-3 if dtype == torch.float32 else 5e-2)
    losses = trained(model, reviews(5, 4))
    assert min(losses) < losses[0] or "activations" in base  # the steps of rounded activations are not differentiable


@pytest.mark.filterwarnings("default")  # warnings of other libraries are not tested here
def test_all_programs_of_the_page(tmp_path: Path) -> None:
    page = Path(blocks.__file__).parent / "howto_adapters.md"
    with blocks.inside(tmp_path):
        outputs = blocks.run(page, blocks.libraries(page)).outputs
    assert None not in outputs
