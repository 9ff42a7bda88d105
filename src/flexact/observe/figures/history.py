"""Pictures of a Recorder's history over the steps of a run: the loss, the probabilities, the picks.

>>> history = [{"step": 0, "sites": {"1": {"relu": 0.4, "tanh": 0.6}}, "picks": {"1": "tanh"}, "loss": 1.5}]
>>> [picture.title for picture in history_pictures(history)]
['Map of the network', 'Recorded numbers', 'Probability by step', 'Pick by site and step',
 'Probability by site and step']

Every picture has a matplotlib figure (needs flexact[plots]): ``picks(recorder.history).figure().savefig("picks.png")``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from flexact.errors import FlexActError
from flexact.io.markdown_tables import counted
from flexact.observe.figures.description import INK, Event, Grid, Line, Panel, candidate_colours, candidate_dash
from flexact.observe.figures.network_map import margins, network
from flexact.observe.figures.outcomes import by_site, channels_note, check_not_empty, drops_of, outcomes
from flexact.observe.figures.picture import Picture
from flexact.observe.history import TRYING, Records, number_names
from flexact.observe.selection_rows import TIE

MAX_COLUMNS = 300
"""Maximum number of steps in a heat map, evenly spaced; more would be narrower than a pixel."""
MAX_CELLS = 500_000
"""Maximum number of cells of all heat maps of a picture; each takes about a byte of the page."""
MAX_POINTS = 1000
"""Maximum number of points of a curve."""
UNDECIDED = ("undecided", "#ffffff")
"""Name and colour of a cell whose leading candidates are equally likely, as all are before training."""
_AFTER = 3
"""Minimum number of records that are shown after the last site has committed."""


def history_pictures(history: Records, stem: str = "history") -> list[Picture]:
    """Return all pictures of a Recorder's history."""
    pictures = [network(history, stem), curves(history, stem)]
    if number_names(history):
        pictures.insert(1, numbers(history, stem))
    if any(row.evidence for row in outcomes(history)):
        pictures.append(margins(history, stem))
    return [*pictures, picks(history, stem), probabilities(history, stem)]


def picks(history: Records, stem: str = "history", by: str = "step") -> Picture:
    """Draw the leading candidate at each site and step. by: another number in every record, such as "epoch"."""
    check_not_empty(history)
    if any(by not in entry for entry in history):
        raise FlexActError(f"every record needs a number {by!r}; record(step, {by}=...) adds it.")
    shown, note = _shown(history, by)
    candidates, table = by_site(shown)
    colours = candidate_colours(candidates)
    categories = [(name, colours[name]) for name in candidates]
    values = [[_category(pi, candidates) for pi in records] for records in table.values()]
    if any(value == len(candidates) for row in values for value in row):
        categories.append(UNDECIDED)
    grid = Grid([entry[by] for entry in shown], values, categories)
    return Picture(
        f"{stem}-picks",
        f"Pick by site and {by}",
        "The candidate with the highest probability at each site (first layer on top) as training went on"
        + channels_note(history),
        [Panel("", by, "", rows=list(table), grid=grid, x_note=note)],
        across=1,
    )


