"""Elimination rounds: how many candidates each leaves, and at which steps they end."""

from __future__ import annotations

from flexact.config import FlexConfig


def left_after_rounds(k: int, config: FlexConfig) -> list[int]:
    """How many of k candidates are left after each round; the last round leaves one.

    >>> from flexact import FlexConfig
    >>> left_after_rounds(7, FlexConfig(eliminate="half")), left_after_rounds(4, FlexConfig(eliminate="one"))
    ([4, 2, 1], [3, 2, 1])
    """
    left = []
    while k > 1 and config.eliminate != "none":
        k = (k + 1) // 2 if config.eliminate == "half" else min(k - 1, round(k * 2 / 3)) if config.eliminate == "third" else k - 1
        left.append(k)
    return left


def picking_steps(k: int, config: FlexConfig, total_steps: int) -> float:
    """How many steps a run of this length takes until k candidates are one; infinite where it never commits."""
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
