"""What a grid can be asked for, checked in the words of its options, and the cells that come of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from flexact.errors import FlexActError
from flexact.io.option_checks import check_names, check_whole

MOST_SEEDS = 1000

Grid = TypeVar("Grid", bound="Choices")


@dataclass(frozen=True)
class Choices(ABC):
    """Which cells; checked. A study adds what it can vary, as tuples of names."""

    seeds: int = field(default=3, kw_only=True)
    first_seed: int = field(default=0, kw_only=True)

    KNOWN: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The study's fields, each with the names that it can have."""

    def __post_init__(self) -> None:
        for kind, known in self.KNOWN.items():
            check_names(kind, getattr(self, kind), known)
        check_whole("seeds", self.seeds, 1, MOST_SEEDS)
        check_whole("first-seed", self.first_seed, 0, 2**40)

    @property
    def each_seed(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    @abstractmethod
    def cells(self) -> Sequence[Any]:
        """Each once, in the order in which they are run."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        names = {kind: list(getattr(self, kind)) for kind in self.KNOWN}
        return {**names, "seeds": self.seeds, "first_seed": self.first_seed}

    @classmethod
    def from_dict(cls: type[Grid], data: dict[str, Any]) -> Grid:
        """The inverse of `to_dict`."""
        try:
            names = {kind: tuple(data[kind]) for kind in cls.KNOWN}
            return cls(**names, seeds=data["seeds"], first_seed=data["first_seed"])
        except (KeyError, TypeError):
            raise FlexActError(f"not a grid of cells: {data!r:.80}.") from None

    @classmethod
    def asked_for(cls: type[Grid], chosen: Mapping[str, Any], before: Mapping[str, Any] | None) -> list[Grid]:
        """The grids that options ask for; what they leave open is as it was in each grid of the folder gone on with.

        chosen: the fields that are given; where a folder is gone on with and none is, there is no new grid.
        before: config.json of that folder; None where a grid begins.
        """
        if before is None:
            return [cls(**chosen)]
        if not chosen:
            return []
        return list(dict.fromkeys(replace(cls.from_dict(one), **chosen) for one in before.get("grids", [])))
