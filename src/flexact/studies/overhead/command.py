"""The command `flexact reproduce overhead`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from flexact.studies.grid.command import Names, Overwrite, Quiet, names
from flexact.studies.progress import Progress


def overhead(
    models: Annotated[Names, typer.Option(help="resnet18, resnet34, or both.", show_default="both")] = None,
    modes: Annotated[
        Names,
        typer.Option(
            help="eager, graph (the whole step is replayed from one CUDA graph), compiled, compiled_graph.",
            show_default="all on a GPU, eager on a CPU",
        ),
    ] = None,
    ways: Annotated[
        Names,
        typer.Option(help="plain, closed_form, fused, fused_bn.", show_default="all that the device supports"),
    ] = None,
    repeats: Annotated[int | None, typer.Option(help="Rounds of timing.", show_default="20; 5 on a CPU")] = None,
    batch: Annotated[int | None, typer.Option(help="Images per batch.", show_default="128; 8 on a CPU")] = None,
    width: Annotated[
        int | None, typer.Option(help="Channels of the first stage.", show_default="64; 16 on a CPU")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu.", show_default="cuda if there is a GPU")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure one network with three repeats, and compile nothing.")
    ] = False,
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("runs/overhead"),
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Measure what routing costs in time, memory and parameters: the paper's overhead table."""
    from flexact.io.result_folder import TABLE
    from flexact.studies.overhead.options import BASELINE, TRAIN, by_key, chosen
    from flexact.studies.overhead.study import run

    sizes = {"repeats": repeats, "batch": batch, "width": width}
    options = chosen(device, quick, models=names(models), modes=names(modes), ways=names(ways), **sizes)
    try:
        rows = run(options, out, overwrite=overwrite, progress=Progress(quiet, pieces="networks"))
    except KeyboardInterrupt:
        print(f"\nInterrupted. {out} holds the networks that are done.", file=sys.stderr)
        raise typer.Exit(130) from None
    if not quiet:
        print((out / TABLE).read_text(encoding="utf-8"))
        print(f"Folder: {out}")
    if not any(cell.placement != BASELINE and quantity == TRAIN for cell, quantity in by_key(rows)):
        print(f"flexact: no routed network was measured; the end of {out / TABLE} says why.", file=sys.stderr)
        raise typer.Exit(1)
