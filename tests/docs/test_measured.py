"""Pages show only measured numbers that are in files of results."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from docs import measured
from docs.measured import TABLES, exceptions, generated, main, name_of, pages, unexplained, written

KNOWN = exceptions()
RUN = {"steps": 30, "seconds": 1.25, "reached": True}


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_pages_show_measured_numbers(page: Path) -> None:
    """If this fails, run `python -m docs.measured --write`, or enter the source of a number in docs/numbers.toml."""
    text, name = page.read_text(encoding="utf-8"), name_of(page)
    assert written(text) == text
    texts = KNOWN.texts.get(name, {})
    found = list(unexplained(text, texts))
    assert bool(found) == (name in KNOWN.pages), found
    for piece in texts:
        assert piece in text
        assert len(list(unexplained(text, {other: "" for other in texts if other != piece}))) > len(found), piece


def test_exceptions_are_of_pages() -> None:
    names = {name_of(page) for page in pages()}
    assert {*KNOWN.pages, *KNOWN.texts} <= names
    assert all(reason for part in (KNOWN.pages, *KNOWN.texts.values(), KNOWN.results) for reason in part.values())


def save(folder: Path, name: str, rows: Sequence[object], **environment: object) -> None:
    content = {"environment": environment, "rows": rows}
    (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def test_marks_are_filled(tmp_path: Path) -> None:
    save(tmp_path, "x", [{"kind": "a b", "ratio": 1.26}, {"kind": "c", "ratio": 3}, {"kind": "c", "ratio": None}])
    inline = "so <!-- measured: value x ratio 1 'kind=a b' --><!-- end --> and\n"
    once = written(f"{inline}<!-- measured: value x ratio 0% -->\nold\n<!-- end -->", tmp_path)
    assert "-->1.3<!--" in once
    assert "\n126 to 300 %\n" in once
    assert written(once, tmp_path) == once
    assert generated("value x ratio 1ms kind=c", tmp_path) == "3000.0 ms"
    with pytest.raises(ValueError, match=r"x\.json has no row with"):
        generated("value x ratio 1 kind=d", tmp_path)
    with pytest.raises(ValueError, match="There is no table other, but value,"):
        generated("other", tmp_path)


def test_numbers_that_look_measured() -> None:
    page = """takes 1.5 times as long
    `lr=0.3`, $0.5 x$, [0.2](a0.1.md) <!-- 0.7 -->
