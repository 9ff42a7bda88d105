"""What the commands that run a grid have in common: their options, and what they say at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from flexact.errors import FlexActError
from flexact.io.markdown_tables import counted
from flexact.io.result_folder import CONFIG
from flexact.studies.calling import again
from flexact.studies.grid.protocol import GridProtocol
from flexact.studies.grid.store import FAILED, Store, place_of_data
from flexact.studies.progress import Progress

Names = list[str] | None
Seeds = Annotated[int | None, typer.Option(help="How many seeds.", show_default="3")]
FirstSeed = Annotated[int | None, typer.Option(help="The first of them.", show_default="0")]
Out = Annotated[Path, typer.Option(help="The folder to write.")]
EngineName = Annotated[
    str, typer.Option(help="local (processes), streams (one GPU shared by threads; picks only) or ray (a cluster).")
]
Address = Annotated[str | None, typer.Option(help="Of the Ray cluster.", show_default="the one that runs")]
Policy = Annotated[
    str | None, typer.Option(help="What Flex-Act runs: default (FlexConfig()) or paper.", show_default="default")
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Cells at once.", show_default="one a device")]
Device = Annotated[
    str | None, typer.Option(help="cuda (all GPUs), cuda:N or cpu.", show_default="cuda where there is one")
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on with the grid in that folder, as it was asked for; or add what is named, the rest as it is there.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the grid in that folder.")]
RetryFailed = Annotated[bool, typer.Option("--retry-failed", help="Go on, and try the failed cells again.")]
Status = Annotated[bool, typer.Option("--status", help="Only say where the grid in that folder stands.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing.")]


def carry_out(store: Store[Any], table_of: Callable[[Any], str], quiet: bool, **options: Any) -> None:
    """Run a grid, write its table and its page, and print them; exits with an error where not all went well.

    A machine that trains need not have what a page needs: the folder can be copied to one that has.
    options: of `grid.run.run`.
    """
    from flexact.report.build import build, missing_packages
    from flexact.studies.grid.run import Stopped, run

    lacking = ", ".join(missing_packages())
    progress = Progress(quiet, pieces="cells")
    try:
        run(store, progress=progress, **options)
        table = store.write_table(table_of(store))
        page = f"not built, for lack of {lacking}: flexact report {store.folder}, where there is 'flexact[report]'"
        if not lacking:
            with progress.during("building the page"):
                page = str(build(store.folder))
    except Stopped as stopped:
        print(f"flexact: {stopped} Go on with: {again()}", file=sys.stderr)
        raise typer.Exit(128 + stopped.number) from None
    except KeyboardInterrupt:
        there = (store.folder / CONFIG).exists()
        told = f"what is done is kept. Go on with: {again()}" if there else "nothing was begun."
        print(f"\ninterrupted; {told}", file=sys.stderr)
        raise typer.Exit(130) from None
    if not quiet:
        print(table.read_text(encoding="utf-8"))
        print(f"Page: {page}")
    failed = sum(row.state == FAILED for row in store.results().values())
    if failed:
        print(
            f"flexact: {counted(failed, 'cell')} failed; see --status, try again with --retry-failed.", file=sys.stderr
        )
        raise typer.Exit(1)


def begun(store: Store[Any], resume: bool) -> dict[str, Any] | None:
    """config.json of the grid that is gone on with: what options leave open is as it was there; None: one begins."""
    if not resume:
        return None
    found = store.config()
    if not isinstance(found.get("protocol"), dict):
        raise FlexActError(f"{store.folder / CONFIG} has no protocol; restore it, or start again with --overwrite.")
    return found


def protocol_of(kind: type[GridProtocol], settings: dict[str, Any], before: dict[str, Any] | None) -> GridProtocol:
    """The protocol that options ask for; what they leave open is as it was in the grid that is resumed."""
    return kind(**settings) if before is None else kind.from_dict({**before["protocol"], **settings})


def is_partial(given: bool, before: dict[str, Any] | None) -> bool:
    """Whether parts of data sets are accepted: as given, or as in the grid that is resumed."""
    return given or bool((before or {}).get("data", {}).get("partial"))


def folder_of_data(given: Path | None, before: dict[str, Any] | None, usual: Path) -> Path:
    """As it is given; otherwise where the grid that is gone on with had it, or the usual one."""
    return given or place_of_data(before or {}) or usual


def given(**options: Any) -> dict[str, Any]:
    """The options that are there; lists become names.

    >>> given(seeds=None, lr=0.1, methods=["relu,prelu"])
    {'lr': 0.1, 'methods': ('relu', 'prelu')}
    """
    there = {name: value for name, value in options.items() if value is not None}
    return {name: names(value) if isinstance(value, list) else value for name, value in there.items()}


def print_status(store: Store[Any]) -> None:
    """Where a grid stands."""
    from flexact.studies.grid.status import table

    print(table(store))


def names(given: Names) -> tuple[str, ...] | None:
    """Names separated by commas, in one option or in several; None where the option is not there.

    >>> names(["relu, prelu", "splash"])
    ('relu', 'prelu', 'splash')
    """
    if given is None:
        return None
    return tuple(name for part in given for name in map(str.strip, part.split(",")) if name)
