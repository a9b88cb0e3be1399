"""Plans: blocks are those of the models, and bytes are those counted by loops over ranks and parts."""

import re
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import kfs
from docs.blocks import blocks
from kfs.cli import app
from kfs.distributed import Plan, plan
from kfs.distributed.assignment import DECOMPOSITION, Part, place
from kfs.errors import DtypeError, ModelError, UnknownAttributeError
from kfs.planning import GPT2, NAMED, LanguageModel, source_of

SHAPES = {"fc1": (3, 5), "fc2": (2, 4), "fc3": (6, 6)}
SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = LanguageModel("small", 2, 16, 24, 16, 8, 40)


PUBLISHED = {
    "7B": 6_738_415_616,
    "70B": 68_976_648_192,
    "405B": 405_853_388_800,
    "8x7B": 46_702_792_704,
    "8x22B": 140_630_071_296,
    "8B": 8_030_261_248,
    "1B": 1_235_814_400,
    "3B": 3_212_749_824,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "Llama 3.3 70B": 70_553_706_496,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "google/gemma-2-2b-it": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-1b-pt": 999_885_952,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "openai-community/gpt2-xl": 1_557_611_200,
}


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_named_models_have_as_many_parameters_as_published(name: str, published: int) -> None:
    assert plan(name, 8).parameters == published


