"""Tiny language models of Hugging Face: eleven words, two layers, up to six positions."""

from typing import Any

from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

_VOCABULARY = 11
_SIZE: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 6,
}


def gpt2(layers: int = 2, **settings: Any) -> Any:
    size: dict[str, Any] = {"n_positions": 6, "n_embd": 8, "n_layer": layers, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=_VOCABULARY, bos_token_id=0, eos_token_id=0, **size, **settings))


def gpt2_without_dropout(layers: int = 2) -> Any:
    return gpt2(layers, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def bert() -> Any:
    return BertForMaskedLM(BertConfig(**_SIZE))


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**_SIZE))
