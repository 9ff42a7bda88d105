"""table.md of a comparison: one row per method, then the picks of each seed, then what went wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from flexact.candidates import ORIGINAL
from flexact.io.markdown_tables import counted, markdown
from flexact.studies.compare.cells import Cell
from flexact.studies.compare.protocol import Protocol
from flexact.studies.compare.statistics import Summary, agreement, mean_agreement, picks_by_seed, summaries
from flexact.studies.compare.study import Result
from flexact.studies.grid.statistics import gain_and_p, spread, times
from flexact.studies.grid.status import not_done, several_devices

_EXPLAINED = (
    "Score: mean ± standard deviation over seeds. Difference and p (two-sided paired t-test): against the original "
    "network, over the seeds that both have. Cost: time of `train` relative to the original network on the same seed, "
    "median over seeds. It is meaningful only if runs did not share a device. flexact is the network that picks while "
    "it trains; flexact-alone trains its picks from the start in a plain network, and its cost leaves out the picking."
)
_HEADER = ("method", "seeds", "score", "difference", "p", "cost")


def table(rows: Sequence[Result], protocol: Protocol, asked: Sequence[Cell]) -> str:
    """Markdown with the finished runs, and the names of the others."""
    found = summaries(rows, list(dict.fromkeys(cell.method for cell in asked)))
    decimals = decimals_of(found)
    parts = ["# Comparison with fixed activations", _EXPLAINED]
    if found:
        parts.append(markdown(_HEADER, [_row(one, decimals) for one in found]))
        if ORIGINAL not in {cell.method for cell in asked}:
            parts.append(f"Without {ORIGINAL} among the methods there are no differences, no p and no costs.")
    parts += _picks(picks_by_seed(rows))
    parts += [f"Note on {row.cell.name}: {row.note}." for row in rows if row.note]
    parts += [
        f"No test for {one.method}: {one.against.why}."
        for one in found
        if one.against is not None and one.against.p is None
    ]
    return "\n\n".join(parts + several_devices(rows) + not_done(rows, asked)) + "\n"


def decimals_of(found: Sequence[Summary]) -> int:
    """The number of decimals with which scores are shown: two digits of the smallest standard deviation."""
    deviations = [one.deviation for one in found if one.deviation > 0]
    if not deviations:
        return 4
    return min(6, max(0, 1 - math.floor(math.log10(min(deviations)))))


def _row(one: Summary, decimals: int) -> tuple[str, ...]:
    seeds = str(len(one.scores)) + (f" ({one.failed} failed)" if one.failed else "")
    cost = "-" if one.method == ORIGINAL else times(one.cost)
    return one.method, seeds, spread(one.scores, decimals), *gain_and_p(one.against, decimals), cost


def _picks(found: Mapping[int, Mapping[str, str]]) -> list[str]:
    """The picks of each site by seed; sites that picked alike on every seed share a row."""
    if not found:
        return []
    alike: dict[tuple[str, ...], list[str]] = {}
    for site in dict.fromkeys(site for own in found.values() for site in own):
        alike.setdefault(tuple(own.get(site, "-") for own in found.values()), []).append(site)
    rows = [
        (sites[0] if len(sites) == 1 else counted(len(sites), "site"), *picks, f"{100 * agreement(picks):.0f} %")
        for picks, sites in alike.items()
    ]
    header = ("site", *(f"seed {seed}" for seed in found), "agreement")
    parts = ["## Picks", markdown(header, rows, words=header[1:-1])]
    if len(rows) > 1:
        parts.append(f"Mean agreement over all sites: {100 * mean_agreement(found):.0f} %.")
    return parts
