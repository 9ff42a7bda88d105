"""The study's table in Markdown and its figures: our ratios to ReLU, and the paper's."""

from __future__ import annotations

from collections.abc import Mapping

from flexact.io.markdown_tables import markdown
from flexact.observe.figures.description import Bars, Panel
from flexact.observe.figures.picture import Picture
from flexact.studies.overhead.measurement import (
    BASELINE,
    EXTRACTED,
    INFERENCE,
    PARAMETERS,
    PEAK,
    SAVED,
    TO_COMPILED,
    TRAIN,
    Cell,
    Measurement,
    Measurements,
)
from flexact.studies.overhead.networks import WAYS
from flexact.studies.overhead.options import MODES, NETWORKS
from flexact.studies.overhead.paper import OVERHEAD

MODE_TITLES = {
    "eager": "Eager",
    "graph": "One CUDA graph a step",
    "compiled": "Compiled",
    "compiled_graph": "Compiled, one CUDA graph a step",
}
_PLACEMENTS = {BASELINE: "ReLU", "penultimate": "penultimate", "all": "all sites"}
_MEMORY = {PEAK: "peak allocated, MB", SAVED: "saved for backward, MB"}
_COLOURS = dict(zip(list(WAYS)[1:], ("#999999", "#e69f00", "#cc79a7", "#56b4e9", "#0072b2"), strict=True))

Found = Mapping[tuple[Cell, str], Measurement]


def written(found: Measurements, made: Mapping[str, str]) -> str:
    """The whole of table.md. made: what every row has in common, such as batch, device and date."""
    rounds = sorted({row.repeats for row in found.rows if row.quantity == TRAIN and row.value is not None}) or [0]
    repeats = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"{rounds[0]}"
    machine = ", ".join(f"{name} {value}" for name, value in made.items() if value)
    about = (
        f"{machine}. Images of 3×32×32, channels-last, five candidates, statistics on. Medians of {repeats} "
        "interleaved repeats, as many as the time allowed, with the 10th and 90th percentiles; ratios "
        "are to the same network with ReLU in the same mode, round by round."
    )
    sections = [section for mode in MODES if (section := _section(found.by_key, mode))]
    return "\n\n".join(["# What routing costs", about, *sections, *_errors(found)]) + "\n"


def pictures(found: Measurements) -> list[Picture]:
    """The figures that there are data for."""
    memory = PEAK if any(row.quantity == PEAK for row in found.rows) else SAVED
    made = [_ratios(found.by_key, "training", "Training step", TRAIN, 0)]
    made.append(_ratios(found.by_key, "memory", "Memory in training", memory, 2))
    return [picture for picture in made if picture is not None]


def _cells(found: Found, mode: str) -> list[Cell]:
    """The cells of a mode whose training was timed, as the paper orders them, the plainest way first."""
    cells = [cell for cell, quantity in found if cell.mode == mode and quantity == TRAIN]
    orders = list(NETWORKS), list(_PLACEMENTS), list(WAYS)
    return sorted(
        cells,
        key=lambda cell: [
            order.index(name) for order, name in zip(orders, (cell.network, cell.placement, cell.way), strict=True)
        ],
    )


def _section(found: Found, mode: str) -> str:
    cells = _cells(found, mode)
    if not cells:
        return ""
    memory = next((quantity for _, quantity in found if quantity in _MEMORY), PEAK)
    header = ["network", "way", "training, ms", "ratio", *(["to compiled ReLU"] if cells[0].captured else [])]
    header += ["paper's", "inference, ms", "ratio", "paper's", _MEMORY[memory], "ratio", "paper's", "extra parameters"]
    return f"## {MODE_TITLES[mode]}\n\n" + markdown(header, [_line(found, cell, memory) for cell in cells])


def _line(found: Found, cell: Cell, memory: str) -> list[str]:
    routed = cell.placement != BASELINE
    own, base = OVERHEAD[cell.network, cell.placement], OVERHEAD[cell.network, BASELINE]
    papers = [f"{value / relu:.2f}" if routed else "" for value, relu in zip(own[:3], base[:3], strict=True)]
    plain = Cell(cell.network, cell.placement, EXTRACTED if routed else BASELINE, cell.mode)
    train, inference, used = found[cell, TRAIN], found.get((plain, INFERENCE)), found.get((cell, memory))
    compiled, parameters = found.get((cell, TO_COMPILED)), found.get((cell, PARAMETERS))
    return [
        f"{cell.network}, {_PLACEMENTS[cell.placement]}",
        WAYS[cell.way].title if routed else "",
        _spread(train.value, train.p10, train.p90),
        _spread(train.ratio, train.ratio_p10, train.ratio_p90),
        *([_figure(compiled.value if compiled else None)] if cell.captured else []),
        papers[0],
        _spread(inference.value, inference.p10, inference.p90) if inference else "",
        _spread(inference.ratio, inference.ratio_p10, inference.ratio_p90) if inference else "",
        papers[1],
        f"{used.value:.1f}" if used else "",
        _figure(used.ratio if used else None),
        papers[2],
        f"{parameters.value:.0f}" if parameters and parameters.value else "",
    ]


def _ratios(found: Found, slug: str, title: str, quantity: str, papers: int) -> Picture | None:
    """Bars of a ratio by network and placement: a panel for each mode, with the paper's ratios beside ours."""
    panels = []
    for mode in MODES:
        cells = [cell for cell in _cells(found, mode) if (cell, quantity) in found and cell.placement != BASELINE]
        if not cells:
            continue
        labels = [
            (name, place) for name in dict.fromkeys(cell.network for cell in cells) for place in ("penultimate", "all")
        ]
        bars = []
        for way in [way for way in _COLOURS if any(cell.way == way for cell in cells)]:
            rows = [found.get((Cell(*label, way, mode), quantity)) for label in labels]
            bars.append(Bars(WAYS[way].title, [(row.ratio if row else None) or 0.0 for row in rows], _COLOURS[way]))
        paper = [OVERHEAD[label][papers] / OVERHEAD[label[0], BASELINE][papers] for label in labels]
        bars.append(Bars("the paper's", paper, "#222222"))
        panels.append(Panel(MODE_TITLES[mode], "ratio to ReLU", rows=[f"{n}, {p}" for n, p in labels], bars=bars))
    sentence = "Ratio to the same network with ReLU in the same mode; 1 costs nothing."
    return Picture(f"overhead-{slug}", title, sentence, panels, across=2) if panels else None


def _errors(found: Measurements) -> list[str]:
    """Each error once, with what could not be measured."""
    missing: dict[str, list[str]] = {}
    for row in found.rows:
        if row.error:
            cell = row.cell
            missing.setdefault(row.error, []).append(
                f"{row.quantity} of {cell.network} {cell.placement} {cell.way} {cell.mode}"
            )
    lines = [f"- {error} ({'; '.join(dict.fromkeys(what))})" for error, what in missing.items()]
    return ["## Not measured", "\n".join(lines)] if lines else []


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _spread(median: float | None, low: float | None, high: float | None) -> str:
    return "" if median is None or low is None or high is None else f"{median:.3f} ({low:.3f}–{high:.3f})"
