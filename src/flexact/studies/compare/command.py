"""The command `flexact compare`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from flexact.errors import FlexActError
from flexact.studies.grid import command as shared


@shared.grid_command()
def compare(
    grid: shared.GridCommand,
    _: dict[str, Any],
    build: Annotated[
        str | None, typer.Argument(help="The function that builds the network, as module:name.", show_default=False)
    ] = None,
    train: Annotated[
        str | None,
        typer.Argument(
            help="The training, train(model, seed, make_schedule) -> score, as module:name.", show_default=False
        ),
    ] = None,
    candidates: Annotated[
        shared.Names, typer.Option(help="The candidates, with commas between them.", show_default="those of --config")
    ] = None,
    methods: Annotated[
        shared.Names,
        typer.Option(
            help="original, fixed (each candidate at every site), fixed-CANDIDATE, flexact, flexact-alone.",
            show_default="original, fixed, flexact, flexact-alone",
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds.", show_default="5")] = None,
    first_seed: shared.FirstSeed = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A JSON file of FlexConfig.to_json().", show_default="FlexConfig(), or the resumed one"),
    ] = None,
    where: Annotated[
        shared.Names,
        typer.Option(help="The sites: all, penultimate, names or patterns.", show_default="all, or the resumed ones"),
    ] = None,
) -> None:
    """Compare your network with fixed activations and with Flex-Act, in your own training, paired by seed."""
    from flexact.studies.compare.functions import Functions, named
    from flexact.studies.compare.protocol import USUAL, methods_of
    from flexact.studies.compare.setup import Setup, config_of, engine_for, where_of
    from flexact.studies.compare.study import Store

    before = grid.before(Store(grid.out))
    if build is None or train is None:
        raise FlexActError("a function is missing. Give both, as in: flexact compare my_module:build my_module:train")
    settings = config_of(config, shared.names(candidates), before)
    functions = Functions(named(build), named(train), where_of(shared.names(where), before))
    first = first_seed or 0
    setup = Setup.of(functions, settings, (first, first + 1))
    if before is not None and (changes := setup.changes(before)):
        warnings.warn(changes, stacklevel=2)
    chosen: dict[str, Any] = {"seeds": 5} if before is None else {}
    chosen |= shared.given(seeds=seeds, first_seed=first_seed)
    if methods is not None or before is None:
        chosen["methods"] = methods_of(settings.candidates, shared.names(methods) or USUAL, setup.original)
    engine = engine_for(functions, grid.engine, grid.device, grid.jobs, grid.address)
    grid.carry_out(Store(grid.out, functions), chosen, Path.cwd(), protocol=setup.protocol, engine=engine)
