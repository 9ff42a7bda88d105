"""The command `flexact compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexact.config import FlexConfig
from flexact.errors import FlexActError
from flexact.studies.compare.protocol import Grid
from flexact.studies.grid import command as shared


@shared.grid_command(Grid)
def compare(
    grid: shared.GridCommand,
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
    config: Annotated[
        Path | None,
        typer.Option(help="A JSON file written by FlexConfig.to_json().", show_default="FlexConfig()"),
    ] = None,
    where: Annotated[
        shared.Names,
        typer.Option(help="The sites: all, penultimate, names or patterns.", show_default="all"),
    ] = None,
) -> None:
    """Compare your network with fixed activations and with Flex-Act, in your own training, paired by seed."""
    from flexact.studies.compare.comparison import compare as run_comparison
    from flexact.studies.compare.functions import named
    from flexact.studies.compare.study import Store

    store, asked = Store(grid.out), Grid(**grid.chosen)
    grid.before(store)  # prints the state and exits, with --status
    if build is None or train is None:
        raise FlexActError("a function is missing. Give both, as in: flexact compare my_module:build my_module:train")
    places = shared.names(where) or ("all",)
    with grid.reported(store):
        run_comparison(
            named(build),
            named(train),
            shared.names(candidates),
            asked.methods,
            asked.each_seed,
            config=None if config is None else _read(config),
            where=places[0] if len(places) == 1 else places,
            out=grid.out,
            engine=grid.engine,
            jobs=grid.jobs,
            device=grid.device,
            address=grid.address,
            overwrite=grid.overwrite,
            retry_failed=grid.retry_failed,
            quiet=grid.quiet,
        )


def _read(file: Path) -> FlexConfig:
    try:
        return FlexConfig.from_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise FlexActError(f"cannot read {file} ({error}). Write it with FlexConfig.to_json().") from None
