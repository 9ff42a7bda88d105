"""What a data set is known by: its SHA-256, kept with the results that were made from it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def sha256_of(parts: Iterable[bytes | bytearray]) -> str:
    """The SHA-256 of bytes, one part after another, in hexadecimal digits.

    >>> sha256_of([b"a", b"bc"]) == sha256_of([b"abc"])
    True
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
