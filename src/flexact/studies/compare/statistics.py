"""Statistics of a comparison: scores, paired tests against the original network, costs, and how far picks agree."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from flexact.candidates import ORIGINAL
from flexact.studies.averages import mean_and_deviation
from flexact.studies.compare.methods import FLEXACT
from flexact.studies.compare.study import Result
from flexact.studies.grid.statistics import Comparison, paired, seconds_ratios
from flexact.studies.grid.store import DONE
from flexact.studies.grid.study import picked


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

    @property
    def mean(self) -> float:
        """Mean score; NaN if all runs failed."""
        return mean_and_deviation(list(self.scores.values()))[0] if self.scores else math.nan

    @property
    def deviation(self) -> float:
        """Standard deviation of the score over seeds; NaN with fewer than two."""
        return mean_and_deviation(list(self.scores.values()))[1] if len(self.scores) > 1 else math.nan


def summaries(rows: Sequence[Result], methods: Sequence[str]) -> list[Summary]:
    """A summary of each method with a row."""
    done = [row for row in rows if row.state == DONE]
    base = {row.seed: row for row in done if row.method == ORIGINAL}
    found = []
    for method in methods:
        own = {row.seed: row for row in sorted(done, key=lambda row: row.seed) if row.method == method}
        failed = sum(row.method == method and row.state != DONE for row in rows)
        if own or failed:
            scores = {seed: row.score for seed, row in own.items()}
            reference = {} if method == ORIGINAL else {seed: row.score for seed, row in base.items()}
            ratios = seconds_ratios((row, base[seed]) for seed, row in own.items() if seed in base)
            cost = median(ratios) if ratios else math.nan
            found.append(Summary(method, scores, failed, paired(scores, reference), cost))
    return found


def differences(rows: Sequence[Result], method: str) -> dict[int, float]:
    """The score minus that of the original network, by seed."""
    scores = {
        name: {row.seed: row.score for row in rows if row.method == name and row.state == DONE}
        for name in (method, ORIGINAL)
    }
    return {seed: score - scores[ORIGINAL][seed] for seed, score in scores[method].items() if seed in scores[ORIGINAL]}


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
