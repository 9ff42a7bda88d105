"""Short names of sites for figures."""

from __future__ import annotations

from collections.abc import Sequence


def short_names(names: Sequence[str], most: int = 26) -> list[str]:
    """Return names for an axis, without the prefix that all of them share. Long names are cut at the start, or at the
    end if some would become equal; if they would in both cases, they stay whole.

    >>> short_names(["encoder.layer.0.act", "encoder.layer.1.act"])
    ['0.act', '1.act']
    >>> short_names(["encoder.layer.0.intermediate.act", "encoder.layer.1.intermediate.act", "pool"], most=18)
    ['encoder.layer.0.i…', 'encoder.layer.1.i…', 'pool']
    """
    whole = without_shared_start(names)
    ends = [name if len(name) <= most else "…" + name[1 - most :] for name in whole]
    starts = [name if len(name) <= most else name[: most - 1] + "…" for name in whole]
    return next((short for short in (ends, starts) if len(set(short)) == len(set(whole))), whole)


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
