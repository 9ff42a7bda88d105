"""The commands `doctor` and `report`, and those of the studies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexact.studies.commands import data, reproduce

app = typer.Typer(
    help="Flexible activation functions for PyTorch: the studies of the paper, reports of your own runs, and what this "
    "machine has.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(reproduce, name="reproduce")
app.command()(data)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A study's folder, or one that a Recorder wrote to.", show_default=False)],
) -> None:
    """Build figures and one self-contained page from a run."""
    from flexact.report.build import build
    from flexact.studies.progress import Progress

    with Progress().during("building the page"):
        page = build(run)
    print(f"Page: {page}")


@app.command()
def doctor() -> None:
    """Print what this machine has: versions, devices, the kernels that run on each, optional packages."""
    from flexact.cli.doctor import examine, lines

    print("\n".join(lines(examine())))
