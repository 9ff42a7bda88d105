"""Base classes for the protocols of grid studies: how every cell is trained."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from flexact.config import PAPER_CANDIDATES, FlexConfig
from flexact.errors import FlexActError
from flexact.io.value_checks import check_known

VERSION = 1
POLICIES: tuple[str, ...] = ("default", "paper")
PRECISIONS: tuple[str, ...] = ("bf16", "float32")
_KEY = "flexact_protocol"

Protocol = TypeVar("Protocol", bound="GridProtocol")


@dataclass(frozen=True)
class GridProtocol:
    """Settings that are checked and can be saved as a dictionary."""

    WHOLE: ClassVar[tuple[str, ...]] = ()
    """The fields that are whole numbers of at least 1, or None if that is their default."""
    FROM_ZERO: ClassVar[tuple[str, ...]] = ()
    """The fields that are finite numbers of at least 0."""
    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The fields that are one of several names."""

    def __post_init__(self) -> None:
        for name in self.WHOLE:
            value = getattr(self, name)
            if value is None and getattr(type(self), name) is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise FlexActError(f"{name} must be a whole number of at least 1; got {value!r}.")
        for name in self.FROM_ZERO:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise FlexActError(f"{name} must be a finite number of at least 0; got {value!r}.")
        for name, known in self.CHOICES.items():
            check_known(name, getattr(self, name), known)

    def epochs_of(self, dataset: str) -> int:
        """The epochs of a cell on a data set; 0 in a study whose cells have no curve over epochs."""
        return 0

    def about(self) -> list[str]:
        """What `--status` prints about the protocol, besides its epochs."""
        return []

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain JSON types, with the version of the format."""
        return {_KEY: VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls: type[Protocol], data: dict[str, Any]) -> Protocol:
        """The inverse of `to_dict`; missing fields have their defaults."""
        if not isinstance(data, dict) or data.get(_KEY) != VERSION:
            raise FlexActError(
                f"not a Protocol of this version: expected {{'{_KEY}': {VERSION}, ...}}; got {data!r:.80}."
            )
        settings = {name: value for name, value in data.items() if name != _KEY}
        for name in settings:
            check_known("field", name, [one.name for one in dataclasses.fields(cls)])
        return cls(**settings)


@dataclass(frozen=True)
class PickingProtocol(GridProtocol):
    """The protocol of a study whose methods pick activations with one policy."""

    policy: str = "default"
    """"default" is `FlexConfig()`, "paper" is `FlexConfig.paper()`."""
    candidates: tuple[str, ...] | None = None
    """The candidates of every site; None for the study's own."""
    changes: dict[str, Any] = field(default_factory=dict, hash=False)
    """Other fields of the policy's `FlexConfig` to change."""
    precision: str = "bf16"
    """The precision on a GPU; a CPU computes in float32."""

    OWN_CANDIDATES: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(POLICIES, PAPER_CANDIDATES)
    """The default candidates of each policy."""
    OWN_CHANGES: ClassVar[Mapping[str, Any]] = {"share": "site", "rewind": False}
    """The fields that the study changes in every policy."""
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
