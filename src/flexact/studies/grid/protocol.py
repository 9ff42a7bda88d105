"""What the protocols of studies that run as grids have in common.

The checks of their fields and the dictionary they are saved as; and the policy of the methods that pick.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from flexact.config import PAPER_CANDIDATES, FlexConfig
from flexact.errors import FlexActError
from flexact.io.option_checks import check_known

VERSION = 1
POLICIES: tuple[str, ...] = ("default", "paper")
PRECISIONS: tuple[str, ...] = ("bf16", "float32")
_KEY = "flexact_protocol"

Protocol = TypeVar("Protocol", bound="GridProtocol")


@dataclass(frozen=True)
class GridProtocol:
    """How every cell is trained: fields that are checked, and saved as a dictionary."""

    WHOLE: ClassVar[tuple[str, ...]] = ()
    """The fields that are whole numbers from 1 on, or None where that is their default."""
    FROM_ZERO: ClassVar[tuple[str, ...]] = ()
    """The fields that are finite numbers from 0 on."""
    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The fields that are one of several names."""

    def __post_init__(self) -> None:
        default = {one.name: one.default for one in dataclasses.fields(self)}
        for name in self.WHOLE:
            value = getattr(self, name)
            if value is None and default[name] is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise FlexActError(f"{name} must be a whole number from 1 on; got {value!r}.")
        for name in self.FROM_ZERO:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise FlexActError(f"{name} must be a finite number from 0 on; got {value!r}.")
        for name, known in self.CHOICES.items():
            check_known(name, getattr(self, name), known)

    def epochs_of(self, dataset: str) -> int:
        """Passes over a data set; 0 in a study whose cells have no curve over epochs."""
        return 0

    def about(self) -> list[str]:
        """What `--status` says of the protocol, besides its epochs."""
        return []

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, with the format's version."""
        return {_KEY: VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls: type[Protocol], data: dict[str, Any]) -> Protocol:
        """The inverse of `to_dict`; fields it does not name keep their defaults."""
        version = data.get(_KEY) if isinstance(data, dict) else None
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise FlexActError(f"not a Protocol: expected {{'{_KEY}': {VERSION}, ...}}; got {data!r:.80}.")
        if version > VERSION:
            raise FlexActError(f"this protocol has version {version}, and this flexact reads up to {VERSION}; update.")
        known = [one.name for one in dataclasses.fields(cls)]
        given = {key: value for key, value in data.items() if key != _KEY}
        for key in given:
            check_known("field", key, known)
        return cls(**given)


@dataclass(frozen=True)
class PickingProtocol(GridProtocol):
    """How every cell of a study is trained whose methods pick by one policy."""

    policy: str = "default"
    """"default" is `FlexConfig()`, "paper" `FlexConfig.paper()`."""
    candidates: tuple[str, ...] | None = None
    """What a site picks from; None for the study's own."""
    changes: dict[str, Any] = field(default_factory=dict, hash=False)
    """Other fields of the policy's `FlexConfig` that are changed."""
    precision: str = "bf16"
    """On a GPU; a CPU computes in float32."""

    OWN_CANDIDATES: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(POLICIES, PAPER_CANDIDATES)
    """What each policy picks from where nothing else is said."""
    OWN_CHANGES: ClassVar[Mapping[str, Any]] = {"share": "site", "rewind": False}
    """What the study changes in every policy."""
    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {"policy": POLICIES, "precision": PRECISIONS}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.candidates is None:
            object.__setattr__(self, "candidates", self.OWN_CANDIDATES[self.policy])
        elif not isinstance(self.candidates, str):
            object.__setattr__(self, "candidates", tuple(self.candidates))
        self.config(seed=0)  # checks the candidates and the changes

    def config(self, seed: int) -> FlexConfig:
        """The policy of the methods that pick."""
        if not isinstance(self.changes, dict):
            raise FlexActError(f"changes must be a dictionary of FlexConfig's fields; got {self.changes!r}.")
        base = FlexConfig() if self.policy == "default" else FlexConfig.paper()
        fields = {**base.to_dict(), "candidates": self.candidates, "seed": seed, **self.OWN_CHANGES, **self.changes}
        if isinstance(fields["policy"], dict):
            fields["policy"] = base.to_dict()["policy"] | fields["policy"]
        return FlexConfig.from_dict(fields)

    def about(self) -> list[str]:
        return [f"policy {self.policy}", f"candidates {', '.join(self.candidates or ())}"]

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "candidates": list(self.candidates or ())}
