"""How long picking takes: the rounds in which a blend drops candidates, and the rungs of a trial."""

from __future__ import annotations

from typing import NamedTuple

from flexact.config import FlexConfig


class Rung(NamedTuple):
    """One rung of a trial: how many candidates are tried in it, and for how many steps each has been trained then."""

    count: int
    until: int


def left_after_rounds(k: int, config: FlexConfig) -> list[int]:
    """How many of k candidates are left after each round of a blend; the last round leaves one.

    >>> from flexact import FlexConfig
    >>> left_after_rounds(7, FlexConfig(eliminate="half")), left_after_rounds(4, FlexConfig(eliminate="one"))
    ([4, 2, 1], [3, 2, 1])
    """
    how = config.elimination
    left = []
    while k > 1 and how != "none":
        k = (k + 1) // 2 if how == "half" else k - 1
        left.append(k)
    return left


def picking_steps(k: int, config: FlexConfig, total_steps: int) -> float:
    """How many steps a run of this length takes to pick by a blend of k candidates; infinite if it never commits."""
    if config.commit_at is None:
        return float("inf")
    latest = config.commit_at * total_steps
    rounds = len(left_after_rounds(k, config))
    if rounds and config.round_steps is not None:
        latest = min(latest, config.warmup * total_steps + config.round_steps * rounds)
    return max(1, round(latest))


def drops(k: int, config: FlexConfig, total_steps: int, commit_step: int) -> dict[int, int]:
    """How many candidates are left from which step on: the steps are spaced evenly, and the last is the commitment."""
    left = left_after_rounds(k, config)
    start = config.warmup * total_steps
    span = commit_step - start
    return {max(1, round(start + span * (i + 1) / len(left))): count for i, count in enumerate(left)}


def rungs(k: int, config: FlexConfig, total_steps: int) -> list[Rung]:
    """The rungs of a trial of k candidates: half of them go on to the next, which is twice as long.

    The last two are compared after `FlexConfig.trial_steps`, or sooner where the run is too short for that.

    >>> from flexact import FlexConfig
    >>> [tuple(rung) for rung in rungs(7, FlexConfig(trial_steps=300), 8_000)]
    [(7, 75), (4, 150), (2, 300)]
    """
    counts = [k]
    while counts[-1] > 2:
        counts.append((counts[-1] + 1) // 2)
    last = config.trial_steps
    most = (1.0 if config.commit_at is None else config.commit_at) * total_steps
    while last > 1 and trial_steps(found := _rungs(counts, last)) > most:
        last -= 1
    return found if last > 1 else _rungs(counts, 1)


def trial_steps(found: list[Rung]) -> int:
    """How many steps a trial takes in all."""
    before = 0
    total = 0
    for count, until in found:
        total += count * (until - before)
        before = until
    return total


def _rungs(counts: list[int], last: int) -> list[Rung]:
    longest = len(counts) - 1
    return [Rung(count, max(i + 1, last >> (longest - i))) for i, count in enumerate(counts)]
