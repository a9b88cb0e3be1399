"""TRL's `SFTTrainer` with its own defaults: bfloat16, checkpoints, a fused output layer, packing, low-rank adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.optim import lr_scheduler
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import kfs
from kfs.losses import TokenCrossEntropy
from kfs.optim import KFAC
from tests.optim.training import weights

WORDS = ["<pad>", "<eos>", "the", "a", "cat", "dog", "bird", "sees", "hears", "likes", "small", "old", "sleeps"]
# Of two to six words.
SENTENCES = ["the cat", "a small dog sees the bird", "the old bird sleeps", "a cat hears a dog"] * 4
LOSS = TokenCrossEntropy(shift=True)

pytestmark = pytest.mark.filterwarnings("default")  # warnings of other libraries are not tested here


def llama() -> Any:
    torch.manual_seed(0)
    size: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, **size))


def tokenizer() -> Any:
    whole = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}))
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=whole, pad_token="<pad>", eos_token="<eos>")


def sft(
    folder: Path, model: Any, fisher: Any = "type-2", damping: float = 0.003, **options: Any
) -> tuple[SFTTrainer, KFAC]:
    """Train for three steps."""
    optimizer = KFAC(model, LOSS, lr=0.05, fisher=fisher, damping=damping)
    settings = {"per_device_train_batch_size": 4, "max_grad_norm": 0.0, "train_sampling_strategy": "sequential"}
    arguments = SFTConfig(
        str(folder),
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        max_steps=3,
        **settings | options,
    )
    trainer = SFTTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_list([{"text": sentence} for sentence in SENTENCES]),
        processing_class=tokenizer(),
        optimizers=(optimizer, lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
    )
    trainer.train()
    assert optimizer.steps == 3
    assert optimizer.events.skipped_steps == 0
    return trainer, optimizer


def plain(trainer: SFTTrainer, fisher: Any, accumulated: int = 1) -> Tensor:
    """Return the parameters after three steps of a plain loop over the trainer's batches, in float32."""
    model = llama()
    optimizer = KFAC(model, LOSS, lr=0.05, fisher=fisher)
    batches = list(trainer.get_train_dataloader())
    for step in range(3):
        parts = [batches[(step * accumulated + n) % len(batches)] for n in range(accumulated)]
        count = sum(LOSS.count(part["labels"]) for part in parts)
        for part in parts:
            f = model(**{name: t for name, t in part.items() if name != "labels"}, use_cache=False).logits
            (LOSS.criterion(f, part["labels"]).sum() / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("fisher", ["type-2", "mc", "empirical"])
@pytest.mark.parametrize(
    ("options", "accumulated"),
    [
        ({}, 1),
        ({"packing": True, "max_length": 12, "per_device_train_batch_size": 1}, 1),
        ({"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}, 2),
    ],
)
def test_steps_are_those_of_a_plain_loop(
    options: dict[str, Any], accumulated: int, fisher: Any, tmp_path: Path
) -> None:
    """The fused output layer returns no logits, so curvature is computed with another forward pass."""
    model = llama()
    start = weights(model)
    trainer, optimizer = sft(tmp_path, model, fisher, bf16=False, **options)
    assert not optimizer.uncovered
    expected = plain(trainer, fisher, accumulated)
    assert (weights(model) - expected).norm() < 1e-3 * (expected - start).norm()  # float32, singular factors


@pytest.mark.parametrize("packing", [False, True])
def test_defaults(packing: bool, tmp_path: Path) -> None:
    """In bfloat16, steps are those in float32 up to round-off."""
    moved = []
    for options in ({}, {"bf16": False}):
        model = llama()
        start = weights(model)
        # With less damping, round-off is large in directions that few tokens do not determine.
        trainer, optimizer = sft(tmp_path, model, "empirical", 1.0, packing=packing, max_length=12, **options)
        assert trainer.args.bf16 == (not options)
        assert trainer.args.gradient_checkpointing
        assert not optimizer.uncovered
        moved.append(weights(model) - start)
    assert 0 < float((moved[0] - moved[1]).norm() / moved[1].norm()) < 0.1


def test_adapters(tmp_path: Path) -> None:
    """Only adapters are trained, and have factors; the risk of the trained model is that of its own logits."""
    model = get_peft_model(llama(), LoraConfig(r=2, task_type="CAUSAL_LM"))
    trainer, optimizer = sft(tmp_path, model, fisher="mc")
    assert not optimizer.uncovered
    assert len(optimizer.preconditioner.curvature.averages) == 8  # two matrices for q and v of two layers
    batches = [batch | {"use_cache": False} for batch in trainer.get_train_dataloader()]
    K = kfs.KFAC(kfs.EmpiricalRisk(model.eval(), LOSS, batches), fisher="mc")
    assert len(K.blocks) == 8
