"""The command `flexact reproduce picks`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flexact.studies.grid import command as shared
from flexact.studies.picks.protocol import Protocol


@shared.grid_command(Protocol)
def picks(
    grid: shared.GridCommand,
    settings: dict[str, Any],
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
    data: Annotated[
        Path | None,
        typer.Option(
            help="The folder with CIFAR-100, which the image tasks need; see `flexact data`.",
            show_default="data; with --resume the previous one",
        ),
    ] = None,
    partial: shared.Partial = False,
) -> None:
    """Run the benchmark of picks: ten tasks with fixed activations, Flex-Act, random picks and a race."""
    from flexact.studies.picks.study import Store

    chosen = shared.given(tasks=tasks, methods=methods, seeds=seeds, first_seed=first_seed)
    grid.carry_out(Store(grid.out), chosen, data, settings, partial=partial)
