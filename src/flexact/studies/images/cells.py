"""The cells of the image study: data sets × models × methods × seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flexact.errors import FlexActError
from flexact.studies.grid.choices import check_names, check_seeds
from flexact.studies.images.data import NAMES
from flexact.studies.images.methods import FIXED, METHODS, MODELS
from flexact.studies.images.protocol import Cell


@dataclass(frozen=True)
class Grid:
    """Which cells; checked.

    >>> [cell.name for cell in Grid(("cifar10",), ("resnet18",), ("relu",), seeds=2, first_seed=3).cells]
    ['cifar10-resnet18-relu-3', 'cifar10-resnet18-relu-4']
    """

    datasets: tuple[str, ...] = NAMES
    models: tuple[str, ...] = ("resnet18",)
    methods: tuple[str, ...] = METHODS
    seeds: int = 3
    first_seed: int = 0

    def __post_init__(self) -> None:
        check_names("dataset", self.datasets, NAMES)
        check_names("model", self.models, tuple(MODELS))
        check_names("method", self.methods, METHODS + FIXED)
        check_seeds(self.seeds, self.first_seed)

    @property
    def cells(self) -> list[Cell]:
        """Seed by seed, so that a grid that is cut short has all methods on the first seeds."""
        return [
            Cell(dataset, model, method, seed)
            for dataset in self.datasets
            for model in self.models
            for seed in range(self.first_seed, self.first_seed + self.seeds)
            for method in self.methods
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        names = {kind: list(getattr(self, kind)) for kind in ("datasets", "models", "methods")}
        return {**names, "seeds": self.seeds, "first_seed": self.first_seed}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Grid:
        """The inverse of `to_dict`."""
        try:
            names = {kind: tuple(data[kind]) for kind in ("datasets", "models", "methods")}
            return cls(**names, seeds=data["seeds"], first_seed=data["first_seed"])
        except (KeyError, TypeError):
            raise FlexActError(f"not a grid of cells: {data!r:.80}.") from None


def asked(config: Mapping[str, Any]) -> list[Cell]:
    """All cells that a folder's grids were asked for, each once."""
    grids = [Grid.from_dict(one) for one in config.get("grids", [])]
    return list(dict.fromkeys(cell for grid in grids for cell in grid.cells))
