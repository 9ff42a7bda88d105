"""`flexact reproduce cifar`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from flexact.errors import FlexActError, suggestion
from flexact.studies.grid.command import (
    Address,
    Device,
    EngineName,
    FirstSeed,
    Jobs,
    Names,
    Out,
    Overwrite,
    Policy,
    Quiet,
    Resume,
    RetryFailed,
    Seeds,
    Status,
    begun,
    carry_out,
    folder_of_data,
    given,
    names,
    print_status,
)


def cifar(
    methods: Annotated[
        Names,
        typer.Option(
            help="relu, prelu, swish_beta, affine, parametric, splash, flexact-penultimate, flexact-all; or a "
            "candidate's name, such as gelu, for that activation in all blocks.",
            show_default="the first eight",
        ),
    ] = None,
    datasets: Annotated[Names, typer.Option(help="cifar10, cifar100, or both.", show_default="both")] = None,
    models: Annotated[Names, typer.Option(help="resnet18, resnet34, or both.", show_default="resnet18")] = None,
    seeds: Seeds = None,
    first_seed: FirstSeed = None,
    budget: Annotated[str | None, typer.Option(help="paper (200 epochs) or short (30).", show_default="paper")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.", show_default="the budget's")] = None,
    policy: Policy = None,
    candidates: Annotated[
        Names,
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
    out: Out = Path("runs/cifar"),
    engine: EngineName = "local",
    address: Address = None,
    jobs: Jobs = None,
    device: Device = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    retry_failed: RetryFailed = False,
    status: Status = False,
    quiet: Quiet = False,
) -> None:
    """CIFAR with ResNets: a grid of data sets, models, methods and seeds, each cell a run that can be gone on with."""
    from flexact.studies.cifar.cells import Grid
    from flexact.studies.cifar.grid import run
    from flexact.studies.cifar.protocol import Protocol
    from flexact.studies.cifar.store import Store
    from flexact.studies.cifar.table import table_of
    from flexact.studies.grid.engines import engine as engine_named

    if status:
        print_status(Store(out))
        return
    store = Store(out)
    before = begun(store, resume or retry_failed)
    chosen = given(
        datasets=names(datasets), models=names(models), methods=names(methods), seeds=seeds, first_seed=first_seed
    )
    grids = Grid.asked_for(chosen, before)
    settings = given(
        epochs=_epochs(budget, epochs),
        policy=policy,
        candidates=names(candidates),
        lr=lr,
        batch=batch,
        width=width,
        checkpoint_minutes=checkpoint_minutes,
    )
    if before is None:
        protocol = Protocol(**settings)
    else:
        protocol = Protocol.from_dict({**before["protocol"], **settings})
        partial = partial or bool(before.get("data", {}).get("partial"))
    begin = functools.partial(
        run,
        grids,
        protocol,
        folder_of_data(data, before, Path("data")),
        out,
        engine_named(engine, device, jobs, address),
        partial=partial,
        resume=resume,
        overwrite=overwrite,
        retry_failed=retry_failed,
    )
    carry_out(store, begin, table_of, quiet)


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
