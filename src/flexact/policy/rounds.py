"""The plan of a run: the rounds in which a blend drops candidates, or the rungs of a trial."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from flexact.config import FlexConfig
from flexact.errors import FlexActError
from flexact.io.value_checks import MAX_STEPS


class Rung(NamedTuple):
    """One rung of a trial: its number of candidates, and the steps of each candidate at which it starts and ends."""

    candidates: int
    start: int
    until: int


@dataclass(frozen=True)
class Plan:
    """How a run with k candidates divides its steps."""

    k: int
    config: FlexConfig
    total_steps: int
    commit_step: int
    """The step at which every site commits to its pick; past the end if the policy never commits."""
    rungs: tuple[Rung, ...]
    """The rungs of the trial; empty for a blend."""
    rewinds: bool
    """Whether the commitment restores earlier weights."""

    @property
    def network_steps(self) -> int:
        """The number of steps that train the final network."""
        own = self.rungs[-1].until if self.rungs else 0
        return self.total_steps - self.commit_step + own if self.rewinds else self.total_steps

    @property
    def warmup_steps(self) -> float:
        return self.config.warmup * self.total_steps

    @cached_property
    def rounds(self) -> int:
        """The number of elimination rounds; k − 1 if nothing is eliminated."""
        return len(left_after_rounds(self.k, self.config)) or self.k - 1

    @cached_property
    def round_steps(self) -> float:
        """The length of a round, even if nothing is eliminated."""
        return max((min(self.commit_step, self.total_steps) - self.warmup_steps) / self.rounds, 1.0)


def planned(k: int, config: FlexConfig, tries: bool, total_steps: int) -> Plan:
    """Return the plan of a run of this length with k candidates.

    tries: whether to pick by a trial if the run is long enough for one; otherwise by a blend.
    """
    found = rungs(k, config, total_steps) if tries else []
    if found and trial_steps(found) <= _latest(config, total_steps):
        return Plan(k, config, total_steps, trial_steps(found), tuple(found), rewinds=True)
    commit_step = int(min(picking_steps(k, config, total_steps), total_steps + 1))
    rewinds = 2 * (total_steps - commit_step) >= total_steps if config.rewind is None else config.rewind
    return Plan(k, config, total_steps, commit_step, (), rewinds)


def planned_for(k: int, config: FlexConfig, tries: bool, network_steps: int) -> Plan:
    """Return the plan of a run that trains its final network for `network_steps`, plus the steps for picking.

    >>> from flexact import FlexConfig
    >>> planned_for(7, FlexConfig(), tries=True, network_steps=8_000).total_steps
    9155
    """
    never_commits = picking_steps(k, config, MAX_STEPS) >= MAX_STEPS
    if config.rewind is None:
        config = replace(config, rewind=not never_commits)
    plan = planned(k, config, tries, network_steps)
    tries = bool(plan.rungs)  # fixed here, so that the longer run does not switch to a trial
    if plan.rewinds and not tries and never_commits:
        raise FlexActError(
            f"network_steps={network_steps} needs steps after the commitment, but commit_at={config.commit_at} leaves "
            "none. Give FlexConfig a smaller commit_at, or set rewind=False."
        )
    while plan.network_steps < network_steps:
        plan = planned(k, config, tries, plan.total_steps + network_steps - plan.network_steps)
    return plan


def left_after_rounds(k: int, config: FlexConfig) -> list[int]:
    """Return the number of candidates that are left after each round of a blend; the last round leaves one.

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
    """Return the step at which a blend of k candidates commits; infinite if it never does."""
    if config.commit_at is None:
        return float("inf")
    latest = config.commit_at * total_steps
    rounds = len(left_after_rounds(k, config))
    if rounds and config.round_length is not None:
        latest = min(latest, config.warmup * total_steps + config.round_length * rounds)
    return max(1, round(latest))


def drops(k: int, config: FlexConfig, total_steps: int, commit_step: int) -> dict[int, int]:
    """Return {step: number of candidates left}. The steps are evenly spaced, and the last is the commitment."""
    left = left_after_rounds(k, config)
    start = config.warmup * total_steps
    span = commit_step - start
    return {max(1, round(start + span * (i + 1) / len(left))): count for i, count in enumerate(left)}


def rungs(k: int, config: FlexConfig, total_steps: int) -> list[Rung]:
    """Return the rungs of a trial of k candidates. Half of them resume in the next rung, which ends at twice the steps.

    The last two candidates are compared after `FlexConfig.trial_steps`, or earlier if the run is short. Every rung has
    at least one step per candidate.

    >>> from flexact import FlexConfig
    >>> [tuple(rung) for rung in rungs(7, FlexConfig(trial_steps=300), 8_000)]
    [(7, 0, 75), (4, 75, 150), (2, 150, 300)]
    """
    counts = [k]
    while counts[-1] > 2:
        counts.append((counts[-1] + 1) // 2)
    last = config.trial_steps
    while last > 1 and trial_steps(_rungs(counts, last)) > _latest(config, total_steps):
        last -= 1
    return _rungs(counts, last)


def trial_steps(found: list[Rung]) -> int:
    """Return the total number of steps of a trial."""
    return sum(rung.candidates * (rung.until - rung.start) for rung in found)


def _latest(config: FlexConfig, total_steps: int) -> float:
    """Return the last step of a run at which a trial may end."""
    return min((1.0 if config.commit_at is None else config.commit_at) * total_steps, total_steps - 1)


def _rungs(counts: list[int], last: int) -> list[Rung]:
    longest = len(counts) - 1
    ends = [max(i + 1, last >> (longest - i)) for i in range(len(counts))]
    return [Rung(*one) for one in zip(counts, [0, *ends], ends, strict=False)]
