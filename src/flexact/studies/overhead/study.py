"""The overhead study from beginning to end: networks, files, and the time it may take."""

from __future__ import annotations

from pathlib import Path

from flexact.errors import missing_extra
from flexact.io import csv_rows
from flexact.io.atomic_files import write_whole
from flexact.io.result_folder import TABLE, VERSION, enter, write_config
from flexact.report.build import Report
from flexact.report.page import Section
from flexact.studies.cuda_graph import study_stream
from flexact.studies.overhead.measure import measure
from flexact.studies.overhead.measurement import BASELINE, FILE, Measurement, Measurements
from flexact.studies.overhead.networks import FIVE, build
from flexact.studies.overhead.options import NETWORKS, Options
from flexact.studies.overhead.steps import Batch, Training, release
from flexact.studies.overhead.table import pictures, written
from flexact.studies.overhead.timing import Deadline
from flexact.studies.progress import Progress
from flexact.studies.provenance import processor, provenance, versions

NAME = "overhead"
TITLE = "Overhead: the paper's table of costs"


def run(options: Options, folder: Path, *, overwrite: bool = False, progress: Progress | None = None) -> Measurements:
    """Measure everything that was asked for and write the folder; what fails becomes a row with its error."""
    _check_matplotlib()
    made = provenance()
    if options.device == "cpu":
        made["device"] = f"{processor()}, one thread"
    config = {
        "flexact_study": VERSION,
        "study": NAME,
        "title": TITLE,
        "options": options.to_dict(),
        "versions": versions(),
        **{name: made[name] for name in ("device", "commit", "date")},
    }
    enter(folder, NAME, resume=False, overwrite=overwrite, writes=(FILE,))
    write_config(folder, config)
    sizes = {"batch": str(options.batch), "width": str(options.width), "dtype": str(options.dtype)[6:]}
    made, found = sizes | made, Measurements()
    progress = Progress(quiet=True) if progress is None else progress
    with study_stream(options.where), progress.over([float(sum(NETWORKS[name])) for name in options.models]):
        _wake(options)
        deadline = Deadline(options.minutes * 60)
        for number, name in enumerate(options.models):
            measure(name, options, deadline.share(1 / (len(options.models) - number)), found)
            csv_rows.write(folder / FILE, Measurement, found.rows, made)
            write_whole(folder / TABLE, written(found, made))
            progress.finished(number, name)
    Report(folder, TITLE, {}, [Section(TITLE, "", pictures(found))], {}).write_figures()
    return found


def _wake(options: Options) -> None:
    """Let libraries allocate what they keep, and build the kernels of all ways, before anything is measured."""
    batch = Batch(options.batch, options.where, options.dtype)
    for way in (BASELINE, *options.ways):
        placement = BASELINE if way == BASELINE else "all"
        try:
            network = build(NETWORKS[options.models[0]], options.width, placement, way, FIVE, options.where)
            Training(network, way, batch, compiled=False).warm_up()
        except Exception:
            if way == BASELINE:
                raise
            continue  # it fails again when it is measured, and is reported there
        finally:
            release(options.where)


def _check_matplotlib() -> None:
    """Raise before minutes of measuring, not after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise missing_extra("matplotlib", "plots") from None
