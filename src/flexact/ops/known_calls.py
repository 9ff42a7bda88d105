"""The calls of a site that can be repeated without a search for what runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flexact.ops import dispatch

MOST = 8
"""Number of chains after which the oldest is forgotten, so that a call with ever new sizes does not search many."""


class KnownCalls:
    """The chains that ran calls of a site in the extension (`ops.triton.chain`)."""

    def __init__(self) -> None:
        self.chains: tuple[Any, ...] = ()
        self.repeat: Callable[..., Any] | None = None
        """The extension's function of this name, which runs a call with one of the chains."""
        self._changes = dispatch.changes

    def add(self, repeat: Callable[..., Any], chain: Any) -> None:
        """Add the chain that ran a call."""
        if not self.are_valid():
            self.chains, self._changes = (), dispatch.changes
        if chain not in self.chains:
            self.chains = (*self.chains, chain)[-MOST:]
        self.repeat = repeat

    def are_valid(self) -> bool:
        """Return whether the same implementation would still run."""
        return self._changes == dispatch.changes
