"""The commands `flexact reproduce synthetic`, `alpha` and `corrections`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from flexact.io.result_folder import TABLE
from flexact.studies.grid.command import Overwrite, Quiet, again, given, with_settings
from flexact.studies.progress import Progress
from flexact.studies.synthetic.options import Options
from flexact.studies.synthetic.studies import Study


def command_of(study: Study) -> Callable[..., None]:
    """Return the command of `flexact reproduce` that runs a study. Its first options are the fields of `Options`."""

    @with_settings(Options)
    def command(
        out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("runs", study.name),
        jobs: Annotated[
            int | None, typer.Option(min=1, help="Number of processes.", show_default="one per core")
        ] = None,
        resume: Annotated[bool, typer.Option("--resume", help="Resume the run in that folder.")] = False,
        overwrite: Overwrite = False,
        quiet: Quiet = False,
        **settings: Any,
    ) -> None:
        from flexact.report.build import build, check_packages
        from flexact.studies.synthetic.runner import run

        options, progress = replace(study.defaults, **given(**settings)), Progress(quiet)
        check_packages()
        try:
            run(study, options, out, resume=resume, overwrite=overwrite, jobs=jobs, progress=progress)
            page = build(out)
        except KeyboardInterrupt:
            print(f"\nInterrupted. The finished models are kept; resume with: {again()}", file=sys.stderr)
            raise typer.Exit(130) from None
        if not quiet:
            print((out / TABLE).read_text(encoding="utf-8"))
            print(f"Page: {page}")

    return command
