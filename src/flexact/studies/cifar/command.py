"""The command `flexact reproduce cifar`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from flexact.errors import FlexActError
from flexact.io.value_checks import check_known
from flexact.studies.cifar.protocol import BUDGETS, Grid, Protocol
from flexact.studies.grid import command as shared


@shared.grid_command(Grid, Protocol)
def cifar(
    grid: shared.GridCommand,
    budget: Annotated[str | None, typer.Option(help="paper (200 epochs) or short (30).", show_default="paper")] = None,
    data: shared.Data = None,
) -> None:
    """CIFAR with ResNets: a grid of data sets, models, methods and seeds. Every cell is a run that can be resumed."""
    from flexact.studies.cifar.study import Store

    if budget is not None:
        check_known("budget", budget, BUDGETS)
        if "epochs" in grid.settings:
            raise FlexActError(
                f"--budget {budget} is {BUDGETS[budget]} epochs and --epochs asks for {grid.settings['epochs']}; give "
                "one of the two."
            )
        grid = replace(grid, settings=grid.settings | {"epochs": BUDGETS[budget]})
    grid.carry_out(Store(grid.out), data)
