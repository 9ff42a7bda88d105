"""What a Recorder's history says about each site: probabilities by record, drops, and the final state."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from flexact.errors import FlexActError
from flexact.observe.history import DECISIONS, DROPS, Records
from flexact.policy.evidence import Contest


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
    deciding: Contest | None
    """The evidence that decides: against the original, or, if that was kept, against the runner-up."""
    decided: bool | None
    """None if the site has not committed, or if the history does not say."""
    decision: str
    dropped: tuple[tuple[str, int], ...] = ()
    """Each dropped candidate with its step; empty for sites that pick per channel."""

    @property
    def confidence(self) -> float:
        """From 0 to 1. Once committed: the confidence level at which the margin excludes 0 (0.95 for z = 1.96), and 0
        without evidence. Before that, and for sites that pick per channel: the margin between the probabilities."""
        if self.deciding is not None:
            return math.erf(max(0.0, self.deciding.z) / math.sqrt(2))
        return max(0.0, self.margin) if self.decided is None or not self.dropped else 0.0  # NaN if the run diverged


def outcomes(history: Records) -> list[Outcome]:
    """Return the final state of each site, in depth order."""
    _, table = by_site(history[-1:])
    decisions = {key: one for entry in history for key, one in entry.get(DECISIONS, {}).items()}
    drops = drops_of(history)
    rows = []
    for site, (pi,) in table.items():
        ranked = sorted(pi.items(), key=lambda item: -item[1])
        if not ranked:
            continue
        (pick, p), (second, q) = ranked[0], ranked[1] if len(ranked) > 1 and ranked[1][1] > 0 else (None, 0.0)
        of_site = [one for key, one in decisions.items() if site_of(key) == site]
        decided = all(one["decided"] for one in of_site) if of_site else None
        lead = deciding = None
        if site in decisions:
            second, original = decisions[site]["runner_up"], decisions[site].get("original")
            lead = deciding = contest(drops.get(site, {}).get(second))
            if original not in (None, pick):
                deciding = contest(drops.get(site, {}).get(original))
        dropped = tuple((name, drop["step"]) for name, drop in drops.get(site, {}).items())
        text = _decision_text(p, of_site, site in decisions)
        rows.append(Outcome(site, pick, p, p - q, second, lead, deciding, decided, text, dropped))
    return rows


def drops_of(history: Records) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Return all drops of a history, by key of the site and by candidate."""
    drops: dict[str, dict[str, Mapping[str, Any]]] = {}
    for entry in history:
        for key, new in entry.get(DROPS, {}).items():
            drops.setdefault(key, {}).update(new)
    return drops


def _decision_text(probability: float, decisions: Sequence[Mapping[str, Any]], is_whole: bool) -> str:
    """Return a decision in words. is_whole: whether the site has one pick for all channels."""
    if not decisions:
        return "not committed" if probability < 1 else "-"
    count = sum(one["decided"] for one in decisions)
    if is_whole:
        return "decided" if count else "undecided"
    return f"{count} of {len(decisions)} channels decided"


def contest(drop: Mapping[str, Any] | None) -> Contest | None:
    """Return the evidence of a drop that a Recorder wrote."""
    if drop is None or drop["standard_error"] is None:
        return None
    return Contest(math.inf if drop["margin"] is None else drop["margin"], drop["standard_error"], drop["steps"])


_CHANNEL = re.compile(r"(.+):\d+")


def site_of(key: str) -> str:
    """Return the site of a record's key, without its channel."""
    match = _CHANNEL.fullmatch(key)
    return match[1] if match else key


def check_not_empty(history: Records) -> None:
    if not history:
        raise FlexActError("the history is empty; call record(step) on the Recorder during training.")


def channels_note(history: Records) -> str:
    by_channel = any(_CHANNEL.fullmatch(site) for entry in history for site in entry["sites"])
    return "; a site that picks by channel shows the mean over its channels." if by_channel else "."


def by_site(history: Records) -> tuple[list[str], dict[str, list[dict[str, float]]]]:
    """Return the candidates, and per site one {candidate: probability} per record, as the mean over channels."""
    check_not_empty(history)
    candidates: dict[str, None] = {}
    table: dict[str, list[dict[str, float]]] = {}
    for number, entry in enumerate(history):
        channels: dict[str, dict[str, list[float]]] = {}
        for key, pi in entry["sites"].items():
            of_site = channels.setdefault(site_of(key), {})
            for candidate, p in pi.items():
                of_site.setdefault(candidate, []).append(p)
        for site, of_site in channels.items():
            candidates.update(dict.fromkeys(of_site))
            means = {name: ps[0] if len(ps) == 1 else fmean(ps) for name, ps in of_site.items()}
            table.setdefault(site, [{} for _ in history])[number] = means
    return list(candidates), table
