"""The cells of the image study: data sets × models × methods × seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flexact.studies.cifar.methods import FIXED, METHODS, MODELS
from flexact.studies.cifar.protocol import Cell
from flexact.studies.cifar_data.data import NAMES
from flexact.studies.grid.choices import Choices


@dataclass(frozen=True)
class Grid(Choices):
    """Which cells; checked.

    >>> [cell.name for cell in Grid(("cifar10",), ("resnet18",), ("relu",), seeds=2, first_seed=3).cells]
    ['cifar10-resnet18-relu-3', 'cifar10-resnet18-relu-4']
    """

    datasets: tuple[str, ...] = NAMES
    models: tuple[str, ...] = ("resnet18",)
    methods: tuple[str, ...] = METHODS

    KNOWN: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "datasets": NAMES,
        "models": tuple(MODELS),
        "methods": METHODS + FIXED,
    }

    @property
    def cells(self) -> list[Cell]:
        """Seed by seed, so that a grid that is cut short has all methods on the first seeds."""
        return [
            Cell(dataset, model, method, seed)
            for dataset in self.datasets
            for model in self.models
            for seed in self.each_seed
            for method in self.methods
        ]
