"""The command line: `kfs tour | inspect`. Commands parse arguments and exit codes; the work is done elsewhere."""

import json
import sys
from dataclasses import asdict
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.console import Console

from kfs import __version__
from kfs.errors import KfsError, ModelError
from kfs.kfac import inspect as inspect_model
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


@app.command()
def inspect(
    target: Annotated[
        str, typer.Argument(help="package.module:name of (model, sample), or of a function returning it.")
    ],
    sharing: Annotated[str, typer.Option(help="Weight sharing: expand or reduce.")] = "expand",
    joint_bias: Annotated[bool, typer.Option(help="Whether weight and bias share a block.")] = True,
    max_dim: Annotated[int | None, typer.Option(help="Factors wider than this are diagonal.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what KFAC covers of a model, with what factors, at what cost. Fails if something is not covered."""
    try:
        model, sample = _load(target)
        table = inspect_model(model, sample, sharing=sharing, joint_bias=joint_bias, max_dim=max_dim)
    except KfsError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(code=2) from error
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in table.rows], indent=2))
    else:
        Console().print(table.table())
    if table.uncovered:
        raise typer.Exit(code=1)


def _load(target: str) -> tuple[Any, Any]:
    """Import what the user names; modules in the current folder are found."""
    module, _, name = target.partition(":")
    sys.path.insert(0, "")
    try:
        made = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(f"{target!r} cannot be imported: {error}.", "Name it as package.module:name.") from error
    finally:
        sys.path.remove("")
    made = made() if callable(made) else made
    if not isinstance(made, tuple) or len(made) != 2:
        raise ModelError(f"{target!r} is a {type(made).__name__}.", "Let it be, or return, a pair (model, sample).")
    return made
