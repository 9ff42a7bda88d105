"""The overhead study from beginning to end: stages, files, the time it may take."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexact.errors import FlexActError, missing_extra
from flexact.studies.overhead import operation, profiling, sweeps, training
from flexact.studies.overhead import rows as files
from flexact.studies.overhead.deadline import Deadline
from flexact.studies.overhead.figures import pictures
from flexact.studies.overhead.networks import BASELINE, build
from flexact.studies.overhead.options import NETWORKS, Options
from flexact.studies.overhead.precompile import precompile
from flexact.studies.overhead.steps import Batch, Training, study_stream
from flexact.studies.overhead.table import Results, written
from flexact.studies.progress import Progress
from flexact.studies.provenance import processor, provenance, versions
from flexact.studies.report import Report
from flexact.studies.report_page import Section
from flexact.studies.store import CONFIG, TABLE, VERSION
from flexact.writing import write_whole

NAME = "overhead"
TITLE = "Overhead: the paper's table of costs"


@dataclass(frozen=True)
class Stage:
    """One part of the study; after each, all files are written."""

    name: str
    seconds: float
    """What it takes, roughly, on the device of the options."""
    run: Callable[[Deadline], None]
    slack: float = 1.5
    """How much more than its share of the time left it may take."""


def run(options: Options, folder: Path, *, overwrite: bool = False, progress: Progress | None = None) -> Results:
    """Measure everything that was asked for and write the folder; what fails is told in the rows."""
    _check_matplotlib()
    _open(folder, overwrite)
    made = provenance()
    if options.device == "cpu":
        made["device"] = f"{processor()}, one thread"
    write_whole(folder / CONFIG, json.dumps(_configuration(options, made), indent=2) + "\n")
    results = Results()
    stages = _stages(options, results)
    progress = Progress(quiet=True) if progress is None else progress
    with study_stream(options.where), progress.over([stage.seconds for stage in stages]):
        _wake(options)
        deadline = Deadline(options.minutes * 60)
        for number, stage in enumerate(stages):
            remaining = sum(later.seconds for later in stages[number:])
            part = min(1.0, stage.slack * stage.seconds / remaining)
            try:
                stage.run(deadline.share(part, late=number == 0))  # the first network is what the rest builds on
            except Exception as error:
                results.failures[stage.name] = files.told(error)
            training.release(options.where)
            _write(folder, results, made)
            progress.finished(number, stage.name)
    Report(folder, TITLE, {}, [Section(TITLE, "", pictures(results))], {}).write_figures()
    return results


def _stages(options: Options, results: Results) -> list[Stage]:
    """What compiles late, so that the rest is there whatever that costs; what profiles last."""
    direct = [mode for mode in options.modes if not mode.startswith("compiled")]
    compiled = [mode for mode in options.modes if mode.startswith("compiled")]
    if "compiled_graph" in compiled and "graph" in direct:
        compiled = ["graph", *compiled]  # again: they are timed against the compiled ReLU
    unit = 1.0 if options.device == "cuda" else 0.3

    def table(network: str, modes: list[str], seconds: float, slack: float) -> Stage:
        def measured(deadline: Deadline) -> None:
            results.add_overhead(training.measure(network, modes, options, deadline))

        return Stage(f"{network}, {', '.join(modes)}", seconds * unit * sum(NETWORKS[network]), measured, slack)

    def part(name: str, seconds: float, measure: Callable[[Deadline], list[Any]]) -> Stage:
        return Stage(name, seconds * unit, lambda deadline: setattr(results, name, measure(deadline)))

    stages = [table(network, direct, 3.0, slack=1.5) for network in options.models if direct]
    stages += [
        part("operation", 20, lambda deadline: operation.measure(options, deadline)),
        part("candidates", 60, lambda deadline: sweeps.against_candidates(options, deadline)),
        part("depth", 30, lambda deadline: sweeps.against_depth(options, deadline)),
    ]
    if compiled and options.device == "cuda":
        cells = [cell for network in options.models for cell in training.planned(network, compiled, options.ways)]
        stages.append(Stage("compiling", 80, lambda deadline: precompile(cells, options, deadline), slack=1.0))
    stages += [table(network, compiled, 5.0, slack=1.0) for network in options.models if compiled]
    stages.append(part("launches", 20, lambda deadline: profiling.launches(options)))
    if options.device == "cuda":
        stages.append(part("profile", 20, lambda deadline: profiling.profile(options)))
    return stages


def _wake(options: Options) -> None:
    """Let libraries take the memory that they keep, so that it is not counted as the first contender's, and build the
    kernels of all ways, so that the first network's share of the time does not go there."""
    batch = Batch(options.batch, options.where, options.dtype)
    for way in (BASELINE, *options.ways):
        placement = BASELINE if way == BASELINE else "all"
        try:
            network = build(NETWORKS[options.models[0]], options.width, placement, way, training.FIVE, options.where)
            Training(network, way, batch, compiled=False).warm_up()
        except Exception:
            if way == BASELINE:
                raise
            continue  # it fails again in its own row, and is told there
        finally:
            training.release(options.where)


def _write(folder: Path, results: Results, made: dict[str, str]) -> None:
    for name, rows in (
        (files.OVERHEAD, results.overhead),
        (files.OPERATION, results.operation),
        (files.CANDIDATES, results.candidates),
        (files.DEPTH, results.depth),
        (files.LAUNCHES, results.launches),
        (files.PROFILE, results.profile),
    ):
        files.write(folder / name, rows, made)
    write_whole(folder / TABLE, written(results, made))


def _open(folder: Path, overwrite: bool) -> None:
    """Make the folder, or clear what an earlier run of this study left in it."""
    if folder.exists() and not folder.is_dir():
        raise FlexActError(f"{folder} is a file; give --out a folder.")
    if folder.exists() and any(folder.iterdir()):
        if not _holds_this_study(folder):
            raise FlexActError(f"{folder} is not empty and holds no run of this study; give --out another folder.")
        if not overwrite:
            raise FlexActError(
                f"{folder} holds a run of this study already; replace it with --overwrite, or give another --out."
            )
        for path in (*folder.glob("*.csv"), folder / TABLE, folder / "report.html", folder / CONFIG):
            path.unlink(missing_ok=True)
        shutil.rmtree(folder / "figures", ignore_errors=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FlexActError(f"cannot write to {folder}: {error.strerror}; give another --out.") from None


def _holds_this_study(folder: Path) -> bool:
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("study") == NAME


def _configuration(options: Options, made: dict[str, str]) -> dict[str, Any]:
    return {
        "flexact_study": VERSION,
        "study": NAME,
        "title": TITLE,
        "options": options.to_dict(),
        "versions": versions(),
        **{name: made[name] for name in ("device", "commit", "date")},
    }


def _check_matplotlib() -> None:
    """Now rather than after minutes of measuring."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise missing_extra("matplotlib", "plots") from None
