"""The parts that build the book: modules as pages, links, results of running, and checks of a site."""

from pathlib import Path

import pytest

from docs import links, modules, runs, search, site_checks
from docs.modules import Module, all_modules, cell, module_page, read_module
from kfs.tour import run as tour

SOURCE = 'r"""A title: with more.\n\nProse with $x$.\n"""\n\nfrom kfs.problem.risk import EmpiricalRisk\n'


def test_a_module_becomes_a_page() -> None:
    module = read_module(SOURCE, "kfs/new.py")
    assert (module.title, module.prose, module.first_line) == ("A title: with more", "Prose with $x$.", 6)
    assert module.code == "from kfs.problem.risk import EmpiricalRisk"
    assert {"kfs.problem.risk", "kfs.problem.risk.EmpiricalRisk"} == module.imports
    page = module_page(module, None)
    assert "# A title: with more\n" in page
    assert "Uses: [problem.risk](/kfs/problem/risk.py)" in page
    assert "What running it verified" not in page


def test_claims_with_many_cases_share_a_row() -> None:
    module = read_module(SOURCE, "kfs/new.py")
    checks = [("a | b", "one", 1e-3), ("a | b", "two", None)] + [("many", str(n), n * 1e-3) for n in range(9)]
    page = module_page(module, [*checks, *(("unmeasured", str(n), None) for n in range(9))])
    assert r"| a \| b | one | 1.0e-03 |" in page
    assert r"| a \| b | two |  |" in page
    assert "| many | 9 cases | 8.0e-03 |" in page
    assert "| unmeasured | 9 cases |  |" in page


def test_signs_in_cells_mean_nothing() -> None:
    assert cell("a_b *c* |$x$| `d`") == r"a\_b \*c\* \|\$x\$\| \`d\`"


def test_a_package_lists_its_modules() -> None:
    package = next(module for module in all_modules() if module.path == "kfs/factors/__init__.py")
    page = module_page(package, None, elsewhere={"kfs/kfac/scaffold.py"})
    assert "\n/kfs/factors/settings\n" in page
    assert "\n/kfs/factors/rules/__init__\n" in page
    assert "/kfs/factors/rules/linear" not in page
    assert "\n/kfs/kfac/scaffold\n" not in page


def test_a_module_without_prose_is_refused() -> None:
    with pytest.raises(ValueError, match="no module docstring"):
        read_module("x = 1\n", "kfs/silent.py")


def test_tests_of_a_module() -> None:
    """They are in the test folder of the same name or, for a room, in that of its package."""
    assert modules.tests_of("kfs/problem/risk.py") == ["tests/problem/test_risk.py"]
    assert modules.tests_of("kfs/factors/checkpoint.py") == ["tests/factors/test_checkpoint.py"]
    assert modules.tests_of("kfs/conformance/checks.py") == []  # tests/test_state.py is about kfs/problem/isolation.py


def test_names_of_modules_in_other_rooms() -> None:
    """A module of the same folder comes first, then a definition, then another room of the same package."""

    def module(name: str) -> Module:
        return Module(f"kfs/{name}.py", "", "", "", 1, frozenset())

    names = ("factors/blocks/damping", "factors/rows/gram", "factors/rules/gram", "factors/rows/patches", "optim/rule")
    known = links.Modules(map(module, names), ["kfs/factors/blocks/damping.py"])

    def found(text: str, here: str = "") -> str | None:
        page = known.find(text, here)
        return None if page is None else page.docname

    here = "kfs/factors/rules/convolution.py"
    assert found("gram", here) == "kfs/factors/rules/gram"
    assert found("patches", here) == found("patches.py", here) == "kfs/factors/rows/patches"
    assert found("damping", "kfs/optim/kfac.py") == found("damping.py") == "kfs/factors/blocks/damping"
    assert found("kfs/optim/rule.py") == found("kfs.optim.rule") == "kfs/optim/rule"
    assert found("rule", here) is None
    assert found("patches") is None
    assert found("gram", "kfs/factors/rules/gram.py") is None  # a page does not link to itself


