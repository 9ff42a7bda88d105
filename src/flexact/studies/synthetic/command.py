"""The commands `flexact reproduce synthetic`, `alpha` and `corrections`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from flexact.config import PAPER_CANDIDATES
from flexact.io.result_folder import TABLE
from flexact.studies.calling import again
from flexact.studies.grid.command import Names, Overwrite, Quiet, names
from flexact.studies.progress import Progress
from flexact.studies.synthetic.options import Options
from flexact.studies.synthetic.studies import Study

Seeds = Annotated[int | None, typer.Option(help="Number of seeds.", show_default="the paper's number")]
FirstSeed = Annotated[int, typer.Option(help="The first seed.")]
Epochs = Annotated[int, typer.Option(help="Passes over the data.")]
PolicyName = Annotated[
    str,
    typer.Option(
        help="Policy of the flexact-a… models and of the corrections: paper (the reading closest to its tables), "
        "literal (its formulas taken literally) or default (FlexConfig())."
    ),
]
Truths = Annotated[Names, typer.Option(help="The functions to find, separated by commas.", show_default="the paper's")]
Candidates = Annotated[Names, typer.Option(help="The candidates.", show_default="the paper's five")]
Models = Annotated[Names, typer.Option(help="The models to train.", show_default="all models of the study")]
Slope = Annotated[float, typer.Option(help="K in y = a(K·x₁).")]
LabelNoise = Annotated[float, typer.Option(help="Standard deviation of the noise on the labels.")]
Distractors = Annotated[int, typer.Option(help="Number of uninformative inputs.")]
TargetScale = Annotated[float, typer.Option(help="Factor on the labels.")]
Hidden = Annotated[
    int,
    typer.Option(
        help="Width of a two-layer teacher and student; the student starts from its teacher's weights and must find "
        "the hidden activation. 0 for the paper's single unit."
    ),
]
Out = Annotated[Path | None, typer.Option(help="The folder to write.", show_default="runs/<study>")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the run in that folder.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Number of processes.", show_default="one per core")]


def command_of(study: Study) -> Callable[..., None]:
    """Return the command of `flexact reproduce` that runs a study."""

    def command(
        seeds: Seeds = None,
        first_seed: FirstSeed = 0,
        epochs: Epochs = 100,
        policy: PolicyName = "paper",
        truths: Truths = None,
        candidates: Candidates = None,
        models: Models = None,
        slope: Slope = 5.0,
        label_noise: LabelNoise = 0.0,
        distractors: Distractors = 3,
        target_scale: TargetScale = 1.0,
        hidden: Hidden = 0,
        out: Out = None,
        resume: Resume = False,
        overwrite: Overwrite = False,
        quiet: Quiet = False,
        jobs: Jobs = None,
    ) -> None:
        from flexact.report.build import build, check_packages
        from flexact.studies.synthetic.runner import run

        chosen = PAPER_CANDIDATES if candidates is None else names(candidates) or ()
        options = Options(
            seeds=study.seeds if seeds is None else seeds,
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
        folder = Path("runs", study.name) if out is None else out
        progress = Progress(quiet)
        check_packages()
        try:
            run(study, options, folder, resume=resume, overwrite=overwrite, jobs=jobs, progress=progress)
            with progress.during("building the page"):
                page = build(folder)
        except KeyboardInterrupt:
            print(f"\nInterrupted. The finished models are kept; resume with: {again()}", file=sys.stderr)
            raise typer.Exit(130) from None
        if not quiet:
            print((folder / TABLE).read_text(encoding="utf-8"))
            print(f"Page: {page}")

    return command
