"""One row of a selection: a site's pick and its evidence, and the same in plain JSON types."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from flexact.errors import FlexActError
from flexact.policy.evidence import Contest


@dataclass(frozen=True)
class Row:
    """One site, or one channel of it: its pick, and by how much that leads."""

    site: str
    channel: int | None
    original: str | None
    """The candidate that stood here before; None if it is none of them."""
    pick: str | None
    """The candidate that leads now. None while all that are left are alike, as before training and in a trial."""
    probability: float
    runner_up: str | None
    """The second likeliest candidate. Once the row is committed: the one that was dropped last, and of several the one
    with the smallest margin in standard errors."""
    margin: float
    """The probability of the pick less that of the next candidate still in."""
    committed: bool
    decided: bool
    """Whether the row is committed on significant evidence: that its pick is better than what the site had before, or,
    where it kept that, that this is better than the runner-up."""
    probabilities: dict[str, float]
    dropped: dict[str, int]
    """When each candidate that is out was dropped, in steps."""
    evidence: dict[str, Contest]
    """The margin of each dropped candidate when it was dropped; candidates dropped without evidence are left out. For
    the original: in the round of a blend in which it first was significantly behind."""

    @property
    def key(self) -> str:
        """The site; a channel's key has its number behind a colon."""
        return self.site if self.channel is None else f"{self.site}:{self.channel}"

    @property
    def lead(self) -> Contest | None:
        """The evidence against the runner-up; None before the commitment, and where there is none."""
        return self.evidence.get(self.runner_up) if self.committed and self.runner_up is not None else None

    @property
    def over_original(self) -> Contest | None:
        """The evidence against what the site had before, where it picked something else; None where there is none."""
        if not self.committed or self.original is None or self.original == self.pick:
            return None
        return self.evidence.get(self.original)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        fields: dict[str, Any] = plain(asdict(self))
        return fields

    @classmethod
    def from_dict(cls, number: int, data: Any) -> Row:
        """The inverse of `to_dict`, with every field checked. number: that of the row, for error messages."""
        if not isinstance(data, dict) or data.keys() != _FIELDS.keys():
            raise FlexActError(f"row {number} of a selection needs the fields {', '.join(_FIELDS)}; got {data!r:.80}.")
        for name, value in data.items():
            if not _is_right(name, value):
                raise FlexActError(f"row {number} of a selection: {name} cannot be {value!r:.80}.")
        fields = data | {name: _finite(data[name]) for name in ("probability", "margin")}
        fields["probabilities"] = {key: _finite(p) for key, p in data["probabilities"].items()}
        fields["dropped"] = dict(data["dropped"])
        fields["evidence"] = {
            key: Contest(**(one | {"margin": _finite(one["margin"], math.inf)}))
            for key, one in data["evidence"].items()
        }
        return cls(**fields)


def plain(value: Any) -> Any:
    """The same with None for every number that is not finite, which JSON cannot have."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _finite(value: float | None, otherwise: float = math.nan) -> float:
    return otherwise if value is None else value


def _is(value: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a value is of one of these types; True and False are no numbers."""
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _is_right(name: str, value: Any) -> bool:
    """Whether a field has the type that it must have."""
    if not _is(value, _FIELDS[name]):
        return False
    entries = value.items() if isinstance(value, dict) else ()
    if not all(isinstance(key, str) and _is(one, _ENTRIES[name]) for key, one in entries):
        return False
    contests = [one for _, one in entries] if name == "evidence" else []
    return all(
        one.keys() == _CONTEST.keys() and all(_is(one[field], kinds) for field, kinds in _CONTEST.items())
        for one in contests
    )


_TEXT, _NUMBER = (str, type(None)), (float, int, type(None))
_FIELDS: dict[str, tuple[type, ...]] = {
    "site": (str,),
    "channel": (int, type(None)),
    "original": _TEXT,
    "pick": _TEXT,
    "runner_up": _TEXT,
    "probability": _NUMBER,
    "margin": _NUMBER,
    "committed": (bool,),
    "decided": (bool,),
    "probabilities": (dict,),
    "dropped": (dict,),
    "evidence": (dict,),
}
_ENTRIES: dict[str, tuple[type, ...]] = {"probabilities": _NUMBER, "dropped": (int,), "evidence": (dict,)}
_CONTEST: dict[str, tuple[type, ...]] = {"margin": _NUMBER, "standard_error": (float, int), "steps": (int,)}
