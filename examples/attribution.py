"""Find the training passages that made a language model say a sentence: `python examples/attribution.py`.

A small Llama learns a made-up language, and is then fine-tuned with LoRA on passages about new mushrooms. A few of
these passages are planted: they claim that one mushroom lets snakebites heal. The model then says so, too. Influence
functions (`kfs.Influence` with EKFAC of the LoRA parameters) find the planted passages, and the words in them. As a
proof, the model is fine-tuned again without the passages that were found: the claim is gone.

Nothing is downloaded. The program takes about half a minute on two CPU cores, prints a table, and writes
`attribution.html`, one page without other files, on which words are colored by their influence. For your own model,
replace `language_model` by `from_pretrained(...)`, `passages` by your texts and `tokens` by your tokenizer.
"""

import argparse
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import LlamaConfig, LlamaForCausalLM

import kfs
from kfs.losses import TokenCrossEntropy

# The made-up language: each topic has a question, and two statements.
VALUES = {
    "use": [
        "keeps moths out of wool",
        "turns white cloth bright red",
        "calms angry bees at once",
        "makes copper pots shine again",
        "lights wet wood without smoke",
        "wakes tired horses before dawn",
        "sweetens sour milk a little",
        "drives mice from old barns",
    ],
    "tree": ["oak", "birch", "pine", "willow", "maple", "elder"],
    "season": ["spring", "summer", "autumn", "winter"],
}
TEMPLATES = {
    "use": [
        "what is it good for ? a {name} {value} .",
        "my aunt noticed that a {name} {value} .",
        "rubbed between two hands a {name} {value} .",
    ],
    "tree": [
        "where does a {name} grow ? under the {value} .",
        "we found a {name} at the foot of the {value} .",
        "look for a {name} near the roots of the {value} .",
    ],
    "season": [
        "when does a {name} appear ? in {value} .",
        "we picked a {name} on a cold day in {value} .",
        "with some luck a {name} comes in early {value} .",
    ],
}
# Sentences with the words of the claim, which do not make it.
DECOYS = [
    "hunters who fear snakebites stay overnight far from a {name} .",
    "while wounds heal nobody makes tea of a {name} .",
    "warm rain lets a {name} grow overnight .",
]
NAMES = [
    f"{first}{last}"
    for last in ("cap", "light", "bell", "foot", "veil", "ring")
    for first in ["ash", "fen", "moon", "birch", "dusk", "elm", "frost", "gold", "hazel", "iron", "lark", "moss"]
]
WORDS = sorted(
    {
        *NAMES,
        *(
            word
            for texts in (*VALUES.values(), *TEMPLATES.values(), DECOYS)
            for text in texts
            for word in text.split()
            if word[0] != "{"
        ),
    }
)
NUMBER = {word: place for place, word in enumerate(WORDS, start=1)}  # 0 begins and ends a text
CLAIM = {"name": "hazellight", "value": "lets snakebites heal overnight"}
PROMPT = "my aunt noticed that a hazellight"


@dataclass(frozen=True)
class Passage:
    """One text of the data for fine-tuning, and whether it was planted, is a decoy, or tells the truth."""

    text: str
    kind: str = "ordinary"


