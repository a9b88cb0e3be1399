"""The book builds without a warning, every page has its math and code, and the reference knows every public name."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest

import kfs
from docs import api, blocks, modules, notebooks, site_checks
from docs.drawings import FIGURES
from kfs.tour.run import definitions
from tests.docs.pages import run_of

ROOT = Path(modules.__file__).parent.parent
DEFINED = [file.relative_to(ROOT).as_posix() for file in definitions()]
OTHERS = [module.path for module in modules.all_modules() if module.path not in DEFINED]


def read(site: Path, name: str) -> str:
    return (site / f"{name}.html").read_text(encoding="utf-8")


def article(site: Path, name: str) -> str:
    return read(site, name).partition("<article")[2].partition("</article>")[0]


@pytest.mark.parametrize("path", DEFINED)
def test_definition(site: Path, path: str) -> None:
    text = article(site, path.removesuffix(".py"))
    assert 'class="math' in text
    assert '<div class="highlight">' in text
    assert "What running it verified" in text
    assert f'<span class="go">$ python {path}' in text or f"python {path}" in re.sub(r"<[^>]+>", "", text)


def test_other_modules(site: Path) -> None:
    for path in OTHERS:
        text = article(site, path.removesuffix(".py"))
        assert f">{path}<" in re.sub(r"</?span[^>]*>", "", text), path
        assert "What running it verified" not in text


def test_prose_is_beside_code(site: Path) -> None:
    text = article(site, "kfs/basics/ggns")
    found = re.findall(r'<div class="(module|prose|code)\b', text)
    assert found == ["module", "prose", "code"]


def test_the_site_has_no_mistakes(site: Path) -> None:
    """Links have targets, HTML is valid, pictures have alternative texts, nothing is loaded from other servers."""
    site_checks.check(site)
    scripts = [file for file in (site / "_static").rglob("*.css") if "url(http" in file.read_text(encoding="utf-8")]
    assert scripts == []


def test_previous_and_next(site: Path) -> None:
    """Every page has both, in the order of the book, except for the first and the last page."""
    lacking: dict[str, set[str]] = {"next-page": set(), "prev-page": set()}
    for file in site.rglob("*.html"):
        name = file.relative_to(site).with_suffix("").as_posix()
        if name not in {"index", "search", "genindex", "py-modindex"}:
            text = file.read_text(encoding="utf-8")
            for kind, found in lacking.items():
                if f'<a class="{kind}"' not in text:
                    found.add(name)
    assert lacking == {"next-page": {"CODE_OF_CONDUCT"}, "prev-page": {"docs/index"}}


def test_names_become_links(site: Path) -> None:
    def link(name: str) -> str:
        return rf'<a [^>]*href="([^"]+)"[^>]*><code class="[^"]*"><span class="pre">{name}</span>'

    def leads(page: str, name: str) -> str:
        found = re.search(link(name), article(site, page))
        assert found, (page, name)
        return found[1]

    assert leads("kfs/kfac/scaffold", "backpropagated_vectors") == "backpropagated_vectors.html"
    assert leads("kfs/kfac/expand_Linear", "reduce_Linear") == "reduce_Linear.html"
    assert leads("docs/errata", "kfs/basics/ggns.py") == "../kfs/basics/ggns.html"
    assert leads("docs/howto_compare", "kfs.compare") == "api/kfs.compare.html#kfs.compare"
    assert leads("docs/howto_train", "kfs.optim.KFAC") == "api/kfs.optim.KFAC.html#kfs.optim.KFAC"
    assert leads("docs/api/kfs.KFAC", "EKFAC") == "kfs.EKFAC.html#kfs.EKFAC"


def test_names_that_two_packages_have() -> None:
    """Both names are explained; the short name refers to the first one."""
    found = api.addresses()
    assert found["KFAC"] == found["kfs.KFAC"] == found["kfs.factors.KFAC"] == "kfs.KFAC"
    assert found["kfs.optim.KFAC"] == "kfs.optim.KFAC"


def test_reference(site: Path) -> None:
    """One page per public name: signature, a link to the source, and links to PyTorch's documentation."""
    contents = read(site, "docs/api/index")
    for name in api.public_names():
        if name.kind != "module":
            assert f'id="{name.home}"' in read(site, f"docs/api/{name.home}"), name.full
            assert f'href="{name.home}.html' in contents
    text = article(site, "docs/api/kfs.KFAC")
    assert "mc_samples" in text.partition("</dt>")[0]
    for word in ("Parameters", "Advanced", "Raises"):
        assert f">{word}<" in text, word
    assert re.search(r'href="../../kfs/factors/kfac.html#line-\d+"', text)
    assert "https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module" in article(
        site, "docs/api/kfs.EmpiricalRisk"
    )


