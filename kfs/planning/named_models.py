"""Shapes of language models that need not be here: what blocks KFAC has for them, as Hugging Face writes the models."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockShape:
    """The shape of a block.

    Attributes:
        name: The block's name.
        rows: `d_B`.
        columns: `d_A`; a bias counts as a column.
        indices: Whether inputs are indices, as those of an embedding, so that `A` is diagonal.
        positions: Vectors that each datum (or token) adds.
        same_input: Whether inputs are those of a block that came before, so that `A` is the same.
    """

    name: str
    rows: int
    columns: int
    indices: bool = False
    positions: float = 1.0
    same_input: bool = False


@dataclass(frozen=True)
class LanguageModel:
    """The sizes of a language model.

    Attributes:
        title: Its full name.
        layers: Number of layers.
        hidden: Features of a token between layers.
        wide: Features inside of an MLP, or of an expert.
        queries: Features of all queries, or of the outputs of all attention heads.
        keys: Features of all keys, or of all values.
        vocabulary: Number of tokens.
        experts: Number of experts in a layer; zero without.
        active: Number of experts that each token is sent to.
    """

    title: str
    layers: int
    hidden: int
    wide: int
    queries: int
    keys: int
    vocabulary: int
    experts: int = 0
    active: int = 0

    @property
    def max_dim(self) -> int:
        """The widest side of a block that does not belong to the vocabulary. Both parts of a gate are one matrix."""
        return max(self.hidden, self.queries, self.wide * (2 if self.experts else 1))

    def blocks(self) -> Iterator[BlockShape]:
        """Go through all blocks."""
        hidden = self.hidden
        yield BlockShape("model.embed_tokens.weight", hidden, self.vocabulary, indices=True)
        for number in range(self.layers):
            layer = f"model.layers.{number}"
            attention = f"{layer}.self_attn"
            yield BlockShape(f"{attention}.q_proj.weight", self.queries, hidden)
            yield BlockShape(f"{attention}.k_proj.weight", self.keys, hidden, same_input=True)
            yield BlockShape(f"{attention}.v_proj.weight", self.keys, hidden, same_input=True)
            yield BlockShape(f"{attention}.o_proj.weight", hidden, self.queries)
            yield from self._experts(f"{layer}.mlp") if self.experts else self._mlp(f"{layer}.mlp")
            yield _norm(f"{layer}.input_layernorm.weight", hidden)
            yield _norm(f"{layer}.post_attention_layernorm.weight", hidden)
        yield _norm("model.norm.weight", hidden)
        yield BlockShape("lm_head.weight", self.vocabulary, hidden)

    def _mlp(self, name: str) -> Iterator[BlockShape]:
        yield BlockShape(f"{name}.gate_proj.weight", self.wide, self.hidden)
        yield BlockShape(f"{name}.up_proj.weight", self.wide, self.hidden, same_input=True)
        yield BlockShape(f"{name}.down_proj.weight", self.hidden, self.wide)

    def _experts(self, name: str) -> Iterator[BlockShape]:
        yield BlockShape(f"{name}.gate.weight", self.experts, self.hidden)
        part = self.active / self.experts  # of all tokens, if experts are used equally
        for expert in range(self.experts):
            yield BlockShape(f"{name}.experts.gate_up_proj[{expert}]", 2 * self.wide, self.hidden, positions=part)
            yield BlockShape(f"{name}.experts.down_proj[{expert}]", self.hidden, self.wide, positions=part)


def _norm(name: str, size: int) -> BlockShape:
    """Describe a scale: what multiplies it is added up in `B`."""
    return BlockShape(name, size, 1)


NAMED = {
    "7B": LanguageModel("Llama 2 7B", 32, 4096, 11008, 4096, 4096, 32000),
    "70B": LanguageModel("Llama 2 70B", 80, 8192, 28672, 8192, 1024, 32000),
    "405B": LanguageModel("Llama 3.1 405B", 126, 16384, 53248, 16384, 1024, 128256),
    "8x7B": LanguageModel("Mixtral 8x7B", 32, 4096, 14336, 4096, 1024, 32000, experts=8, active=2),
}
