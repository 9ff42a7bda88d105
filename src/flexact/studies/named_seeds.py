"""Seeds hashed from a text that says what they are for: the same on every device and in a resumed run."""

from __future__ import annotations

import hashlib

import torch


def seed_of(text: str) -> int:
    """The seed for the random numbers that a text describes."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def generator_of(text: str) -> torch.Generator:
    """A generator on the CPU with that seed."""
    return torch.Generator().manual_seed(seed_of(text))
