"""What a Recorder's history says about each site: probabilities by record, drops, and the final state."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from flexact.errors import FlexActError
from flexact.observe.history import DECISIONS, DROPS, Records
from flexact.observe.selection_rows import TIE, Row
from flexact.policy.evidence import Contest


def outcomes(history: Records) -> list[Row]:
    """Return the final state of each site, in depth order.

    A site that picks per channel has the mean probabilities of its channels and no evidence, and is decided if all
    channels are.
    """
    drops = drops_of(history)
    decisions: dict[str, dict[str, Mapping[str, Any]]] = {}
    for entry in history:
        for key, one in entry.get(DECISIONS, {}).items():
            decisions.setdefault(site_of(key), {})[key] = one
    rows = []
    for site, (pi,) in by_site(history[-1:])[1].items():
        ranked = sorted(pi.items(), key=lambda item: -item[1])
        if not ranked:
            continue
        (pick, p), (second, q) = ranked[0], ranked[1] if len(ranked) > 1 and ranked[1][1] > 0 else (None, 0.0)
        of_site, dropped = decisions.get(site, {}), drops.get(site, {})
        decision = of_site.get(site, {})
        row = Row(
            site=site,
            channel=None,
            original=decision.get("original"),
            pick=None if not of_site and p - q <= TIE else pick,
            probability=p,
            runner_up=decision.get("runner_up", second),
            margin=p - q,
            committed=bool(of_site),
            decided=bool(of_site) and all(one["decided"] for one in of_site.values()),
            probabilities=pi,
            dropped={name: drop["step"] for name, drop in dropped.items()},
            evidence={name: _contest(drop) for name, drop in dropped.items() if drop["standard_error"] is not None},
        )
        rows.append(row)
    return rows


def drops_of(history: Records) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Return all drops of a history, by key of the site and by candidate."""
    drops: dict[str, dict[str, Mapping[str, Any]]] = {}
    for entry in history:
        for key, new in entry.get(DROPS, {}).items():
            drops.setdefault(key, {}).update(new)
    return drops


def _contest(drop: Mapping[str, Any]) -> Contest:
    """Return the evidence of a drop that a Recorder wrote. It writes None for an infinite margin."""
    return Contest(math.inf if drop["margin"] is None else drop["margin"], drop["standard_error"], drop["steps"])


_CHANNEL = re.compile(r"(.+):\d+")


def site_of(key: str) -> str:
    """Return the site of a record's key, without its channel."""
    match = _CHANNEL.fullmatch(key)
    return match[1] if match else key


def channels_note(history: Records) -> str:
    """Return the end of a caption: a full stop, after a note on channels if a site picks per channel."""
    by_channel = any(_CHANNEL.fullmatch(site) for entry in history for site in entry["sites"])
    return "; a site that picks per channel shows the mean over its channels." if by_channel else "."


def by_site(history: Records) -> tuple[list[str], dict[str, list[dict[str, float]]]]:
    """Return the candidates, and per site one {candidate: probability} per record, as the mean over channels."""
    if not history:
        raise FlexActError("the history is empty; call record(step) on the Recorder during training.")
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
