"""table.md of a comparison: one row per method, then the picks of each seed, then what went wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from flexact.candidates.registry import ORIGINAL
from flexact.io.markdown_tables import counted, markdown
from flexact.studies.compare.protocol import FLEXACT, Cell, Protocol, Result
from flexact.studies.grid import status
from flexact.studies.grid.statistics import (
    Comparison,
    by_method,
    gain_and_p,
    mean_and_deviation,
    paired,
    seconds_ratios,
    spread,
    times,
)
from flexact.studies.grid.study import DONE, picked


@dataclass(frozen=True)
class Summary:
    """One method of a comparison."""

    method: str
    scores: Mapping[int, float]
    """Score by seed, without failed runs."""
    failed: int
    """Number of failed runs."""
    against: Comparison | None
    """Comparison with the original network; None for the original itself, and if no seed is shared."""
    cost: float
    """Seconds of `train` relative to the original network, over the seeds that both ran on the same device: the
    median, because the first run of a worker includes imports."""
    cost_range: tuple[float, float] = (math.nan, math.nan)
    """The lowest and the highest such ratio."""

    @property
    def mean(self) -> float:
        """Mean score; NaN if all runs failed."""
        return mean_and_deviation(list(self.scores.values()))[0] if self.scores else math.nan

    @property
    def deviation(self) -> float:
        """Standard deviation of the score over seeds; NaN with fewer than two."""
        return mean_and_deviation(list(self.scores.values()))[1] if len(self.scores) > 1 else math.nan


def summaries(rows: Sequence[Result]) -> list[Summary]:
    """A summary of each method, in the order of the rows."""
    done = by_method(rows)
    base, found = done.get(ORIGINAL, {}), []
    for method in dict.fromkeys(row.method for row in rows):
        own = done.get(method, {})
        failed = sum(row.method == method and row.state != DONE for row in rows)
        scores = {seed: row.score for seed, row in own.items()}
        reference = {} if method == ORIGINAL else {seed: row.score for seed, row in base.items()}
        ratios = seconds_ratios((row, base[seed]) for seed, row in own.items() if seed in base)
        costs = (median(ratios), (min(ratios), max(ratios))) if ratios else (math.nan,)
        found.append(Summary(method, scores, failed, paired(scores, reference), *costs))
    return found


def picks_by_seed(rows: Sequence[Result]) -> dict[int, dict[str, str]]:
    """Seed → site → pick, of the runs that picked."""
    found = {row.seed: picked(row.picks) for row in rows if row.method == FLEXACT and row.picks}
    return dict(sorted(found.items()))


def agreement(picks: Sequence[str]) -> float:
    """The share of seeds with the most common pick.

    >>> agreement(["gelu", "gelu", "silu", "gelu"])
    0.75
    """
    return Counter(picks).most_common(1)[0][1] / len(picks) if picks else math.nan


def mean_agreement(found: Mapping[int, Mapping[str, str]]) -> float:
    """The agreement of the seeds, averaged over sites; NaN without picks."""
    sites = dict.fromkeys(site for own in found.values() for site in own)
    shares = [agreement([own[site] for own in found.values() if site in own]) for site in sites]
    return fmean(shares) if shares else math.nan


_EXPLAINED = (
    "Score: mean ± standard deviation over seeds. Difference and p (two-sided paired t-test): against the original "
    "network, over the seeds that both have. Cost: time of `train` relative to the original network on the same seed, "
    "median over seeds (lowest to highest). It is meaningful only if runs did not share a device. flexact is the "
    "network that picks while it trains; flexact-alone trains its picks from the start in a plain network, and its "
    "cost leaves out the picking."
)
TITLE = "# Comparison with fixed activations"
_HEADER = ("method", "seeds", "score", "difference", "p", "cost")


def table(rows: Sequence[Result], protocol: Protocol, asked: Sequence[Cell]) -> str:
    """Markdown with the finished runs, and the names of the others."""
    found = summaries(rows)
    decimals = decimals_of(found)
    parts = [TITLE, f"Network `{protocol.build}`, training `{protocol.train}`.", _EXPLAINED]
    if found:
        parts.append(markdown(_HEADER, [_row(one, decimals) for one in found]))
        if ORIGINAL not in {cell.method for cell in asked}:
            parts.append(f"Without {ORIGINAL} among the methods there are no differences, no p and no costs.")
    parts += _picks(picks_by_seed(rows))
    notes: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            notes.setdefault(row.note, []).append(row.cell.name)
    parts += [f"Note on {', '.join(cells)}: {note}." for note, cells in notes.items()]
    return "\n\n".join(parts + status.notes(rows, asked)) + "\n"


def decimals_of(found: Sequence[Summary]) -> int:
    """The number of decimals with which scores are shown: two digits of the smallest standard deviation."""
    deviations = [one.deviation for one in found if one.deviation > 0]
    if not deviations:
        return 4
    return min(6, max(0, 1 - math.floor(math.log10(min(deviations)))))


def _row(one: Summary, decimals: int) -> tuple[str, ...]:
    seeds = str(len(one.scores)) + (f" ({one.failed} failed)" if one.failed else "")
    low, high = one.cost_range
    cost = "-" if one.method == ORIGINAL else times(one.cost) + (f" ({low:.2f} to {high:.2f})" if high > low else "")
    return one.method, seeds, spread(one.scores, decimals), *gain_and_p(one.against, decimals), cost


def _picks(found: Mapping[int, Mapping[str, str]]) -> list[str]:
    """The picks of each site by seed; sites that picked alike on every seed share a row."""
    if not found:
        return []
    alike: dict[tuple[str, ...], list[str]] = {}
    for site in dict.fromkeys(site for own in found.values() for site in own):
        alike.setdefault(tuple(own.get(site, "-") for own in found.values()), []).append(site)
    rows = [
        (sites[0] if len(sites) == 1 else counted(len(sites), "site"), *picks, _percent(agreement(picks), len(found)))
        for picks, sites in alike.items()
    ]
    header = ("site", *(f"seed {seed}" for seed in found), "agreement")
    parts = ["## Picks", markdown(header, rows, words=header[1:-1])]
    if len(rows) > 1 and len(found) > 1:
        parts.append(f"Mean agreement over all sites: {_percent(mean_agreement(found), len(found))}.")
    return parts


def _percent(share: float, seeds: int) -> str:
    """An agreement in a table; "-" for a single seed, which has nothing to agree with."""
    return f"{100 * share:.0f} %" if seeds > 1 else "-"
