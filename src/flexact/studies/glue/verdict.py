"""What the table's figures mean: the majority-class rate of each accuracy, and a verdict that leaves WNLI out."""

from __future__ import annotations

from collections.abc import Mapping

from flexact.studies.glue.data import OF_DEV, OFFICIAL, TASKS
from flexact.studies.grid.effects import LEVEL, Effect, effects_table, explained, holm
from flexact.studies.grid.statistics import p_value

ARTEFACT = "wnli"
"""The task whose dev rows contradict its training rows: a network that learns nothing scores best (docs/text.md)."""
_OF_DEV = {"qnli": 100 * 528 / 1053}
"""The majority-class rates of dev rows that are part of a dev file."""


def majority(task: str, metric: str, split: str) -> str:
    """The accuracy in percent of always answering a task's more frequent class; empty for another metric.

    >>> majority("wnli", "accuracy", "official"), majority("mrpc", "f1", "official")
    ('56.34', '')
    """
    rates = {OFFICIAL: TASKS[task].majority, OF_DEV: _OF_DEV.get(task)}
    rate = rates.get(split)
    return "" if metric != "accuracy" or rate is None else f"{rate:.2f}"


def statistics(average: Mapping[str, Effect | None], without: Mapping[str, Effect | None]) -> str:
    """A section with the statistics of the average, with and without WNLI, and a verdict.

    average, without: title of a method → its effect on the average of all tasks, and of all tasks but WNLI. They are
    the same if WNLI was not run. Empty if no seed is shared.
    """
    if not any(without.values()):
        return ""
    parts = ["## Statistics of the average", explained("the fixed activation")]
    if average != without:
        parts += _table("All tasks.", average) + _table(f"Without {TASKS[ARTEFACT].title}.", without)
        reason = (
            f"{TASKS[ARTEFACT].title} is left out, because its dev rows contradict its training rows: a network that "
            "has learned nothing scores higher than one that has learned its training rows."
        )
        return "\n\n".join([*parts, f"**Verdict, without {TASKS[ARTEFACT].title}.** {_verdict(without)} {reason}"])
    return "\n\n".join([*parts, *_table("", without), f"**Verdict.** {_verdict(without)}"])


def _table(about: str, effects: Mapping[str, Effect | None]) -> list[str]:
    shown = effects_table(effects)
    return [f"{about}\n\n{shown}".strip()] if shown else []


def _verdict(effects: Mapping[str, Effect | None]) -> str:
    known = {title: one for title, one in effects.items() if one is not None}
    adjusted = holm([one.p for one in known.values()])
    return " ".join(_sentence(title, one, p) for (title, one), p in zip(known.items(), adjusted, strict=True))


def _sentence(title: str, one: Effect, p: float | None) -> str:
    if p is None:
        return f"{title}: {one.gain:+.2f} points, without a test."
    found = "no significant difference" if p >= LEVEL else "a gain" if one.gain > 0 else "a loss"
    return f"{title}: {one.gain:+.2f} points (p {p_value(p)} after Holm's correction), {found}."
