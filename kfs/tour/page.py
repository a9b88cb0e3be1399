"""The page: verified claims, settings in which KFAC is exact, the paper's figures, interactive plots, and real data."""

import ast
import base64
import io
import re
import tempfile
from collections.abc import Callable, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kfs.conformance.cases import EXACT
from kfs.plots import linearized_rosenbrock, synthetic_fisher, synthetic_hessian, synthetic_kfac
from kfs.tour import digits, mislabelled, play, structure_errors
from kfs.tour.run import Report, chapters
from kfs.verification import by_claim, largest_error
from kfs.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What a figure is, and what to see in it.
CAPTIONS = {
    "linearized_rosenbrock": (
        "The Rosenbrock function and its partially linearized version around an anchor. "
        "Both touch at the star; the dashed one is convex, and a Gauss-Newton step leads to its minimum."
    ),
    "synthetic_hessian_cvec": (
        "Hessian and GGN of a small net, flattened by columns; lines mark parameters. "
        "The blocks on the diagonal are equal: the two matrices differ only beside them."
    ),
    "synthetic_hessian_rvec": (
        "The same matrices, flattened by rows. Entries change places within blocks, and their values stay the same."
    ),
    "synthetic_fisher_cvec": (
        "GGN, Monte Carlo Fisher with one and a hundred samples, exact and empirical Fisher. "
        "The exact Fisher equals the GGN, more samples come closer to it, and the empirical Fisher is another matrix."
    ),
    "synthetic_fisher_rvec": (
        "The same matrices, flattened by rows. The exact Fisher equals the GGN in this order, too."
    ),
    "synthetic_fisher_convergence": (
        "Error of the Monte Carlo Fisher, by the number of samples. "
        "It falls along the dashed line: four times as many samples halve it."
    ),
    "synthetic_kfac_cvec": (
        "Exact matrices (left), their layer blocks (middle) and KFAC (right). "
        "KFAC drops what is between layers, and replaces each block of the middle column by one Kronecker product."
    ),
    "synthetic_kfac_rvec": (
        "The same matrices, flattened by rows. "
        "Entries change places in all three columns alike, so KFAC is as far off as before."
    ),
    "structure_errors": (
        "Errors of structures against exact blocks of a small convolutional network; lower is better. "
        "For the linear layers, Kronecker products are much closer than the diagonal, and less so after training."
    ),
}
# Headings before the first one of some figures.
_HEADINGS = {
    "linearized_rosenbrock": "Partial linearization",
    "synthetic_hessian_cvec": "Hessian and GGN",
    "synthetic_fisher_cvec": "Fisher matrices",
    "synthetic_kfac_cvec": "KFAC",
    "structure_errors": "Structures",
}
# Marks the link to the section that is read.
_MARK_CURRENT = """
const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
const headings = [...document.querySelectorAll("section[id], h3[id]")].filter((place) => links.has(place.id));
const mark = () => {
  const above = headings.filter((place) => place.getBoundingClientRect().top < 150);
  links.forEach((link) => link.removeAttribute("aria-current"));
  if (above.length) links.get(above[above.length - 1].id).setAttribute("aria-current", "true");
};
addEventListener("scroll", mark, { passive: true });
mark();
"""
_MISSING = {
    "matplotlib": "Left out: figures. They need matplotlib: pip install matplotlib",
    "sklearn": "Left out: digits. They need scikit-learn: pip install scikit-learn",
}
Step = Callable[[str], None]


def write_report(out: Path, reports: Sequence[Report], quick: bool = False, step: Step = lambda _: None) -> Path:
    """Compute the remaining results, and write everything into one page.

    Args:
        out: The folder; it is created if it is missing.
        reports: Results of running the definitions.
        quick: Whether to leave out slow parts.
        step: Called with the name of each part before it starts.

    Returns:
        Path of the page.
    """
    out.mkdir(parents=True, exist_ok=True)
    sections = {"What was verified": _verified(reports), "Where KFAC is exact, and why": _exact()}
    if find_spec("matplotlib") is None:
        sections["Figures"] = f"<p>{escape(_MISSING['matplotlib'])}</p>"
    else:
        step("figures")
        sections["Figures"] = _figures(quick)
    step("things to play with")
    data = play.play_data(quick)
    sections["Play"] = "\n".join(play.fragment(name, data[name]) for name in play.TITLES)
    if find_spec("sklearn") is None:
        sections["Digits"] = f"<p>{escape(_MISSING['sklearn'])}</p>"
    else:
        step("digits")
        sections["Digits"] = _digits(digits.examine(quick))
        step("influence")
        sections["Influence"] = mislabelled.section(mislabelled.examine(quick))
    target = out / "report.html"
    target.write_text(_page(sections), encoding="utf-8")
    return target


def left_out() -> list[str]:
    """Return messages about parts that the page lacks because a package is missing, and how to install it."""
    return [sentence for package, sentence in _MISSING.items() if find_spec(package) is None]


