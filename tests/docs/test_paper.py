"""The pages about the paper: every item of the paper has a row, and every file, command, claim and erratum exists."""

import re
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

from docs import bridge, paper
from docs.drawings import FIGURES, file_of, plots
from kfs.basics.ggns import vec_ggn
from kfs.basics.hessians import vec_hessian
from kfs.tour.run import definitions
from tests.docs.test_book import ROOT, article

# As counted in the source of the paper; one listing and one example are commented out there.
NAMED = {"listing": 27, "figure": 11, "definition": 23, "test": 2, "example": 17, "setup": 8, "caveat": 2}
RUN = {file.relative_to(ROOT).as_posix() for file in definitions()}
DRAWN = {file_of(name) for name in plots()}


def named_errata() -> list[str]:
    """Return all errata that the page links to, with repetitions."""
    in_text = [title for section in paper.sections() for title in section.errata]
    return in_text + [title for entry in paper.entries() for title in entry.errata]


def test_nothing_is_missing() -> None:
    entries = paper.entries()
    assert Counter(entry.kind for entry in entries if entry.kind != "topic") == NAMED
    assert len({(entry.kind, entry.name) for entry in entries}) == len(entries)
    assert Counter(entry.kind for entry in entries if entry.unprinted) == {"listing": 1, "example": 1}


def test_numbers_are_those_of_the_paper() -> None:
    """As in LaTeX, each kind is numbered from one, and commented-out items are not counted."""
    for kind, count in {**NAMED, "example": 16}.items():
        printed = [entry for entry in paper.entries() if entry.kind == kind and not entry.unprinted]
        if kind == "listing":
            assert {entry.number for entry in printed} == {None}
        elif kind != "figure":
            assert [entry.number for entry in printed] == list(range(1, count + 1))


def test_sections_are_those_of_the_paper() -> None:
    """All sections are listed except for 2.4, which has no text of its own."""
    numbers = [section.number for section in paper.sections() if section.number]
    expected = (
        "1 2 2.1 2.2 2.3 2.4.1 2.4.2 2.4.3 2.4.4 2.5 2.5.1 2.5.2 2.5.3 2.5.4 2.5.5 3 4 4.1 4.1.1 4.1.2 4.1.3 4.2 4.3 "
    )
    assert numbers == (expected + "5 5.1 5.2 5.2.1 5.2.2 6 7").split()
    parents = {section.number for section in paper.sections() if not section.entries and not section.page}
    assert parents == {"4.1", "5.2"}


@pytest.mark.parametrize(
    ("title", "section"),
    [  # in the PDF's spelling
        ("Definition 19: $\\mathrm{cvec}$- and $\\mathrm{rvec}$-GGN matrices", "2.4.4"),
        ("Definition 23: KFAC for a linear layer without weight sharing", "5.1"),
        ("Example 9: GGN for the Rosenbrock function", "2.4.4"),
        ("Example 16: Motivation for KFAC's expectation approximation", "5.1"),
        ("Setup 8: Linear layer inside a neural net", "5"),
        ("Caveat 2: Flattening", "2.4.1"),
        ("Test 2: KFAC for regression with a deep linear net (no nonlinear layers)", "5.2.2"),
        ("Figure 6: The GGN of a neural net exhibits block structure", "2.5.1"),
    ],
)
def test_an_item_is_in_its_section(title: str, section: str) -> None:
    assert [each.number for each in paper.sections() for entry in each.entries if entry.title == title] == [section]


def test_the_committed_table_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """If this fails, run `python -m docs.paper --write`."""
    assert paper.main([]) == 0, capsys.readouterr().out


def test_an_old_table_is_noticed_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "ROOT", tmp_path)
    monkeypatch.setattr(paper, "TABLE", tmp_path / "table.md")
    monkeypatch.setattr(paper, "table", lambda: "new")
    (tmp_path / "table.md").write_text("old", encoding="utf-8")
    assert paper.main([]) == 1
    assert paper.main(["--write"]) == 0
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == "new"


def test_links_of_the_committed_table() -> None:
    """Links are paths relative to the page's folder, and every item has a row."""
    text = paper.TABLE.read_text(encoding="utf-8")
    targets = {target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target}
    assert all((paper.DOCS / target).is_file() for target in targets)
    assert all(f"| {entry.title} |" in text for entry in paper.entries())


def test_names_of_the_printed_listings() -> None:
    """All of our names in the table exist in the module beside them; printed names that differ do not."""
    text = (paper.DOCS / "paper.md").read_text(encoding="utf-8").partition("## Names in")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    module = ""
    ours = []
    for first, printed, here in rows[1:]:
        module = first.partition("`")[2].partition("`")[0] or module
        calls = [re.match(r"\w+", call) for call in re.findall(r"`([^`]+)`", here)]
        names = [call[0] for call in calls if call is not None and call[0] not in ("layers", "b")]
        assert names, here
        assert all(hasattr(import_module(module), name) for name in names), (module, names)
        old = set(re.findall(r"`(\w+)[`(]", printed)) - set(names)
        assert not any(hasattr(import_module(module), name) for name in old), (module, old)
        ours += names
    assert {"vec_hessian", "vec_ggn", "reduction_factor", "sample_label", "kfac"} <= set(ours)


