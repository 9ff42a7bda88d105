"""The command `flexact reproduce cifar`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flexact.errors import FlexActError
from flexact.io.value_checks import check_known
from flexact.studies.cifar.protocol import BUDGETS, Protocol
from flexact.studies.grid import command as shared


@shared.grid_command(Protocol)
def cifar(
    grid: shared.GridCommand,
    settings: dict[str, Any],
    methods: Annotated[
        shared.Names,
        typer.Option(
            help="relu, gelu, silu, mish, prelu, swish_beta, affine, parametric, splash, deu, flexact-penultimate, "
            "flexact-all; or another candidate's name, such as elu, for that activation in all blocks.",
            show_default="the first twelve",
        ),
    ] = None,
    datasets: Annotated[shared.Names, typer.Option(help="cifar10, cifar100, or both.", show_default="both")] = None,
    models: Annotated[shared.Names, typer.Option(help="resnet18, resnet34, or both.", show_default="resnet18")] = None,
    seeds: shared.Seeds = None,
    first_seed: shared.FirstSeed = None,
    budget: Annotated[str | None, typer.Option(help="paper (200 epochs) or short (30).", show_default="paper")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="The folder with the data sets; see `flexact data`.",
            show_default="data; with --resume the grid's own",
        ),
    ] = None,
    partial: shared.Partial = False,
) -> None:
    """CIFAR with ResNets: a grid of data sets, models, methods and seeds. Every cell is a run that can be resumed."""
    from flexact.studies.cifar.study import Store

    if budget is not None:
        check_known("budget", budget, BUDGETS)
        if "epochs" in settings:
            raise FlexActError(
                f"--budget {budget} is {BUDGETS[budget]} epochs and --epochs asks for {settings['epochs']}; give one "
                "of the two."
            )
        settings["epochs"] = BUDGETS[budget]
    chosen = shared.given(datasets=datasets, models=models, methods=methods, seeds=seeds, first_seed=first_seed)
    grid.carry_out(Store(grid.out), chosen, data, settings, partial=partial)
