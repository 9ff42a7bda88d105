"""Short names of sites for figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def short_names(names: Sequence[str], most: int = 24) -> list[str]:
    """Return names for an axis. A prefix that all names share is removed, and long names are cut at the start. Names
    that would become equal are cut at the end, and stay whole if that does not distinguish them.

    >>> short_names(["encoder.layer.0.act", "encoder.layer.1.act"])
    ['0.act', '1.act']
    >>> short_names(["encoder.layer.0.intermediate.act", "encoder.layer.1.intermediate.act", "pool"], most=18)
    ['encoder.layer.0…', 'encoder.layer.1…', 'pool']
    """
    whole = without_shared_start(names)
    short = [_end(name, most) for name in whole]
    for label in _repeated(short):
        alike = [i for i, other in enumerate(short) if other == label]
        ends = without_shared_end([whole[i] for i in alike])
        for i, end in zip(alike, ends, strict=True):
            short[i] = _end(end, most - 1) + "…"
    repeated = _repeated(short)
    return [name if label in repeated else label for name, label in zip(whole, short, strict=True)]


def without_shared_start(names: Sequence[str]) -> list[str]:
    """Return dotted names without their common prefix. The last part of a name always stays."""
    parts = [name.split(".") for name in names]
    shared = 0
    while len(names) > 1 and all(len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts):
        shared += 1
    return [".".join(p[shared:]) for p in parts]


def without_shared_end(names: Sequence[str]) -> list[str]:
    mirrored = [".".join(reversed(name.split("."))) for name in names]
    return [".".join(reversed(name.split("."))) for name in without_shared_start(mirrored)]


def _end(name: str, most: int) -> str:
    return name if len(name) <= most else "…" + name[1 - most :]


def _repeated(labels: Sequence[str]) -> set[str]:
    return {label for label, count in Counter(labels).items() if count > 1}
