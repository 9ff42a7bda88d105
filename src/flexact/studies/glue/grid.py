"""The grid of the text study, run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from flexact.errors import FlexActError
from flexact.studies.glue.cells import Grid
from flexact.studies.glue.checking import check_encoder
from flexact.studies.glue.data import check_rows, load
from flexact.studies.glue.encoder import find_encoder
from flexact.studies.glue.protocol import METHODS, Protocol
from flexact.studies.glue.store import STUDY, Store, figures
from flexact.studies.glue.table import table_of
from flexact.studies.glue.tasks import USUAL
from flexact.studies.glue.train import train_cell
from flexact.studies.grid import run as shared
from flexact.studies.grid.engines import Engine
from flexact.studies.grid.engines import engine as engine_named
from flexact.studies.grid.running import Task
from flexact.studies.grid.store import FAILED, PLACE
from flexact.studies.grid.study import Cell
from flexact.studies.progress import Progress


def run(
    grids: Sequence[Grid],
    protocol: Protocol,
    data: Path,
    folder: Path,
    engine: Engine,
    *,
    resume: bool = False,
    overwrite: bool = False,
    retry_failed: bool = False,
    progress: Progress | None = None,
) -> Store:
    """Run the cells that are not done yet; what ends is kept at once, whatever comes after.

    grids: none for the cells that the folder was asked for before.
    """
    store = Store(folder)

    def task_of(cell: Cell, own: Path) -> Task:
        return Task(cell, protocol, own, Path(data).absolute(), train_cell, load, figures)

    def sha256_of(name: str) -> str:
        found = load(name, Path(data))
        check_rows(found.first(protocol.limit))
        return found.sha256

    shared.run(
        store,
        shared.configuration(STUDY, grids, protocol, {PLACE: str(Path(data).absolute())}),
        task_of,
        sha256_of,
        engine,
        resume=resume,
        overwrite=overwrite,
        retry_failed=retry_failed,
        progress=progress,
    )
    return store


def main(arguments: Sequence[str] | None = None) -> int:
    """A grid without the packages of the command and of the page: ``python -m flexact.studies.glue.grid --help``."""
    parser = argparse.ArgumentParser(prog="python -m flexact.studies.glue.grid", description=main.__doc__)
    parser.add_argument("--model", required=True, help="a folder with a model and its tokenizer")
    parser.add_argument("--data", required=True, type=Path, help="the folder with GLUE's own folders")
    parser.add_argument("--out", required=True, type=Path, help="the folder to write")
    parser.add_argument("--tasks", type=_names, help=f"default: {','.join(USUAL)}")
    parser.add_argument("--methods", type=_names, help=f"default: {','.join(METHODS)}")
    parser.add_argument("--seeds", type=int, help="default: 3")
    parser.add_argument("--first-seed", type=int, help="default: 0")
    parser.add_argument("--protocol", default="{}", help="fields of the Protocol, as a JSON object")
    parser.add_argument("--device", help="cuda, cuda:N or cpu")
    parser.add_argument("--jobs", type=int, help="cells at once")
    parser.add_argument("--resume", action="store_true", help="go on with the grid in --out, or add what is named")
    given = parser.parse_args(arguments)
    try:
        chosen = {name: getattr(given, name) for name in ("tasks", "methods", "seeds", "first_seed")}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        grids = Grid.asked_for(chosen, Store(given.out).config() if given.resume else None)
        protocol = Protocol.of(find_encoder(given.model), **json.loads(given.protocol))
        check_encoder(protocol.encoder, protocol.length)
        engine = engine_named("local", given.device, given.jobs, None)
        progress = Progress(pieces="cells")
        store = run(grids, protocol, given.data, given.out, engine, resume=given.resume, progress=progress)
    except (FlexActError, ValueError, TypeError) as error:
        print(f"flexact: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    text = table_of(store)
    store.write_table(text)
    print(text)
    return 1 if any(row.state == FAILED for row in store.results().values()) else 0


def _names(given: str) -> tuple[str, ...]:
    return tuple(given.split(","))


if __name__ == "__main__":
    sys.exit(main())
