"""Measuring one network: training time, memory and inference time of every placement, way and mode."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch

from flexact.studies.cuda_graph import study_stream
from flexact.studies.overhead.measurement import (
    BASELINE,
    EXTRACTED,
    INFERENCE,
    PARAMETERS,
    SAME,
    TO_COMPILED,
    TRAIN,
    Cell,
    Measurements,
)
from flexact.studies.overhead.networks import FIVE, build, extracted, logit_count, same_modules
from flexact.studies.overhead.options import NETWORKS, Options
from flexact.studies.overhead.steps import Batch, Inference, Memory, Training, release
from flexact.studies.overhead.timing import Deadline, Run, interleaved, ratios, spread


def planned(network: str, modes: Sequence[str], ways: Sequence[str]) -> list[Cell]:
    """The cells of a network, the most important first, since time may run out.

    torch.compile does not look into the library's own operators. So the compiled modes measure only the fastest way,
    and at all sites also the first, plain one.

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


def measure(network: str, options: Options, deadline: Deadline, found: Measurements) -> None:
    """Add the measurements of a network to `found`; what fails is added as rows with an error."""
    cells = planned(network, options.modes, options.ways)
    batch = Batch(options.batch, options.where, options.dtype)
    if options.device == "cuda":
        precompile(cells, options)
    _train(cells, options, batch, deadline.share(0.75), found)
    _infer(cells, options, batch, deadline, found)
    release(options.where)


def precompile(cells: Iterable[Cell], options: Options) -> None:
    """Compile all networks at the same time, each in its own process, into torch's cache on disk.

    Compiling them one after another would take longer than the whole study. Errors are ignored here: they occur again,
    and are reported, when the network is measured.
    """
    networks = dict.fromkeys(replace(cell, mode="compiled") for cell in cells if cell.compiled)
    if networks:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(len(networks), mp_context=context) as pool:
            for future in [pool.submit(_compile, cell, options) for cell in networks]:
                future.exception()


def _compile(cell: Cell, options: Options) -> None:
    with study_stream(options.where):
        batch = Batch(options.batch, options.where, options.dtype)
        Training(_built(cell, options), cell.way, batch, compiled=True).warm_up()
        if cell.placement == BASELINE:
            Inference(_built(cell, options), batch, compiled=True).warm_up()


def _train(cells: Sequence[Cell], options: Options, batch: Batch, deadline: Deadline, found: Measurements) -> None:
    contenders: dict[Cell, Run] = {}
    memory: dict[Cell, float] = {}
    for group in _by_network(cells):
        first = group[0]
        try:
            deadline.check()
            meter = Memory(options.where)
            network = _built(first, options)
            training = Training(network, first.way, batch, first.compiled)
            training.warm_up()
        except Exception as error:
            found.fail(group, TRAIN, error)
            continue
        for cell in group:
            try:
                memory[cell] = meter.of(training.capture if cell.captured else training.step)
                contenders[cell] = training.replay if cell.captured else training.step
                found.add(cell, PARAMETERS, logit_count(network))
            except Exception as error:
                found.fail([cell], TRAIN, error)
    for cell, megabytes in memory.items():
        base = memory.get(_relu(cell))
        found.add(cell, meter.quantity, megabytes, megabytes / base if base else None)
    for group in _timed_together(contenders):
        times = _timed({cell: contenders[cell] for cell in group}, TRAIN, options, deadline, found)
        compiled = times.get(replace(_relu(group[0]), mode="compiled_graph"))
        for cell, values in times.items():
            if cell.captured and compiled:
                found.add(cell, TO_COMPILED, ratios(values, compiled).median)


def _infer(cells: Sequence[Cell], options: Options, batch: Batch, deadline: Deadline, found: Measurements) -> None:
    """Time what extraction leaves behind, once for each placement."""
    contenders: dict[Cell, Run] = {}
    plain = _built(_relu(cells[0]), replace(options, device="cpu"))
    ways = {True: BASELINE, False: EXTRACTED}
    remaining = dict.fromkeys(replace(cell, way=ways[cell.placement == BASELINE]) for cell in cells)
    for group in _by_network(list(remaining)):
        first = group[0]
        try:
            deadline.check()
            network = extracted(_built(replace(first, way=BASELINE), options))
            inference = Inference(network, batch, first.compiled)
            inference.warm_up()
        except Exception as error:
            found.fail(group, INFERENCE, error)
            continue
        for cell in group:
            try:
                if cell.captured:
                    inference.capture()
                contenders[cell] = inference.replay if cell.captured else inference.step
                found.add(cell, SAME, same_modules(network, plain))
            except Exception as error:
                found.fail([cell], INFERENCE, error)
    for group in _timed_together(contenders):
        _timed({cell: contenders[cell] for cell in group}, INFERENCE, options, deadline, found)


def _timed(
    runs: dict[Cell, Run], quantity: str, options: Options, deadline: Deadline, found: Measurements
) -> dict[Cell, list[float]]:
    """Time contenders against each other and add their times, with ratios to ReLU in the same mode."""
    times, failed = interleaved(runs, options.repeats, options.where, options.burst_ms, deadline)
    for cell, error in failed.items():
        found.fail([cell], quantity, error)
    for cell, values in times.items():
        base = times.get(_relu(cell))
        found.add_times(cell, quantity, spread(values), ratios(values, base) if base else None, len(values))
    return times


def _built(cell: Cell, options: Options) -> torch.nn.Module:
    return build(NETWORKS[cell.network], options.width, cell.placement, cell.way, FIVE, options.where)


def _by_network(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Groups of cells that share one network, which is run directly before it is captured.

    The baselines come first, then the networks that are not compiled.
    """
    groups: dict[tuple[str, str, bool], list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: (cell.compiled, cell.placement != BASELINE)):
        groups.setdefault((cell.placement, cell.way, cell.compiled), []).append(cell)
    return [sorted(group, key=lambda cell: cell.captured) for group in groups.values()]


def _timed_together(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Groups by mode; all replayed graphs are one group, since the compiled ReLU among them is a baseline of all."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault("graph" if cell.captured else cell.mode, []).append(cell)
    return list(groups.values())


def _relu(cell: Cell) -> Cell:
    """The baseline of a cell."""
    return replace(cell, placement=BASELINE, way=BASELINE)