<!-- measured: x -->
| 3.25 |
<!-- end -->
```python
0.9
```
| 4 ms | **0.25** ± 0.01 | 16 GiB | 3 % | 12 | 1e-3 | PyTorch 2.11 | 0.2.0 | arXiv 2507.05127 |
"""
    assert [(line, number) for line, number in unexplained(page, {})] == [
        *((1, "1.5"), (2, "0.2")),
        *((9, number) for number in ("4 ms", "0.25", "0.01", "16 GiB", "3 %")),
    ]
    assert [number for _, number in unexplained(page, {"**0.25** ± 0.01": "a reason", "1.5": "another one"})] == [
        *("0.2", "4 ms", "16 GiB", "3 %")
    ]


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "README.md"
    page.write_text("<!-- measured: overhead --><!-- end --> 0.5\n", encoding="utf-8")
    monkeypatch.setattr(measured, "ROOT", tmp_path)
    monkeypatch.setattr(measured, "exceptions", lambda: measured.Exceptions({}, {}, {}))
    with pytest.raises(SystemExit, match=r"^README.md does not show what was measured\nREADME.md:6 has 0.5"):
        main([])
    with pytest.raises(SystemExit, match=r"^README.md:6 has 0.5, which no file has$"):
        main(["--write"])
    assert capsys.readouterr().out == "Written: README.md\n"
    monkeypatch.setattr(measured, "exceptions", lambda: measured.Exceptions({"README.md": "of another run"}, {}, {}))
    main([])


def test_training(tmp_path: Path) -> None:
    lost = RUN | {"reached": False}
    rows = [
        {"optimizer": "adam", "runs": [RUN, RUN | {"steps": 40, "seconds": 0.5}, RUN]},
        {"optimizer": "kfs", "runs": [RUN | {"steps": 20}] * 3},
        {"optimizer": "sgd", "runs": [RUN, lost, lost]},
        {"optimizer": "singd", "runs": []},
    ]
    save(tmp_path, "train_cnn", rows, target=0.005)
    assert generated("train cnn", tmp_path).splitlines() == [
        "| | target | SGD | AdamW | Muon | SOAP | SINGD | kfs |",
        "|---|---|---|---|---|---|---|---|",
        "| CNN on digits | 0.005 | not reached | 30 / **1.2 s** | | | | **20** / **1.2 s** |",
    ]


def test_tables_of_a_gpu(tmp_path: Path) -> None:
    products = [("GGN, 1", "kfs", 0.5), ("GGN, replay=False, 1", "kfs", 2), ("GGN, 1", "curvlinops", 3)]
    rows = [{"problem": "GPT", "program": name, "library": library, "ratio": r} for name, library, r in products]
    save(tmp_path, "operators", rows)
    assert "| GGN | 1 | 0.50 | 2.00 | 3.00 |\n| | 10 |" in generated("operators", tmp_path)
    replayed = dict.fromkeys(("graphed_ratio", "no_replay", "first", "recording", "allocated"), 2.0)
    row = {"problem": "MLP", "program": "mc expand", "library": "kfs", "ratio": 0.5, **replayed}
    save(tmp_path, "factors_cuda", [row, row | {"library": "curvlinops", "ratio": 4, "recording": None}])
    assert "| MLP | 0.50 | 2.00 | 2.00 | 2.00 | 2.00 | 2.00 |" in generated("factors_cuda", tmp_path)
    assert generated("factors_cuda ratio no_replay", tmp_path).endswith("|\n| MLP | 0.50 | 2.00 |")
    assert "| | kfs | curvlinops |\n|---|---|---|\n| MLP, mc expand | 0.50 | 4.00 |" in generated(
        "factors_cuda_peers", tmp_path
    )


def test_defaults_and_diverged_runs(tmp_path: Path) -> None:
    one = {"schedule": "constant", "optimizer": "kfs", "lr": 1.0, "half": 0.0012, "end": 2e-9}
    rows = [one, one | {"optimizer": "adamw", "half": 1.5, "end": None}, one | {"optimizer": "kfs-fixed", "lr": 0.3}]
    save(tmp_path, "train_defaults_cpu_wine", rows)
    line = "| wine, constant | 1.500, diverged | | | | 0.0012, **2e-9** (0.3) | 0.0012, **2e-9** |"
    assert line in generated("defaults cpu wine", tmp_path)


def test_numbers_of_a_whole_run(tmp_path: Path) -> None:
    settings = {"gain": {"strong": [1.0, 2.0, 3.0]}, "errors": [{"mean": 0.1234}]}
    (tmp_path / "merging.json").write_text(json.dumps({"environment": settings, "rows": []}), encoding="utf-8")
    assert generated("setting merging 2 gain strong", tmp_path) == "2.00 ± 0.58"
    assert generated("setting merging -1 gain strong", tmp_path) == "-2.0 ± 0.6"
    assert generated("setting merging 3 errors 0 mean", tmp_path) == "0.123"


@pytest.mark.parametrize(
    "words",
    [
        "where train_cuda_gpt",
        "defaults cuda full lora gpt lstm deep",
        "defaults cpu cnn tanh wine cancer diabetes",
        "costs train_cost_cuda",
        "costs train_cost",
        "long_runs lstm gpt tanh classifier",
        "whole_runs gpt deep lstm large",
        "overhead",
        "recurrent",
        "precision",
        "value factors audit_ratio 1 library=kfs",
    ],
)
def test_tables_of_committed_files(words: str) -> None:
    """Tables that pages show are tested above; these are tables that pages may show."""
    assert words.split(maxsplit=1)[0] in TABLES
    lines = generated(words).splitlines()
    assert len({line.count("|") for line in lines}) == 1
