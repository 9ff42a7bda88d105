"""`flexact reproduce cifar`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexact.errors import FlexActError, suggestion
from flexact.studies.grid import command as shared


def cifar(
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
            help="What it picks from.",
            show_default="relu, leaky_relu, gelu, silu; with --policy paper the paper's five",
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate at the first step; it falls to 0 along a cosine.", show_default="0.1"),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Images a step.", show_default="128")] = None,
    width: Annotated[
        int | None, typer.Option(help="Channels of the first stage.", show_default="64, the paper's")
    ] = None,
    checkpoint_minutes: Annotated[
        float | None,
        typer.Option(min=0.0, help="From one checkpoint to the next; 0 for one after every epoch.", show_default="1"),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="The folder with the data sets; see `flexact data`.",
            show_default="data; with --resume the one of before",
        ),
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Take data sets with fewer images than the official ones.")
    ] = False,
    out: shared.Out = Path("runs/cifar"),
    engine: shared.EngineName = "local",
    address: shared.Address = None,
    jobs: shared.Jobs = None,
    device: shared.Device = None,
    resume: shared.Resume = False,
    overwrite: shared.Overwrite = False,
    retry_failed: shared.RetryFailed = False,
    status: shared.Status = False,
    quiet: shared.Quiet = False,
) -> None:
    """CIFAR with ResNets: a grid of data sets, models, methods and seeds, each cell a run that can be gone on with."""
    from flexact.studies.cifar.protocol import Protocol
    from flexact.studies.cifar.study import Grid, Store
    from flexact.studies.cifar.table import table_of
    from flexact.studies.grid.engines import engine as engine_named

    store = Store(out)
    if status:
        shared.print_status(store)
        return
    before = shared.begun(store, resume or retry_failed)
    chosen = shared.given(datasets=datasets, models=models, methods=methods, seeds=seeds, first_seed=first_seed)
    settings = shared.given(
        epochs=_epochs(budget, epochs),
        policy=policy,
        candidates=candidates,
        lr=lr,
        batch=batch,
        width=width,
        checkpoint_minutes=checkpoint_minutes,
    )
    shared.carry_out(
        store,
        table_of,
        quiet,
        grids=Grid.asked_for(chosen, before),
        protocol=shared.protocol_of(Protocol, settings, before),
        data=shared.folder_of_data(data, before, Path("data")),
        engine=engine_named(engine, device, jobs, address),
        partial=shared.is_partial(partial, before),
        resume=resume,
        overwrite=overwrite,
        retry_failed=retry_failed,
    )


def _epochs(budget: str | None, epochs: int | None) -> int | None:
    """Those that are given, or of a budget; None where neither is."""
    from flexact.studies.cifar.protocol import Protocol

    budgets = {"paper": Protocol().epochs, "short": Protocol.short().epochs}
    if budget is not None and budget not in budgets:
        raise FlexActError(f"unknown budget {budget!r}{suggestion(budget, budgets)} Known: {', '.join(budgets)}.")
    if budget is not None and epochs is not None:
        raise FlexActError(
            f"--budget {budget} is {budgets[budget]} epochs and --epochs asks for {epochs}; give one of the two."
        )
    return epochs if budget is None else budgets[budget]
