"""Attribution on the command line: the training data behind predictions, as tables, pages and pictures."""

import base64
import re
import struct
import sys
import types
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import kfs
from kfs.cli import app
from kfs.tour import mislabelled
from kfs.tour.attribution import as_image, data_at, data_uri, first_data

NUM_DATA = 20


def images() -> tuple[Any, ...]:
    """Return a model with images as inputs, and training data as queries."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()
    X, y = torch.rand(NUM_DATA, 1, 4, 4, dtype=torch.float64), torch.randint(3, (NUM_DATA,))
    return model, nn.CrossEntropyLoss(), [(X[:12], y[:12]), (X[12:], y[12:])], [(X[:2], y[:2]), (X[2:5], y[2:5])]


def vectors() -> tuple[Any, ...]:
    model, loss, train, queries = images()
    return model, loss, *([(x.flatten(1), y) for x, y in data] for data in (train, queries))


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    module = types.ModuleType("made_for_influence")
    module.images = images  # type: ignore[attr-defined]
    module.vectors = vectors()  # type: ignore[attr-defined]
    module.pair = (1, 2)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_for_influence", module)
    monkeypatch.setenv("COLUMNS", "200")
    return CliRunner()


def expected(damping: float = 0.1) -> tuple[Tensor, Tensor]:
    """Return all scores, and self-scores of training data."""
    model, loss, *data = images()
    train, queries = (kfs.EmpiricalRisk(model, loss, part) for part in data)
    influence = kfs.Influence(kfs.EKFAC(train), kfs.Relative(damping))
    return influence.scores(queries, train), influence.self_scores(train)


def test_command_line(runner: CliRunner, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    command = ["influence", "made_for_influence:images", "--top", "2", "--damping", "0.5", "--self"]
    result = runner.invoke(app, [*command, "--html", str(page)])
    assert result.exit_code == 0, result.stderr
    scores, own = expected(0.5)
    y = torch.cat([labels for _, labels in images()[2]])
    for query in range(5):
        for values, indices in (scores[query].topk(2), (-scores[query]).topk(2)):
            for value, index in zip(values.tolist(), indices.tolist(), strict=True):
                sign = 1 if value == scores[query, index] else -1
                assert f"{index} (" in result.stdout
                assert f"{sign * value:.4g}" in result.stdout
    assert f"{int(own.argmax())}" in result.stdout
    assert f"{float(own.max()):.4g}" in result.stdout
    best = int(scores[0].argmax())
    assert f"{best} ({int(y[best])}) {float(scores[0].max()):.4g}" in result.stdout
    text = page.read_text(encoding="utf-8")
    assert text.count("<h3>Query ") == 5
    assert text.count("<img ") == 5 * (1 + 4) + 2
    assert not re.findall(r'(?:src|href)="(?!data:|#)', text)


def test_weight_decay(runner: CliRunner) -> None:
    command = ["influence", "made_for_influence:vectors", "--top", "1", "--queries", "1", "--weight-decay", "0.02"]
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.stderr
    model, loss, train_data, query_data = vectors()
    train, queries = (kfs.EmpiricalRisk(model, loss, data) for data in (train_data, query_data))
    best = kfs.Influence(kfs.EKFAC(train), 0.02).scores(queries, train)[0].max()
    assert f"{float(best):.4g}"[:4] in result.stdout
    both = runner.invoke(app, [*command, "--damping", "0.1"])
    assert both.exit_code == 2
    assert "Pass one of them" in both.stderr


def test_fewer_queries_and_an_index(runner: CliRunner, tmp_path: Path) -> None:
    few = ["influence", "made_for_influence:vectors", "--top", "3", "--queries", "3"]
    plain = runner.invoke(app, few)
    assert plain.exit_code == 0, plain.stderr
    for options, words in ([], "its score times 0.05"), (["--normalize", "self"], "divided by roots of self-scores"):
        written = runner.invoke(app, [*few, *options, "--html", str(tmp_path / "few.html")])
        assert written.exit_code == 0
        text = (tmp_path / "few.html").read_text(encoding="utf-8")
        assert words in text
        assert "The largest scores" not in text
    scores, _ = expected()
    for value in scores[:3].topk(3).values.flatten().tolist():
        assert f"{value:.4g}" in plain.stdout
    assert "5 queries" not in plain.stdout
    assert "3 queries" in plain.stdout
    page = tmp_path / "page.html"
    more = ["--index", str(tmp_path / "index"), "--self", "--queries", "1", "--rank", "2", "--html", str(page)]
    with_index = ["influence", "made_for_influence:vectors", "--top", "3", *more]
    for _ in range(2):
        kept = runner.invoke(app, with_index)
        assert kept.exit_code == 0, kept.stderr
        for value in scores[:1].topk(3).values.flatten().tolist():
            assert f"{value:.4g}"[:4] in kept.stdout  # float32
        assert "relative error" in kept.stdout
    text = page.read_text(encoding="utf-8")
    assert "<img" not in text
    first = ", ".join(f"{value:.3g}" for value in images()[3][0][0][0].flatten()[:4].tolist())
    assert f"<code>{first}, ...</code>" in text
    shaped = runner.invoke(app, [*with_index, "--image", "4x4"])
    assert shaped.exit_code == 0
    assert page.read_text(encoding="utf-8").count("<img") == 1 + 6 + 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["made_for_influence:pair"],
            r"is a tuple of length 2. It must be, or return, a tuple (model, loss, training data, queries)",
        ),
        (["made_for_influence:images", "--top", "50"], r"k is 50, and there are 20 training examples"),
        (["made_for_influence:images", "--normalize", "much"], r"normalize is 'much'"),
        (["made_for_influence:images", "--image", "big"], r"The shape of images is 'big'"),
        (
            ["made_for_influence:vectors", "--image", "5x5"],
            r"Images of shape 5 x 5 have 25 numbers, and inputs have 16.",
        ),
        (["made_for_influence:none"], r"cannot be imported"),
        # Arguments that are refused before any import or computation.
        (["made_for_influence:none", "--html", "no/folder/page.html"], r"page.html cannot be written: its folder"),
        (["made_for_influence:none", "--html", "."], r". is a folder. Name a file."),
        (["made_for_influence:images", "--rank", "2"], r"rank is 2, and there is no index"),
        (["made_for_influence:images", "--queries", "0"], r"The data set is empty"),
        (["made_for_influence:vectors", "--queries", "0", "--image", "4x4"], r"The data set is empty"),
    ],
)
def test_refused(runner: CliRunner, arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["influence", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_data_at_indices() -> None:
    model, loss, data, _ = images()
    risk = kfs.EmpiricalRisk(model, loss, data)
    found = data_at(risk, [13, 2])
    assert set(found) == {2, 13}
    assert torch.equal(found[13].x, data[1][0][1])
    assert torch.equal(found[2].y, data[0][1][2])
    for number in (5, 12, 14, 20, 30):
        assert first_data(risk, number).num_data == min(number, 20)


def decoded(image: Tensor) -> tuple[list[int], bytes]:
    """Read a PNG file: its size and kind, and the bytes of its rows."""
    content = base64.b64decode(data_uri(image).partition(",")[2])
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    place, chunks = 8, {}
    while place < len(content):
        (length,) = struct.unpack(">I", content[place : place + 4])
        name, body = content[place + 4 : place + 8], content[place + 8 : place + 8 + length]
        assert struct.unpack(">I", content[place + 8 + length : place + 12 + length])[0] == zlib.crc32(name + body)
        chunks[name] = body
        place += 12 + length
    return list(struct.unpack(">IIBBBBB", chunks[b"IHDR"])), zlib.decompress(chunks[b"IDAT"])


def test_pictures() -> None:
    grey = torch.tensor([[0.0, 1.0, 0.5], [0.25, 0.0, 1.0]])
    header, rows = decoded(grey)
    assert header == [3, 2, 8, 0, 0, 0, 0]
    assert list(rows) == [0, 0, 255, 128, 0, 64, 0, 255]
    color = torch.zeros(1, 2, 3)
    color[0, 1, 2] = 5
    header, rows = decoded(color)
    assert header[:4] == [2, 1, 8, 2]
    assert list(rows) == [0, 0, 0, 0, 0, 0, 255]
    assert list(decoded(torch.ones(1, 2))[1]) == [0, 0, 0]  # an empty picture
    sizes = [(4, 4), (1, 4, 5), (4, 5, 3), (3, 5, 6), (64,), (2, 8), (2, 4, 4, 4)]
    found = [as_image(torch.zeros(size)) for size in sizes]
    assert [None if image is None else tuple(image.shape) for image in found] == [
        (4, 4), (4, 5), (4, 5, 3), (5, 6, 3), None, None, None
    ]  # fmt: skip
    assert as_image(torch.zeros(4, 4, dtype=torch.int64)) is None  # tokens
    assert as_image(torch.zeros(63), (8, 8)) is None


def test_mislabelled_digits() -> None:
    """Self-scores find labels that were changed; the section gives the number of those that it shows."""
    result = mislabelled.examine(quick=True)
    assert result.auroc > 0.9
    text = mislabelled.section(result)
    caught = sum(bool(result.flipped[index]) for index in result.found.suspects)
    assert f"{caught} of these 20 are mislabelled" in text
    assert caught > 20 * 3 * float(result.flipped.double().mean())
    for index in result.found.suspects:
        if result.flipped[index]:
            assert f"is a {int(result.labels[index])}" in text
    assert text.count("taken for a") == 4
    pairs = [(a > b) + 0.5 * (a == b) for a in (1.0, 3.0) for b in (1.0, 2.0)]
    area = mislabelled.area_under_curve(torch.tensor([1.0, 1.0, 3.0, 2.0]), torch.tensor([True, False, True, False]))
    assert area == sum(pairs) / 4
