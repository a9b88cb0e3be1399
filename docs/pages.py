"""What pages look like: the frame of all, definitions and modules, the index."""

import html
from collections.abc import Iterable
from pathlib import Path

from docs.markup import Links, Markup, coloured
from docs.sources import Module, tests_of
from kfs import __version__
from kfs.plots import linearized_rosenbrock, structure_errors, synthetic_fisher, synthetic_hessian, synthetic_kfac
from kfs.report import play
from kfs.tour import Report, by_claim
from kfs.verification import Check

MANY_CASES = 8  # from here on a claim's cases share a row
SMALL_NET = "a network 5-4-4-3 with ReLU, square loss and 100 data; lines mark parameters"
# Figures by the page that shows them: their names, and what to say about them.
FIGURES = {
    "ggn_rosenbrock": {
        "linearized_rosenbrock": "The Rosenbrock function and its partial linearization around an anchor.",
    },
    "ggns": {
        "synthetic_hessian_cvec": f"Hessian and GGN of {SMALL_NET}. Flattened by columns.",
        "synthetic_hessian_rvec": "The same, flattened by rows.",
    },
    "exact_fishers": {
        "synthetic_fisher_cvec": f"GGN and Fisher matrices of {SMALL_NET}. Flattened by columns.",
        "synthetic_fisher_rvec": "The same, flattened by rows.",
    },
    "mc_fisher_convergence": {
        "synthetic_fisher_convergence": "Relative distance of the Monte Carlo Fisher to the GGN, in the spectral norm.",
    },
    "scaffold": {
        "synthetic_kfac_cvec": f"Curvature, its layer blocks, and KFAC, of {SMALL_NET}. Flattened by columns.",
        "synthetic_kfac_rvec": "The same, flattened by rows.",
    },
    "alternatives": {
        "structure_errors": "Relative errors of structures against the exact blocks of the GGN, for the layers of a "
        "small convolutional network. <code>kfs.compare(risk)</code> does the same for your model.",
    },
}
PLOTS = (linearized_rosenbrock, synthetic_hessian, synthetic_fisher, synthetic_kfac)
MENU = {
    "play": "play",
    "API": "api",
    "test your KFAC": "test_your_kfac",
    "benchmarks": "benchmarks",
    "errata": "errata",
}


def page(title: str, body: str) -> str:
    """Wrap a page's body into the frame that all pages share."""
    menu = "\n".join(f'<a href="{name}.html">{text}</a>' for text, name in MENU.items())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)} · kfs</title>
<link rel="stylesheet" href="style.css">
<script src="search_index.js" defer></script>
<script src="search.js" defer></script>
</head>
<body>
<header>
<a class="home" href="index.html">kfs: KFAC from scratch</a>
<form role="search" autocomplete="off">
<label for="search" class="hidden">Search the book</label>
<input id="search" type="search" placeholder="Search" aria-controls="search-results" aria-expanded="false">
<span id="search-status" class="hidden" role="status"></span>
<ul id="search-results" aria-label="Search results" hidden></ul>
</form>
<span class="menu">{menu}
<span>{__version__}</span></span>
</header>
<main>
{body}
</main>
</body>
</html>
"""


def single(body: str) -> str:
    """Return the body of a page of prose."""
    return f'<article class="single">\n{body}\n</article>'


def claim_rows(claim: str, checks: list[Check]) -> list[str]:
    """Return a table's rows for one claim: a row per case, or one row for all if there are many."""
    shown = [(check.case, check.error) for check in checks]
    if len(shown) > MANY_CASES:
        errors = [error for _, error in shown if error is not None]
        shown = [(f"{len(shown)} cases", max(errors) if errors else None)]
    return [
        f"<tr><td>{html.escape(claim)}</td><td>{html.escape(case)}</td>"
        f"<td class=number>{'' if error is None else f'{error:.1e}'}</td></tr>"
        for case, error in shown
    ]


def verified(module: Module, report: Report) -> str:
    """Return what running a definition verified, as a table."""
    rows = "\n".join(row for claim, checks in by_claim(report.checks).items() for row in claim_rows(claim, checks))
    return f"""<h2>What running it verified</h2>
<p><code>python {module.path}</code></p>
<div class="scroll" tabindex="0"><table>
<thead><tr><th>claim</th><th>case</th><th class=number>largest error</th></tr></thead><tbody>
{rows}
</tbody></table></div>"""


