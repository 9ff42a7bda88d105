"""The study's table in Markdown: the paper's figures beside ours, and the figures to reach."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flexact.studies.overhead.goals import goals
from flexact.studies.overhead.networks import BASELINE, WAYS
from flexact.studies.overhead.options import MODES
from flexact.studies.overhead.rows import LaunchRow, OperationRow, OverheadRow, ProfileRow, SweepRow
from flexact.studies.paper_tables import OVERHEAD
from flexact.studies.tables import markdown

MODE_TITLES = {
    "eager": "Eager",
    "graph": "One CUDA graph a step",
    "compiled": "Compiled",
    "compiled_graph": "Compiled, one CUDA graph a step",
}
_PLACEMENT_TITLES = {BASELINE: "ReLU", "penultimate": "penultimate", "all": "all sites"}


@dataclass
class Results:
    """Everything that was measured so far."""

    overhead: list[OverheadRow] = field(default_factory=list)
    operation: list[OperationRow] = field(default_factory=list)
    candidates: list[SweepRow] = field(default_factory=list)
    depth: list[SweepRow] = field(default_factory=list)
    launches: list[LaunchRow] = field(default_factory=list)
    profile: list[ProfileRow] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Stages that broke off, with their errors."""

    @property
    def has_routed(self) -> bool:
        """Whether a step of a routed network was timed at all."""
        return any(row.placement != BASELINE and row.train_ms is not None for row in self.overhead)

    def add_overhead(self, rows: Sequence[OverheadRow]) -> None:
        """Rows measured later take the place of earlier ones of the same cell, but for those that failed.

        Inference that was not measured again stays as it was.
        """
        known = {row.cell: row for row in self.overhead}
        for row in rows:
            before = known.get(row.cell)
            if before is None:
                known[row.cell] = row
            elif row.train_ms is not None:
                known[row.cell] = row if row.inference_ms is not None else _with_inference_of(before, row)
        self.overhead = list(known.values())


def _with_inference_of(before: OverheadRow, row: OverheadRow) -> OverheadRow:
    if before.inference_ms is None:
        return row
    names = [field.name for field in dataclasses.fields(row) if field.name.startswith("inference_")]
    error = "" if row.error.startswith("inference: ") else row.error
    return dataclasses.replace(row, error=error, **{name: getattr(before, name) for name in names})


def written(results: Results, made: Mapping[str, str]) -> str:
    """The whole of table.md."""
    first = results.overhead[0] if results.overhead else None
    parts = ["# What routing costs", _about(results.overhead, made)]
    if first is not None:
        parts += [section for mode in MODES if (section := _mode_section(results.overhead, mode))]
        if first.dtype == "bfloat16":  # a GPU's; the figures are set for one
            parts += _goal_section(results)
    parts += _operation_section(results.operation)
    parts += _sweep_section("Against the number of candidates", results.candidates, by_k=True)
    parts += _sweep_section("Against depth", results.depth, by_k=False)
    parts += _launch_section(results.launches)
    parts += _error_section(results)
    return "\n\n".join(parts) + "\n"


def _about(rows: Sequence[OverheadRow], made: Mapping[str, str]) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in made.items() if value)
    if not rows:
        return machine + "."
    row, rounds = rows[0], sorted({row.repeats for row in rows if row.train_ms is not None}) or [0]
    repeats = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"{rounds[0]}"
    return (
        f"{machine}. Batches of {row.batch} images of 3×32×32, {row.dtype}, channels-last, {row.width} channels in the "
        f"first stage, five candidates, statistics on. Medians of {repeats} interleaved repeats (overhead.csv says how "
        "many of each: as many as the time allowed), with the 10th and 90th percentiles; ratios are to the same "
        "network with ReLU in the same mode, round by round."
    )


def _mode_section(rows: Sequence[OverheadRow], mode: str) -> str:
    own = [row for row in rows if row.mode == mode and row.train_ms is not None]
    if not own:
        return ""
    memory = own[0].memory_kind or "memory"
    header = ["network", "way", "training, ms", "ratio"]
    if own[0].cell.captured:
        header.append("to compiled ReLU")
    header += ["paper's", "inference, ms", "ratio", "paper's", f"{memory}, MB", "ratio", "paper's", "extra parameters"]
    return f"## {MODE_TITLES[mode]}\n\n" + markdown(header, [_line(row) for row in _in_order(own)])


def _line(row: OverheadRow) -> list[str]:
    paper = OVERHEAD.get((row.network, row.placement))
    base = OVERHEAD.get((row.network, BASELINE))
    papers = ["", "", ""]
    if paper and base and row.placement != BASELINE:
        papers = [f"{own / relu:.2f}" for own, relu in zip(paper[:3], base[:3], strict=True)]
    title = _PLACEMENT_TITLES[row.placement]
    to_compiled = row.train_ratio_to_compiled_graph
    return [
        f"{row.network}, {title}",
        WAYS[row.way].title if row.way != BASELINE else "",
        _ms(row.train_ms, row.train_ms_p10, row.train_ms_p90),
        _ratio(row.train_ratio, row.train_ratio_p10, row.train_ratio_p90),
        *(["" if to_compiled is None else f"{to_compiled:.3f}"] if row.cell.captured else []),
        papers[0],
        _ms(row.inference_ms, row.inference_ms_p10, row.inference_ms_p90),
        _ratio(row.inference_ratio, row.inference_ratio_p10, row.inference_ratio_p90),
        papers[1],
        "" if row.memory_mb is None else f"{row.memory_mb:.1f}",
        "" if row.memory_ratio is None else f"{row.memory_ratio:.3f}",
        papers[2],
        str(row.extra_parameters or ""),
    ]


