"""The command `flexact reproduce cifar`."""

from __future__ import annotations

from flexact.studies.cifar.protocol import Grid, Protocol
from flexact.studies.grid import command as shared


@shared.grid_command(Grid, Protocol)
def cifar(
    grid: shared.GridCommand,
    data: shared.Data = None,
    partial: shared.Partial = False,
) -> None:
    """CIFAR with ResNets: a grid of data sets, models, methods and seeds. Every cell is a run that can be resumed."""
    from flexact.studies.cifar.study import Store

    grid.carry_out(Store(grid.out), data, partial)
