"""Pictures of a Recorder's history: the picks by site and step.

>>> history = [{"step": 0, "sites": {"1": {"relu": 0.4, "tanh": 0.6}}, "picks": {"1": "tanh"}, "loss": 1.5}]
>>> [picture.title for picture in history_pictures(history)]
['Pick by site and step', 'Probability by site and step', 'Final pick by depth', 'Recorded numbers']

Every picture has a matplotlib figure (needs flexact[plots]): ``picks(recorder.history).figure().savefig("picks.png")``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from flexact.errors import FlexActError
from flexact.observe.figures.description import Bars, Grid, Line, Panel, candidate_colours
from flexact.observe.figures.picture import Picture
from flexact.observe.history import RESERVED
from flexact.policy.evidence import Contest

MOST_COLUMNS = 300
"""Maximum number of steps in a heat map, evenly spaced; more would be narrower than a pixel."""
UNDECIDED = ("undecided", "#ffffff")
"""Name and colour of a cell whose leading candidates are equally likely, as all are before training."""
_TIE = 1e-6
_AFTER = 3
"""Minimum number of records that are shown after the last site has committed."""


def history_pictures(history: Sequence[Mapping[str, Any]], stem: str = "history") -> list[Picture]:
    """Return all pictures of a Recorder's history."""
    pictures = [picks(history, stem), probabilities(history, stem), final_picks(history, stem)]
    if _numbers(history):
        pictures.append(numbers(history, stem))
    return pictures


def picks(history: Sequence[Mapping[str, Any]], stem: str = "history", by: str = "step") -> Picture:
    """Draw the leading candidate at each site and step. by: another number in every record, such as "epoch"."""
    sites, candidates, table = _by_site(history)
    if any(by not in entry for entry in history):
        raise FlexActError(f"every record needs a number {by!r}; record(step, {by}=...) adds it.")
    shown, note = _shown(history, by)
    colours = candidate_colours(candidates)
    categories = [(name, colours[name]) for name in candidates]
    values, notes = [], []
    for site in sites:
        leaders = [_leaders(table[site][i]) for i in shown]
        values.append([_category(names, candidates) for names, _ in leaders])
        notes.append([f"{' or '.join(names)}, probability {p:.3f}" for names, p in leaders])
    if any(value == len(candidates) for row in values for value in row):
        categories.append(UNDECIDED)
    grid = Grid([history[i][by] for i in shown], values, categories, notes)
    return Picture(
        f"{stem}-picks",
        f"Pick by site and {by}",
        "The candidate with the highest probability at each site (first layer on top) as training went on"
        + _channels_note(history),
        [Panel("", by, "", rows=sites, grid=grid, x_note=note)],
        across=1,
    )


def probabilities(history: Sequence[Mapping[str, Any]], stem: str = "history") -> Picture:
    """Draw the probability of each candidate by site and step, as one heat map per candidate."""
    sites, candidates, table = _by_site(history)
    shown, note = _shown(history, "step")
    steps = [history[i]["step"] for i in shown]
    panels = [
        Panel(
            candidate,
            "step",
            x_note=note,
            rows=sites,
            grid=Grid(steps, [[table[site][i].get(candidate, math.nan) for i in shown] for site in sites]),
        )
        for candidate in candidates
    ]
    return Picture(
        f"{stem}-probabilities",
        "Probability by site and step",
        "How likely each candidate was at each site (first layer on top) as training went on" + _channels_note(history),
        panels,
    )


def final_picks(history: Sequence[Mapping[str, Any]], stem: str = "history") -> Picture:
    """Draw the probabilities of the last record, site by site in depth order."""
    sites, candidates, table = _by_site(history)
    colours = candidate_colours(candidates)
    bars = [Bars(name, [table[site][-1].get(name, 0.0) for site in sites], colours[name]) for name in candidates]
    return Picture(
        f"{stem}-final",
        "Final pick by depth",
        f"Each site's probabilities at step {history[-1]['step']}, the first layer on top: the longest part of a "
        "bar is its pick" + _channels_note(history),
        [Panel("", "probability", "", rows=sites, bars=bars, stacked=True, value_range=(0.0, 1.0))],
        across=1,
    )


def numbers(history: Sequence[Mapping[str, Any]], stem: str = "history") -> Picture:
    """Draw the other recorded numbers, such as loss and accuracy."""
    panels = []
    for name in _numbers(history):
        points = [(entry["step"], entry[name]) for entry in history if name in entry]
        panels.append(Panel(name, "step", lines=[Line(name, [x for x, _ in points], [y for _, y in points])]))
    if not panels:
        raise FlexActError(
            "this history has no numbers besides the picks; give them to record: record(step, loss=...)."
        )
    return Picture(f"{stem}-numbers", "Recorded numbers", "What was recorded beside the picks, by step.", panels)


@dataclass(frozen=True)
class Outcome:
    """The final state of a site."""

    site: str
    pick: str
    probability: float
    margin: float
    """The pick's probability less the runner-up's."""
    runner_up: str | None
    lead: Contest | None
    """The pick's lead over the runner-up when that was dropped. None for sites that pick per channel."""
    decided: bool | None
    """None if the site has not committed, or if the history does not say."""
    decision: str