def _goal_section(results: Results) -> list[str]:
    rows = []
    for goal in goals(results.overhead, results.operation, results.candidates):
        verdict = {True: "reached", False: "not reached", None: "not measured"}[goal.reached]
        value = "" if goal.value is None else f"{goal.value:.3f}"
        rows.append([goal.figure, goal.network, f"≤ {goal.limit:.2f}", value, goal.found_in, verdict])
    header = ["figure", "network", "to reach", "ours", "way and mode", ""]
    note = (
        "Set for an H200 at batch 128, width 64 and five candidates, every site. A step's figures are those of one way "
        "in each network and mode: the library's one with the least median ratio to ReLU at all sites. Inference "
        "counts as 1.00 where the extracted network has the modules of that with ReLU and the ratio's spread reaches "
        "to within half a percent of 1."
    )
    return ["## Figures to reach", note, markdown(header, rows)]


def _operation_section(rows: Sequence[OperationRow]) -> list[str]:
    own = [row for row in rows if row.ms is not None]
    if not own:
        return []
    lines = [
        [
            WAYS[row.operation].title if row.operation in WAYS else row.operation,
            row.direction,
            row.mode,
            _ms(row.ms, row.ms_p10, row.ms_p90),
            _ratio(row.ratio, row.ratio_p10, row.ratio_p90),
            "" if row.gb_per_s is None else f"{row.gb_per_s:.0f}",
            "" if row.of_copy is None else f"{row.of_copy:.2f}",
        ]
        for row in own
    ]
    header = ["operation", "direction", "mode", "ms", "to ReLU", "GB/s", "of a copy's"]
    note = (
        f"{own[0].elements:,} elements of {own[0].dtype}, statistics on. GB/s counts the fewest bytes that a direction "
        "must move: h read and x written; h and δ read and ∂h written."
    )
    return ["## The operation alone", note, markdown(header, lines)]


def _sweep_section(title: str, rows: Sequence[SweepRow], by_k: bool) -> list[str]:
    own = [row for row in rows if row.ms is not None]
    if not own:
        return []
    lines = [
        [
            f"{row.what} {row.network}".strip(),
            WAYS[row.way].title,
            row.mode,
            str(row.candidates if by_k else row.sites),
            _ms(row.ms, row.ms_p10, row.ms_p90),
            _ratio(row.ratio, row.ratio_p10, row.ratio_p90),
            *([f"{row.ratio_to_five:.3f}" if row.ratio_to_five else ""] if by_k else []),
        ]
        for row in own
    ]
    header = ["", "way", "mode", "candidates" if by_k else "sites", "ms", "to ReLU"]
    return [f"## {title}", markdown([*header, *(["to five"] if by_k else [])], lines)]


def _launch_section(rows: Sequence[LaunchRow]) -> list[str]:
    own = [row for row in rows if not row.error]
    if not own:
        return []
    numbers: list[Callable[[LaunchRow], int | None]] = [
        lambda row: row.sites,
        lambda row: row.draw,
        lambda row: row.policy,
        lambda row: row.schedule,
        lambda row: row.step,
        lambda row: row.relu_step,
    ]
    lines = [[f"resnet{row.layers}", WAYS[row.way].title, *(str(one(row)) for one in numbers)] for row in own]
    header = ["network", "way", "sites", "draw", "policy", "schedule's step", "whole step", "whole step, ReLU"]
    note = f"How many {own[0].counted} each part of an eager training step has; the draw is one for all sites."
    return ["## Launches", note, markdown(header, lines)]


def _error_section(results: Results) -> list[str]:
    """Each error once, with what it kept from being measured."""
    missing: dict[str, list[str]] = {}
    for cell in results.overhead:
        missing.setdefault(cell.error, []).append(f"{cell.network} {cell.placement} {cell.way} {cell.mode}")
    for one in results.operation:
        missing.setdefault(one.error, []).append(f"operation {one.operation} {one.direction} {one.mode}")
    for point in (*results.candidates, *results.depth):
        missing.setdefault(point.error, []).append(
            f"{point.what} {point.network} {point.way} {point.mode} with {point.candidates} candidates"
        )
    for launch in results.launches:
        missing.setdefault(launch.error, []).append(f"launches of {launch.sites} sites {launch.way}")
    for stage, error in results.failures.items():
        missing.setdefault(error, []).append(stage)
    lines = [f"- {error} ({'; '.join(dict.fromkeys(what))})" for error, what in missing.items() if error]
    return ["## Not measured", "\n".join(lines)] if lines else []


def _in_order(rows: Sequence[OverheadRow]) -> list[OverheadRow]:
    """As the paper's table goes: by network, then ReLU, penultimate, all; the plainest way first."""
    networks = list(dict.fromkeys(row.network for row in rows))
    ways = list(WAYS)
    placements = list(_PLACEMENT_TITLES)
    return sorted(
        rows, key=lambda row: (networks.index(row.network), placements.index(row.placement), ways.index(row.way))
    )


def _ms(median: float | None, low: float | None, high: float | None) -> str:
    return "" if median is None or low is None or high is None else f"{median:.3f} ({low:.3f}–{high:.3f})"


def _ratio(median: float | None, low: float | None, high: float | None) -> str:
    return "" if median is None or low is None or high is None else f"{median:.3f} ({low:.3f}–{high:.3f})"