def test_every_definition_and_listing_is_in_the_table() -> None:
    files = {file for file in RUN if file.startswith(("kfs/basics/", "kfs/kfac/", "kfs/kfac_tests/"))}
    assert files <= {entry.page for entry in paper.entries()}


@pytest.mark.parametrize("entry", paper.entries(), ids=lambda entry: entry.title)
def test_pages_exist_and_files_run(entry: paper.Entry) -> None:
    assert (ROOT / entry.page).is_file()
    assert entry.page.endswith(".md") or entry.page in RUN | DRAWN or entry.kind == "topic"
    assert (entry.page in DRAWN) == bool(entry.pictures)
    if entry.command is not None:
        assert entry.command.split()[:2] == ["python", entry.page]


def test_figures_are_numbered_as_in_the_paper() -> None:
    numbers = [entry.number for entry in paper.entries() if entry.kind == "figure"]
    assert numbers == [None, *range(1, 11)]
    for figure in FIGURES:
        shown = [entry for entry in paper.entries() if figure.name in entry.pictures]
        assert tuple(entry.number for entry in shown) == figure.document
        assert all(entry.page == figure.plot for entry in shown)
        assert all(f"{number}" in figure.origin for number in figure.document)


def test_errata_are_linked() -> None:
    titles = paper.errata()
    assert len(titles) > 10
    assert set(named_errata()) == set(titles)


def test_errata_say_whether_they_are_fixed() -> None:
    sections = (paper.DOCS / "errata.md").read_text(encoding="utf-8").split("\n## ")[1:]
    last = [section.strip().splitlines()[-1] for section in sections]
    assert all(re.match(r"Upstream: (open|fixed \(.*\))\.$", line) for line in last)
    assert sum("fixed" in line for line in last) == 3


@pytest.mark.parametrize(("activation", "curved"), [(nn.Tanh(), True), (nn.ReLU(), False)])
def test_why_the_hessian_is_out_of_scope(activation: nn.Module, curved: bool) -> None:
    """A layer's block is a sum of Kronecker products, may be indefinite, and with ReLU it equals the GGN's block."""
    torch.manual_seed(1)
    N, d_out = 6, 4
    first, last = nn.Linear(3, d_out, bias=False).double(), nn.Linear(d_out, 2).double()
    X, y = torch.randn(N, 3, dtype=torch.float64), 10 * torch.randn(N, 2, dtype=torch.float64)
    z = first(X)
    f = last(activation(z))
    risk = nn.MSELoss()(f, y)
    H, G = vec_hessian(risk, first.weight), vec_ggn(risk, f, first.weight)
    H_z = vec_hessian(risk, z).reshape(N, d_out, N, d_out)
    terms = [torch.kron(H_z[n, :, n, :].contiguous(), torch.outer(X[n], X[n])) for n in range(N)]  # in rvec
    torch.testing.assert_close(torch.stack(terms).sum(0), H)
    assert torch.allclose(H, G) != curved
    B = torch.stack([H_z[n, :, n, :] for n in range(N)]).sum(0)
    for matrix in (H, B):
        spectrum = torch.linalg.eigvalsh(matrix)
        assert bool(spectrum[0] < -0.01 * spectrum[-1]) == curved


def test_a_claim_that_is_not_made_is_refused() -> None:
    with pytest.raises(ValueError, match="which it does not"):
        paper.markdown(lambda _: ["something else"])


def test_page(site: Path) -> None:
    text = article(site, "docs/paper")
    rows = re.findall(r"<tr class=\"row-\w+\"><td>.*?</tr>", text, flags=re.DOTALL)
    names = (paper.DOCS / "paper.md").read_text(encoding="utf-8").count("\n| `kfs.") + 1  # rows that continue another
    assert len(rows) == len(paper.entries()) + names
    assert text.count("errata.html#") == len(named_errata())
    plain = re.sub(r"<[^>]+>", "", text)
    assert "python kfs/kfac_tests/mlp_batch_size_1.py" in plain
    assert "KFAC-empirical equals the empirical Fisher" in plain


def test_listings_are_one_screen() -> None:
    """Listings are short, since they appear between two paragraphs."""
    files = [file for file in sorted(RUN) if file.startswith(("kfs/kfac/", "kfs/kfac_tests/"))]
    for file in files:
        shown = bridge.functions((ROOT / file).read_text(encoding="utf-8"), file)
        assert 20 < len(shown.splitlines()) <= 60, file


def test_chapters_show_listings_and_the_drawing(site: Path) -> None:
    overview, layers = article(site, "docs/kfac_overview"), article(site, "docs/kfac_layers")
    assert overview.count('class="code listing') == 3
    assert layers.count('class="code listing') == 10
    assert "Step 5: return the factors." in re.sub(r"<[^>]+>", "", overview)
    assert 'aria-label="The way of a batch' in article(site, "docs/engine")
    assert article(site, "docs/gallery").count("<figure") == len(FIGURES)
