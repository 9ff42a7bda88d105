"""The paper's table: training, inference and memory of each network, placement, way and mode."""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from flexact.sites import sites_of
from flexact.studies.overhead.deadline import Deadline
from flexact.studies.overhead.memory import Memory
from flexact.studies.overhead.networks import BASELINE, build, extracted, logit_count, same_modules
from flexact.studies.overhead.options import CANDIDATES, NETWORKS, PAPERS_K, Options
from flexact.studies.overhead.rows import Cell, OverheadRow, told, with_times
from flexact.studies.overhead.steps import Batch, Inference, Training
from flexact.studies.overhead.timing import Run, interleaved, ratios, spread

FIVE = CANDIDATES[:PAPERS_K]
COMPILED_GRAPH = "compiled_graph"


def planned(network: str, modes: Sequence[str], ways: Sequence[str]) -> list[Cell]:
    """The cells of a network, what matters most first: time may run out.

    Compiled, only the fastest way is measured, and in all places the first one, as one writes it: the compiler does not
    look into the others' operators.

    >>> [(cell.placement, cell.way) for cell in planned("resnet18", ["eager"], ["plain", "closed_form", "fused"])]
    [('relu', 'relu'), ('all', 'fused'), ('all', 'closed_form'), ('penultimate', 'fused'), ('all', 'plain'),
     ('penultimate', 'closed_form'), ('penultimate', 'plain')]
    """
    ranked = [(float(rank), "all", way) for rank, way in enumerate(reversed(ways))]
    ranked += [(rank + 1.5, "penultimate", way) for rank, _, way in ranked]
    cells = [Cell(network, placement, way, mode) for _, placement, way in sorted(ranked) for mode in modes]
    worth_compiling = {("all", ways[0]), ("all", ways[-1]), ("penultimate", ways[-1])}
    routed = [cell for cell in cells if not cell.compiled or (cell.placement, cell.way) in worth_compiling]
    return [*(Cell(network, BASELINE, BASELINE, mode) for mode in modes), *routed]


def measure(network: str, modes: Sequence[str], options: Options, deadline: Deadline) -> list[OverheadRow]:
    """Build the cells of a network side by side and time them against each other; failures are rows too."""
    table = Table(planned(network, modes, options.ways), options)
    batch = Batch(options.batch, options.where, options.dtype)
    kept_for_inference = 0.25 * deadline.left()  # whatever training takes beyond its share
    _train(table, batch, deadline.share(0.75))
    _infer(table, batch, deadline.at_least(kept_for_inference))
    release(options.where)
    return table.rows()


class Table:
    """Rows that become complete bit by bit."""

    def __init__(self, cells: Iterable[Cell], options: Options) -> None:
        self.options = options
        self._fields: dict[Cell, dict[str, Any]] = {cell: {} for cell in cells}

    @property
    def cells(self) -> list[Cell]:
        return list(self._fields)

    def add(self, cell: Cell, **fields: Any) -> None:
        self._fields[cell].update(fields)

    def fail(self, cells: Iterable[Cell], error: BaseException, doing: str) -> None:
        """Note an error, the first of each cell."""
        for cell in cells:
            self._fields[cell].setdefault("error", f"{doing}: {told(error)}")

    def built(self, cell: Cell) -> bool:
        """Whether there is a network of this cell."""
        return "sites" in self._fields[cell]

    def rows(self) -> list[OverheadRow]:
        options = self.options
        shared = {
            "batch": options.batch,
            "width": options.width,
            "dtype": str(options.dtype).removeprefix("torch."),
        }
        return [
            OverheadRow(**dataclasses.asdict(cell), **{**shared, **fields}) for cell, fields in self._fields.items()
        ]


