"""The cells that a grid asks for, as options of its command."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from flexact.errors import FlexActError
from flexact.io.option_checks import check_names, check_whole

MAX_SEEDS = 1000

Grid = TypeVar("Grid", bound="Choices")


@dataclass(frozen=True)
class Choices(ABC):
    """The cells of a grid. A study adds fields for what it varies, as tuples of names."""

    seeds: int = field(default=3, kw_only=True)
    first_seed: int = field(default=0, kw_only=True)

    KNOWN: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The study's fields, and the names that each can have."""

    def __post_init__(self) -> None:
        for kind in self.KNOWN:
            check_names(kind, getattr(self, kind), self.known(kind))
        check_whole("seeds", self.seeds, 1, MAX_SEEDS)
        check_whole("first-seed", self.first_seed, 0, 2**40)

    def known(self, kind: str) -> tuple[str, ...]:
        """The names that a field can have."""
        return self.KNOWN[kind]

    @property
    def each_seed(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    @abstractmethod
    def cells(self) -> Sequence[Any]:
        """Each cell once, in the order in which they run."""

    def to_dict(self) -> dict[str, Any]:
        """The grid as plain JSON types."""
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
        """The grids that options ask for.

        chosen: the fields that are given. On resuming, each grid of the folder provides the others, and there is no new
        grid if nothing is given.
        before: config.json of the folder to resume; None for a new grid.
        """
        if before is None:
            return [cls(**chosen)]
        if not chosen:
            return []
        return list(dict.fromkeys(replace(cls.from_dict(one), **chosen) for one in before.get("grids", [])))
