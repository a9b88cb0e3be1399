"""The command line, `kfs tour | inspect | check | influence | plan`. Commands parse arguments and print results."""

import json
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from kfs import __version__
from kfs.conformance import Result, checks, find, report, run_one, script, select
from kfs.distributed import plan as plan_ranks
from kfs.errors import KfsError, ModelError, StorageError
from kfs.factors import EKFAC, Relative
from kfs.factors import inspect as inspect_model
from kfs.influence import Influence
from kfs.problem.risk import EmpiricalRisk
from kfs.tour import attribution
from kfs.tour.page import left_out, write_report
from kfs.tour.run import one_thread, run_tour

app = typer.Typer(no_args_is_help=True, add_completion=False)


def _print_version(wanted: bool) -> None:
    """Print the version and exit."""
    if wanted:
        typer.echo(f"kfs {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """KFAC from scratch: curvature matrices of neural networks and their Kronecker-factored approximations."""


@app.command()
def tour(
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("report"),
    quick: Annotated[bool, typer.Option("--quick", help="Skip the parts that take long, and list them.")] = False,
    show: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
) -> None:
    """Run and verify every definition, draw the figures, and write a report page. Fails if anything is wrong."""
    console = Console()
    with one_thread():
        reports = run_tour(console, quick)
        with console.status("report") as status:
            page = write_report(out, reports, quick, lambda what: status.update(f"report: {what}"))
    console.print(f"Report: {page}", markup=False, highlight=False, soft_wrap=True)
    for note in left_out():
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    if show:
        typer.launch(str(page))
    if any(report.failure is not None for report in reports):
        raise typer.Exit(code=1)


@app.command()
def inspect(
    target: Annotated[
        str, typer.Argument(help="package.module:name of (model, sample), or of a function returning it.")
    ],
    sharing: Annotated[str, typer.Option(help="Weight sharing: expand or reduce.")] = "expand",
    joint_bias: Annotated[bool, typer.Option(help="Whether weight and bias share a block.")] = True,
    max_dim: Annotated[int | None, typer.Option(help="Factors wider than this are diagonal.")] = None,
    audit: Annotated[
        bool | None,
        typer.Option(help="Whether to verify the capture on a few examples. By default, unless the model is large."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show which parameters KFAC covers, with their factors and costs. Fails if a parameter is not covered."""
    try:
        model, sample = _load(target, "model, sample")
        table = inspect_model(model, sample, sharing=sharing, joint_bias=joint_bias, max_dim=max_dim, audit=audit)
    except KfsError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(code=2) from error
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in table.rows], indent=2))
    else:
        typer.echo(str(table))
    if table.uncovered:
        raise typer.Exit(code=1)


@app.command()
def check(
    target: Annotated[
        str, typer.Argument(help="An adapter's name (kfs, curvlinops, ...), or your package.module:compute.")
    ],
    only: Annotated[list[str] | None, typer.Option(help="Run checks with this tag only; may be repeated.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results as JSON.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a report as a page.")] = None,
    verbose: Annotated[bool, typer.Option(help="Also show checks that passed.")] = False,
) -> None:
    """Check an implementation of KFAC on cases with known results. Fails if a result is wrong."""
    sys.path.insert(0, "")
    try:
        _check_files(json_file, html_file)
        adapter, chosen = find(target), select(only or ())
    except KfsError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(code=2) from error
    finally:
        sys.path.remove("")
    if not chosen:
        tags = sorted({tag for one in checks() for tag in one.tags})
        typer.echo(f"Error: No check has all of the tags {only}. Choose from: {', '.join(tags)}.", err=True)
        raise typer.Exit(code=2)
    console, results = Console(), list[Result]()
    with Live(console=console, refresh_per_second=8, transient=True) as live:
        for one in chosen:
            live.update(report.progress(results, len(chosen), one.name))
            results.append(run_one(adapter, one))
    bad = [result for result in results if result.bad]
    if bad or verbose or any(result.status == "expected failure" for result in results):
        console.print(report.table(adapter, results, verbose))
    console.print(f"{adapter.name} {adapter.version}: {report.summary(results)}.", markup=False, highlight=False)
    wrong = [result for result in results if result.outcome in report.WRONG]
    if wrong:
        program = script(target, wrong[0].check)
        console.print(f"Repeat the first one:\n\n{program}", markup=False, highlight=False, soft_wrap=True)
    for file, text in (
        (json_file, report.to_json(adapter, results)),
        (html_file, report.to_html(adapter, target, results)),
    ):
        if file is not None:
            file.write_text(text, encoding="utf-8")
            console.print(f"Written: {file}", markup=False)
    if bad:
        raise typer.Exit(code=1)


