"""The command `flexact reproduce picks`."""

from __future__ import annotations

from flexact.studies.grid import command as shared
from flexact.studies.picks.protocol import Grid, Protocol


@shared.grid_command(Grid, Protocol)
def picks(
    grid: shared.GridCommand,
    data: shared.Data = None,
) -> None:
    """Run the benchmark of picks: ten tasks with fixed activations, Flex-Act, random picks and a race."""
    from flexact.studies.picks.study import Store

    grid.carry_out(Store(grid.out), data)
