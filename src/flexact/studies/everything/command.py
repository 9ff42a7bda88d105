"""The command `flexact reproduce all`."""

from __future__ import annotations

import math
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexact.io.markdown_tables import counted, markdown
from flexact.io.result_folder import CONFIG, TABLE
from flexact.io.value_checks import check_known

if TYPE_CHECKING:
    from flexact.studies.everything.stages import Stage

BUDGETS = ("short", "paper")
GRIDS = ("cifar", "glue", "picks")
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
    results: Annotated[
        Path, typer.Option(help="The folder with the measurements for --plan.", show_default="that of the checkout")
    ] = _RESULTS,
) -> None:
    """Run all studies one after the other, or print what they would run and how long it would take.

    A study that was interrupted is resumed, and one that is done is not run again.
    """
    from flexact.studies.everything.stages import stages

    check_known("budget", budget, BUDGETS)
    check_known("engine", engine, ("local", "ray"))
    shared = {"--engine": engine if engine != "local" else None, "--address": address, "--jobs": jobs}
    calls = [(stage, _call(stage, out, data, glue_data, shared)) for stage in stages(budget)]
    if plan:
        print(_plan(budget, calls, results, out))
        return
    failed = []
    for stage, call in calls:
        print(f"\n== {stage.study}: {stage.about}", flush=True)
        code = _run(stage, call, out / stage.place)
        if code >= 128 or code < 0:  # stopped by a signal
            raise typer.Exit(code if code >= 128 else 128 - code)
        if code:
            failed.append(stage.study)
    if failed:
        print(f"flexact: not complete: {', '.join(dict.fromkeys(failed))}; run the command again.", file=sys.stderr)
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
    begun = (folder / CONFIG).is_file()
    if stage.study == "overhead":
        if begun and (folder / TABLE).is_file():
            return 0
        call = [*call, "--overwrite"]
    elif begun:
        call = [*call, "--resume"]
    return subprocess.run([sys.executable, "-m", "flexact", *call]).returncode


def _plan(budget: str, calls: list[tuple[Stage, list[str]]], results: Path, out: Path) -> str:
    import torch

    from flexact.studies.everything.times import estimate
    from flexact.studies.provenance import processor

    present = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    estimates = [estimate(stage, results, present) for stage, _ in calls]
    rows = [
        [
            stage.study,
            stage.about,
            str(len(stage.cells)) if stage.cells else "-",
            "-" if math.isnan(one.hours) else f"{one.hours:.2f}",
            one.device or "-",
            one.note,
        ]
        for (stage, _), one in zip(calls, estimates, strict=True)
    ]
    header = ("study", "runs", "cells", "hours", "measured on", "note")
    cells = counted(sum(len(stage.cells) for stage, _ in calls), "cell")
    hours = math.fsum(one.hours for one in estimates if not math.isnan(one.hours))
    parts = [f"# All studies, budget {budget}", markdown(header, rows, words=("runs", "measured on", "note"))]
    parts.append(
        f"{cells}, {hours:.1f} hours if run sequentially, estimated from {results}. Finished cells are skipped. Stages "
        "without an estimate are not counted."
    )
    others = sorted({one.device for one in estimates if one.device and one.device != present})
    if others:
        parts.append(
            f"This machine has {present}. Hours that were measured on {' or '.join(others)} are for that device, and "
            "only a rough estimate for this one."
        )
    count = torch.cuda.device_count()
    if count > 1:
        parts.append(f"On the {count} GPUs of this machine the grids take about {1 / count:.0%} of their hours.")
    lines = "\n".join("    " + shlex.join(["flexact", *call]) for _, call in calls)
    cluster = shlex.join(["flexact", "reproduce", "all", "--budget", budget, "--out", str(out), "--engine", "ray"])
    parts += [
        f"The commands, one after the other:\n\n{lines}",
        "On a Ray cluster, whose machines must all see --out and the data under the same paths:\n\n"
        f"    {cluster} --address HOST:PORT",
    ]
    return "\n\n".join(parts)
