"""Checks a comparison before its first run, and finds what identifies it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexact.config import FlexConfig
from flexact.errors import FlexActError, missing_extra
from flexact.routing.sites import sites_of
from flexact.studies.compare.functions import Functions, name_of
from flexact.studies.compare.networks import checked_network, digest
from flexact.studies.compare.protocol import Protocol
from flexact.surgery.choosing import Where
from flexact.surgery.convert import convert


@dataclass(frozen=True)
class Setup:
    """The functions of a comparison, and what identifies it."""

    functions: Functions
    protocol: Protocol
    original: str | None
    """The candidate that all sites of the original network have; None if they differ or if it is not a candidate."""

    @classmethod
    def of(cls, functions: Functions, config: FlexConfig, seeds: Sequence[int]) -> Setup:
        """Build the network and convert it once. Raises if that is not possible."""
        try:
            import scipy.stats  # noqa: F401  # before the training rather than after it
        except ImportError:
            raise missing_extra("scipy", "studies") from None
        try:
            model = checked_network(functions.build, (seeds[0], seeds[-1] if len(seeds) > 1 else seeds[0] + 1))
        except FlexActError:
            raise
        except Exception as error:
            raise FlexActError(f"build() raised {type(error).__name__}: {error!s:.300}.") from error
        architecture, source = digest(model), functions.sources(model)
        sites = sites_of(convert(model, functions.where, config))
        originals = {site.candidates[site.original_index] if site.original_index >= 0 else None for site in sites}
        protocol = Protocol(
            build=name_of(functions.build),
            train=name_of(functions.train),
            architecture=architecture,
            config=config.to_dict(),
            where=_where_as_text(functions.where),
            sites=[site.name for site in sites],
            source=source,
        )
        return cls(functions, protocol, originals.pop() if len(originals) == 1 else None)

    def changes(self, before: Mapping[str, Any]) -> str:
        """What changed in the code since the comparison in a folder began, as a warning; empty if nothing did."""
        old, new = before.get("protocol") or {}, self.protocol.to_dict()
        edited = [name for name, one in (old.get("source") or {}).items() if new["source"].get(name) != one]
        if not edited or old | {"source": {}} != new | {"source": {}}:  # the latter is another comparison
            return ""
        shown = edited[:6] + ([f"and {len(edited) - 6} more"] if len(edited) > 6 else [])
        return (
            f"{', '.join(shown)} changed since this comparison began. Runs that are done keep their results; to train "
            "them again, give --overwrite or another --out."
        )


def _where_as_text(where: Where) -> str | list[str]:
    if isinstance(where, str):
        return where
    return name_of(where) if callable(where) else sorted(where)
