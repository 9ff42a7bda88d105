"""The lines of the table in docs/overhead.md: which rows they show, and the goals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cost_rows import first_run, sites
from cost_rows.resnets import FOURTEEN, MEMORY, MODES, STEP, TO_FIVE, case_of
from cost_rows.steps import PICKING, RUN

Key = tuple[str, str]
"""The case and the quantity of a row."""


class Entry(NamedTuple):
    """A row, and its goal: the maximum of its value, as a number or as the row that has it."""

    key: Key
    goal: float | Key = math.inf


class Line(NamedTuple):
    """A line of the table, with its entries next to each other."""

    title: str
    entries: Sequence[Entry]
    digits: int = 2


def _resnets(placement: str, way: str, quantity: str, goal: float = math.inf) -> list[Entry]:
    return [Entry((case_of(network, placement, way, "eager"), quantity), goal) for network in MODES]


def _without_triton(placement: str) -> list[Entry]:
    keys = [[(case_of(name, placement, way, "eager"), STEP) for way in ("measured", "plain")] for name in MODES]
    return [Entry(own, plain) for own, plain in keys]


def _resnet18(way: str, mode: str, goal: float) -> list[Entry]:
    return [Entry((case_of("resnet18", "all", way, mode), STEP), goal)]


def _network(case: str, goal_picking: float, goal_run: float) -> list[Entry]:
    return [Entry((case, PICKING), goal_picking), Entry((case, RUN), goal_run)]


def _waits(quantity: str, goal: float = math.inf) -> list[Entry]:
    return [Entry((case, quantity), goal) for case in (first_run.FUSED, first_run.DEFAULT)]


NOTHING = 0.1
"""The seconds up to which a wait counts as none."""

LINES = (
    Line("ResNet-18 / -34, eager, all sites, `fuse=True`", _resnets("all", "fused_bn", STEP, 1.15)),
    Line("the same, penultimate", _resnets("penultimate", "fused_bn", STEP, 1.03)),
    Line("the same, all sites, default (no `fuse`)", _resnets("all", "fused", STEP, 1.25)),
    Line("ResNet-18, compiled without a graph, `fuse=True`", _resnet18("fused_bn", "compiled", 1.05)),
    Line("ResNet-18, CUDA graph, `fuse=True`: 14 candidates relative to five", [Entry((FOURTEEN, TO_FIVE), 1.1)]),
    Line("ResNet-18 / -34, eager, without Triton, all sites", _without_triton("all")),
    Line("the same, penultimate", _without_triton("penultimate")),
    Line("plain torch, all sites", _resnets("all", "plain", STEP)),
    Line("plain torch, penultimate", _resnets("penultimate", "plain", STEP)),
    Line("ResNet-18, eager, all sites, through Inductor", _resnet18("compiled_form", "eager", 1.6)),
    Line("peak memory of ResNet-18 / -34, eager, `fuse=True`", _resnets("all", "fused_bn", MEMORY, 1.02)),
    Line("the same, default (no `fuse`)", _resnets("all", "fused", MEMORY, 1.15)),
    Line("MLP 64-64-64-10, batch of 64, a trial: step / run", _network("mlp", math.inf, 1.4)),
    Line("the same, a blend: step / run", _network("mlp-blend", math.inf, 1.4)),
    Line("Mixer, 4 blocks: step / run", _network("mixer", 1.3, 1.3)),
    Line("GPT, 4 blocks: step / run", _network("gpt", 1.3, 1.3)),
    Line("GPT with a custom candidate: step / run", _network("gpt-custom", 1.25, 1.3)),
    Line("U-Net, 2 levels: step / run", _network("unet", 1.3, 1.3)),
    Line("timm's `convnext_atto`: step / run", _network("convnext", 1.3, 1.3)),
    Line("timm's `mobilenetv3_small_100`: step / run", _network("mobilenet", 1.3, 1.3)),
    Line("timm's `resnet18`: step / run", _network("timm-resnet", 1.3, 1.3)),
    Line("physics-informed network, a trial: step / run", _network("physics-trial", 1.5, 1.5)),
    Line("the same, a blend: step / run", _network("physics-blend", 1.5, 1.5)),
    Line("a call of a site beyond that of a ReLU, µs", [Entry(sites.CALL, 60.0)], digits=0),
    Line(
        "policy, 8 sites, ms: logits move / hold still / a trial / committed",
        [Entry((sites.POLICY, phase), 0.15) for phase in sites.PHASES],
        3,
    ),
    Line("custom candidate, 2²⁰ + 1 elements: longest first step of a round, s", [Entry(first_run.STALL, 1.0)]),
    Line("first run, `fuse=True` / default: wait for builds at drops, s", _waits(first_run.DROPS, NOTHING)),
    Line("the same, at the commitment, s", _waits(first_run.COMMITMENT, NOTHING)),
    Line("the same, in evaluations, s", _waits(first_run.EVALUATIONS, NOTHING)),
    Line("the same on a GPU, at the first three steps, s", _waits(first_run.FIRST["cuda"])),
    Line(
        "first run on a CPU, at the first three steps, s",
        [Entry((first_run.DEFAULT, first_run.FIRST["cpu"]), 1.0)],
    ),
)

_GOALS = {entry.key: entry.goal for line in LINES for entry in line.entries}


def goal(key: Key, values: Mapping[Key, float]) -> float:
    """Return the maximum value of a row; infinite if it has no goal.

    values: the values of all rows.
    """
    found = _GOALS.get(key, math.inf)
    return found if isinstance(found, float) else values.get(found, math.inf)
