"""One row of a selection: a site's pick and its evidence, and the same in plain JSON types."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args, get_origin, get_type_hints

from flexact.errors import FlexActError
from flexact.io.markdown_tables import counted
from flexact.policy.evidence import Contest

TIE = 1e-6
"""Probabilities that differ by at most this are equal."""


@dataclass(frozen=True)
class Row:
    """One site, or one channel of it: its pick, and by how much that leads."""

    site: str
    channel: int | None
    original: str | None
    """The original activation, if it is a candidate; otherwise None."""
    pick: str | None
    """The candidate that leads now. None while those left are equally likely, as before training and in a trial."""
    probability: float
    runner_up: str | None
    """The second likeliest candidate. Once the row is committed: the one that was dropped last, and of several the one
    with the smallest margin in standard errors."""
    margin: float
    """The probability of the pick minus that of the next remaining candidate."""
    committed: bool
    decided: bool
    """Whether the row is committed on significant evidence: that its pick is better than the original or, if that was
    kept or is unknown, than the runner-up."""
    probabilities: dict[str, float]
    dropped: dict[str, int]
    """The step at which each dropped candidate was dropped."""
    evidence: dict[str, Contest]
    """The margin of each dropped candidate when it was dropped; candidates dropped without evidence are left out. For
    the original: in the round of a blend in which it first was significantly behind."""
    trying: str | None = None
    """In a trial: the candidate that is being trained."""

    @property
    def key(self) -> str:
        """The site, or `site:channel` for a channel."""
        return self.site if self.channel is None else f"{self.site}:{self.channel}"

    @property
    def lead(self) -> Contest | None:
        """The evidence against the runner-up; None before the commitment, and where there is none."""
        return self.evidence.get(self.runner_up) if self.committed and self.runner_up is not None else None

    @property
    def over_original(self) -> Contest | None:
        """The evidence against the original, if the pick is another candidate; None if there is none."""
        return None if self.original in (None, self.pick) else self.deciding

    @property
    def deciding(self) -> Contest | None:
        """The evidence on which `decided` rests; None before the commitment, and where there is none."""
        rival = self.runner_up if self.original in (None, self.pick) else self.original
        return self.evidence.get(rival) if self.committed and rival is not None else None

    @property
    def undecided(self) -> bool:
        """Whether the row is committed without significant evidence."""
        return self.committed and not self.decided

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        fields: dict[str, Any] = plain(asdict(self))
        if self.trying is None:
            del fields["trying"]
        return fields

    @classmethod
    def from_dict(cls, number: int, data: Any) -> Row:
        """The inverse of `to_dict`, with every field checked. number: the number of the row, for error messages."""
        kinds = get_type_hints(cls)
        if not isinstance(data, dict) or data.keys() | {"trying"} != kinds.keys():
            raise FlexActError(f"row {number} of a selection needs the fields {', '.join(kinds)}; got {data!r:.80}.")
        fields = {}
        for name, value in data.items():
            try:
                fields[name] = _restored(value, kinds[name])
            except TypeError:
                raise FlexActError(f"row {number} of a selection: {name} cannot be {value!r:.80}.") from None
        return cls(**fields)


def alike(rows: Iterable[Row]) -> list[tuple[str, Row]]:
    """Sites that picked together as one row each, with its name: that of the site, or how many sites they are."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(repr(replace(row, site="", channel=None)), []).append(row)
    return [(one[0].key if len(one) == 1 else counted(len(one), "site"), one[0]) for one in groups.values()]


def plain(value: Any) -> Any:
    """The same with None for every number that is not finite, which JSON cannot have."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _restored(value: Any, kind: Any) -> Any:
    """The inverse of `plain`; raises TypeError unless a value is of this type. Booleans do not count as numbers."""
    if get_origin(kind) is dict and isinstance(value, dict):
        return {_restored(key, str): _restored(one, get_args(kind)[1]) for key, one in value.items()}
    if kind is Contest and isinstance(value, dict):
        found = Contest(**value)
        margin = math.inf if found.margin is None else found.margin
        return Contest(*map(_restored, (margin, found.standard_error, found.steps), (_NUMBER, _NUMBER, int)))
    if kind is float:
        kind, value = _NUMBER, math.nan if value is None else value
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError
    return value


_NUMBER = float | int