def relations(module: Module, links: Links) -> str:
    """Say where a module comes from, what tests it, and which pages it has to do with."""
    uses = [other for other in links.all if other.dotted in module.imports and other is not module]
    used_by = [other for other in links.all if module.dotted in other.imports and other is not module]
    lines = [f"Source: <code>{module.path}</code>"]
    lines += [f"Tests: <code>{name}</code>" for name in tests_of(module)]
    for title, others in (("Uses", uses), ("Used by", used_by)):
        if others:
            lines.append(f"{title}: " + ", ".join(f'<a href="{o.name}.html">{_short(o)}</a>' for o in others))
    return '<div class="about">' + "\n".join(f"<p>{line}</p>" for line in lines) + "</div>"


def _short(module: Module) -> str:
    return module.dotted.removeprefix("kfs.")


def module_body(module: Module, markup: Markup, around: tuple[Module | None, Module | None], extra: str = "") -> str:
    """Lay a module out: prose left, code right, then the way on. Definitions have more to say below their prose."""
    before, after = around
    previous_link = f'<a href="{before.name}.html">← {markup.inline(before.title)}</a>' if before else "<span></span>"
    next_link = f'<a href="{after.name}.html">{markup.inline(after.title)} →</a>' if after else "<span></span>"
    return f"""<h1>{markup.inline(module.title)}</h1>
<div class="columns">
<article>
{markup.render(module.prose, module)}
{figure(module.name)}
{extra}
{relations(module, markup.links)}
</article>
<section class="code" tabindex="0" aria-label="Code"><p class="file">{module.path}</p>
{coloured(module.code, "python")}
</section>
</div>
<nav>{previous_link}{next_link}</nav>"""


def figure(name: str) -> str:
    """Return the figures of a page, if it has any."""
    return "\n".join(
        f'<figure><img src="{file}.svg" alt=""><figcaption>{caption} Drawn by <code>{_source(file)}</code>.'
        "</figcaption></figure>"
        for file, caption in FIGURES.get(name, {}).items()
    )


def _source(file: str) -> str:
    """Return the module that draws a figure."""
    names = [plot.__name__.rpartition(".")[2] for plot in (*PLOTS, structure_errors)]
    return f"kfs/plots/{next(name for name in names if file.startswith(name))}.py"


def draw_figures(site: Path) -> None:
    """Draw all figures into the site."""
    for plot in PLOTS:
        plot.draw(site, ("svg",))
    structure_errors.draw(site / "structure_errors.svg")


def play_body() -> str:
    """Return the page of things to play with."""
    data = play.play_data()
    pieces = "\n".join(play.fragment(name, data[name]) for name in play.TITLES)
    return (
        '<link rel="stylesheet" href="play.css"><script src="play.js" defer></script>\n<h1>Play</h1>\n'
        "<p>The definitions behind these pictures: the Gauss-Newton matrix of the Rosenbrock function, Fisher "
        f"matrices, KFAC and EKFAC. The matrices are those of {SMALL_NET}.</p>\n{pieces}"
    )


def module_list(modules: Iterable[Module], markup: Markup, kind: str) -> str:
    """List modules by title and file name."""
    items = "\n".join(
        f'<li><a href="{m.name}.html">{markup.inline(m.title)}</a> <code class="name">{_file(m)}</code></li>'
        for m in modules
    )
    return f"<{kind}>\n{items}\n</{kind}>"


def _file(module: Module) -> str:
    path = Path(module.path)
    return f"{path.parent.name}/{path.name}" if path.name == "__init__.py" else path.name


def index_body(intro: str, chapters: dict[str, list[Module]], engine: dict[str, list[Module]], markup: Markup) -> str:
    """Return the reading guide, and below all chapters."""
    parts = [intro, '<h2 id="chapters">Chapters</h2>']
    for title, modules in chapters.items():
        parts.append(f"<h3>{html.escape(title)}</h3>\n{module_list(modules, markup, 'ol')}")
    parts.append('<h2 id="engine">The engine, file by file</h2>')
    for title, modules in engine.items():
        parts.append(f"<h3>{html.escape(title)}</h3>\n{module_list(modules, markup, 'ul')}")
    return f'<article class="index">{"".join(parts)}</article>'
