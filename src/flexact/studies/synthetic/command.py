"""The commands `flexact reproduce synthetic`, `alpha` and `corrections`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from flexact.config import PAPER_CANDIDATES
from flexact.io.result_folder import TABLE
from flexact.studies.grid.command import Names, Overwrite, Quiet, again, names
from flexact.studies.progress import Progress
from flexact.studies.synthetic.options import Options
from flexact.studies.synthetic.studies import Study


def command_of(study: Study) -> Callable[..., None]:
    """Return the command of `flexact reproduce` that runs a study. Its first options are the fields of `Options`."""

    def command(
        truths: Annotated[
            Names, typer.Option(help="The functions to find, separated by commas.", show_default="the paper's")
        ] = None,
        candidates: Annotated[Names, typer.Option(help="The candidates.", show_default="the paper's five")] = None,
        models: Annotated[Names, typer.Option(help="The models to train.", show_default="all of the study")] = None,
        out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("runs", study.name),
        resume: Annotated[bool, typer.Option("--resume", help="Resume the run in that folder.")] = False,
        overwrite: Overwrite = False,
        quiet: Quiet = False,
        jobs: Annotated[
            int | None, typer.Option(min=1, help="Number of processes.", show_default="one per core")
        ] = None,
        **settings: Any,
    ) -> None:
        from flexact.report.build import build, check_packages
        from flexact.studies.synthetic.runner import run

        chosen = PAPER_CANDIDATES if candidates is None else names(candidates) or ()
        options = Options(
            **settings,
            truths=study.truths if truths is None else names(truths) or (),
            candidates=chosen,
            models=study.models(chosen) if models is None else names(models) or (),
        )
        progress = Progress(quiet)
        check_packages()
        try:
            run(study, options, out, resume=resume, overwrite=overwrite, jobs=jobs, progress=progress)
            with progress.during("building the page"):
                page = build(out)
        except KeyboardInterrupt:
            print(f"\nInterrupted. The finished models are kept; resume with: {again()}", file=sys.stderr)
            raise typer.Exit(130) from None
        if not quiet:
            print((out / TABLE).read_text(encoding="utf-8"))
            print(f"Page: {page}")

    *own, _ = inspect.signature(command, eval_str=True).parameters.values()
    every = inspect.signature(Options, eval_str=True).parameters.values()
    others = [option for option in every if option.name not in {one.name for one in own}]
    others = [option.replace(default=study.seeds) if option.name == "seeds" else option for option in others]
    command.__signature__ = inspect.Signature([*others, *own])  # type: ignore[attr-defined]  # which typer reads
    return command
