"""The options that all grid commands share, and how they run their grid."""

from __future__ import annotations

import functools
import inspect
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from flexact.io.markdown_tables import counted
from flexact.io.result_folder import CONFIG, TABLE
from flexact.studies.grid.store import PLACE, Store, data_of
from flexact.studies.grid.study import FAILED, Choices, GridProtocol, Setting, settings_of
from flexact.studies.progress import Progress

Names = list[str] | None
Data = Annotated[
    Path | None,
    typer.Option(
        help="The folder with CIFAR's data sets; see `flexact data`.",
        show_default="data; with --resume the grid's own",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing.")]
_KIND = inspect.Parameter.POSITIONAL_OR_KEYWORD


@dataclass(frozen=True)
class GridCommand:
    """The values of the options that all grid commands share, and those of the study's own; runs the grid."""

    out: Path
    engine: Annotated[
        str,
        Setting(
            "local (processes), ray (a cluster), streams (threads that share one GPU; cifar and picks) or inline (this "
            "process; compare only)."
        ),
    ] = "local"
    address: Annotated[str | None, Setting("Address of the Ray cluster.", "the one that is running")] = None
    jobs: Annotated[
        int | None,
        Setting(
            "Cells that run at the same time.",
            "one per device; with streams 16; glue on a CPU: one per core up to 4",
            at_least=1,
        ),
    ] = None
    device: Annotated[str | None, Setting("cuda (all GPUs), cuda:N or cpu.", "cuda if available, else cpu")] = None
    resume: Annotated[
        bool, Setting("Resume the grid in the folder with its saved settings; further cells can be added.")
    ] = False
    overwrite: Annotated[bool, Setting("Replace the run in the folder.")] = False
    retry_failed: Annotated[bool, Setting("Resume, and rerun the failed cells.")] = False
    status: Annotated[bool, Setting("Only print the state of the grid in the folder.")] = False
    quiet: Annotated[bool, Setting("Print nothing.")] = False
    chosen: dict[str, Any] = field(default_factory=dict)
    """The fields of the study's grid that were given on the command line."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The fields of its protocol that were given."""

    def before(self, store: Store) -> dict[str, Any] | None:
        """config.json of the grid to resume, which provides the options that are not given; None for a new grid.

        With --status, print the state of the grid and exit.
        """
        if self.status:
            from flexact.studies.grid import status

            print(status.table(store))
            raise typer.Exit
        return store.config() if self.resume or self.retry_failed else None

    def carry_out(self, store: Store, data: Path | None) -> None:
        """Run a grid, write its table and build its page; see `reported`.

        Options that were not given are those of the grid to resume, or the defaults of the study.
        """
        from flexact.studies.grid.engines import engine
        from flexact.studies.grid.run import run_and_report

        study, before, settings = store.study, self.before(store), self.settings
        protocol = study.protocol(**settings) if before is None else replace(store.protocol(), **settings)
        with self.reported(store):
            run_and_report(
                store,
                Progress(self.quiet, pieces="cells"),
                grids=study.grid.asked_for(self.chosen, before),
                protocol=protocol,
                data=data or Path(data_of(before or {}).get(PLACE, study.data)),
                engine=engine(self.engine, self.device, self.jobs, self.address),
                resume=self.resume,
                overwrite=self.overwrite,
                retry_failed=self.retry_failed,
            )

    @contextmanager
    def reported(self, store: Store) -> Iterator[None]:
        """Print the table of the grid that the body runs, or how to resume it. Exits with an error if a cell failed."""
        from flexact.studies.grid.run import GridStopped, page_of

        try:
            yield
        except GridStopped as stopped:
            print(f"flexact: {stopped} Resume with: {again()}", file=sys.stderr)
            raise typer.Exit(128 + stopped.number) from None
        except KeyboardInterrupt:
            then = f"resume with: {again()}" if (store.folder / CONFIG).exists() else "nothing was started."
            print(f"\ninterrupted; {then}", file=sys.stderr)
            raise typer.Exit(130) from None
        if not self.quiet:
            print((store.folder / TABLE).read_text(encoding="utf-8"))
            print(f"Page: {page_of(store.folder)}")
        failed = sum(row.state == FAILED for row in store.results().values())
        if failed:
            count = counted(failed, "cell")
            print(
                f"flexact: {count} failed; --status shows the errors, --retry-failed reruns the cells.", file=sys.stderr
            )
            raise typer.Exit(1)


def grid_command(
    grid: type[Choices] | None = None, protocol: type[GridProtocol] = GridProtocol
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds options to a command: the fields of the grid and of the protocol that have a
    `Setting`, and those that all grid commands share. The command receives their values as a `GridCommand`, which is
    its first argument, and keeps the options that it declares itself."""

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        chosen, settings = [] if grid is None else setting_options(grid), setting_options(protocol)
        shared = setting_options(GridCommand)
        folder = Annotated[Path, typer.Option(help="The folder to write.")]
        out = inspect.Parameter("out", _KIND, default=Path("runs", command.__name__), annotation=folder)

        @functools.wraps(command)
        def called(**options: Any) -> None:
            def taken(parameters: Sequence[inspect.Parameter]) -> dict[str, Any]:
                return given(**{one.name: options.pop(one.name) for one in parameters})

            shared_options = taken([out, *shared])
            command(GridCommand(**shared_options, chosen=taken(chosen), settings=taken(settings)), **options)

        parameters = [*chosen, *own, *settings, out, *shared]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # which typer reads
        return called

    return decorated


def with_settings(options: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the fields that have a `Setting` as options. The command receives their values as
    `**settings`."""

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        *own, _ = inspect.signature(command, eval_str=True).parameters.values()
        command.__signature__ = inspect.Signature([*setting_options(options), *own])  # type: ignore[attr-defined]
        return command

    return decorated


def setting_options(kind: type[Any]) -> list[inspect.Parameter]:
    """Return an option per field that has a `Setting`. An option that is not given is None, or False for a flag."""
    options = []
    for name, (value, setting) in settings_of(kind).items():
        shown = setting.default or str(getattr(kind, name))
        option = typer.Option(help=setting.help, min=setting.at_least, show_default=shown)
        given, default = value | None, None
        if tuple in [get_origin(part) for part in (value, *get_args(value))]:
            given = Names
        elif value is bool:
            option, given, default = typer.Option(f"--{name.replace('_', '-')}", help=setting.help), bool, False
        annotation = Annotated[given, option]  # type: ignore[valid-type]
        options.append(inspect.Parameter(name, _KIND, default=default, annotation=annotation))
    return options


def given(**options: Any) -> dict[str, Any]:
    """The options that are neither None nor False; lists become names.

    >>> given(seeds=None, lr=0.1, methods=["relu,prelu"])
    {'lr': 0.1, 'methods': ('relu', 'prelu')}
    """
    found = {name: value for name, value in options.items() if value is not None and value is not False}
    return {name: names(value) if isinstance(value, list) else value for name, value in found.items()}


def names(given: Names) -> tuple[str, ...] | None:
    """Names separated by commas, in one option or several; None if the option is not given.

    >>> names(["relu, prelu", "splash"])
    ('relu', 'prelu', 'splash')
    """
    if given is None:
        return None
    return tuple(name for part in given for name in map(str.strip, part.split(",")) if name)


def again() -> str:
    """The command that resumes this run."""
    program = Path(sys.argv[0])
    called = [sys.executable, "-m", "flexact"] if program.name == "__main__.py" else [program.name]
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--overwrite", "--resume")]
    return shlex.join([*called, *arguments, "--resume"])