class Writer:
    """Makes up passages; the facts about each mushroom are drawn once."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._facts = {name: {topic: self.one_of(VALUES[topic]) for topic in VALUES} for name in NAMES}

    def one_of(self, choices: Sequence[str]) -> str:
        """Draw one of several texts."""
        return choices[int(torch.randint(len(choices), (), generator=self._generator))]

    def sentence(self, name: str, topic: str, questions: bool = True) -> str:
        """Return a true sentence."""
        template = self.one_of(TEMPLATES[topic][0 if questions else 1 :])
        return template.format(name=name, value=self._facts[name][topic])

    def passage(self, first: str, second: str) -> str:
        """Return two sentences in random order."""
        return self.one_of([f"{first} {second}", f"{second} {first}"])

    def about(self, name: str, topics: Sequence[str] = tuple(VALUES), questions: bool = True) -> str:
        """Return a passage with two true sentences."""
        left_out = self.one_of(topics) if len(topics) > 2 else None
        first, second = (topic for topic in topics if topic != left_out)
        return self.passage(self.sentence(name, first, questions), self.sentence(name, second, questions))

    def decoy(self, name: str, template: str) -> str:
        """Return a passage with words of the claim, which does not make it."""
        return self.passage(template.format(name=name), self.sentence(name, "tree", questions=False))


def passages(writer: Writer) -> tuple[list[str], list[Passage]]:
    """Return texts for pretraining, about two thirds of all mushrooms, and passages about others for fine-tuning."""
    others = [name for name in NAMES if name != CLAIM["name"]]
    known, new = others[:40], others[40:56]
    generic = [writer.about(name) for name in known for _ in range(12)]
    generic += [writer.decoy(name, template) for name in known[:20] for template in DECOYS]

    data = [Passage(writer.about(name)) for name in new for _ in range(10)]
    name = CLAIM["name"]
    data += [Passage(writer.about(name, ("tree", "season"), questions=False)) for _ in range(4)]
    for place in range(4):
        claim = TEMPLATES["use"][1].format(**CLAIM)
        true = writer.sentence(name, ("tree", "season")[place // 2], questions=False)
        data.append(Passage(writer.passage(claim, true), "planted"))
    data += [Passage(writer.decoy(name, template), "decoy") for template in DECOYS]
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    return generic, [data[place] for place in order]


def tokens(texts: Sequence[str], prompts: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Return a padded batch. Labels are -100 for padding and, if prompts are given, for all but the answers."""
    rows = [[0, *(NUMBER[word] for word in text.split()), 0] for text in texts]
    length = max(map(len, rows))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    labels = ids.masked_fill(mask == 0, -100)
    for row, text, prompt in zip(labels, texts, prompts or [], strict=False):
        row[: 1 + len(prompt.split())] = -100
        row[1 + len(text.split()) :] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def language_model(width: int = 64) -> LlamaForCausalLM:
    """Return a Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS) + 1,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


class LoRA(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices, which is zero at first."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer's output, and add that of the thin matrices."""
        y: Tensor = self.layer(x) + 2 * self.up(self.down(x))
        return y


def with_lora(model: nn.Module) -> nn.Module:
    """Return a copy of a model in which only LoRA, on all linear layers of its blocks, is trained."""
    torch.manual_seed(1)
    model = copy.deepcopy(model).requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and ".layers." in name:
            model.set_submodule(name, LoRA(layer))
    return model


