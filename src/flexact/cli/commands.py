"""The commands `inspect`, `doctor` and `report`, and those of the studies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from flexact.studies.commands import compare, data, reproduce
from flexact.studies.compare.functions import named
from flexact.studies.grid.command import names


def load_model(given: str) -> tuple[Any, Any]:
    """Return the model that `given` names, and its example inputs or None. Modules of the current folder are found too.

    given: "module:build", where `build` is a model, or a function without arguments that returns a model, or a model
    and its example inputs.
    """
    found: Any = named(given)
    made = found() if callable(found) and not isinstance(found, nn.Module) else found
    return made if isinstance(made, tuple) and len(made) == 2 else (made, None)


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(asked: bool) -> None:
    if asked:
        from flexact.cli.doctor import installed_version

        print(f"flexact {installed_version()}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Flexible activation functions for PyTorch: inspect what convert would do to your model, compare and report
    your own runs, reproduce the paper's studies, and check this machine."""


app.add_typer(reproduce, name="reproduce")
app.command()(compare)
app.command()(data)


@app.command()
def report(
    run: Annotated[
        Path, typer.Argument(help="The folder of a study or a Recorder, or a history file.", show_default=False)
    ],
) -> None:
    """Build figures and one self-contained page from a run."""
    from flexact.report.build import build
    from flexact.studies.progress import Progress

    with Progress().during("building the page"):
        page = build(run)
    print(f"Page: {page}")


@app.command()
def inspect(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:BUILD",
            help="A function that returns a model, or a model and its example inputs; or a model itself.",
            show_default=False,
        ),
    ],
    where: Annotated[
        list[str] | None, typer.Option(help="Names or patterns of activations, as for convert.", show_default="all")
    ] = None,
    per_call: Annotated[bool, typer.Option("--per-call", help="Make each call of an activation a site.")] = False,
) -> None:
    """List the activations of a model, and what convert would do with each of them and why."""
    from flexact.surgery import inspection

    network, example_inputs = load_model(model)
    patterns = names(where) or ("all",)
    chosen = patterns[0] if len(patterns) == 1 else patterns
    print(inspection.inspect(network, chosen, example_inputs=example_inputs, per_call=per_call))


@app.command()
def doctor() -> None:
    """Print what this machine has: versions, devices, the kernels that run on each, optional packages."""
    from flexact.cli.doctor import lines

    print("\n".join(lines()))
