"""The parts of sites' names that tell them apart, for figures."""

from __future__ import annotations

from collections.abc import Sequence


def without_shared_start(names: Sequence[str]) -> list[str]:
    """Return dotted names without their common prefix. The last part of a name always stays.

    >>> without_shared_start(["encoder.layer.0.act", "encoder.layer.1.act"])
    ['0.act', '1.act']
    """
    parts = [name.split(".") for name in names]
    shared = 0
    while len(names) > 1 and all(len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts):
        shared += 1
    return [".".join(p[shared:]) for p in parts]


def without_shared_end(names: Sequence[str]) -> list[str]:
    mirrored = [".".join(reversed(name.split("."))) for name in names]
    return [".".join(reversed(name.split("."))) for name in without_shared_start(mirrored)]
