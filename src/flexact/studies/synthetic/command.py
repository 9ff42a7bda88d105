"""The commands `flexact reproduce synthetic`, `alpha` and `corrections`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from flexact.config import PAPER_CANDIDATES
from flexact.io.result_folder import TABLE
from flexact.studies.grid.command import Names, Overwrite, Quiet, again, names
from flexact.studies.progress import Progress
from flexact.studies.synthetic.options import Options
from flexact.studies.synthetic.studies import Study

_POLICY = (
    "Policy of the flexact-a… models and of the corrections: paper (our interpretation of the paper), literal (its "
    "formulas taken literally) or default (FlexConfig())."
)
_HIDDEN = (
    "Width of a two-layer teacher and student; the student starts from its teacher's weights and must find the hidden "
    "activation. 0 for the paper's single unit."
)


def command_of(study: Study) -> Callable[..., None]:
    """Return the command of `flexact reproduce` that runs a study."""

    def command(
        seeds: Annotated[int, typer.Option(help="Number of seeds.")] = study.seeds,
        first_seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
        epochs: Annotated[int, typer.Option(help="Passes over the data.")] = 100,
        policy: Annotated[str, typer.Option(help=_POLICY)] = "paper",
        truths: Annotated[
            Names, typer.Option(help="The functions to find, separated by commas.", show_default="the paper's")
        ] = None,
        candidates: Annotated[Names, typer.Option(help="The candidates.", show_default="the paper's five")] = None,
        models: Annotated[Names, typer.Option(help="The models to train.", show_default="all of the study")] = None,
        slope: Annotated[float, typer.Option(help="K in y = a(K·x₁).")] = 5.0,
        label_noise: Annotated[float, typer.Option(help="Standard deviation of the noise on the labels.")] = 0.0,
        distractors: Annotated[int, typer.Option(help="Number of uninformative inputs.")] = 3,
        target_scale: Annotated[float, typer.Option(help="Factor on the labels.")] = 1.0,
        hidden: Annotated[int, typer.Option(help=_HIDDEN)] = 0,
        out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("runs", study.name),
        resume: Annotated[bool, typer.Option("--resume", help="Resume the run in that folder.")] = False,
        overwrite: Overwrite = False,
        quiet: Quiet = False,
        jobs: Annotated[
            int | None, typer.Option(min=1, help="Number of processes.", show_default="one per core")
        ] = None,
    ) -> None:
        from flexact.report.build import build, check_packages
        from flexact.studies.synthetic.runner import run

        chosen = PAPER_CANDIDATES if candidates is None else names(candidates) or ()
        options = Options(
            seeds=seeds,
            first_seed=first_seed,
            epochs=epochs,
            policy=policy,
            truths=study.truths if truths is None else names(truths) or (),
            candidates=chosen,
            models=study.models(chosen) if models is None else names(models) or (),
            slope=slope,
            label_noise=label_noise,
            distractors=distractors,
            target_scale=target_scale,
            hidden=hidden,
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

    return command