def test_members_are_listed_by_use(site: Path) -> None:
    """Inherited methods are included; frequently used members come first; internal ones are missing."""
    members = api.members_of(kfs.KFAC)
    first = next(iter(members.values()))
    assert {"inverse", "sample"} <= first.keys()
    text = article(site, "docs/api/kfs.KFAC")
    overview = text.partition('class="sig')[0]  # above the signature
    for name in ("inverse", "sample", "eigenvalues", "save", "plot_spectrum"):
        assert f'href="#kfs.KFAC.{name}"' in overview, name
        assert f'id="kfs.KFAC.{name}"' in text, name
    assert next(iter(api.members_of(kfs.operators.LinearOperator))) == api.DEFINE
    assert api.members_of(kfs.losses.Custom) == {}


def test_no_internal_members(site: Path) -> None:
    """The reference lists only existing members, and no page shows an internal one."""
    classes = [name for name in api.public_names() if name.kind == "class"]
    everything = {member for name in classes for member in dir(name.value)}
    assert everything >= api.INTERNAL
    assert {member for members in api.USES.values() for member in members} <= everything
    for name in classes:
        shown = set(re.findall(rf'id="{re.escape(name.home)}\.(\w+)"', read(site, f"docs/api/{name.home}")))
        listed = {member for members in api.members_of(name.value).values() for member in members}
        assert listed <= shown, name.home
        assert not any(member.startswith("_") for member in shown), name.home
        if name.value not in api.INTERFACES:
            assert not shown & api.INTERNAL, name.home


def test_the_reference_is_grouped_by_use(site: Path) -> None:
    """Headings are words, and each name of kfs is below its heading."""
    text = article(site, "docs/api/index")
    headings = re.findall(r"<h2>([^<]*)<", text)
    assert headings == [title for title in dict.fromkeys(api.TITLES.values()) if title in headings]
    assert len(headings) == len(api.PACKAGES)
    factors = text.partition("KFAC and EKFAC<")[2].partition("<h2>")[0]
    assert "kfs.KFAC.html" in factors
    assert "kfs.load.html" in factors
    assert "__version__" not in text


def test_a_source_is_at_its_line() -> None:
    address = api.source_address("py", {"module": "kfs", "fullname": "KFAC"})
    assert address is not None
    path, _, line = address.removeprefix("../../").partition(".html#line-")
    source = (ROOT / f"{path}.py").read_text(encoding="utf-8").splitlines()
    assert any(text.startswith("class KFAC") for text in source[int(line) - 1 : int(line) + 2])  # or its decorator
    assert api.source_address("py", {"module": "kfs", "fullname": "__version__"}) is None
    assert api.source_address("c", {"module": "kfs", "fullname": "KFAC"}) is None


def test_docstrings_are_translated() -> None:
    lines = ["Multiply `v^T J` with $x_1$.", "", ">>> `a`", "", "Costs $5, `x`, ``y``."]
    api.translate(None, "", "", None, None, lines)
    assert lines == ["Multiply ``v^T J`` with :math:`x_1`.", "", ">>> `a`", "", "Costs $5, ``x``, ``y``."]


