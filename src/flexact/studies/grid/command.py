"""The options that all grid commands share, and how they run their grid."""

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
Seeds = Annotated[int | None, typer.Option(help="Number of seeds.", show_default="3")]
FirstSeed = Annotated[int | None, typer.Option(help="The first seed.", show_default="0")]
Out = Annotated[Path, typer.Option(help="The folder to write.")]
EngineName = Annotated[
    str, typer.Option(help="local (processes), streams (threads that share one GPU; picks only) or ray (a cluster).")
]
Address = Annotated[
    str | None, typer.Option(help="Address of the Ray cluster.", show_default="the one that is running")
]
Policy = Annotated[
    str | None, typer.Option(help="Flex-Act's policy: default (FlexConfig()) or paper.", show_default="default")
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Cells at a time.", show_default="one per device")]
Device = Annotated[
    str | None, typer.Option(help="cuda (all GPUs), cuda:N or cpu.", show_default="cuda if available, else cpu")
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Resume the grid in the folder with its own settings; cells that are named are added."
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the grid in the folder.")]
RetryFailed = Annotated[bool, typer.Option("--retry-failed", help="Resume, and run the failed cells again.")]
Status = Annotated[bool, typer.Option("--status", help="Only print the state of the grid in the folder.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing.")]


def carry_out(store: Store[Any], table_of: Callable[[Any], str], quiet: bool, **options: Any) -> None:
    """Run a grid, write and print its table, and build its page. Exits with an error if a cell failed.

    A machine without the packages of the page still trains; the page can be built elsewhere.
    options: the options of `grid.run.run`.
    """
    from flexact.report.build import build, missing_packages
    from flexact.studies.grid.run import Stopped, run

    missing = ", ".join(missing_packages())
    progress = Progress(quiet, pieces="cells")
    try:
        run(store, progress=progress, **options)
        table = store.write_table(table_of(store))
        page = (
            f"not built, because {missing} is missing. Install 'flexact[report]', then: flexact report {store.folder}"
        )
        if not missing:
            with progress.during("building the page"):
                page = str(build(store.folder))
    except Stopped as stopped:
        print(f"flexact: {stopped} Continue with: {again()}", file=sys.stderr)
        raise typer.Exit(128 + stopped.number) from None
    except KeyboardInterrupt:
        started = (store.folder / CONFIG).exists()
        print(f"\ninterrupted; {f'continue with: {again()}' if started else 'nothing was started.'}", file=sys.stderr)
        raise typer.Exit(130) from None
    if not quiet:
        print(table.read_text(encoding="utf-8"))
        print(f"Page: {page}")
    failed = sum(row.state == FAILED for row in store.results().values())
    if failed:
        count = counted(failed, "cell")
        print(f"flexact: {count} failed; see --status, try again with --retry-failed.", file=sys.stderr)
        raise typer.Exit(1)


def begun(store: Store[Any], resume: bool) -> dict[str, Any] | None:
    """config.json of the grid to resume, which provides the options that are not given; None for a new grid."""
    if not resume:
        return None
    found = store.config()
    if not isinstance(found.get("protocol"), dict):
        raise FlexActError(f"{store.folder / CONFIG} has no protocol; restore it, or start again with --overwrite.")
    return found


def protocol_of(kind: type[GridProtocol], settings: dict[str, Any], before: dict[str, Any] | None) -> GridProtocol:
    """The protocol with the given settings; the others are defaults, or those of the grid to resume."""
    return kind(**settings) if before is None else kind.from_dict({**before["protocol"], **settings})


def is_partial(given: bool, before: dict[str, Any] | None) -> bool:
    """Whether partial data sets are accepted: if given, or if the grid to resume accepts them."""
    return given or bool((before or {}).get("data", {}).get("partial"))


def folder_of_data(given: Path | None, before: dict[str, Any] | None, default: Path) -> Path:
    """The folder of the data: the given one, that of the grid to resume, or the default."""
    return given or place_of_data(before or {}) or default


def given(**options: Any) -> dict[str, Any]:
    """The options that are not None; lists become names.

    >>> given(seeds=None, lr=0.1, methods=["relu,prelu"])
    {'lr': 0.1, 'methods': ('relu', 'prelu')}
    """
    found = {name: value for name, value in options.items() if value is not None}
    return {name: names(value) if isinstance(value, list) else value for name, value in found.items()}


def names(given: Names) -> tuple[str, ...] | None:
    """Names separated by commas, in one option or several; None if the option is not given.

    >>> names(["relu, prelu", "splash"])
    ('relu', 'prelu', 'splash')
    """
    if given is None:
        return None
    return tuple(name for part in given for name in map(str.strip, part.split(",")) if name)


def print_status(store: Store[Any]) -> None:
    """Print the state of a grid."""
    from flexact.studies.grid.status import table

    print(table(store))
