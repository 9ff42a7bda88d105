"""The command `flexact reproduce all`: the paper's studies and the benchmark of picks, and how long they take."""

from __future__ import annotations

import dataclasses
import math
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from flexact.io.markdown_tables import counted, markdown
from flexact.io.result_folder import CONFIG, TABLE
from flexact.io.value_checks import check_known
from flexact.studies.cifar.methods import USUAL
from flexact.studies.cifar.protocol import BUDGETS
from flexact.studies.cifar.protocol import Grid as ImageGrid
from flexact.studies.estimates import device_name, hours, slowdowns
from flexact.studies.glue.data import TASKS
from flexact.studies.glue.protocol import Grid as TextGrid
from flexact.studies.grid.study import Choices
from flexact.studies.picks.protocol import Grid as PicksGrid
from flexact.studies.synthetic.studies import STUDIES

MAIN = ("relu", "gelu", "flexact-penultimate", "flexact-all")
"""The methods of CIFAR that have the most seeds."""
PICKING = ("relu", "flexact-penultimate", "flexact-all")
"""The methods that pick, and their baseline."""
RIVALS = tuple(method for method in USUAL if method not in MAIN)
FIRST_SEEDS = {"cifar": 200, "picks": 100}
"""The first seeds. Lower ones were seen when candidates were chosen, and in CIFAR also when the policy was."""
GRIDS = ("cifar", "glue", "picks")
"""The studies whose cells an engine runs."""
PAPERS_FIVE = ("--candidates", "relu,sigmoid,tanh,leaky_relu,identity")


@dataclass(frozen=True)
class Stage:
    """One call of `flexact reproduce STUDY`."""

    study: str
    cells: Sequence[Any] = ()
    """A grid's cells, or the names of the models of a synthetic study."""
    arguments: tuple[str, ...] = ()
    folder: str = ""
    """The subfolder of --out, if it is not the study's name; stages with the same one add cells to the same grid."""
    epochs: int = 100
    """The number of epochs of a cell if its measured time is per epoch; 1 if the time is per cell."""

    @property
    def place(self) -> str:
        return self.folder or self.study


def stages(budget: str) -> list[Stage]:
    """The stages of a budget: short trains CIFAR for 30 epochs, and paper for 200 with 10 seeds of every method."""

    def images(
        methods: tuple[str, ...],
        seeds: int,
        models: tuple[str, ...] = ("resnet18",),
        datasets: tuple[str, ...] = ("cifar100",),
        arguments: tuple[str, ...] = (),
        folder: str = "",
    ) -> Stage:
        grid = ImageGrid(datasets, models, methods, seeds=seeds, first_seed=FIRST_SEEDS["cifar"])
        return _grid("cifar", grid, ("--epochs", str(BUDGETS[budget]), *arguments), folder, BUDGETS[budget])

    if budget == "short":
        paper = [
            images(MAIN, 10),
            images(PICKING, 10, arguments=PAPERS_FIVE, folder="cifar-papers-five"),
            images(RIVALS, 3),
            images(MAIN, 3, models=("resnet34",)),
            images(MAIN, 3, datasets=("cifar10",)),
            _grid("glue", TextGrid(seeds=5)),
            _grid("glue", TextGrid(("cola", "mrpc"), seeds=5), ("--from-scratch",), "glue-from-scratch"),
        ]
    else:
        models, datasets = ("resnet18", "resnet34"), ("cifar10", "cifar100")
        paper = [
            images(USUAL, 10, models, datasets),
            images(PICKING, 10, models, datasets, PAPERS_FIVE, "cifar-papers-five"),
            _grid("glue", TextGrid(tuple(TASKS), seeds=5), ("--model", "bert-base-uncased")),
        ]
    synthetic = [Stage(name, study.defaults.models) for name, study in STUDIES.items()]
    return [*synthetic, Stage("overhead"), *paper, _grid("picks", PicksGrid(seeds=5, first_seed=FIRST_SEEDS["picks"]))]


def _grid(study: str, grid: Choices, arguments: tuple[str, ...] = (), folder: str = "", epochs: int = 1) -> Stage:
    """The stage of a grid, whose options name its cells."""
    for name, value in dataclasses.asdict(grid).items():
        arguments += (f"--{name.replace('_', '-')}", ",".join(value) if isinstance(value, tuple) else str(value))
    return Stage(study, grid.cells, arguments, folder, epochs)


_RESULTS = Path(__file__).resolve().parents[3] / "results"
"""The measurements of a source checkout."""