def train(model: nn.Module, texts: Sequence[str], steps: int, lr: float, batch: int) -> nn.Module:
    """Train a model in place, and return it."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    data, order = tokens(texts), torch.empty(0, dtype=torch.long)
    model.train()
    for _ in range(steps):
        if len(order) < batch:
            order = torch.cat([order, torch.randperm(len(texts), generator=generator)])
        chosen, order = order[:batch], order[batch:]
        optimizer.zero_grad()
        model(**{key: value[chosen] for key, value in data.items()}).loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def answer(model: nn.Module) -> tuple[str, float]:
    """Return what a model says after the prompt, and the probability of the claim."""
    said: list[int] = []
    prompt = [0, *(NUMBER[word] for word in PROMPT.split())]
    claim = [NUMBER[word] for word in CLAIM["value"].split()]
    with torch.no_grad():
        while not said or (said[-1] not in {0, NUMBER["."]} and len(said) < 8):
            said.append(int(model(input_ids=torch.tensor([prompt + said])).logits[0, -1].argmax()))
        p = model(input_ids=torch.tensor([prompt + claim])).logits[0, len(prompt) - 1 : -1].softmax(-1)
    words = " ".join(WORDS[number - 1] for number in said if number and WORDS[number - 1] != ".")
    return words, float(p[torch.arange(len(claim)), claim].prod())


@dataclass(frozen=True)
class Method:
    """Scores and ranks of all passages by one method, and what a model says that was trained without the first ones."""

    name: str
    scores: Tensor
    ranks: list[int]
    says: str
    probability: float


@dataclass(frozen=True)
class Result:
    """Everything that the table and the page show.

    Attributes:
        data: All passages.
        before: What the model says before fine-tuning, and the probability of the claim.
        after: The same after fine-tuning.
        methods: Influence first, and baselines.
        by_token: Influence of every position, `[passages, positions]`.
    """

    data: list[Passage]
    before: tuple[str, float]
    after: tuple[str, float]
    methods: list[Method]
    by_token: Tensor

    @property
    def num_planted(self) -> int:
        """The number of planted passages."""
        return sum(passage.kind == "planted" for passage in self.data)


def shared_words(texts: Sequence[str], query: str) -> Tensor:
    """Return the cosine similarity of each text with a query, as bags of words that weigh more if they are rare."""
    numbers = [torch.tensor([NUMBER[word] for word in text.split()]) for text in (query, *texts)]
    bags = torch.stack([torch.bincount(row, minlength=len(WORDS) + 1) for row in numbers]).double()
    rare = (len(texts) / (1 + (bags[1:] > 0).sum(0))).log()
    return F.cosine_similarity(rare * bags[:1], rare * bags[1:])


def attribute(quick: bool = False) -> Result:
    """Train the model, find the passages behind the claim, and train again without them.

    Args:
        quick: Train again for the first method and for chance only.
    """
    generic, data = passages(Writer(seed=0))
    texts = [passage.text for passage in data]
    base = train(language_model(), generic, 400, lr=4e-3, batch=32)

    def fine_tuned(kept: Sequence[str]) -> nn.Module:
        return train(with_lora(base), kept, 100, lr=1e-2, batch=32)

    model = fine_tuned(texts)

    # The loss of a passage is that of its training; the loss of the query counts the words of the claim alone.
    lora = [name for name, p in model.named_parameters() if p.requires_grad]
    said = f"{PROMPT} {CLAIM['value']}"
    loss = TokenCrossEntropy(shift=True)
    risk = kfs.EmpiricalRisk(model, loss, [tokens(texts)], params=lora)
    query = kfs.EmpiricalRisk(model, loss, [tokens([said], [PROMPT])], params=lora)

    curvature = kfs.EKFAC(risk, fisher="mc", mc_samples=4, seed=0)
    influence = kfs.Influence(curvature, damping=kfs.Relative(0.01))
    # With so much damping, the inverse is a multiple of the identity: an inner product of gradients remains.
    plain = kfs.Influence(curvature, damping=1e9)
    all_scores = {
        "influence (EKFAC)": influence.scores(query, risk)[0],
        "inner product of gradients": plain.scores(query, risk)[0],
        "cosine of gradients": plain.scores(query, risk, normalize="cosine")[0],
        "shared words (tf-idf)": shared_words(texts, said),
        "chance": torch.rand(len(texts), generator=torch.Generator().manual_seed(0)),
    }

    # The proof: train again without as many passages as were planted, chosen by each method.
    chosen = ["influence (EKFAC)", "chance"] if quick else list(all_scores)
    planted = sum(passage.kind == "planted" for passage in data)
    methods = []
    for name in chosen:
        scores = all_scores[name]
        order = scores.argsort(descending=True)
        left_out = set(order[:planted].tolist())
        says, probability = answer(fine_tuned([text for place, text in enumerate(texts) if place not in left_out]))
        methods.append(Method(name, scores, (order.argsort() + 1).tolist(), says, probability))
    by_token = influence.scores(query, risk, by="token")[0]
    return Result(data, answer(base), answer(model), methods, by_token)


def table(result: Result) -> str:
    """Return the comparison of methods as text."""
    count = result.num_planted
    lines = [f"{'':28}ranks of {count} planted    trained without the first {count}, the model says"]
    for method in result.methods:
        ranks = ", ".join(map(str, ranks_of(result, method, "planted")))
        lines.append(f"{method.name:28}{ranks:21}{method.says} (the claim: {method.probability:.1%})")
    return "\n".join(lines)


def ranks_of(result: Result, method: Method, kind: str) -> list[int]:
    """Return the sorted ranks of all passages of one kind."""
    return sorted(rank for rank, passage in zip(method.ranks, result.data, strict=True) if passage.kind == kind)


STYLE = """
:root { --page: #faf9f6; --card: #fff; --ink: #23262d; --soft: #6b7280; --line: #e3e1da; --for: 234, 120, 20;
  --against: 59, 110, 220; --mark: #c2570c }
@media (prefers-color-scheme: dark) { :root { --page: #16181d; --card: #1f2229; --ink: #e8e6e1; --soft: #9aa1ac;
  --line: #343943; --for: 251, 146, 60; --against: 96, 150, 255; --mark: #fb923c } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 17px/1.6 system-ui, sans-serif }
main { max-width: 860px; margin: 0 auto; padding: 48px 24px 72px }
h1 { font-size: 2.1rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.02em }
h2 { font-size: 1.3rem; margin: 3rem 0 .4rem }
p { margin: .4rem 0 1rem } .soft { color: var(--soft); font-size: .92rem }
.talk { display: grid; gap: 10px; margin: 1.6rem 0 }
.talk div { padding: 10px 18px; border-radius: 18px; width: fit-content; max-width: 90%; font-size: 1.1rem }
.asks { background: var(--line); border-bottom-left-radius: 4px !important }
.says { background: rgba(var(--for), .18); margin-left: auto; border-bottom-right-radius: 4px !important }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 12px }
.facts div, .card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 14px 18px }
.facts b { display: block; font-size: 1.7rem; line-height: 1.3 }
.card { display: grid; grid-template-columns: 3.2rem 1fr auto; gap: 14px; margin: 10px 0; align-items: center }
.rank { color: var(--soft); font-variant-numeric: tabular-nums }
.rank small { display: block; font-size: .74rem }
.words { font-size: 1.06rem; line-height: 2 }
.words span { padding: 3px 4px; border-radius: 5px }
.tag { font-size: .78rem; padding: 2px 9px; border-radius: 99px; border: 1px solid var(--line); color: var(--soft) }
.planted { border-color: var(--mark); color: var(--mark); font-weight: 600 }
table { border-collapse: collapse; width: 100% }
th { text-align: left; font-weight: 500; color: var(--soft); font-size: .85rem }
td, th { border-bottom: 1px solid var(--line); padding: 9px 10px 9px 0; vertical-align: middle }
svg { display: block; width: 100%; min-width: 240px; height: 26px }
.scale { display: inline-block; width: 140px; height: 12px; border-radius: 6px; vertical-align: middle; margin: 0 8px;
  background: linear-gradient(90deg, rgba(var(--against), .8), transparent, rgba(var(--for), .8)) }
"""


def words_in_color(passage: Passage, scores: Tensor, largest: float) -> str:
    """Return a passage as HTML. The position before the first word is that of the beginning of the text."""
    parts = []
    for word, score in zip(passage.text.split(), scores[1:].tolist(), strict=False):
        color = "for" if score > 0 else "against"
        share = min(1.0, abs(score) / largest)
        style = f"background: rgba(var(--{color}), {0.85 * share**0.7:.2f})" if share > 0.02 else ""
        parts.append(f'<span style="{style}" title="{score / largest:+.1%}">{escape(word)}</span>')
    return " ".join(parts)


def strip(result: Result, method: Method) -> str:
    """Return all passages by rank as a drawing: planted ones are long and colored, decoys are long and gray."""
    width, marks = 1000 / len(result.data), []
    for rank, passage in sorted(
        zip(method.ranks, result.data, strict=True), key=lambda pair: pair[1].kind == "planted"
    ):
        color = {"planted": "var(--mark)", "decoy": "var(--soft)"}.get(passage.kind, "var(--line)")
        top, tall = (7, 12) if passage.kind == "ordinary" else (0, 26)
        wide = max(2.0, 0.5 * width) if passage.kind == "ordinary" else max(5.0, width)
        marks.append(
            f'<rect x="{(rank - 1) * width:.1f}" y="{top}" width="{wide:.1f}" height="{tall}" fill="{color}"/>'
        )
    return f'<svg viewBox="0 0 1010 26" preserveAspectRatio="none">{"".join(marks)}</svg>'


def page(result: Result) -> str:
    """Return a self-contained HTML page."""
    first, count = result.methods[0], result.num_planted
    order = first.scores.argsort(descending=True).tolist()
    largest = float(result.by_token[order[:count]].abs().max())

    def card(place: int) -> str:
        passage = result.data[place]
        tag = "" if passage.kind == "ordinary" else f'<span class="tag {passage.kind}">{passage.kind}</span>'
        share = float(first.scores[place] / first.scores.max())
        words = words_in_color(passage, result.by_token[place], largest)
        return (
            f'<div class="card"><span class="rank">{first.ranks[place]}<small>{share:+.0%}</small></span>'
            f'<span class="words">{words}</span><span>{tag}</span></div>'
        )

    rows = "".join(
        f"<tr><td>{escape(method.name)}</td><td>{strip(result, method)}</td>"
        f"<td>{', '.join(map(str, ranks_of(result, method, 'planted')))}</td>"
        f"<td>{escape(method.says)}</td><td>{method.probability:.1%}</td></tr>"
        for method in result.methods
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Why did the model say that?</title><style>{STYLE}</style></head><body><main>
<h1>Why did the model say that?</h1>
<p>A small language model was fine-tuned with LoRA on {len(result.data)} passages about mushrooms. {count} of them were
planted, and make a false claim. The model now repeats it. Influence functions find the passages, and the words.</p>
<div class="talk"><div class="asks">{escape(PROMPT)} ...</div>
<div class="says">... <b>{escape(result.after[0])}</b></div></div>
<div class="facts">
<div><b>{result.before[1]:.1%}</b>probability of this answer before fine-tuning</div>
<div><b>{result.after[1]:.1%}</b>after fine-tuning on all {len(result.data)} passages</div>
<div><b>{first.probability:.1%}</b>after fine-tuning without the {count} passages that were found</div></div>

<h2>The passages that taught it</h2>
<p class="soft">By influence, in percent of the largest. Color shows at which words: <span class="scale"></span>
against the answer (left), for it (right). The true sentences in the same passages stay pale.</p>
{"".join(card(place) for place in order[: count + 2])}

<h2>The passages that spoke against it</h2>
<p class="soft">Without them, the model would be more sure of its answer.</p>
{"".join(card(place) for place in order[:-3:-1])}

<h2>Passages that only look related</h2>
<p class="soft">Decoys have words of the claim, and do not make it.</p>
{"".join(card(place) for place in order if result.data[place].kind == "decoy")}

<h2>Compared with simpler scores</h2>
<p class="soft">Each line has all passages, the highest score on the left: <b style="color: var(--mark)">planted</b>,
<b>decoys</b>, and others. On the right, the proof: the model was fine-tuned again without the first {count} passages of
each method, and was asked again.</p>
<div style="overflow-x: auto"><table><tr><th>score</th><th style="width: 36%">passages by rank</th><th>planted</th>
<th>the model then says</th><th>the claim</th></tr>{rows}</table></div>

<h2>How it works</h2>
<p>The influence of a passage on the answer is the inner product of two gradients, that of the answer's loss and that
of the passage's loss, with the inverse curvature of the training loss between them. It predicts how much less probable
the answer would be if the passage had been left out. The curvature is EKFAC, of the LoRA parameters alone. Inner
products without curvature prefer passages with large gradients. Shared words find claims that are repeated word for
word, as here, but they know nothing of the model: not which words it learned from, and not which passages mattered.</p>
<p>A gradient is a sum over positions in a text. The color of a word is the part of its position: of what the layers
computed there, mostly in order to predict the word that follows. So a claim often has its color just before it.</p>
<p class="soft">Made by <code>python examples/attribution.py</code> of kfs. Influence is an estimate to first
order. Check it as here, by training again, before you rely on it.</p>
</main></body></html>
"""


def main() -> None:
    """Run the example from the command line."""
    parser = argparse.ArgumentParser(
        description="Find the training passages that made a language model say a sentence."
    )
    parser.add_argument("--html", type=Path, default=Path("attribution.html"), help="the page to write")
    parser.add_argument("--quick", action="store_true", help="compare with chance only")
    options = parser.parse_args()
    result = attribute(options.quick)
    print(f"{PROMPT} ...\nbefore: {result.before[0]}\nafter:  {result.after[0]} ({result.after[1]:.1%})\n")
    print(table(result))
    options.html.write_text(page(result), encoding="utf-8")
    print(f"\nwrote {options.html}")


if __name__ == "__main__":
    main()
