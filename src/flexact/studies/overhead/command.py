"""The command `flexact reproduce overhead`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from flexact.io.result_folder import TABLE
from flexact.studies.grid.command import Overwrite, Quiet, given, with_settings
from flexact.studies.overhead.options import BASELINE, TRAIN, Options, chosen
from flexact.studies.progress import Progress


@with_settings(Options)
def overhead(
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("runs/overhead"),
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    **settings: Any,
) -> None:
    """Measure what routing costs in time, memory and parameters: the paper's overhead table."""
    from flexact.studies.overhead.study import run

    progress = Progress(quiet, pieces="networks")
    rows = run(chosen(**given(**settings)), out, overwrite=overwrite, progress=progress)
    if not quiet:
        print((out / TABLE).read_text(encoding="utf-8"))
        print(f"Folder: {out}")
    if not any(row.placement != BASELINE and row.quantity == TRAIN and not row.error for row in rows):
        print(f"flexact: no routed network was measured; the end of {out / TABLE} says why.", file=sys.stderr)
        raise typer.Exit(1)