@app.command()
def influence(
    target: Annotated[
        str,
        typer.Argument(
            help="package.module:name of (model, loss, training data, queries), or of a function returning it."
        ),
    ],
    top: Annotated[int, typer.Option(help="Number of helpful and of harmful examples to show for each query.")] = 10,
    damping: Annotated[
        float | None, typer.Option(help="Damping, in units of each block's mean eigenvalue; 0.1 by default.")
    ] = None,
    weight_decay: Annotated[
        float | None, typer.Option(help="L2 penalty of training, as in the optimizer; replaces damping.")
    ] = None,
    fisher: Annotated[str, typer.Option(help="Curvature of EKFAC: type-2, mc or empirical.")] = "type-2",
    num_queries: Annotated[int | None, typer.Option("--queries", help="Explain the first queries only.")] = None,
    own: Annotated[bool, typer.Option("--self", help="Also show examples with the largest self-scores.")] = False,
    normalize: Annotated[str | None, typer.Option(help="Divide scores: cosine or self.")] = None,
    folder: Annotated[Path | None, typer.Option("--index", help="Store the gradients of training data here.")] = None,
    rank: Annotated[int | None, typer.Option(help="Store this many singular vectors of each gradient.")] = None,
    image: Annotated[str | None, typer.Option(help="Shape of images that are stored as vectors, such as 8x8.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a page, with pictures of images.")] = None,
) -> None:
    """Show which training examples help or harm the predictions for queries most, using influence functions."""
    try:
        _check_files(html_file)
        model, loss, train_data, query_data = _load(target, "model, loss, training data, queries")
        shape = None if image is None else _shape(image)
        train = EmpiricalRisk(model, loss, train_data)
        queries = EmpiricalRisk(model, loss, query_data)
        if num_queries is not None:
            queries = attribution.first_data(queries, num_queries)
        found = attribution.explain(
            queries,
            train,
            Influence(
                EKFAC(train, fisher),  # type: ignore[arg-type]
                None if damping is None else Relative(damping),
                weight_decay=weight_decay,
            ),
            attribution.Request(top, own, normalize, folder, rank, shape),
        )
    except KfsError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(code=2) from error
    console = Console()
    for table in attribution.tables(found):
        console.print(table)
    if html_file is not None:
        html_file.write_text(attribution.page(found), encoding="utf-8")
        console.print(f"Written: {html_file}", markup=False)


@app.command()
def plan(
    target: Annotated[
        str,
        typer.Argument(
            help="A language model, such as 8B or Qwen/Qwen3-8B; or package.module:name of (model, sample), or of a "
            "function returning it."
        ),
    ],
    ranks: Annotated[int, typer.Option(help="Number of processes.")],
    max_dim: Annotated[int | None, typer.Option(help="Factors wider than this are diagonal.")] = None,
    eigen: Annotated[bool, typer.Option(help="Plan for EKFAC instead of KFAC.")] = False,
    memory: Annotated[float | None, typer.Option(help="GiB of each process; shows the number of passes.")] = None,
    batch: Annotated[int | None, typer.Option(help="Examples (or tokens) in a batch of one process.")] = None,
    split: Annotated[str | None, typer.Option(help="Split factors wider than this number, or 'share'.")] = None,
) -> None:
    """Show which process would own which block, and what each process would hold, compute and send."""
    try:
        model, sample = _load(target, "model, sample") if ":" in target else (target, None)
        table = plan_ranks(
            model,
            ranks,
            sample=sample,
            max_dim=max_dim,
            eigen=eigen,
            memory=None if memory is None else int(memory * 2**30),
            batch=batch,
            split=int(split) if split is not None and split.isdigit() else split,  # type: ignore[arg-type]
        )
    except KfsError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(code=2) from error
    typer.echo(str(table))


def _check_files(*files: Path | None) -> None:
    """Raise an error if output files cannot be written, before the computation starts."""
    for file in files:
        if file is None:
            continue
        if file.is_dir():
            raise StorageError(f"{file} is a folder.", "Name a file.")
        if not file.absolute().parent.is_dir():
            raise StorageError(f"{file} cannot be written: its folder does not exist.", "Make the folder first.")


def _shape(text: str) -> tuple[int, ...]:
    """Parse the shape of an image, such as `"8x8"`."""
    parts = text.split("x")
    if not all(part.isdigit() for part in parts):
        raise ModelError(f"The shape of images is {text!r}.", "Write it as 8x8, or 3x32x32.")
    return tuple(map(int, parts))


def _load(target: str, parts: str) -> tuple[Any, ...]:
    """Import `module:name`, call it if it is a function, and check that the result is a tuple with these parts."""
    module, _, name = target.partition(":")
    sys.path.insert(0, "")  # find modules in the current folder
    try:
        made = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(f"{target!r} cannot be imported: {error}.", "Use the form package.module:name.") from error
    finally:
        sys.path.remove("")
    made = made() if callable(made) else made
    number = len(parts.split(", "))
    if not isinstance(made, tuple) or len(made) != number:
        length = f" of length {len(made)}" if isinstance(made, tuple) else ""
        what = "a pair" if number == 2 else "a tuple"
        raise ModelError(f"{target!r} is a {type(made).__name__}{length}.", f"It must be, or return, {what} ({parts}).")
    return made


if __name__ == "__main__":
    app(prog_name="kfs")
