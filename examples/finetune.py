"""Fine-tune a language model with `transformers.Trainer`: `python examples/finetune.py`.

A small model with random weights learns some sentences. For a model of yours, replace `tiny()` by
`AutoModelForCausalLM.from_pretrained(...)`, and `tokens()` by its tokenizer.
"""

import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, get_cosine_schedule_with_warmup

from kfs.losses import TokenCrossEntropy
from kfs.optim import KFAC

WORDS = ["<end>", "the", "a", "cat", "dog", "fish", "sees", "hears", "likes", "sleeps"]


def tiny() -> LlamaForCausalLM:
    """Return a small Llama."""
    size: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), bos_token_id=None, eos_token_id=0, **size))


def tokens(n: int) -> dict[str, torch.Tensor]:
    """Return a sentence, as a tokenizer and a collator do: labels are tokens, or -100 where nothing counts."""
    subject, verb, other = WORDS[3 + n % 3], WORDS[6 + n // 3 % 3], WORDS[3 + n // 9 % 3]
    sentence = f"the {subject} {verb} a {other} <end>" if n % 4 else f"the {subject} sleeps <end>"
    ids = torch.tensor([WORDS.index(word) for word in sentence.split()])
    padding = torch.zeros(6 - len(ids), dtype=torch.long)
    mask = torch.cat([torch.ones_like(ids), padding])
    return {
        "input_ids": torch.cat([ids, padding]),
        "attention_mask": mask,
        "labels": torch.cat([ids, padding - 100]),
    }


def main(steps: int = 40) -> tuple[float, float]:
    """Train, and return the losses on held-out sentences before and after."""
    torch.manual_seed(0)
    model = tiny()
    optimizer = KFAC(model, TokenCrossEntropy(shift=True))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            bf16=True,
            gradient_checkpointing=True,
            max_grad_norm=0.0,  # the trust region bounds the length of steps
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=[tokens(n) for n in range(60)],
            eval_dataset=[tokens(n) for n in range(60, 80)],
            optimizers=(optimizer, get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)),
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
    print(optimizer.report())
    return before, after


if __name__ == "__main__":
    print("held-out losses {:.2f} and {:.2f}".format(*main()))