def _page(sections: dict[str, str]) -> str:
    places = {title: title.split(",", maxsplit=1)[0].lower().replace(" ", "-") for title in sections}
    links, body = "", ""
    for title, text in sections.items():
        place = places[title]
        parts = _H3.findall(text)
        below = "".join(f'<li><a href="#{place}-{number}">{part}</a></li>' for number, part in enumerate(parts))
        links += f'<li><a href="#{place}">{escape(title)}</a>{f"<ul>{below}</ul>" if parts else ""}</li>\n'
        body += f'<section id="{place}"><h2>{escape(title)}</h2>\n{_with_places(text, place)}\n</section>\n'
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>The curvature of a neural network</title><style>{play.asset("report.css")}{play.asset("play.css")}</style></head>
<body class="report">
<nav aria-label="Contents"><a class="title" href="#top">Contents</a><ul>
{links}</ul></nav>
<main id="top">
<h1>The curvature of a neural network</h1>
<p>Everything here was computed, verified and drawn by <code>kfs tour</code>, version {__version__}.</p>
{body}</main>
<script>{play.asset("play.js")}</script>
<script>{_MARK_CURRENT}</script>
</body></html>
"""


_H3 = re.compile(r"<h3>(.*?)</h3>")


def _with_places(text: str, place: str) -> str:
    """Number the headings of a section, so that the contents can link to them."""
    numbers = iter(range(len(_H3.findall(text))))
    return _H3.sub(lambda found: f'<h3 id="{place}-{next(numbers)}">{found[1]}</h3>', text)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Return an HTML table with text cells. Columns in `numbers` contain numbers."""
    kinds = [' class="number"' if place in numbers else "" for place in range(len(head))]
    top = "".join(f"<th{kind}>{escape(cell)}</th>" for kind, cell in zip(kinds, head, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _verified(reports: Sequence[Report]) -> str:
    """Return every claim with its number of cases and largest error."""
    rows = []
    for report in reports:
        for claim, checks in by_claim(report.checks).items():
            error = largest_error(checks)
            rows.append((report.name, claim, str(len(checks)), "" if error is None else f"{error:.1e}"))
    failed = "".join(
        f'<p class="failed">{escape(r.name)} failed: {escape(r.failure)}</p>' for r in reports if r.failure is not None
    )
    claims = sum(len(report.checks) for report in reports)
    table = _table(("definition", "what was verified", "cases", "largest error"), rows, numbers=(2, 3))
    words = f"<p>{len(reports)} files, {claims} claims, all checked in double precision.</p>"
    return f"{words}{failed}<details><summary>all of them</summary>{table}</details>"


def _exact() -> str:
    """Return the settings in which KFAC is exact: files that verify it, and cases of the conformance kit."""
    items = []
    for file in chapters()["Where KFAC is exact"]:
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        items.append(f"<li>{escape(docstring.partition(chr(10))[0])} <code>{file.name}</code></li>")
    rows = [(case.name, ", ".join(case.sharings), ", ".join(case.fishers), case.why) for case in EXACT]
    table = _table(("setting", "weight sharing", "curvature", "why"), rows)
    return f"<ul>{''.join(items)}</ul><details><summary>settings of the conformance kit</summary>{table}</details>"


def _figures(quick: bool) -> str:
    """Draw all figures, and embed them in the page."""
    modules = (linearized_rosenbrock, synthetic_hessian, synthetic_fisher, synthetic_kfac)[: 1 if quick else None]
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        paths = [path for module in modules for path in module.draw(folder, ("png",))]
        if not quick:
            structure_errors.draw(Path(folder) / "structure_errors.png")
            paths.append(Path(folder) / "structure_errors.png")
        for path in paths:
            heading = f"<h3>{escape(_HEADINGS[path.stem])}</h3>" if path.stem in _HEADINGS else ""
            parts.append(heading + _figure(path.read_bytes(), CAPTIONS.get(path.stem, path.stem)))
    return "\n".join(parts)


def _figure(image: bytes, caption: str) -> str:
    """Return a figure with an embedded image."""
    source = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    picture = f'<img alt="{escape(caption)}" src="{source}">'
    return f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>"


def _plots(found: digits.Digits) -> str:
    """Draw cost of layers, factors, eigenvalues, convergence of a solver, and errors of structures."""
    from matplotlib import pyplot  # noqa: PLC0415 (optional)

    plots = {
        "What its factors take, by kfs.inspect(model, X).plot(). "
        "The first layer has most of the inputs, and takes most of the memory and of the operations.": (
            found.inspection.plot()[0]
        ),
        "Its Kronecker factors, by K.plot(). "
        "Each pair is a layer: A has a row for every input, B one for every output.": found.factors.plot()[0],
        "Eigenvalues of its blocks, and what damping adds, by K.plot_spectrum(). "
        "Below the dotted line, damping is larger than the curvature.": found.factors.plot_spectrum(),
        "Eigenvalues of its Hessian, by kfs.operators.spectral_density(Hessian).plot(). "
        "The peak at zero is flat directions; those far to the right are few; left of zero, curvature is negative.": (
            found.density.plot()
        ),
        "Conjugate gradients with its damped GGN, by kfs.operators.solve(A, b).plot(). "
        "The solver stops as soon as the residual is below the dotted line.": found.solution.plot(),
        "Errors of structures, by kfs.compare(risk).plot(). "
        "Lower is better: 0 is the exact block, and 1 is as far off as zeros are.": found.comparison.plot(),
    }
    parts = []
    for caption, axes in plots.items():
        image = io.BytesIO()
        figure = cast("Figure", axes.figure)
        figure.savefig(image, dpi=150)
        pyplot.close(figure)
        parts.append(_figure(image.getvalue(), caption))
    return "\n".join(parts)


def _digits(found: digits.Digits) -> str:
    """Return errors layer by layer, and times of programs."""
    ratios = _table(
        ("program", "time on one thread / (forward and backward pass)"),
        [(n, f"{r:.2f}") for n, r in found.ratios.items()],
        (1,),
    )
    table = f'<div class="scroll">{found.comparison.describe().html()}</div>'
    return (
        f"<p>A net with two hidden layers, trained on half of scikit-learn's digits; it gets {found.accuracy:.1%} of "
        "the other half right. Errors are relative, against the exact block of the GGN.</p>"
        f"{'' if find_spec('matplotlib') is None else '<h3>Plots of results</h3>' + _plots(found)}"
        f"<h3>Errors, layer by layer</h3>{table}<h3>What it costs</h3>{ratios}"
    )
