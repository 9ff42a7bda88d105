"""The command `flexact reproduce all`."""

from __future__ import annotations

import math
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from flexact.io.markdown_tables import counted, markdown
from flexact.io.result_folder import CONFIG, TABLE
from flexact.io.value_checks import check_known
from flexact.studies.everything import stages
from flexact.studies.everything.stages import Stage

_RESULTS = Path(__file__).resolve().parents[4] / "results"
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
    calls = [(stage, _call(stage, out, data, glue_data, shared)) for stage in stages.stages(budget)]
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
    if stage.study in ("cifar", "glue", "picks"):
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


def _plan(budget: str, calls: list[tuple[Stage, list[str]]], out: Path, data: Path, glue_data: Path) -> str:
    estimates = [stages.hours(stage, _RESULTS) for stage, _ in calls]
    total = math.fsum(one for one in estimates if not math.isnan(one))
    rows = [
        (str(len(stage.cells)), "-" if math.isnan(one) else f"{one:.2f}", shlex.join(["flexact", *call]))
        for (stage, call), one in zip(calls, estimates, strict=True)
    ]
    cells = counted(sum(len(stage.cells) for stage, _ in calls), "cell")
    folders = {"--data": data, "--glue-data": glue_data, "--out": out}
    words = [str(word) for option in folders.items() for word in option]
    cluster = shlex.join(["flexact", "reproduce", "all", "--budget", budget, *words, "--engine", "ray"])
    return (
        f"# All studies, budget {budget}\n\n{markdown(('cells', 'hours', 'command'), rows, words=('command',))}\n\n"
        f"{cells}, {total:.1f} hours if run sequentially, from the times in {_RESULTS}: measured on one NVIDIA H200 "
        "for the grids, and on a CPU for the synthetic studies. Finished cells are skipped.\n\n"
        "On a Ray cluster, whose machines must all see --out and the data under the same paths:\n\n"
        f"    {cluster} --address HOST:PORT"
    )
