"""`flexact reproduce picks`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

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
    begun,
    carry_out,
    folder_of_data,
    given,
    names,
    print_status,
)


def picks(
    tasks: Annotated[
        Names,
        typer.Option(
            help="resnet-rectifiers, resnet-seven, vit, gpt, physics, convnet, deep-mlp, autoencoder, coordinates, "
            "tabular.",
            show_default="all",
        ),
    ] = None,
    methods: Annotated[
        Names,
        typer.Option(
            help="fixed (each candidate at every site), fixed-CANDIDATE, flexact, flexact-alone, flexact-one, "
            "flexact-sites, flexact-blend, flexact-trial, flexact-unrewound, random, race.",
            show_default="all but flexact-sites, -blend, -trial and -unrewound",
        ),
    ] = None,
    seeds: Seeds = None,
    first_seed: FirstSeed = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of a plain run, to try it.", show_default="each task's own")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="The folder with CIFAR-100, which the image tasks need; see `flexact data`.",
            show_default="data; with --resume the one of before",
        ),
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Take a CIFAR-100 with fewer images than the official one.")
    ] = False,
    out: Out = Path("runs/picks"),
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
    """The benchmark of picks: ten tasks, their fixed activations, Flex-Act, random picks and a race, as a grid."""
    from flexact.studies.grid.engines import engine as engine_named
    from flexact.studies.picks.cells import Grid
    from flexact.studies.picks.grid import run
    from flexact.studies.picks.protocol import Protocol
    from flexact.studies.picks.store import Store
    from flexact.studies.picks.table import table_of

    store = Store(out)
    if status:
        print_status(store)
        return
    before = begun(store, resume or retry_failed)
    chosen = given(tasks=names(tasks), methods=names(methods), seeds=seeds, first_seed=first_seed)
    grids = Grid.asked_for(chosen, before)
    settings = given(steps=steps)
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
