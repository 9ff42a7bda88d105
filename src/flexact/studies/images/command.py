"""`flexact reproduce cifar`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexact.errors import FlexActError, suggestion
from flexact.studies.calling import again
from flexact.studies.progress import Progress

if TYPE_CHECKING:
    from flexact.studies.images.protocol import Protocol

Names = list[str] | None
BUDGETS = ("paper", "short")


def cifar(
    methods: Annotated[
        Names,
        typer.Option(
            help="relu, prelu, swish_beta, affine, parametric, splash, flexact-penultimate, flexact-all.",
            show_default="all",
        ),
    ] = None,
    datasets: Annotated[Names, typer.Option(help="cifar10, cifar100, or both.", show_default="both")] = None,
    models: Annotated[Names, typer.Option(help="resnet18, resnet34, or both.", show_default="resnet18")] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds.")] = 3,
    first_seed: Annotated[int, typer.Option(help="The first of them.")] = 0,
    budget: Annotated[str, typer.Option(help="paper (200 epochs) or short (30).")] = "paper",
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.", show_default="the budget's")] = None,
    policy: Annotated[str, typer.Option(help="What Flex-Act runs: default (FlexConfig()) or paper.")] = "default",
    candidates: Annotated[Names, typer.Option(help="What it picks from.", show_default="the paper's five")] = None,
    batch: Annotated[int, typer.Option(help="Images a step.")] = 128,
    width: Annotated[int, typer.Option(help="Channels of the first stage; 64 is the paper's.")] = 64,
    checkpoint_minutes: Annotated[
        float, typer.Option(min=0.0, help="From one checkpoint to the next; 0 for one after every epoch.")
    ] = 1.0,
    data: Annotated[Path, typer.Option(help="The folder with the data sets; see `flexact data`.")] = Path("data"),
    partial: Annotated[
        bool, typer.Option("--partial", help="Take data sets with fewer images than the official ones.")
    ] = False,
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("runs/cifar"),
    engine: Annotated[str, typer.Option(help="local (processes of this machine) or ray (a cluster).")] = "local",
    address: Annotated[str | None, typer.Option(help="Of the Ray cluster.", show_default="the one that runs")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Cells at once.", show_default="one a device")] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda (all GPUs), cuda:N or cpu.", show_default="cuda where there is one")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the grid in that folder, or add to it.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the grid in that folder.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Go on, and try the failed cells again.")
    ] = False,
    status: Annotated[bool, typer.Option("--status", help="Only say where the grid in that folder stands.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing.")] = False,
) -> None:
    """CIFAR with ResNets: a grid of data sets, models, methods and seeds, each cell a run that can be gone on with."""
    if status:
        _print_status(out)
        return
    from flexact.studies.images.engines import engine as engine_named
    from flexact.studies.images.grid import Grid, Stopped, run
    from flexact.studies.images.report import write_table
    from flexact.studies.images.store import FAILED
    from flexact.studies.report import build, check_packages

    chosen = {"datasets": _names(datasets), "models": _names(models), "methods": _names(methods)}
    named = {kind: given for kind, given in chosen.items() if given is not None}
    grid = Grid(**named, seeds=seeds, first_seed=first_seed)
    settings: dict[str, Any] = {"policy": policy, "batch": batch, "width": width}
    settings["checkpoint_minutes"] = checkpoint_minutes
    if candidates is not None:
        settings["candidates"] = _names(candidates)
    if epochs is not None:
        settings["epochs"] = epochs
    protocol = _protocol(budget, settings)
    check_packages()
    progress = Progress(quiet, pieces="cells")
    try:
        store = run(
            grid,
            protocol,
            data,
            out,
            engine_named(engine, device, jobs, address),
            partial=partial,
            resume=resume,
            overwrite=overwrite,
            retry_failed=retry_failed,
            progress=progress,
        )
        table = write_table(store)
        with progress.during("building the page"):
            page = build(out)
    except Stopped as stopped:
        print(f"flexact: {stopped} Go on with: {again()}", file=sys.stderr)
        raise typer.Exit(128 + stopped.number) from None
    except KeyboardInterrupt:
        print(f"\ninterrupted; what is done is kept. Go on with: {again()}", file=sys.stderr)
        raise typer.Exit(130) from None
    if not quiet:
        print(table.read_text(encoding="utf-8"))
        print(f"Page: {page}")
    failed = sum(row.state == FAILED for row in store.results().values())
    if failed:
        print(f"flexact: {failed} cells failed; see --status, try them again with --retry-failed.", file=sys.stderr)
        raise typer.Exit(1)


def _protocol(budget: str, settings: dict[str, Any]) -> Protocol:
    from flexact.studies.images.protocol import Protocol

    if budget not in BUDGETS:
        raise FlexActError(f"unknown budget {budget!r};{suggestion(budget, BUDGETS)} Known: {', '.join(BUDGETS)}.")
    return Protocol.short(**settings) if budget == "short" else Protocol(**settings)


def _print_status(folder: Path) -> None:
    from flexact.studies.images.status import states, table
    from flexact.studies.images.store import Store

    print(table(states(Store(folder))))


def _names(given: list[str] | None) -> tuple[str, ...] | None:
    """Names separated by commas, in one option or in several; None where the option is not there."""
    if given is None:
        return None
    return tuple(name for part in given for name in map(str.strip, part.split(",")) if name)
