"""The command line of the studies; `flexact.cli` is what runs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from flexact.config import PAPER_CANDIDATES
from flexact.studies.alpha import ALPHA
from flexact.studies.calling import again
from flexact.studies.corrections import CORRECTIONS
from flexact.studies.folder import TABLE
from flexact.studies.images.command import cifar
from flexact.studies.images.data_command import data
from flexact.studies.options import Options
from flexact.studies.overhead.command import overhead
from flexact.studies.picks.command import picks
from flexact.studies.progress import Progress
from flexact.studies.runner import Study, run
from flexact.studies.synthetic import SYNTHETIC
from flexact.studies.text.command import glue

app = typer.Typer(
    help="Flexible activation functions for PyTorch: the studies of the paper, reports of your own runs, and what this "
    "machine has.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
reproduce = typer.Typer(help="Run one of the paper's studies and write its folder.", no_args_is_help=True)
app.add_typer(reproduce, name="reproduce")

Names = list[str] | None
Seeds = Annotated[int | None, typer.Option(help="How many seeds.", show_default="the paper's number")]
FirstSeed = Annotated[int, typer.Option(help="The first of them.")]
Epochs = Annotated[int, typer.Option(help="Passes over the data.")]
PolicyName = Annotated[
    str,
    typer.Option(
        help="What the flexact-a… models and the corrections run: paper (the reading nearest its tables), literal (its "
        "formulas as they stand) or default (FlexConfig())."
    ),
]
Truths = Annotated[Names, typer.Option(help="The functions to find, separated by commas.", show_default="the paper's")]
Candidates = Annotated[Names, typer.Option(help="The functions to pick from.", show_default="the paper's five")]
Models = Annotated[Names, typer.Option(help="Only these models.", show_default="all of the study")]
Slope = Annotated[float, typer.Option(help="K in y = a(K·x₁).")]
LabelNoise = Annotated[float, typer.Option(help="Standard deviation of the noise on the labels.")]
Distractors = Annotated[int, typer.Option(help="Inputs that say nothing.")]
TargetScale = Annotated[float, typer.Option(help="A factor on the labels.")]
Hidden = Annotated[
    int,
    typer.Option(
        help="Width of a two-layer teacher and student, whose hidden activation is to be found; the student starts "
        "from its teacher's weights. 0 for the paper's one unit."
    ),
]
Out = Annotated[Path | None, typer.Option(help="The folder to write.", show_default="runs/<study>")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in that folder.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run in that folder.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes to use.", show_default="one a core")]


def _add(study: Study) -> None:
    """Make a study a command of `flexact reproduce`."""

    @reproduce.command(study.name, help=study.title + ".")
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
        chosen = PAPER_CANDIDATES if candidates is None else _names(candidates)
        options = Options(
            seeds=study.seeds if seeds is None else seeds,
            first_seed=first_seed,
            epochs=epochs,
            policy=policy,
            truths=study.truths if truths is None else _names(truths),
            candidates=chosen,
            models=study.models(chosen) if models is None else _names(models),
            slope=slope,
            label_noise=label_noise,
            distractors=distractors,
            target_scale=target_scale,
            hidden=hidden,
        )
        folder = Path("runs", study.name) if out is None else out
        progress = Progress(quiet)
        _check_report_packages()
        try:
            run(study, options, folder, resume=resume, overwrite=overwrite, jobs=jobs, progress=progress)
            with progress.during("building the page"):
                page = _build_report(folder)
        except KeyboardInterrupt:
            print(f"\ninterrupted; the models that are done are kept. Go on with: {again()}", file=sys.stderr)
            raise typer.Exit(130) from None
        if not quiet:
            print((folder / TABLE).read_text(encoding="utf-8"))
            print(f"Page: {page}")


for _study in (SYNTHETIC, ALPHA, CORRECTIONS):
    _add(_study)
reproduce.command("overhead")(overhead)
app.command()(data)
reproduce.command("cifar")(cifar)
reproduce.command("glue")(glue)
reproduce.command("picks")(picks)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A study's folder, or one that a Recorder wrote to.", show_default=False)],
) -> None:
    """Build figures and one self-contained page from a run."""
    with Progress().during("building the page"):
        page = _build_report(run)
    print(f"Page: {page}")


@app.command()
def doctor() -> None:
    """Say what this machine has: versions, devices, the kernels that run on each, optional packages."""
    from flexact.doctor import examine, show

    show(examine())


def _check_report_packages() -> None:
    from flexact.studies.report import check_packages

    check_packages()


def _build_report(folder: Path) -> Path:
    from flexact.studies.report import build

    page: Path = build(folder)
    return page


def _names(given: list[str] | None) -> tuple[str, ...]:
    """Names separated by commas, in one option or in several."""
    names = [name.strip() for part in given or [] for name in part.split(",")]
    return tuple(name for name in names if name)
