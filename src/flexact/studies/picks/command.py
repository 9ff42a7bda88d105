"""The command `flexact reproduce picks`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexact.studies.grid import command as shared


def picks(
    tasks: Annotated[
        shared.Names,
        typer.Option(
            help="resnet-rectifiers, resnet-seven, vit, gpt, physics, convnet, deep-mlp, autoencoder, coordinates, "
            "tabular.",
            show_default="all",
        ),
    ] = None,
    methods: Annotated[
        shared.Names,
        typer.Option(
            help="fixed (each candidate at every site), fixed-CANDIDATE, flexact, flexact-alone, flexact-one, "
            "flexact-sites, flexact-blend, flexact-trial, flexact-unrewound, random, race.",
            show_default="all but flexact-sites, -blend, -trial and -unrewound",
        ),
    ] = None,
    seeds: shared.Seeds = None,
    first_seed: shared.FirstSeed = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of a plain run, for a quick test.", show_default="each task's own")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="The folder with CIFAR-100, which the image tasks need; see `flexact data`.",
            show_default="data; with --resume the previous one",
        ),
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Accept a CIFAR-100 with fewer images than the official one.")
    ] = False,
    out: shared.Out = Path("runs/picks"),
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
    """Run the benchmark of picks: ten tasks with fixed activations, Flex-Act, random picks and a race."""
    from flexact.studies.grid.engines import engine as engine_named
    from flexact.studies.picks.cells import Grid
    from flexact.studies.picks.protocol import Protocol
    from flexact.studies.picks.study import Store
    from flexact.studies.picks.table import table_of

    store = Store(out)
    if status:
        shared.print_status(store)
        return
    before = shared.begun(store, resume or retry_failed)
    chosen = shared.given(tasks=tasks, methods=methods, seeds=seeds, first_seed=first_seed)
    shared.carry_out(
        store,
        table_of,
        quiet,
        grids=Grid.asked_for(chosen, before),
        protocol=shared.protocol_of(Protocol, shared.given(steps=steps), before),
        data=shared.folder_of_data(data, before, Path("data")),
        engine=engine_named(engine, device, jobs, address),
        partial=shared.is_partial(partial, before),
        resume=resume,
        overwrite=overwrite,
        retry_failed=retry_failed,
    )
