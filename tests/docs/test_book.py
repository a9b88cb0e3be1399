"""The book builds, every page has its math and code, no formula is left unrendered, and all links lead somewhere."""

import html
import json
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs import build, reference, results, site_checks, sources
from docs.docstrings import to_markdown
from docs.markup import Links
from docs.search import read_index
from kfs import tour
from kfs.tour import Report, definitions

ROOT = Path(build.__file__).parent.parent
ENGINE = [module for section in sources.engine(definitions()).values() for module in section]


def read(site: Path, name: str) -> str:
    return (site / f"{name}.html").read_text(encoding="utf-8")


def test_number_of_pages(site: Path) -> None:
    expected = len(definitions()) + len(ENGINE) + len(build.PAGES) + len(build.GENERATED)
    assert len(list(site.glob("*.html"))) == expected


@pytest.mark.parametrize("name", [file.stem for file in definitions()])
def test_definition(site: Path, name: str) -> None:
    text = read(site, name)
    assert "<math" in text
    assert '<div class="highlight">' in text
    assert "What running it verified" in text
    assert f"Source: <code>{next(f for f in definitions() if f.stem == name).relative_to(ROOT)}</code>" in text
    article = re.sub(r"<math.*?</math>", "", text.split("<article>")[1].split("</article>")[0], flags=re.DOTALL)
    assert "$" not in article, "a formula was not recognised"


@pytest.mark.parametrize("module", ENGINE, ids=lambda module: module.name)
def test_engine_module(site: Path, module: sources.Module) -> None:
    text = read(site, module.name)
    assert '<div class="highlight">' in text
    assert "What running it verified" not in text
    assert f"<code>{module.path}</code>" in text


def test_every_engine_module_has_a_page() -> None:
    paths = {module.path for module in ENGINE} | {file.relative_to(ROOT).as_posix() for file in definitions()}
    for folder in ("kfac", "operators", "optim", "merging", "distributed", "planning", "losses"):
        for file in (ROOT / "kfs" / folder).rglob("*.py"):
            assert file.relative_to(ROOT).as_posix() in paths
    for file in (ROOT / "kfs" / "conformance").glob("*.py"):  # adapters of other libraries have no page
        assert file.relative_to(ROOT).as_posix() in paths
    assert {"kfs/risk.py", "kfs/storage.py", "kfs/conformance/adapters/kfs.py"} <= paths


def test_tests_of_a_module() -> None:
    """They lie in its own folder or, for a room, in that of its package."""
    tests = {module.path: sources.tests_of(module) for module in ENGINE}
    assert tests["kfs/risk.py"] == ["tests/test_risk.py"]
    assert tests["kfs/kfac/storage/checkpoint.py"] == ["tests/kfac/test_checkpoint.py"]
    assert tests["kfs/conformance/state.py"] == []  # tests/test_state.py is about kfs/state.py


def test_all_links_lead_somewhere(site: Path) -> None:
    for page in site.glob("*.html"):
        assert site_checks.broken_links(page, page.read_text(encoding="utf-8")) == [], page.name


def test_no_latex_is_left(site: Path) -> None:
    for page in site.glob("*.html"):
        assert site_checks.unrendered(page.read_text(encoding="utf-8")) == [], page.name


def test_nothing_is_loaded_from_a_network(site: Path) -> None:
    for page in (file for file in site.iterdir() if file.suffix != ".png"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'(?:src|href)="(?:https?:)?//|@import|url\((?!#)|fetch\(|XMLHttpRequest', text)


def test_every_page_is_reachable_from_the_index(site: Path) -> None:
    linked = {link.partition("#")[0] for link in re.findall(r'href="([^"]+)"', read(site, "index"))}
    searched = {entry["url"].partition("#")[0] for entry in read_index(site / "search_index.js")}
    pages = {page.name for page in site.glob("*.html")}
    assert pages <= linked
    assert pages == searched


def test_previous_and_next(site: Path) -> None:
    for chain in ([file.stem for file in definitions()], [module.name for module in ENGINE]):
        for before, after in pairwise(chain):
            assert f'href="{after}.html"' in read(site, before).partition("<nav>")[2]
            assert f'href="{before}.html"' in read(site, after).partition("<nav>")[2]


def test_names_become_links(site: Path) -> None:
    assert '<a href="backpropagated_vectors.html"><code>backpropagated_vectors</code></a>' in read(site, "scaffold")
    assert '<a href="reduce_Linear.html"><code>reduce_Linear</code></a>' in read(site, "expand_Linear")
    assert '<a href="ggns.html"><code>ggns.py</code></a>' in read(site, "errata")
    assert '<a href="api.html#kfs.compare"><code>kfs.compare</code></a>' in read(site, "howto_compare")


