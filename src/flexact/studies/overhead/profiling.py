"""Launches against depth, and where a step's time goes on the device and, when it is run eagerly, on the host.

Done after everything is timed: what a profiler leaves behind slows launches down.
"""

from __future__ import annotations

import dataclasses

from flexact.sites import sites_of
from flexact.studies.overhead.host import functions_of_run
from flexact.studies.overhead.launches import Kernel, count, kernels_of_run
from flexact.studies.overhead.networks import BASELINE, build, kernels_of
from flexact.studies.overhead.options import CANDIDATES, NETWORKS, PAPERS_K, Options
from flexact.studies.overhead.rows import LaunchRow, ProfileRow, told
from flexact.studies.overhead.steps import Batch, Training
from flexact.studies.overhead.sweeps import layers

FIVE = CANDIDATES[:PAPERS_K]
MOST_KERNELS = 25
OTHERS = "(others)"
HOST = "eager, on the host"


def launches(options: Options) -> list[LaunchRow]:
    """Of a step, and of the draw and the policy in it, for each depth and way: eagerly, as the host launches them."""
    batch = Batch(options.batch, options.where, options.dtype)
    rows: list[LaunchRow] = []
    for blocks in options.depths:
        relu = Training(build(blocks, options.width, BASELINE, BASELINE, FIVE, options.where), BASELINE, batch, False)
        relu.warm_up()
        if not rows:
            count(relu.step, options.where)  # a profiler's first session may miss what it sees first
        relu_step = count(relu.step, options.where)
        for way in options.sweep_ways:
            counted = "kernels" if options.device == "cuda" else "operators"
            row = LaunchRow(layers(blocks), sum(blocks), way, counted, relu_step=relu_step)
            try:
                rows.append(_counted(row, blocks, way, batch, options))
            except Exception as error:
                rows.append(dataclasses.replace(row, error=told(error)))
    return rows


def _counted(row: LaunchRow, blocks: tuple[int, ...], way: str, batch: Batch, options: Options) -> LaunchRow:
    network = build(blocks, options.width, "all", way, FIVE, options.where)
    training = Training(network, way, batch, compiled=False)
    training.warm_up()
    schedule = training.schedule
    assert schedule is not None
    router = sites_of(network)[0].router
    with kernels_of(way, options.where):
        step = count(training.step, options.where)
        draw = count(lambda: router.refresh(True), options.where)
        with batch.autocast():
            out = network(batch.images)
        out.float().square().mean().backward()  # gives the logits gradients, for the policy to work on
        policy = count(lambda: schedule.before_optimizer_step(training.optimizer), options.where)
    return dataclasses.replace(row, draw=draw, policy=policy, schedule=count(schedule.step, options.where), step=step)


def profile(options: Options) -> list[ProfileRow]:
    """The kernels of a step of each network, with ReLU, with all sites routed in each way but the plain one, and with
    the most candidates in the last of these; and the Python functions of an eager step."""
    batch = Batch(options.batch, options.where, options.dtype)
    mode = options.sweep_modes[-1]
    ways = options.sweep_ways
    points = [(BASELINE, 1), *((way, PAPERS_K) for way in ways), (ways[-1], max(options.ks))]
    rows = []
    for network in options.models:
        for way, k in points:
            placement = BASELINE if way == BASELINE else "all"
            try:
                built = build(NETWORKS[network], options.width, placement, way, CANDIDATES[:k], options.where)
                training = Training(built, way, batch, compiled=False)
                training.warm_up()
                found = {HOST: _longest(functions_of_run(training.step))}
                if mode == "graph":
                    training.capture()
                run = training.replay if mode == "graph" else training.step
                found[mode] = _longest(kernels_of_run(run, options.where))
            except Exception as error:
                found = {mode: [Kernel(f"({told(error)})", 0, 0.0)]}
            rows += [
                ProfileRow(network, placement, way, k, where, kernel.name[:160], kernel.calls, kernel.microseconds)
                for where, kernels in found.items()
                for kernel in kernels
            ]
    return rows


def _longest(kernels: list[Kernel]) -> list[Kernel]:
    """The longest of them, and all others together."""
    rest = kernels[MOST_KERNELS:]
    if not rest:
        return kernels
    together = Kernel(OTHERS, sum(one.calls for one in rest), sum(one.microseconds for one in rest))
    return [*kernels[:MOST_KERNELS], together]