def test_points_of_words(tmp_path: Path) -> None:
    """A page about a word has a higher score than a page that mentions it; the script has all of these pages."""
    points = search.points()
    eigenvalue, checkpoint = points[search.stem("eigenvalues")], points[search.stem("checkpoint")]
    assert max(eigenvalue, key=eigenvalue.__getitem__) == "docs/howto_spectra"
    assert max(checkpoint, key=checkpoint.__getitem__) == "docs/howto_checkpoints"
    assert search.counts("# Plot\n\n## Plots\n\nplot_spectrum, the")["plot"] == 10
    assert "the" not in search.counts("the")
    code = search.write_scorer(tmp_path).read_text(encoding="utf-8")
    assert '"docs/howto_spectra":' in code
    assert "/* points */" not in code


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let runs read pages from, and write into, an empty folder."""
    monkeypatch.setattr(runs, "DOCS", tmp_path)
    monkeypatch.setattr(runs, "RESULTS", tmp_path / ".runs")
    monkeypatch.setattr(runs, "PICTURES", tmp_path / "figures")
    (tmp_path / "figures").mkdir()
    return tmp_path


def test_results_are_used_until_a_page_changes(folders: Path) -> None:
    page = folders / "page.md"
    page.write_text("```python\nopen('a.svg', 'w').close()\nprint(1)\n```\n![a](figures/a.svg)\n", encoding="utf-8")
    job = runs.Job("page", "page")
    assert not runs.current(job)
    runs.save(job, runs.perform(job))
    assert runs.current(job)
    assert runs.result(job) == ["1\n"]
    assert (folders / "figures" / "a.svg").is_file()
    page.write_text(page.read_text(encoding="utf-8") + "More.\n", encoding="utf-8")
    assert not runs.current(job)


def test_a_picture_that_is_gone_is_drawn_again(folders: Path) -> None:
    job = runs.Job("plot", "linearized_rosenbrock")
    runs.save(job, runs.perform(job))
    assert runs.current(job)
    (folders / "figures" / "linearized_rosenbrock.svg").unlink()
    assert not runs.current(job)


def test_a_failing_definition_stops_the_book(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tour, "run_definition", lambda file: tour.Report(file.stem, (), 0.0, "False: a lie."))
    with pytest.raises(RuntimeError, match=r"kfs/basics/ggns.py failed: False: a lie\."):
        runs.perform(runs.definition_job("kfs/basics/ggns.py"))


def test_failed_jobs_are_named(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed job is named, and all other jobs run. They run in this process; processes take seconds to start."""

    class Here:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> "Here":
            return self

        def __exit__(self, *_: object) -> None: ...
        def map(self, function: object, jobs: list[runs.Job]) -> list[str]:
            return [function(job) for job in jobs]  # type: ignore[operator]

    monkeypatch.setattr(runs, "ProcessPoolExecutor", Here)
    (folders / "wrong.md").write_text("```python\n1 / 0\n```\n", encoding="utf-8")
    (folders / "right.md").write_text("```python\nprint(2)\n```\n", encoding="utf-8")
    jobs = [runs.Job("page", "wrong"), runs.Job("page", "right")]
    with pytest.raises(RuntimeError, match="page wrong: ZeroDivisionError"):
        runs.run_all(jobs)
    assert runs.result(jobs[1]) == ["2\n"]
    runs.run_all(jobs[1:])  # no job is left


def test_all_that_runs_is_a_job() -> None:
    jobs = runs.all_jobs()
    assert len(set(jobs)) == len({job.file for job in jobs}) == len(jobs)
    assert {job.name for job in jobs if job.kind == "page"} >= {"index", "howto_train", "test_your_kfac"}
    assert len([job for job in jobs if job.kind == "definition"]) == len(tour.definitions())
    assert all(job.drawn for job in jobs if job.kind in {"plot", "benchmark"})


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ('<a href="nowhere.html">x</a>', "links to nowhere.html"),
        ('<a href="page.html#nowhere">x</a>', "links to page.html#nowhere"),
        ('<a href="#nowhere">x</a>', "links to #nowhere"),
        ('<img alt="a picture" src="nowhere.png">', "links to nowhere.png"),
        ('<img src="page.html">', "without saying what it is"),
        ('<script src="https://example.org/x.js"></script>', "loads https://example.org/x.js"),
        ('<p id="a"></p><p id="a"></p>', "two places called a"),
        ("<p>so $x$ is</p>", "shows LaTeX"),
        (r"<p>\alpha</p>", "shows LaTeX"),
        ("<p><table></p>", "not valid HTML"),
        ("<div><span></div>", "not valid HTML"),
    ],
)
def test_a_mistake_stops_the_book(tmp_path: Path, body: str, complaint: str) -> None:
    head = '<!doctype html><html lang="en"><head><title>x</title></head>'
    right = '<h1 id="top">x</h1><a href="#top">x</a><a href="https://example.org">x</a><p>5 $</p>'
    (tmp_path / "page.html").write_text(f"{head}<body>{right}</body></html>", encoding="utf-8")
    site_checks.check(tmp_path)
    (tmp_path / "page.html").write_text(f"{head}<body>{right}{body}</body></html>", encoding="utf-8")
    with pytest.raises(RuntimeError, match=complaint):
        site_checks.check(tmp_path)