def test_names_of_modules_in_other_rooms() -> None:
    """A neighbour comes first, then a definition, then another room of the package; other packages are not meant."""

    def module(dotted: str) -> sources.Module:
        path = dotted.replace(".", "/") + ".py"
        return sources.Module(dotted.removeprefix("kfs."), dotted, path, "", "", "", (), frozenset())

    definition = module("kfs.kfac.structures.damping")
    others = [
        module(f"kfs.{name}") for name in ("kfac.sums.gram", "kfac.rules.gram", "kfac.sums.patches", "optim.rule")
    ]
    links = Links([definition], others, {})
    here = module("kfs.kfac.rules.convolution")
    assert links.find("gram", here) == "kfac.rules.gram.html"
    assert links.find("patches", here) == links.find("patches.py", here) == "kfac.sums.patches.html"
    assert links.find("damping", module("kfs.optim.kfac")) == links.find("damping.py") == "kfac.structures.damping.html"
    assert links.find("rule", here) is None
    assert links.find("patches") is None


def test_names_that_two_packages_have(site: Path) -> None:
    """Both are explained; the short name is that of the first one."""
    found = reference.addresses(reference.public_names())
    assert found["KFAC"] == found["kfs.KFAC"] == "api.html#kfs.KFAC"
    assert found["kfs.optim.KFAC"] == "api.html#kfs.optim.KFAC"
    assert '<a href="api.html#kfs.optim.KFAC"><code>kfs.optim.KFAC</code></a>' in read(site, "howto_train")


@pytest.mark.parametrize("name", reference.public_names(), ids=lambda name: name.full)
def test_reference(site: Path, name: reference.Name) -> None:
    text = read(site, "api")
    assert f'id="{html.escape(name.home)}"' in text
    assert f'href="#{name.home}"' in text


def test_reference_shows_signature_and_sections(site: Path) -> None:
    text = read(site, "api").partition('id="kfs.KFAC"')[2].partition("<h3")[0]
    assert "mc_samples" in text.partition("</pre>")[0]
    for word in ("Args", "Attributes", "Raises", "Example"):
        assert f"<strong>{word}</strong>" in text
    assert "<li><code>sharing</code>: How " in text
    assert 'href="kfac.kfac.html"' in text


def test_docstring_sections() -> None:
    arguments = "Args:\n    a: One\n        and more.\n    b: Two."
    markdown = to_markdown(f"First.\n\n{arguments}\n\nReturns:\n    A thing.\n\nExample:\n    >>> 1\n    1\n")
    assert "**Args**\n\n- `a`: One and more.\n- `b`: Two." in markdown
    assert "**Returns**\n\nA thing." in markdown
    assert "```pycon\n>>> 1\n1\n```" in markdown


def test_search_finds_ekfac(site: Path) -> None:
    entries = read_index(site / "search_index.js")
    found = {entry["url"] for entry in entries if "EKFAC" in (entry["title"], *entry["names"])}
    assert {"api.html#kfs.EKFAC", "ekfac.html"} <= found
    assert all(entry["title"] and not re.search(r"[<$]|\\[a-z]", entry["title"]) for entry in entries)


def test_errata_name_existing_files(site: Path) -> None:
    files = re.findall(r"<code>([\w/]+\.py)</code>", read(site, "errata"))
    assert files
    for name in files:
        assert (ROOT / name).is_file() or (ROOT / "kfs" / "basics" / name).is_file(), name


def test_sections_of_contributing(site: Path) -> None:
    """They are written once, and the page of the engine shows them."""
    text = read(site, "engine")
    for title in ("The way of a batch", "The rooms of kfac", "Glossary"):
        assert re.search(rf"<h2[^>]*>{title}</h2>", text)
    assert "CONTRIBUTING:" not in text
    assert "OuterProductSum.add(g)" in html.unescape(re.sub(r"<[^>]+>", "", text))
    with pytest.raises(RuntimeError, match="no section 'Nonsense'"):
        build.contributing("Nonsense")


def test_drawings(site: Path) -> None:
    """They are XML with a title, load nothing, and pages show them from where they were copied to."""
    drawings = sorted((ROOT / "docs" / "assets").glob("*.svg"))
    assert drawings
    pages = "".join(read(site, name) for name in build.PAGES)
    for drawing in drawings:
        root = ElementTree.parse(drawing).getroot()
        names = [element.tag.rpartition("}")[2] for element in root.iter()]
        assert "title" in names
        assert "image" not in names
        assert "@font-face" not in drawing.read_text(encoding="utf-8")
        assert f'<img src="{drawing.name}" alt="' in pages
        assert (site / drawing.name).read_bytes() == drawing.read_bytes()


def test_benchmarks_with_and_without_results(tmp_path: Path) -> None:
    assert "make bench" in results.benchmarks_body(tmp_path).partition("no numbers yet")[2]
    row = {"problem": "MLP", "program": "KFAC", "library": "kfs", "seconds": 1.0, "ratio": 1.234, "flop_ratio": None}
    content = {"environment": {"torch": "2"}, "rows": [row]}
    (tmp_path / "factors.json").write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "conformance.json").write_text(json.dumps({"results": {}}), encoding="utf-8")
    body = results.benchmarks_body(tmp_path)
    assert "<td>MLP</td><td>KFAC</td><td>kfs</td><td class=number>1.23</td>" in body
    assert "no numbers yet" not in body


