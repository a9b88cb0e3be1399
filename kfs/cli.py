"""The command line: `kfs tour`. Commands parse arguments and exit codes; the work is done elsewhere."""

from typing import Annotated

import typer
from rich.console import Console

from kfs import __version__
from kfs.tour import run_tour

app = typer.Typer(no_args_is_help=True, add_completion=False)


def _print_version(wanted: bool) -> None:
    """Print the version and stop."""
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
def tour() -> None:
    """Run every definition, verify it, and show what was verified. Fails if anything is wrong."""
    reports = run_tour(Console())
    if any(report.failure is not None for report in reports):
        raise typer.Exit(code=1)
