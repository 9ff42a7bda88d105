"""`flexact reproduce cifar`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexact.errors import FlexActError
from flexact.io.value_checks import check_known
from flexact.studies.grid import command as shared


@shared.grid_command
def cifar(
    grid: shared.GridCommand,
    methods: Annotated[
        shared.Names,
        typer.Option(
            help="relu, prelu, swish_beta, affine, parametric, splash, flexact-penultimate, flexact-all; or a "
            "candidate's name, such as gelu, for that activation in all blocks.",
            show_default="the first eight",
        ),
    ] = None,
    datasets: Annotated[shared.Names, typer.Option(help="cifar10, cifar100, or both.", show_default="both")] = None,
    models: Annotated[shared.Names, typer.Option(help="resnet18, resnet34, or both.", show_default="resnet18")] = None,
    seeds: shared.Seeds = None,
    first_seed: shared.FirstSeed = None,
    budget: Annotated[str | None, typer.Option(help="paper (200 epochs) or short (30).", show_default="paper")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.", show_default="the budget's")] = None,
    policy: shared.Policy = None,
    candidates: Annotated[
        shared.Names,
        typer.Option(
            help="Candidates of every site.",
            show_default="relu, leaky_relu, gelu, silu; with --policy paper the paper's five",
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate of the first step; it decays to 0 along a cosine.", show_default="0.1"),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Images per step.", show_default="128")] = None,
    width: Annotated[int | None, typer.Option(help="Channels of the first stage.", show_default="64")] = None,
    checkpoint_minutes: Annotated[
        float | None,
        typer.Option(min=0.0, help="Minutes between checkpoints; 0 for one after every epoch.", show_default="1"),
    ] = None,
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
    from flexact.studies.cifar.protocol import BUDGETS
    from flexact.studies.cifar.study import Store

    if budget is not None:
        check_known("budget", budget, BUDGETS)
        if epochs is not None:
            raise FlexActError(
                f"--budget {budget} is {BUDGETS[budget]} epochs and --epochs asks for {epochs}; give one of the two."
            )
        epochs = BUDGETS[budget]
    chosen = shared.given(datasets=datasets, models=models, methods=methods, seeds=seeds, first_seed=first_seed)
    settings = shared.given(
        epochs=epochs,
        policy=policy,
        candidates=candidates,
        lr=lr,
        batch=batch,
        width=width,
        checkpoint_minutes=checkpoint_minutes,
    )
    grid.carry_out(Store(grid.out), chosen, data, settings, partial=partial)
