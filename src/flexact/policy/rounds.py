"""The steps that picking takes: the rounds in which a blend drops candidates, and the rungs of a trial."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from flexact.config import FlexConfig
from flexact.errors import FlexActError
from flexact.io.value_checks import MOST_STEPS


class Rung(NamedTuple):
    """One rung of a trial: how many candidates are tried in it, and for how many steps each has been trained then."""

    candidates: int
    until: int


@dataclass(frozen=True)
class Plan:
    """How the steps of a run are spent."""

    total_steps: int
    commit_step: int
    """The step from which on every site runs its pick alone; past the end if the policy never commits."""
    rungs: tuple[Rung, ...]
    """Of the trial; empty for a blend."""
    rewinds: bool
    """Whether the weights are put back where they were when the commitment comes."""

    @property
    def network_steps(self) -> int:
        """For how many steps the network that the run ends with has been trained with its picks alone."""
        own = self.rungs[-1].until if self.rungs else 0
        return self.total_steps - self.commit_step + own if self.rewinds else self.total_steps


def planned(k: int, config: FlexConfig, tries: bool, total_steps: int) -> Plan:
    """The plan of a run of this length, from k candidates. tries: by a trial, where the run is long enough for one, and
    not by a blend."""
    found = rungs(k, config, total_steps) if tries else []
    if found and trial_steps(found) <= min(_latest(config, total_steps), total_steps - 1):
        return Plan(total_steps, trial_steps(found), tuple(found), rewinds=True)
    commit_step = int(min(picking_steps(k, config, total_steps), total_steps + 1))
    left = total_steps - commit_step
    rewinds = 2 * left >= total_steps if config.rewind is None else config.rewind
    return Plan(total_steps, commit_step, (), rewinds)


def planned_for(k: int, config: FlexConfig, tries: bool, network_steps: int) -> Plan:
    """The plan of a run that trains its picks for so many steps, and picks in further ones.

    >>> from flexact import FlexConfig
    >>> planned_for(7, FlexConfig(), tries=True, network_steps=8_000).total_steps
    9155
    """
    never_ends = picking_steps(k, config, MOST_STEPS) >= MOST_STEPS
    if config.rewind is None:
        config = replace(config, rewind=not never_ends)
    plan = planned(k, config, tries, network_steps)
    tries = bool(plan.rungs)  # decided once: a longer run might have room for a trial where a shorter one has not
    if plan.rewinds and not tries and never_ends:
        raise FlexActError(
            f"network_steps={network_steps} are to be trained after the commitment, and with commit_at="
            f"{config.commit_at} no step is left then. Give FlexConfig a smaller commit_at, or set rewind=False."
        )
    while plan.network_steps < network_steps:
        plan = planned(k, config, tries, plan.total_steps + network_steps - plan.network_steps)
    return plan


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
    if rounds and config.round_length is not None:
        latest = min(latest, config.warmup * total_steps + config.round_length * rounds)
    return max(1, round(latest))


def drops(k: int, config: FlexConfig, total_steps: int, commit_step: int) -> dict[int, int]:
    """How many candidates are left from which step on: the steps are spaced evenly, and the last is the commitment."""
    left = left_after_rounds(k, config)
    start = config.warmup * total_steps
    span = commit_step - start
    return {max(1, round(start + span * (i + 1) / len(left))): count for i, count in enumerate(left)}


def rungs(k: int, config: FlexConfig, total_steps: int) -> list[Rung]:
    """The rungs of a trial of k candidates: half of them go on to the next, which is twice as long.

    The last two are compared after `FlexConfig.trial_steps`, or sooner where the run is too short for that; each
    candidate has one step in a rung at least.

    >>> from flexact import FlexConfig
    >>> [tuple(rung) for rung in rungs(7, FlexConfig(trial_steps=300), 8_000)]
    [(7, 75), (4, 150), (2, 300)]
    """
    counts = [k]
    while counts[-1] > 2:
        counts.append((counts[-1] + 1) // 2)
    last = config.trial_steps
    most = min(_latest(config, total_steps), total_steps - 1)
    while last > 1 and trial_steps(found := _rungs(counts, last)) > most:
        last -= 1
    return found if last > 1 else _rungs(counts, 1)


def trial_steps(found: list[Rung]) -> int:
    """How many steps a trial takes in all."""
    before = 0
    total = 0
    for candidates, until in found:
        total += candidates * (until - before)
        before = until
    return total


def _latest(config: FlexConfig, total_steps: int) -> float:
    """The last step of a run of this length that picking may take."""
    return (1.0 if config.commit_at is None else config.commit_at) * total_steps


def _rungs(counts: list[int], last: int) -> list[Rung]:
    longest = len(counts) - 1
    return [Rung(count, max(i + 1, last >> (longest - i))) for i, count in enumerate(counts)]
