"""What a Recorder's history says about each site: probabilities by record, drops, and the final state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flexact.errors import FlexActError
from flexact.observe.history import DECISIONS, DROPS, Records
from flexact.observe.selection_rows import TIE, Row
from flexact.policy.evidence import Contest


def outcomes(history: Records) -> list[Row]:
    """Return the final state of each site, in depth order. A site that picks per channel has no evidence."""
    drops = drops_of(history)
    decisions: dict[str, Mapping[str, Any]] = {}
    for entry in history:
        decisions |= entry.get(DECISIONS, {})
    rows = []
    for site, (pi,) in by_site(history[-1:])[1].items():
        ranked = sorted(pi.items(), key=lambda item: -item[1])
        if not ranked:
            continue
        (pick, p), (second, q) = ranked[0], ranked[1] if len(ranked) > 1 and ranked[1][1] > 0 else (None, 0.0)
        decision, dropped = decisions.get(site, {}), drops.get(site, {})
        row = Row(
            site=site,
            channel=None,
            original=decision.get("original"),
            pick=None if not decision and p - q <= TIE else pick,
            probability=p,
            runner_up=decision.get("runner_up", second),
            margin=p - q,
            committed=bool(decision),
            decided=decision.get("decided", False),
            probabilities=pi,
            dropped={name: drop["step"] for name, drop in dropped.items()},
            evidence={name: _contest(drop) for name, drop in dropped.items() if drop["standard_error"] is not None},
        )
        rows.append(row)
    return rows


def drops_of(history: Records) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Return all drops of a history, by site (or `site:channel`) and by candidate."""
    drops: dict[str, dict[str, Mapping[str, Any]]] = {}
    for entry in history:
        for key, new in entry.get(DROPS, {}).items():
            drops.setdefault(key, {}).update(new)
    return drops


def _contest(drop: Mapping[str, Any]) -> Contest:
    """Return the evidence of a drop that a Recorder wrote. It writes None for an infinite margin."""
    return Contest(math.inf if drop["margin"] is None else drop["margin"], drop["standard_error"], drop["steps"])


def by_site(history: Records) -> tuple[list[str], dict[str, list[dict[str, float]]]]:
    """Return the candidates, and per site one {candidate: probability} per record."""
    if not history:
        raise FlexActError("the history is empty; call record(step) on the Recorder during training.")
    sites = dict.fromkeys(site for entry in history for site in entry["sites"])
    table = {site: [entry["sites"].get(site, {}) for entry in history] for site in sites}
    return list(dict.fromkeys(name for records in table.values() for pi in records for name in pi)), table
