"""The study's table in Markdown: our ratios to ReLU next to the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flexact.io.markdown_tables import markdown
from flexact.studies.cifar_resnets import BLOCKS
from flexact.studies.overhead.options import (
    BASELINE,
    MODES,
    PARAMETERS,
    PEAK,
    TO_COMPILED,
    TRAIN,
    WAYS,
    Cell,
    Measurement,
    by_key,
)

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
_MODES = dict(
    zip(MODES, ("Eager", "One CUDA graph per step", "Compiled", "Compiled, one CUDA graph per step"), strict=True)
)
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
    sections = [section for mode in MODES if (section := _section(by_key(rows), mode))]
    return "\n\n".join(["# What routing costs", about, *sections, *_errors(rows)]) + "\n"


def _section(found: Found, mode: str) -> str:
    """Return the table of a mode, in the order of the paper and of WAYS."""
    order = [Cell(network, placement, way, mode) for network in BLOCKS for placement in _PLACEMENTS for way in WAYS]
    cells = [cell for cell in order if (cell, TRAIN) in found]
    if not cells:
        return ""
    header = ["network", "way", "training, ms", "ratio", *(["to compiled ReLU"] if cells[0].captured else [])]
    header += ["paper's", "peak allocated, MB", "ratio", "paper's", "extra parameters"]
    return f"## {_MODES[mode]}\n\n" + markdown(header, [_line(found, cell) for cell in cells])


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