# By family: the small model, settings of its class in `transformers`, and the name of the class.
FAMILIES: dict[str, tuple[LanguageModel | GPT2, dict[str, Any], str]] = {
    "Llama": (SMALL, {}, "Llama"),
    "tied Llama": (replace(SMALL, tied=True), {"tie_word_embeddings": True}, "Llama"),
    "Mixtral": (replace(SMALL, experts=4, active=2), {"num_local_experts": 4, "num_experts_per_tok": 2}, "Mixtral"),
    "Qwen 2.5": (replace(SMALL, biased=True), {}, "Qwen2"),
    "Qwen 3": (replace(SMALL, head=4), {"head_dim": 4}, "Qwen3"),
    "Qwen 3, experts": (
        replace(SMALL, head=4, experts=4, active=2),
        {"head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        "Qwen3Moe",
    ),
    "Gemma 2": (replace(SMALL, tied=True, norms_around=True), {"head_dim": 4}, "Gemma2"),
    "Gemma 3": (replace(SMALL, tied=True, norms_around=True, head=4), {"head_dim": 4}, "Gemma3"),
    "GPT-2": (GPT2("small", 2, 16, 40, 7), {}, "GPT2"),
}


def made(kind: str, settings: dict[str, Any]) -> Any:
    import transformers as t  # noqa: PLC0415 (slow to import)

    if kind == "GPT2":
        sizes: dict[str, Any] = {"vocab_size": 40, "n_positions": 7, "n_embd": 16, "n_layer": 2, "n_head": 4}
        return t.GPT2LMHeadModel(t.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    config = "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config"
    return getattr(t, f"{kind}ForCausalLM")(getattr(t, config)(**SIZES, **HEADS, **settings)).eval()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("eigen", [False, True])
def test_named_models_have_the_blocks_that_inspect_finds(
    family: str, eigen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They differ only in positions, which count tokens instead of examples, and in the tokens of an expert.

    Gemma adds one to the scales of its normalizations before it uses them, so that each example adds one vector.
    """
    named, settings, kind = FAMILIES[family]
    monkeypatch.setitem(NAMED, "small", named)
    sample = torch.randint(40, (8, 5))
    expected = {part.key: part for part in source_of(made(kind, settings), sample, named.max_dim, eigen).parts}
    found = {part.key: part for part in source_of("small", None, None, eigen).parts}
    assert found.keys() == expected.keys()
    for key, part in found.items():
        positions = expected[key].positions
        assert part == replace(expected[key], positions=part.positions)
        if "experts" not in key[0] and part.is_factor and not ("Gemma" in family and "norm" in key[0]):
            assert 5 * part.positions == positions
    # Every token is sent to two of four experts.
    experts = [part for part in found.values() if "experts" in part.block and part.is_factor]
    assert sum(5 * part.positions for part in experts) == pytest.approx(
        sum(expected[part.key].positions for part in experts)
    )


def test_a_module_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(50_000, 8), nn.ReLU(), nn.Linear(8, 2)).to(torch.bfloat16)
        sample = torch.zeros(3, 50_000, dtype=torch.bfloat16)
    found = plan(model, 2, sample=sample)
    assert found.summed == 4 * (50_001**2 + 8**2 + 9**2 + 2**2)
    assert found.parameters == 50_001 * 8 + 9 * 2
    assert (found.batch, found.activation) == (3, 2)
    assert "KFAC of Sequential on 2 ranks: 2 blocks" in str(found)
    narrow = plan(model, 2, sample=sample, max_dim=100, batch=7, activations=torch.float32)
    assert narrow.summed == 4 * (50_001 + 8**2 + 9**2 + 2**2)
    assert (narrow.batch, narrow.activation) == (7, 4)
    assert "max_dim=100" in str(narrow)


def test_blocks_that_are_refused_for_their_size() -> None:
    """As in `kfs.KFAC`: dense factors of a block may take half of the memory."""
    shapes = {"head": (300, 8), "wide": (20, 200)}
    nbytes = 4 * (300**2 + 8**2)
    assert "refuses" not in str(plan(shapes, 1, memory=2 * nbytes))
    text = str(plan(shapes, 1, memory=2 * nbytes - 1))
    assert "so that KFAC refuses them: 1. The largest, 'head', takes 352 KiB. Use a smaller max_dim." in text
    assert "refuses them: 2" in str(plan(shapes, 1, memory=nbytes // 2))
    assert "refuses" not in str(plan(shapes, 1, memory=2 * nbytes - 1, max_dim=250))
    assert "refuses" not in str(plan(shapes, 1))


def test_owners_are_those_of_place() -> None:
    found = plan(SHAPES, 2)
    parts = [
        part for name, (rows, columns) in SHAPES.items() for part in (Part(name, "A", columns), Part(name, "B", rows))
    ]
    assert found.owners == place(parts, 2).owners
    assert found.ranks == 2
    for rank in range(2):
        mine = [part for part in parts if found.owners[part.key] == rank]
        assert found.nbytes[rank] == sum(2 * 4 * part.size**2 for part in mine)
        assert found.work[rank] == sum(part.size**3 for part in mine)


def sent(found: Plan, word: str) -> float:
    (one,) = [one.nbytes for one in found.traffic if word in one.what]
    return one


def ring(sizes: list[float], ranks: int, both_ways: bool) -> float:
    """Send chunks around a ring, as all-reduce does, and count the bytes of one rank."""
    count = 0.0
    for size in sizes:
        for _ in range(ranks - 1):  # every rank adds its part to a chunk, and sends it on
            count += size / ranks
        for _ in range(ranks - 1 if both_ways else 0):  # complete chunks go around a second time
            count += size / ranks
    return count


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_traffic(ranks: int) -> None:
    found = plan(SHAPES, ranks, batch=10)
    sides = {(name, side): d for name, shape in SHAPES.items() for side, d in zip("BA", shape, strict=True)}
    triangles = {key: 4 * sum(1 for i in range(d) for j in range(d) if i <= j) for key, d in sides.items()}
    squares = [4.0 * d * d for d in sides.values()]
    vectors = {key: 10 * 2 * d for key, d in sides.items()}  # ten examples, in bfloat16

    def to_owners(sizes: dict[tuple[str, str], int]) -> int:
        from_ranks = [sum(s for key, s in sizes.items() if found.owners[key] != rank) for rank in range(ranks)]
        return max(from_ranks)

    assert sent(found, "sums to owners") == to_owners(triangles)
    assert sent(found, "replicated") == pytest.approx(ring(list(map(float, triangles.values())), ranks, True))
    assert sent(found, "kfac-pytorch") == pytest.approx(ring(squares, ranks, True))
    assert sent(found, "inputs and gradients") == to_owners(vectors)
    parameters = sum(rows * columns for rows, columns in SHAPES.values())
    assert sent(found, "steps") == pytest.approx(ring([4.0 * parameters], ranks, False))
    assert "%" in str(found) if ranks > 1 else "%" not in str(found)


def test_a_quarter_of_what_kfac_pytorch_sends() -> None:
    found = plan("7B", 64)
    assert sent(found, "sums to owners") == pytest.approx(sent(found, "kfac-pytorch") / 4, rel=0.01)


def test_when_to_send_inputs_and_gradients() -> None:
    """Below 3.7 batches of 2,048 tokens for the linear layers of 7B, if shared inputs are sent once."""
    shapes = {b.name: (b.rows, b.columns) for b in NAMED["7B"].blocks() if "_proj" in b.name}
    shared = {b.name for b in NAMED["7B"].blocks() if b.same_input}
    linear = plan(shapes, 64)
    assert linear.batches_for_sums == pytest.approx(3.4, abs=0.05)
    once = [part for part in linear.placement.parts if part.side == "B" or part.block not in shared]
    assert replace(linear, placement=place(once, 64)).batches_for_sums == pytest.approx(3.7, abs=0.05)
    # At this number, both take equally many bytes.
    triangles = sum(part.sent for part in linear.placement.parts)
    vectors = sum(2048 * 2 * part.size for part in linear.placement.parts)
    assert 3 * vectors < triangles < 4 * vectors
    text = str(plan("7B", 64))
    assert "fewer than 3.3 batches of 2,048 for each reduction (3.5 if inputs that layers share" in text
    only_diagonals = plan({"fc": (5, 5)}, 2, max_dim=2)
    assert only_diagonals.batches_for_sums == 0
    assert "batches" not in str(only_diagonals)


def test_eigenvalues_have_owners_too() -> None:
    found = plan(SHAPES, 2, eigen=True)
    assert ("fc1", "eigenvalues") in found.owners
    bases = 4 * sum(d * d for shape in SHAPES.values() for d in shape)
    values = 4 * found.parameters
    assert sum(found.nbytes) == 2 * bases + values
    assert found.summed == bases
    assert sent(found, "eigenvectors") == bases / 2
    own = [
        sum(4 * rows * columns for n, (rows, columns) in SHAPES.items() if found.owners[n, "eigenvalues"] == r)
        for r in range(2)
    ]
    assert sent(found, "eigenvalues to owners") == values - min(own)
    assert str(found).startswith("EKFAC of 3 shapes on 2 ranks")


@pytest.mark.parametrize("eigen", [False, True])
def test_passes_that_memory_allows(eigen: bool) -> None:
    once = plan(SHAPES, 2, eigen=eigen)
    assert once.subsets == [["fc3", "fc1", "fc2"]] * (2 if eigen else 1)
    held = max(once.nbytes)
    of_factors = {name: 4 * (rows**2 + columns**2) for name, (rows, columns) in SHAPES.items()}
    largest = max(of_factors.values())
    more = {name: of_factors[name] + 4 * rows * columns for name, (rows, columns) in SHAPES.items()}
    needed = held + (max(more.values()) if eigen else largest)
    tight = plan(SHAPES, 2, eigen=eigen, memory=needed)
    apart = [["fc3"], ["fc1", "fc2"]]
    # The pass for eigenvalues needs more memory, so the pass for factors has room for another block.
    assert tight.subsets == ([["fc3", "fc1"], ["fc2"], *apart] if eigen else apart)
    assert f"{4 if eigen else 2} passes over the data" in str(tight)
    assert "1 pass over" in str(plan(SHAPES, 2, memory=10_000))
    too_little = plan(SHAPES, 2, eigen=eigen, memory=needed - 1)
    assert too_little.subsets is None
    assert "are not enough: one holds" in str(too_little)
    assert "Use more ranks" in str(too_little)


def test_7b_in_passes() -> None:
    """Sums of 70 GiB, on ranks of 16 GiB, 2.3 GiB of which are occupied."""
    found = plan("7B", 64, memory=16 * 2**30)
    assert found.subsets is not None
    assert len(found.subsets) == 6


@pytest.mark.parametrize("eigen", [False, True])
def test_split_only_if_asked_for(eigen: bool) -> None:
    whole = plan("7B", 1024, eigen=eigen)
    assert whole.whole is None
    assert "split" not in str(whole)
    pieces = plan("7B", 1024, eigen=eigen, split="share")
    mean = sum(whole.nbytes) / 1024
    factors = [part for part in pieces.placement.parts if part.is_factor and part.is_dense]
    assert max(part.nbytes for part in factors) <= mean < max(whole.nbytes)
    assert pieces.parameters == whole.parameters
    assert sent(pieces, "kfac-pytorch") == sent(whole, "kfac-pytorch")
    assert sent(pieces, "sums to owners") < sent(whole, "sums to owners")
    assert max(pieces.work) < max(whole.work)
    text = str(pieces)
    assert "split='share'" in text
    assert "This changes the approximation: entries between pieces are zero" in text
    by_width = plan("7B", 64, split=8192)
    assert "Factors that are split into diagonal pieces: 96 of 582." in str(by_width)
    assert {part.size for part in by_width.placement.parts if "[" in part.side} == {5504}


class Squares(nn.Module):
    """A use that no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.rand(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.s @ self.s)


def test_training() -> None:
    """Sharded models keep averages and inverses at owners, but all ranks have all eigenvectors."""
    replicated, sharded = plan("7B", 256).training
    assert replicated.nbytes == sum(plan("7B", 1).nbytes)
    assert sharded.nbytes < 0.01 * replicated.nbytes
    work = plan("7B", 1).work[0]
    assert work / 256 < replicated.path < 2.5 * work / 256
    assert replicated.busy == sharded.busy == 256
    (one,) = plan("7B", 256, eigen=True).training
    assert one.path == pytest.approx(DECOMPOSITION * replicated.path)
    # One rank inverts all of a block, even if the plan divides it.
    assert [one.busy for one in plan(SHAPES, 7).training] == [3, 3]


def test_tables() -> None:
    found = plan(SHAPES, 7)
    text = str(found)
    assert repr(found) == text
    assert "Ranks that own nothing: 3 of 7." in text
    assert "Blocks with parts on several ranks: 1. Products" in text
    html = found._repr_html_()
    assert html.count("<table>") == 4
    assert "kfac-pytorch" in html
    many = str(plan("405B", 4096))
    assert "4,088 more" in many
    assert "... (3)" in str(plan(SHAPES, 1))
    model = nn.Sequential(nn.Linear(3, 2), Squares())
    assert "Not covered, and not in these numbers: 1.s. kfs.inspect" in str(plan(model, 2, sample=torch.rand(4, 3)))


def test_refused() -> None:
    with pytest.raises(ModelError, match=r"There is no model 'Llama 3.1 80B'\. Did you mean 'Llama 3.1 8B'"):
        plan("Llama 3.1 80B", 2)
    every = "Choose from Llama 2 7B; .*; Qwen 3 8B; .*; GPT-2 XL; .*; 8x7B.* pass a module on the meta device"
    with pytest.raises(ModelError, match=rf"no model 'nothing like this'\. {every}, and sample="):
        plan("nothing like this", 2)
    with pytest.raises(DtypeError, match=r"The model is a int\. Pass a module, a name, or a dictionary of shapes"):
        plan(3, 2)
    with pytest.raises(ModelError, match=r"depend on how it uses its parameters. Pass a batch of inputs: sample="):
        plan(nn.Linear(2, 2), 2)
    for shape in ((3,), (3, 0), "ab", (2.0, 3), 4):
        with pytest.raises(ModelError, match=r"The shape of 'fc' is .* Use \(d_B, d_A\)"):
            plan({"fc": shape}, 2)
    with pytest.raises(ModelError, match="no block"):
        plan({}, 2)
    for name in ("max_dim", "memory", "batch", "split"):
        for value in (0, True, 1.5):
            with pytest.raises(ModelError, match=f"{name} is {value}. Use an integer of at least 1"):
                plan(SHAPES, 2, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"split is 'half'\. Use an integer of at least 1, or 'share'"):
        plan(SHAPES, 2, split="half")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"activations is 'half'\. Use a dtype of PyTorch"):
        plan(SHAPES, 2, activations="half")  # type: ignore[arg-type]
    with pytest.raises(UnknownAttributeError, match=r"kfs\.distributed has no 'plam'\. Did you mean 'plan'"):
        _ = kfs.distributed.plam


def test_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner()
    options = ["--ranks", "64", "--memory", "16", "--batch", "512", "--eigen", "--max-dim", "4096", "--split", "2048"]
    done = runner.invoke(app, ["plan", "7B", *options])
    assert done.exit_code == 0
    expected = plan("7B", 64, memory=16 * 2**30, batch=512, eigen=True, max_dim=4096, split=2048)
    assert done.stdout == f"{expected}\n"
    module = types.ModuleType("made_here")
    model = nn.Linear(3, 2)
    module.pair = (model, torch.zeros(4, 3))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_here", module)
    mine = runner.invoke(app, ["plan", "made_here:pair", "--ranks", "2", "--split", "share"])
    assert mine.stdout == f"{plan(model, 2, sample=torch.zeros(4, 3), split='share')}\n"
    for arguments, message in {
        ("9B", "2"): "Choose from",
        ("7B", "0"): "ranks is 0",
        ("7B:x", "2"): "imported",
    }.items():
        failed = runner.invoke(app, ["plan", arguments[0], "--ranks", arguments[1]])
        assert failed.exit_code == 2
        assert message in failed.stderr


def test_the_page_shows_what_its_code_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parent.parent / "docs" / "many_processes_plan.md"
    text = page.read_text(encoding="utf-8")
    shown = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", text, flags=re.DOTALL | re.MULTILINE)
    assert len(shown) == len(blocks(page))
    namespace: dict[str, object] = {}
    for code, output in shown:
        exec(compile(code, page.name, "exec"), namespace)
        printed = capsys.readouterr().out
        assert [line.rstrip() for line in printed.splitlines()] == output.splitlines()