def outcomes(history: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """Return the final state of each site, in depth order."""
    sites, _, table = _by_site(history)
    decisions: dict[str, Any] = {}
    drops: dict[str, dict[str, Any]] = {}
    for entry in history:
        decisions |= entry.get("decisions", {})
        for key, new in entry.get("drops", {}).items():
            drops.setdefault(key, {}).update(new)
    rows = []
    for site in sites:
        ranked = sorted(table[site][-1].items(), key=lambda p: -p[1])
        if not ranked:
            continue
        (pick, p), (second, q) = ranked[0], ranked[1] if len(ranked) > 1 and ranked[1][1] > 0 else (None, 0.0)
        of_site = [one for key, one in decisions.items() if _site_of(key) == site]
        decided = all(one["decided"] for one in of_site) if of_site else None
        lead = None
        if site in decisions:
            second = decisions[site]["runner_up"]
            lead = _contest(drops.get(site, {}).get(second))
        rows.append(Outcome(site, pick, p, p - q, second, lead, decided, _decision_text(p, of_site, site in decisions)))
    return rows


def _decision_text(probability: float, decisions: Sequence[Mapping[str, Any]], is_whole: bool) -> str:
    """Return a decision in words. is_whole: whether the site has one pick for all channels."""
    if not decisions:
        return "not committed" if probability < 1 else "-"
    count = sum(one["decided"] for one in decisions)
    if is_whole:
        return "decided" if count else "undecided"
    return f"{count} of {len(decisions)} channels decided"


def _contest(drop: Mapping[str, Any] | None) -> Contest | None:
    """Return the evidence of a drop that a Recorder wrote."""
    if drop is None or drop["standard_error"] is None:
        return None
    return Contest(math.inf if drop["margin"] is None else drop["margin"], drop["standard_error"], drop["steps"])


_CHANNEL = re.compile(r"(.+):\d+")


def _site_of(key: str) -> str:
    """Return the site of a record's key, without its channel."""
    match = _CHANNEL.fullmatch(key)
    return match[1] if match else key


def _channels_note(history: Sequence[Mapping[str, Any]]) -> str:
    by_channel = any(_CHANNEL.fullmatch(site) for entry in history for site in entry["sites"])
    return "; a site that picks by channel shows the mean over its channels." if by_channel else "."


def _by_site(
    history: Sequence[Mapping[str, Any]],
) -> tuple[list[str], list[str], dict[str, list[dict[str, float]]]]:
    """Return sites, candidates, and per site one {candidate: probability} per record, as the mean over channels."""
    if not history:
        raise FlexActError("the history is empty; call record(step) on the Recorder during training.")
    sites: dict[str, None] = {}
    candidates: dict[str, None] = {}
    records = []
    for entry in history:
        channels: dict[str, dict[str, list[float]]] = {}
        for key, pi in entry["sites"].items():
            of_site = channels.setdefault(_site_of(key), {})
            for candidate, p in pi.items():
                of_site.setdefault(candidate, []).append(p)
        sites.update(dict.fromkeys(channels))
        candidates.update(dict.fromkeys(candidate for of_site in channels.values() for candidate in of_site))
        records.append(channels)
    table = {
        site: [{name: fmean(ps) for name, ps in channels.get(site, {}).items()} for channels in records]
        for site in sites
    }
    return list(sites), list(candidates), table


def _numbers(history: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for entry in history for key in entry if key not in ("step", *RESERVED)))


def _leaders(probabilities: Mapping[str, float]) -> tuple[list[str], float]:
    """Return the candidates with the highest probability, and that probability."""
    highest = max(probabilities.values(), default=math.nan)
    return [name for name, p in probabilities.items() if highest - p <= _TIE], highest


def _category(leaders: Sequence[str], candidates: Sequence[str]) -> float:
    """Return the index of a cell's category; several leaders have the one after the last candidate."""
    if not leaders:
        return math.nan
    return candidates.index(leaders[0]) if len(leaders) == 1 else len(candidates)


def _shown(history: Sequence[Mapping[str, Any]], by: str) -> tuple[list[int], str]:
    """Return the records that a heat map shows, and a note about its axis.

    If every site commits early, the map ends soon after the last commitment, at 1.5 times that step, and the note says
    so.
    """
    settled = _settled(history)
    if settled is not None:
        start, at = history[0][by], history[settled][by]
        end = start + 1.5 * (at - start)
        count = sum(i <= settled + _AFTER or entry[by] <= end for i, entry in enumerate(history))
        if count < 0.75 * len(history):
            return _evenly(count), f"nothing changes after {by} {at:.12g}"
    return _evenly(len(history)), ""


def _settled(history: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the first record from which on every site is committed; None if a site never commits."""
    last = history[-1]["sites"]
    if not last or any(max(pi.values(), default=0.0) < 1.0 for pi in last.values()):
        return None
    index = len(history) - 1
    while index and history[index - 1]["sites"] == last:
        index -= 1
    return index


def _evenly(count: int) -> list[int]:
    """Return the indexes of at most MOST_COLUMNS records, including the first and the last."""
    if count <= MOST_COLUMNS:
        return list(range(count))
    return [round(i * (count - 1) / (MOST_COLUMNS - 1)) for i in range(MOST_COLUMNS)]
