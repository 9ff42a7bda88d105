"""`flexact reproduce cifar`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    Quiet,
    Resume,
    RetryFailed,
    Seeds,
    Status,
    carry_out,
    names,
    print_status,
)
from flexact.studies.progress import Progress

if TYPE_CHECKING:
    from flexact.studies.images.protocol import Protocol
    from flexact.studies.images.store import Store

BUDGETS = ("paper", "short")


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
    seeds: Seeds = 3,
    first_seed: FirstSeed = 0,
    budget: Annotated[str, typer.Option(help="paper (200 epochs) or short (30).")] = "paper",
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.", show_default="the budget's")] = None,
    policy: Annotated[str, typer.Option(help="What Flex-Act runs: default (FlexConfig()) or paper.")] = "default",
    candidates: Annotated[
        Names, typer.Option(help="What it picks from.", show_default="rectifiers; with --policy paper the paper's five")
    ] = None,
    lr: Annotated[float, typer.Option(help="Learning rate at the first step; it falls to 0 along a cosine.")] = 0.1,
    batch: Annotated[int, typer.Option(help="Images a step.")] = 128,
    width: Annotated[int, typer.Option(help="Channels of the first stage; 64 is the paper's.")] = 64,
    checkpoint_minutes: Annotated[
        float, typer.Option(min=0.0, help="From one checkpoint to the next; 0 for one after every epoch.")
    ] = 1.0,
    data: Annotated[Path, typer.Option(help="The folder with the data sets; see `flexact data`.")] = Path("data"),
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
    from flexact.studies.grid.engines import engine as engine_named
    from flexact.studies.images.cells import Grid
    from flexact.studies.images.grid import run
    from flexact.studies.images.report import write_table
    from flexact.studies.images.store import Store

    if status:
        print_status(Store(out))
        return
    chosen = {"datasets": names(datasets), "models": names(models), "methods": names(methods)}
    named = {kind: given for kind, given in chosen.items() if given is not None}
    grid = Grid(**named, seeds=seeds, first_seed=first_seed)
    settings: dict[str, Any] = {"policy": policy, "lr": lr, "batch": batch, "width": width}
    settings["checkpoint_minutes"] = checkpoint_minutes
    if candidates is not None:
        settings["candidates"] = names(candidates)
    if epochs is not None:
        settings["epochs"] = epochs
    protocol = _protocol(budget, settings)
    runs_on = engine_named(engine, device, jobs, address)

    def carried(progress: Progress) -> Store:
        return run(
            grid,
            protocol,
            data,
            out,
            runs_on,
            partial=partial,
            resume=resume,
            overwrite=overwrite,
            retry_failed=retry_failed,
            progress=progress,
        )

    carry_out(carried, write_table, quiet)


def _protocol(budget: str, settings: dict[str, Any]) -> Protocol:
    from flexact.studies.images.protocol import Protocol

    if budget not in BUDGETS:
        raise FlexActError(f"unknown budget {budget!r};{suggestion(budget, BUDGETS)} Known: {', '.join(BUDGETS)}.")
    return Protocol.short(**settings) if budget == "short" else Protocol(**settings)
