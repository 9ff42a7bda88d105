"""The command `flexact reproduce picks`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexact.studies.grid import command as shared
from flexact.studies.picks.protocol import Grid, Protocol


@shared.grid_command(Grid, Protocol)
def picks(
    grid: shared.GridCommand,
    data: Annotated[
        Path | None,
        typer.Option(
            help="The folder with CIFAR-100, which the image tasks need; see `flexact data`.",
            show_default="data; with --resume the previous one",
        ),
    ] = None,
    partial: shared.Partial = False,
) -> None:
    """Run the benchmark of picks: ten tasks with fixed activations, Flex-Act, random picks and a race."""
    from flexact.studies.picks.study import Store

    grid.carry_out(Store(grid.out), data, partial)