def all_studies(
    budget: Annotated[
        str, typer.Option(help="short (CIFAR for 30 epochs) or paper (200 epochs, 10 seeds, BERT-base).")
    ] = "short",
    plan: Annotated[bool, typer.Option("--plan", help="Only print the cells, the hours and the commands.")] = False,
    out: Annotated[Path, typer.Option(help="Parent folder; each study writes to a subfolder.")] = Path("runs", "all"),
    data: Annotated[Path, typer.Option(help="The folder with CIFAR; see `flexact data`.")] = Path("data"),
    glue_data: Annotated[
        Path, typer.Option(envvar="FLEXACT_GLUE", help="The folder with GLUE's task folders (CoLA, MRPC, …).")
    ] = Path("data", "glue"),
    engine: Annotated[str, typer.Option(help="local (processes) or ray (a cluster), for the grids.")] = "local",
    address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster.", show_default="the one that is running")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Cells that run at the same time.", show_default="one per device")
    ] = None,
) -> None:
    """Run all studies one after the other, or print what they would run and how long it would take.

    Interrupted studies are resumed, and finished ones are skipped.
    """
    check_known("budget", budget, ("short", "paper"))
    check_known("engine", engine, ("local", "ray"))
    shared = {"--engine": engine if engine != "local" else None, "--address": address, "--jobs": jobs}
    calls = [(stage, _call(stage, out, data, glue_data, shared)) for stage in stages(budget)]
    if plan:
        print(_plan(budget, calls, out, data, glue_data))
        return
    failed = []
    for stage, call in calls:
        print(f"\n== flexact {shlex.join(call)}", flush=True)
        code = _run(stage, call, out / stage.place)
        if code >= 128 or code < 0:  # stopped by a signal
            raise typer.Exit(code if code >= 128 else 128 - code)
        if code:
            failed.append(stage.study)
    if failed:
        print(f"flexact: incomplete: {', '.join(dict.fromkeys(failed))}; run the command again.", file=sys.stderr)
        raise typer.Exit(1)


def _call(stage: Stage, out: Path, data: Path, glue_data: Path, shared: Mapping[str, object]) -> list[str]:
    """The arguments of `flexact` for a stage."""
    options: dict[str, object] = {}
    if stage.study in GRIDS:
        options = {"--data": glue_data if stage.study == "glue" else data, **shared}
    options["--out"] = out / stage.place
    words = [str(word) for name, value in options.items() if value for word in (name, value)]
    return ["reproduce", stage.study, *stage.arguments, *words]


def _run(stage: Stage, call: list[str], folder: Path) -> int:
    """Run a stage in a process of its own, and return its exit code."""
    if stage.study == "overhead" and (folder / TABLE).is_file():
        return 0
    if (folder / CONFIG).is_file():
        call = [*call, "--overwrite" if stage.study == "overhead" else "--resume"]
    return subprocess.run([sys.executable, "-m", "flexact", *call]).returncode


def _hours(stage: Stage) -> float:
    """The estimated hours of a stage on the device that measured `_RESULTS`."""
    if "--model" in stage.arguments:  # another encoder than the measured one
        return math.nan
    return hours(stage.study, stage.cells, stage.epochs, _RESULTS)


def _plan(budget: str, calls: list[tuple[Stage, list[str]]], out: Path, data: Path, glue_data: Path) -> str:
    slower = slowdowns(_RESULTS)
    estimates = [_hours(stage) * slower.get(stage.study, math.nan) for stage, _ in calls]
    total = math.fsum(one for one in estimates if not math.isnan(one))
    rows = [
        (str(len(stage.cells)), "-" if math.isnan(one) else f"{one:.2f}", shlex.join(["flexact", *call]))
        for (stage, call), one in zip(calls, estimates, strict=True)
    ]
    factors = ", ".join(f"{slower[study]:.3g} ({study})" for study in GRIDS if study in slower)
    cells = counted(sum(len(stage.cells) for stage, _ in calls), "cell")
    folders = {"--data": data, "--glue-data": glue_data, "--out": out}
    words = [str(word) for option in folders.items() for word in option]
    cluster = shlex.join(["flexact", "reproduce", "all", "--budget", budget, *words, "--engine", "ray"])
    return (
        f"# All studies, budget {budget}\n\n{markdown(('cells', 'hours', 'command'), rows, words=('command',))}\n\n"
        f"{cells}, {total:.1f} hours if run sequentially on this device ({device_name()}), without the rows that have "
        f"no estimate. The times in {_RESULTS} were measured on one NVIDIA H200, and on a CPU for the synthetic "
        f"studies; they are multiplied by {factors}: the ratio of a training step here to one there. Finished cells "
        "are skipped.\n\n"
        "On a Ray cluster, whose machines must all see --out and the data under the same paths:\n\n"
        f"    {cluster} --address HOST:PORT"
    )