def _train(table: Table, batch: Batch, deadline: Deadline) -> None:
    options = table.options
    blocks = NETWORKS[table.cells[0].network]
    plain = build(blocks, options.width, BASELINE, BASELINE, FIVE, torch.device("cpu"))
    contenders: dict[Cell, Run] = {}
    memory: dict[Cell, float] = {}
    for cells in _by_network(table.cells):
        first, start = cells[0], time.monotonic()
        try:
            deadline.check()
            meter = Memory(options.where)
            network = build(blocks, options.width, first.placement, first.way, FIVE, options.where)
            about = {
                "sites": len(sites_of(network)),
                "extra_parameters": logit_count(network),
                "same_modules": same_modules(extracted(network), plain),
                "memory_kind": meter.kind,
            }
            training = Training(network, first.way, batch, first.compiled)
            training.warm_up()
        except Exception as error:
            table.fail(cells, error, "building")
            continue
        for cell in cells:
            table.add(cell, **about)
            try:
                memory[cell] = meter.of(training.capture if cell.captured else training.step)
                contenders[cell] = training.replay if cell.captured else training.step
            except Exception as error:
                table.fail([cell], error, "capturing" if cell.captured else "running")
        deadline.took(time.monotonic() - start)
    for cell, megabytes in memory.items():
        base = memory.get(_baseline(cell))
        table.add(cell, memory_mb=megabytes, memory_ratio=megabytes / base if base else None)
    for group in _timed_together(contenders):
        times = _fill(table, {cell: contenders[cell] for cell in group}, "train", lambda cell: cell, deadline)
        compiled_relu = times.get(_baseline(group[0], COMPILED_GRAPH))
        for cell, values in times.items():
            if cell.captured and compiled_relu:
                table.add(cell, train_ratio_to_compiled_graph=ratios(values, compiled_relu).median)


def _infer(table: Table, batch: Batch, deadline: Deadline) -> None:
    """Time what extraction leaves behind: once for each placement, and given to the rows of all its ways."""
    options = table.options
    blocks = NETWORKS[table.cells[0].network]
    contenders: dict[Cell, Run] = {}

    def extracted_cell(cell: Cell) -> Cell:
        return dataclasses.replace(cell, way=BASELINE)

    for cells in _by_network(list(dict.fromkeys(map(extracted_cell, table.cells)))):
        first, start = cells[0], time.monotonic()
        try:
            deadline.check()
            routed = build(blocks, options.width, first.placement, BASELINE, FIVE, options.where)
            inference = Inference(extracted(routed), batch, first.compiled)
            inference.warm_up()
        except Exception as error:
            table.fail([cell for cell in table.cells if extracted_cell(cell) in cells], error, "inference")
            continue
        for run in cells:
            try:
                if run.captured:
                    inference.capture()
                contenders[run] = inference.replay if run.captured else inference.step
            except Exception as error:
                table.fail([cell for cell in table.cells if extracted_cell(cell) == run], error, "capturing inference")
        deadline.took(time.monotonic() - start)
    for group in _timed_together(contenders):
        _fill(table, {cell: contenders[cell] for cell in group}, "inference", extracted_cell, deadline)


def _fill(
    table: Table, runs: dict[Cell, Run], prefix: str, run_of: Callable[[Cell], Cell], deadline: Deadline
) -> dict[Cell, list[float]]:
    """Time contenders against each other, and fill in the times and ratios of the rows that each stands for."""
    options = table.options
    times, failed = interleaved(runs, options.repeats, options.where, options.burst_ms, deadline)
    for cell in table.cells:
        run = run_of(cell)
        if run in failed:
            table.fail([cell], failed[run], f"timing ({prefix})")
        if run not in times or not table.built(cell):
            continue
        table.add(cell, **with_times(spread(times[run]), f"{prefix}_ms"))
        if prefix == "train":
            table.add(cell, repeats=len(times[run]))
        base = times.get(_baseline(run))
        if base:
            table.add(cell, **with_times(ratios(times[run], base), f"{prefix}_ratio"))
    return times


def _by_network(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that one network serves, compiled once: run directly first, then captured.

    The baselines come first, then what takes little time to build.
    """
    groups: dict[tuple[str, str, bool], list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: (cell.placement != BASELINE, cell.compiled)):
        groups.setdefault((cell.placement, cell.way, cell.compiled), []).append(cell)
    return [sorted(group, key=lambda cell: cell.captured) for group in groups.values()]


def _timed_together(cells: Iterable[Cell]) -> list[list[Cell]]:
    """By mode; those that are replayed from graphs all together, since the compiled ReLU among them is a baseline."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault("graph" if cell.captured else cell.mode, []).append(cell)
    return list(groups.values())


def _baseline(cell: Cell, mode: str = "") -> Cell:
    return Cell(cell.network, BASELINE, BASELINE, mode or cell.mode)


def release(device: torch.device) -> None:
    """Let go of what a stage left: compiled code, graphs, cached memory."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
