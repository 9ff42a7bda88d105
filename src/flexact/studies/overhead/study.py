"""The overhead study: measures time and memory of a training step, and writes overhead.csv and table.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from flexact.io import csv_rows
from flexact.io.atomic_files import write_whole
from flexact.io.markdown_tables import markdown
from flexact.io.result_folder import TABLE, enter, write_config
from flexact.routing.sites import sites_of
from flexact.studies.cifar_resnets import BLOCKS
from flexact.studies.cuda_graph import study_stream
from flexact.studies.overhead.options import (
    BASELINE,
    FILE,
    MODES,
    PARAMETERS,
    PEAK,
    TO_COMPILED,
    TRAIN,
    WAYS,
    Cell,
    Measurement,
    Options,
    failed,
)
from flexact.studies.overhead.timing import Run, allocated, interleaved, peak_mb, ratios, release, spread
from flexact.studies.overhead.training import Batch, Training, build
from flexact.studies.progress import Progress
from flexact.studies.provenance import processor, provenance, run_config

PAPER: dict[tuple[str, str], tuple[float, float, int]] = {
    ("resnet18", "relu"): (22.599, 713, 0),
    ("resnet34", "relu"): (41.529, 1195, 0),
    ("resnet18", "penultimate"): (28.966, 713, 5),
    ("resnet34", "penultimate"): (44.691, 1196, 5),
    ("resnet18", "all"): (40.688, 1057, 40),
    ("resnet34", "all"): (66.384, 1839, 80),
}
"""The paper's overhead (tab:performance_benchmarking) by network and placement: training in ms per batch of 128,
memory in MB, extra parameters."""
_PLACEMENTS = {BASELINE: "ReLU", "penultimate": "penultimate", "all": "all sites"}

Found = Mapping[tuple[Cell, str], Measurement]


def written(rows: Sequence[Measurement], made: Mapping[str, str]) -> str:
    """Return the text of table.md. made: columns with the same value in all rows, such as batch, device and date."""
    repeats = max((row.repeats for row in rows), default=0)
    machine = ", ".join(f"{name} {value}" for name, value in made.items() if value)
    about = (
        f"{machine}. Images of 3×32×32, channels-last, five candidates, statistics on. Medians of {repeats} "
        "interleaved repeats, with the 10th and 90th percentiles; ratios are to the same network with ReLU in the "
        "same mode, round by round."
    )
    found = {(row.cell, row.quantity): row for row in rows if not row.error}
    sections = [section for mode in MODES if (section := _section(found, mode))]
    return "\n\n".join(["# What routing costs", about, *sections, *_errors(rows)]) + "\n"


def _section(found: Found, mode: str) -> str:
    """Return the table of a mode, in the order of the paper and of WAYS."""
    order = [Cell(network, placement, way, mode) for network in BLOCKS for placement in _PLACEMENTS for way in WAYS]
    cells = [cell for cell in order if (cell, TRAIN) in found]
    if not cells:
        return ""
    header = ["network", "way", "training, ms", "ratio", *(["to compiled ReLU"] if cells[0].captured else [])]
    header += ["paper's", "peak allocated, MB", "ratio", "paper's", "extra parameters"]
    return f"## {MODES[mode]}\n\n" + markdown(header, [_line(found, cell) for cell in cells])


def _line(found: Found, cell: Cell) -> list[str]:
    routed = cell.placement != BASELINE
    own, base = PAPER[cell.network, cell.placement], PAPER[cell.network, BASELINE]
    papers = [f"{value / relu:.2f}" if routed else "" for value, relu in zip(own[:2], base[:2], strict=True)]
    empty = Measurement(*cell, "")
    train = found[cell, TRAIN]
    used = found.get((cell, PEAK), empty)
    compiled, parameters = found.get((cell, TO_COMPILED), empty), found.get((cell, PARAMETERS), empty)
    return [
        f"{cell.network}, {_PLACEMENTS[cell.placement]}",
        WAYS[cell.way].title if routed else "",
        _spread(train.value, train.p10, train.p90),
        _spread(train.ratio, train.ratio_p10, train.ratio_p90),
        *([_figure(compiled.value)] if cell.captured else []),
        papers[0],
        _figure(used.value, digits=1),
        _figure(used.ratio),
        papers[1],
        _figure(parameters.value or None, digits=0),
    ]


def _errors(rows: Sequence[Measurement]) -> list[str]:
    """Return a section with each error once and the measurements that it prevented."""
    missing: dict[str, list[str]] = {}
    for row in rows:
        if row.error:
            missing.setdefault(row.error, []).append(f"{row.quantity} of {' '.join(row.cell)}")
    lines = [f"- {error} ({'; '.join(dict.fromkeys(what))})" for error, what in missing.items()]
    return ["## Not measured", "\n".join(lines)] if lines else []


def _figure(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _spread(median: float | None, low: float | None, high: float | None) -> str:
    return "" if median is None or low is None or high is None else f"{median:.3f} ({low:.3f}–{high:.3f})"


NAME = "overhead"
TITLE = "Overhead: the paper's table of costs"
TIMED_TOGETHER = (("eager",), ("compiled",), ("graph", "compiled_graph"))
"""Groups of modes. All graphs are one group, because the compiled ReLU network is a baseline for all of them."""


def run(
    options: Options, folder: Path, *, overwrite: bool = False, progress: Progress | None = None
) -> list[Measurement]:
    """Measure all networks and write the folder. A measurement that fails becomes a row with its error."""
    made = provenance()
    if options.device == "cpu":
        made["device"] = f"{processor()}, one thread"
    enter(folder, NAME, resume=False, overwrite=overwrite, writes=(FILE,))
    write_config(folder, run_config(NAME, TITLE, options=dataclasses.asdict(options), device=made["device"]))
    made = {"batch": str(options.batch), "width": str(options.width), "dtype": str(options.dtype)[6:]} | made
    rows: list[Measurement] = []
    progress = Progress(quiet=True) if progress is None else progress
    with study_stream(options.where), progress.over(len(options.models)):
        for name in options.models:
            rows += measure(name, options)
            csv_rows.write(folder / FILE, Measurement, rows, made)
            progress.finished(name)
    write_whole(folder / TABLE, written(rows, made))
    return rows


def measure(network: str, options: Options) -> list[Measurement]:
    """Return the measurements of one network."""
    batch = Batch(options.batch, options.where, options.dtype)
    first = build(BLOCKS[network], options.width, BASELINE, BASELINE, options.where)
    Training(first, BASELINE, batch, compiled=False).warm_up()  # libraries allocate memory that they keep
    rows: list[Measurement] = []
    for modes in TIMED_TOGETHER:
        cells = planned(network, [mode for mode in modes if mode in options.modes], options.ways)
        rows += _measured_together(cells, options, batch)
        release(options.where)
    return rows


def planned(network: str, modes: Sequence[str], ways: Sequence[str]) -> list[Cell]:
    """Return the cells of a network; the baselines come first.

    torch.compile does not optimise the library's own operators. So the compiled modes measure only the last of
    `ways`, and, with all activations routed, also the first.

    >>> [(cell.placement, cell.way) for cell in planned("resnet18", ["compiled"], ["plain", "closed_form", "fused"])]
    [('relu', 'relu'), ('penultimate', 'fused'), ('all', 'plain'), ('all', 'fused')]
    """
    routed = [Cell(network, place, way, mode) for place in ("penultimate", "all") for way in ways for mode in modes]
    compilable = {("all", ways[0]), ("all", ways[-1]), ("penultimate", ways[-1])}
    routed = [cell for cell in routed if not cell.compiled or (cell.placement, cell.way) in compilable]
    return [*(Cell(network, BASELINE, BASELINE, mode) for mode in modes), *routed]


def _measured_together(cells: Sequence[Cell], options: Options, batch: Batch) -> list[Measurement]:
    """Measure memory and time of a training step of several networks, which are timed against each other."""
    rows: list[Measurement] = []
    runs: dict[Cell, Run] = {}
    memory: dict[Cell, float | None] = {}
    for cell in cells:
        try:
            before = allocated(options.where)
            network = build(BLOCKS[cell.network], options.width, cell.placement, cell.way, options.where)
            training = Training(network, cell.way, batch, cell.compiled)
            training.warm_up()
            work = training.capture if cell.captured else training.step
            memory[cell] = used = peak_mb(work, options.where, before)
        except Exception as error:
            rows.append(failed(cell, error))
            continue
        runs[cell] = training.step
        logits = sum(site.logits.numel() for site in sites_of(network))
        rows.append(Measurement(*cell, PARAMETERS, float(logits)))
        if used is not None:
            base = memory.get(cell.baseline)
            rows.append(Measurement(*cell, PEAK, used, ratio=used / base if base else None))
    times, errors = interleaved(runs, options.repeats, options.where)
    rows += [failed(cell, error) for cell, error in errors.items()]
    for cell, values in times.items():
        row = Measurement(*cell, TRAIN, *spread(values))._replace(repeats=len(values))
        if cell.baseline in times:
            ratio = ratios(values, times[cell.baseline])
            row = row._replace(ratio=ratio.median, ratio_p10=ratio.low, ratio_p90=ratio.high)
        rows.append(row)
        compiled = times.get(cell.baseline._replace(mode="compiled_graph"))
        if compiled:
            rows.append(Measurement(*cell, TO_COMPILED, ratios(values, compiled).median))
    return rows