def probabilities(history: Records, stem: str = "history") -> Picture:
    """Draw the probability of each candidate by site and step, as one heat map per candidate."""
    candidates, table = by_site(history[-1:])
    shown, note = _shown(history, "step", most=min(MAX_COLUMNS, MAX_CELLS // (len(table) * len(candidates)) or 2))
    candidates, table = by_site(shown)
    steps = [entry["step"] for entry in shown]
    panels = [
        Panel(
            candidate,
            "step",
            x_note=note,
            rows=list(table),
            grid=Grid(steps, [[pi.get(candidate, math.nan) for pi in records] for records in table.values()]),
        )
        for candidate in candidates
    ]
    return Picture(
        f"{stem}-probabilities",
        "Probability by site and step",
        "How likely each candidate was at each site (first layer on top) as training went on" + channels_note(history),
        panels,
    )


def curves(history: Records, stem: str = "history") -> Picture:
    """Draw the probability of each candidate over the steps: the mean over sites."""
    shown = _evenly(history)
    candidates, table = by_site(shown)
    colours = candidate_colours(candidates)
    steps = [entry["step"] for entry in shown]
    lines = []
    for name in candidates:
        records = zip(*table.values(), strict=True)
        found = [[pi[name] for pi in record if name in pi] or [math.nan] for record in records]
        lines.append(Line(name, steps, [fmean(ps) for ps in found], colours[name], candidate_dash(name)))
    return Picture(
        f"{stem}-curves",
        "Probability by step",
        "The mean probability of each candidate over the sites, which after the commitment is the share of sites that "
        "picked it. Vertical lines mark drops and the commitment.",
        [Panel("", "step", "probability", lines, events(history), value_range=(0.0, 1.02))],
        across=1,
    )


def numbers(history: Records, stem: str = "history") -> Picture:
    """Draw the other recorded numbers, such as loss and accuracy; in a trial, with one line per candidate."""
    colours = candidate_colours(by_site(history[-1:])[0])
    panels = []
    for name in number_names(history):
        of_candidate: dict[str, list[tuple[float, float]]] = {}  # in a trial each has a line, and the pick's is `name`
        for entry in history:
            if name in entry:
                of_candidate.setdefault(entry.get(TRYING, name), []).append((entry["step"], entry[name]))
        lines = []
        for line, points in of_candidate.items():
            x, y = zip(*_thinned(points), strict=True)
            lines.append(Line(line, x, y, colours.get(line, INK), candidate_dash(line) if line in colours else "solid"))
        panels.append(Panel(name, "step", lines=lines, events=events(history)))
    if not panels:
        raise FlexActError(
            "this history has no numbers besides the picks; give them to record: record(step, loss=...)."
        )
    sentence = (
        "The loss and the other numbers by step; in a trial, one line per candidate. Vertical lines mark drops and "
        "the commitment, after which the picks are trained alone."
    )
    return Picture(f"{stem}-numbers", "Recorded numbers", sentence, panels, across=min(3, len(panels)))


def events(history: Records) -> list[Event]:
    """Return the steps at which candidates were dropped. The last is the commitment if all sites have committed."""
    by_step: dict[int, Counter[str]] = {}
    for dropped in drops_of(history).values():
        for name, drop in dropped.items():
            by_step.setdefault(drop["step"], Counter())[name] += 1
    committed = _settled(history) is not None
    found = []
    for step, counts in sorted(by_step.items()):
        label = ", ".join(counts) if len(counts) <= 2 else f"{counts.total()} drops"
        note = ", ".join(f"{name} at {counted(count, 'site')}" for name, count in counts.most_common())
        name, dash = ("commitment", "solid") if committed and step == max(by_step) else ("drop", "dash")
        found.append(Event(step, name, label, note, dash))
    return found


def _category(probabilities: Mapping[str, float], candidates: Sequence[str]) -> float:
    """Return the index of the likeliest candidate; in a tie, the number of candidates; without any, NaN."""
    highest = max(probabilities.values(), default=math.nan)
    leaders = [name for name, p in probabilities.items() if highest - p <= TIE]
    if not leaders:
        return math.nan
    return candidates.index(leaders[0]) if len(leaders) == 1 else len(candidates)


def _shown(history: Records, by: str, most: int = MAX_COLUMNS) -> tuple[Records, str]:
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
            return _evenly(history[:count], most), f"nothing changes after {by} {at:.12g}"
    return _evenly(history, most), ""


def _settled(history: Records) -> int | None:
    """Return the index of the first record with every site committed; None if a site never commits."""
    last = history[-1]["sites"]
    if not last or any(max(pi.values(), default=0.0) < 1.0 for pi in last.values()):
        return None
    index = len(history) - 1
    while index and history[index - 1]["sites"] == last:
        index -= 1
    return index


def _evenly(history: Records, most: int = MAX_COLUMNS) -> Records:
    """Return at most `most` records, including the first and the last."""
    if len(history) <= most:
        return history
    return [history[round(i * (len(history) - 1) / (most - 1))] for i in range(most)]


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Return at most MAX_POINTS points: the lowest and the highest of each stretch, so that no spike is lost."""
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(2 * len(points) / MAX_POINTS)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        kept += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return kept