def test_traffic_of_several_processes(tmp_path: Path) -> None:
    row = {"model": "MLP", "ranks": 2, "seconds": 0.01, "busy": 0.01, "factors": 9}
    rows = [
        row | {"optimizer": "AdamW", "sent": 0.0, "scheme": 0.0, "held": 0},
        row | {"optimizer": "KFAC", "sent": 2e6, "scheme": 8e6, "held": 5_000_000},
    ]
    (tmp_path / "distributed.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    body = results.benchmarks_body(tmp_path)
    assert "kfac-pytorch" in body
    assert ">8.00<" in body


def test_benchmarks_of_merging(tmp_path: Path) -> None:
    row = {"start": "strong", "tasks": "halves", "way": "average", "accuracies": [90.0, 91.0]}
    rows = [row | {"iterations": None, "seconds": None}, row | {"way": "KFAC", "iterations": 3, "seconds": 0.5}]
    file = tmp_path / "applications_merging.json"
    file.write_text(json.dumps({"environment": {}, "rows": rows}), encoding="utf-8")
    body = results.benchmarks_body(tmp_path)
    number = "<td class=number>"
    assert f"<td>strong start, halves</td><td>average</td>{number}90.50</td>{number}</td>" in body
    assert f"<td></td><td>KFAC</td>{number}90.50</td>{number}3.00</td>{number}0.50</td>" in body


def test_benchmarks_of_training(tmp_path: Path) -> None:
    runs = [{"steps": 10, "seconds": 0.5, "reached": True}, {"steps": 99, "seconds": 9.0, "reached": False}]
    row = {"task": "cnn", "optimizer": "kfs", "lr": 0.1, "runs": [runs[0], runs[1], runs[0]], "note": "at the edge"}
    lost, missing = {**row, "optimizer": "sgd", "runs": runs[1:]}, {**row, "optimizer": "peer", "lr": None, "runs": []}
    steps = [{"problem": "MLP", "optimizer": name, "seconds": 1.0, "ratio": 2.0} for name in ("kfs", "sgd")]
    for name, rows in {"train_cnn": [row, lost, missing], "train_cost": steps, "train_gpt_quick": steps}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"environment": {}, "rows": rows}), encoding="utf-8")
    body = results.benchmarks_body(tmp_path)
    number = "<td class=number>"
    assert f"<td>kfs</td><td>at the edge</td>{number}0.1</td>{number}10</td>{number}0.50</td>" in body
    assert f"<td>sgd</td><td>at the edge, not reached</td>{number}0.1</td>{number}</td>{number}</td>" in body
    assert f"<td>peer</td><td>at the edge</td>{number}</td>" in body
    assert f"<td>MLP</td><td>kfs</td>{number}2.00</td></tr>\n<tr><td></td><td>sgd</td>" in body
    assert "Train: cost" in body
    assert "quick" not in body


def test_benchmarks_of_compression(tmp_path: Path) -> None:
    row = {
        "method": "OBS",
        "keep": 0.2,
        "accuracy": 91.5,
        "accuracies": [91.5],
        "stored": 1.0,
        "flops": 0.5,
        "time": 0.7,
    }
    content = {"environment": {}, "rows": [row, {**row, "keep": 0.1}]}
    (tmp_path / "compression.json").write_text(json.dumps(content), encoding="utf-8")
    number = "<td class=number>"
    first = f"<td>OBS</td>{number}0.20</td>{number}91.50</td>{number}1.00</td>{number}0.50</td>{number}0.70</td>"
    assert f"{first}</tr>\n<tr><td></td>{number}0.10</td>" in results.benchmarks_body(tmp_path)


def test_a_failing_definition_stops_the_book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "definitions", lambda: tour.definitions()[:1])
    monkeypatch.setattr(build, "run_definition", lambda file: Report(file.stem, (), 0.0, "False: a lie."))
    with pytest.raises(RuntimeError, match=r"reduction_factors: False: a lie\."):
        build.build(tmp_path)


def test_a_definition_without_prose_is_refused(tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text("x = 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no module docstring"):
        sources.read_definition(tmp_path / "silent.py")


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ('<a href="nowhere.html">x</a>', "links to nowhere.html"),
        ('<a href="page.html#nowhere">x</a>', "links to page.html#nowhere"),
        ("<p>so $x$ is</p>", "shows LaTeX"),
        (r"<p>\alpha</p>", "shows LaTeX"),
        (r"<math><mi>\foo</mi></math>", "shows LaTeX"),
    ],
)
def test_a_mistake_stops_the_book(tmp_path: Path, body: str, complaint: str) -> None:
    (tmp_path / "page.html").write_text(f"<main>{body}</main>", encoding="utf-8")
    with pytest.raises(RuntimeError, match=complaint):
        site_checks.check(tmp_path)


def test_two_pages_with_one_name_are_refused() -> None:
    with pytest.raises(RuntimeError, match="Several pages are called KFAC, kfac"):
        build.check_names(["kfac", "KFAC", "risk"])