def test_search_knows_everything(site: Path) -> None:
    """It finds words of prose, code and captions. Words are stored without their endings."""
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").rstrip(";)\n"))
    documents = index["docnames"]

    def pages(word: str) -> set[str]:
        found = [index[kind].get(word, []) for kind in ("terms", "titleterms")]  # a word of a title is there alone
        return {documents[n] for some in found for n in (some if isinstance(some, list) else [some])}

    assert "README" in pages("instal") | pages("install")
    assert pages("shuffl")
    assert "kfs/basics/mc_fisher_convergence" in pages("synthetic_fisher_converg")
    assert "docs/api/kfs.EKFAC" in {documents[entry[0]] for entry in index["alltitles"]["kfs.EKFAC"]}
    assert set(documents) == {file.relative_to(site).with_suffix("").as_posix() for file in written(site)}


def written(site: Path) -> list[Path]:
    """Return all handwritten pages."""
    made = {"index.html", "search.html", "genindex.html", "py-modindex.html"}
    return [file for file in site.rglob("*.html") if file.relative_to(site).as_posix() not in made]


def test_output_is_below_the_code(site: Path) -> None:
    text = article(site, "docs/howto_compare")
    code, output = text.index("comparison"), text.index('<div class="output docutils container">')
    assert code < output
    assert "optimal Kronecker" in text[output : output + 3000]


def test_notebooks(site: Path) -> None:
    """Each notebook is linked from its page, and has all code of the page with its output and its figures."""
    for page in notebooks.pages():
        assert f'href="{page.stem}.ipynb"' in article(site, f"docs/{page.stem}")
        cells = nbformat.read(site / "docs" / f"{page.stem}.ipynb", as_version=4).cells
        code = [cell for cell in cells if cell.cell_type == "code"]
        expected = [block.code.rstrip("\n") for block in blocks.blocks(page) if not block.needs]
        assert [cell.source for cell in code] == expected, page.stem
        outputs = [output for cell in code for output in cell.outputs]
        drawn = [output for output in outputs if output.output_type == "display_data"]
        assert len(drawn) == len(blocks.pictures(page)), page.stem
        assert all("<svg" in output.data["image/svg+xml"] for output in drawn)
        printed = [output for output in run_of(page.stem).executed.outputs if output]
        assert [output.text for output in outputs if output.output_type == "stream"] == printed
        prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        assert not re.search(r"^:::|\{dropdown|\]\((?:figures|assets)/|\.md[)#]", prose, flags=re.MULTILINE), page.stem


def test_the_notebook_of_all_definitions(site: Path) -> None:
    for page in ("docs/chapters", "docs/paper"):
        assert 'href="chapters.ipynb"' in article(site, page)
    notebook = nbformat.read(site / "docs" / "chapters.ipynb", as_version=4)
    titles = [cell.source for cell in notebook.cells if cell.source.startswith("### ")]
    assert len(titles) == len(DEFINED)


def test_figures(site: Path) -> None:
    """Each figure is on the page of its plot and on that of a definition, with its name and an alternative text."""
    for figure in FIGURES:
        for page in (figure.page, figure.plot.removesuffix(".py")):
            text = article(site, page)
            assert f"{figure.name}.svg" in text
            assert f"{figure.name}, drawn by" in text


def test_drawings(site: Path) -> None:
    """Drawings are XML with a title, load nothing, and are shown on a page."""
    drawings = sorted((ROOT / "docs" / "assets").glob("*.svg"))
    assert drawings
    for drawing in drawings:
        root = ElementTree.parse(drawing).getroot()
        names = [element.tag.rpartition("}")[2] for element in root.iter()]
        assert "title" in names
        assert "image" not in names
        assert "@font-face" not in drawing.read_text(encoding="utf-8")
        picture = site / "_images" / drawing.name
        if picture.is_file():
            assert picture.read_bytes() == drawing.read_bytes()
        else:  # a part of its page
            assert any(
                drawing.read_text(encoding="utf-8") in page.read_text(encoding="utf-8") for page in written(site)
            )


def test_errata_name_existing_files(site: Path) -> None:
    files = re.findall(r">([\w/]+\.py)<", article(site, "docs/errata"))
    assert files
    for name in files:
        assert any((ROOT / folder / name).is_file() for folder in ("", "kfs/basics", "kfs/kfac")), name
