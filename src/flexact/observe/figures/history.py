"""Pictures of a Recorder's history over the steps of a run: the loss, the probabilities, the picks.

>>> history = [{"step": 0, "sites": {"1": {"relu": 0.4, "tanh": 0.6}}, "picks": {"1": "tanh"}, "loss": 1.5}]
>>> [picture.title for picture in history_pictures(history)]
['Map of the network', 'Recorded numbers', 'Probability by step', 'Pick by site and step',
 'Probability by site and step']

Every picture has a matplotlib figure (needs flexact[plots]): ``picks(recorder.history).figure.savefig("picks.png")``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from flexact.errors import FlexActError
from flexact.observe.figures import drawing
from flexact.observe.figures.colours import INK, candidate_colours, candidate_dash
from flexact.observe.figures.drawing import Picture, style
from flexact.observe.figures.network_map import margins, network
from flexact.observe.figures.outcomes import by_site, drops_of, outcomes
from flexact.observe.history import TRYING, Records, number_names
from flexact.observe.selection_rows import TIE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_COLUMNS = 300
"""Maximum number of steps in a heat map, evenly spaced; more would be narrower than a pixel."""
MAX_CELLS = 40_000
"""Maximum number of cells of all heat maps of a picture, which keeps the page small."""
UNDECIDED = {"undecided": "#ffffff"}
"""The colour of a cell whose leading candidates are equally likely, as all are before training."""
_LABEL_DISTANCE = 0.045
"""Minimum distance between the labels of two events, as a fraction of the recorded steps."""


def history_pictures(history: Records, stem: str = "history") -> list[Picture]:
    """Return every picture that a history has data for. stem: the start of the names of their files."""
    pictures = [network(history, stem), curves(history, stem)]
    if number_names(history):
        pictures.insert(1, numbers(history, stem))
    if any(row.evidence for row in outcomes(history)):
        pictures.append(margins(history, stem))
    return [*pictures, picks(history, stem), probabilities(history, stem)]


@style()
def picks(history: Records, stem: str = "history", by: str = "step") -> Picture:
    """Draw the leading candidate at each site and step. by: the number on the axis, which every record has to have."""
    figure, (ax,) = drawing.panels(inches=drawing.row_inches(len(by_site(history[-1:])[1])))
    colours = pick_map(ax, history, by)
    return Picture(
        f"{stem}-picks",
        f"Pick by site and {by}",
        "The candidate with the highest probability at each site (first layer on top) as training went on.",
        drawing.finished(figure, colours),
    )


def pick_map(ax: Axes, history: Records, by: str) -> dict[str, str]:
    """Draw the leading candidate at each site and step, and return the colours by name."""
    if any(by not in entry for entry in history):
        raise FlexActError(f"every record needs a number {by!r}; record(step, {by}=...) adds it.")
    shown = _evenly(history)
    candidates, table = by_site(shown)
    colours = candidate_colours(candidates)
    values = [[_category(pi, candidates) for pi in records] for records in table.values()]
    if any(value == len(candidates) for row in values for value in row):
        colours |= UNDECIDED
    drawing.heat_map(ax, [entry[by] for entry in shown], list(table), values, list(colours.values()))
    ax.set_xlabel(by)
    return colours


@style()
def probabilities(history: Records, stem: str = "history") -> Picture:
    """Draw the probability of each candidate by site and step, as one heat map per candidate."""
    candidates, table = by_site(history[-1:])
    shown = _evenly(history, most=min(MAX_COLUMNS, MAX_CELLS // (len(table) * len(candidates)) or 2))
    candidates, table = by_site(shown)
    steps = [entry["step"] for entry in shown]
    figure, axes = drawing.panels(len(candidates), across=3, inches=drawing.row_inches(len(table)), same_rows=True)
    for ax, candidate in zip(axes, candidates, strict=True):
        values = [[pi.get(candidate, math.nan) for pi in records] for records in table.values()]
        drawing.heat_map(ax, steps, list(table), values)
        ax.set(title=candidate, xlabel="step")
    figure.colorbar(axes[0].images[0], ax=axes, label="probability", shrink=0.8, aspect=30)
    return Picture(
        f"{stem}-probabilities",
        "Probability by site and step",
        "How likely each candidate was at each site (first layer on top) as training went on.",
        drawing.finished(figure),
    )


@style()
def curves(history: Records, stem: str = "history") -> Picture:
    """Draw the probability of each candidate over the steps: the mean over sites."""
    shown = _evenly(history)
    candidates, table = by_site(shown)
    colours = candidate_colours(candidates)
    figure, (ax,) = drawing.panels()
    for name in candidates:
        records = zip(*table.values(), strict=True)
        means = [fmean([pi[name] for pi in record if name in pi] or [math.nan]) for record in records]
        drawing.line(ax, name, [entry["step"] for entry in shown], means, colours[name], candidate_dash(name))
    ax.set(xlabel="step", ylabel="probability", ylim=(0.0, 1.02))
    _draw_events(ax, history)
    return Picture(
        f"{stem}-curves",
        "Probability by step",
        "The mean probability of each candidate over the sites, which after the commitment is the share of sites that "
        "picked it. Vertical lines mark drops and the commitment.",
        drawing.finished(figure),
    )


@style()
def numbers(history: Records, stem: str = "history") -> Picture:
    """Draw the recorded numbers, such as loss and accuracy, with a panel each; in a trial, one line per candidate."""
    names = number_names(history)
    if not names:
        raise FlexActError(
            "this history has no numbers besides the picks; give them to record: record(step, loss=...)."
        )
    figure, axes = drawing.panels(len(names), across=3)
    for ax, name in zip(axes, names, strict=True):
        _draw_number(ax, history, name)
    sentence = (
        "The loss and the other numbers by step; in a trial, one line per candidate. Vertical lines mark drops and "
        "the commitment, after which the picks are trained alone."
    )
    return Picture(f"{stem}-numbers", "Recorded numbers", sentence, drawing.finished(figure))


def _draw_number(ax: Axes, history: Records, name: str) -> None:
    points: dict[str, list[tuple[float, float]]] = {}  # by candidate in a trial; the key is "" outside of a trial
    for entry in history:
        if name in entry:
            points.setdefault(entry.get(TRYING, ""), []).append((entry["step"], entry[name]))
    colours = candidate_colours(by_site(history[-1:])[0])
    for candidate, own in points.items():
        x, y = zip(*own, strict=True)
        dash = candidate_dash(candidate) if candidate else "-"
        drawing.line(ax, candidate, x, y, colours.get(candidate, INK), dash)
    ax.set(title=name, xlabel="step")
    _draw_events(ax, history)


def _draw_events(ax: Axes, history: Records) -> None:
    """Mark the steps at which candidates were dropped, with labels where there is room. The last is the commitment if
    all sites have committed."""
    by_step: dict[int, Counter[str]] = {}
    for dropped in drops_of(history).values():
        for name, drop in dropped.items():
            by_step.setdefault(drop["step"], Counter())[name] += 1
    committed = all(row.committed for row in outcomes(history))
    free = -math.inf
    for step, counts in sorted(by_step.items()):
        name, dash = ("commitment", "-") if committed and step == max(by_step) else ("drop", "--")
        ax.axvline(step, color="#777777", linewidth=0.8, linestyle=dash, label=name)
        if step >= free:
            text = ", ".join(counts) if len(counts) <= 2 else f"{counts.total()} drops"
            place: Any = {"rotation": 90, "va": "top", "ha": "right", "transform": ax.get_xaxis_transform()}
            ax.text(step, 0.99, text, fontsize=7, color="#555555", **place)
            free = step + _LABEL_DISTANCE * (history[-1]["step"] - history[0]["step"])


def _category(probabilities: Mapping[str, float], candidates: Sequence[str]) -> float:
    """Return the index of the likeliest candidate; the number of candidates in a tie; NaN without probabilities."""
    highest = max(probabilities.values(), default=math.nan)
    leaders = [name for name, p in probabilities.items() if highest - p <= TIE]
    if not leaders:
        return math.nan
    return candidates.index(leaders[0]) if len(leaders) == 1 else len(candidates)


def _evenly(history: Records, most: int = MAX_COLUMNS) -> Records:
    """Return at most `most` records, including the first and the last."""
    if len(history) <= most:
        return history
    return [history[round(i * (len(history) - 1) / (most - 1))] for i in range(most)]
