"""The stages of `flexact reproduce all`: one call of a study's command each, in the order in which they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flexact.io.markdown_tables import counted
from flexact.studies.cifar.methods import USUAL
from flexact.studies.cifar.protocol import BUDGETS
from flexact.studies.cifar.protocol import Grid as ImageGrid
from flexact.studies.glue.protocol import Grid as TextGrid
from flexact.studies.grid.study import Choices
from flexact.studies.picks.protocol import Grid as PicksGrid
from flexact.studies.synthetic.studies import STUDIES

MAIN = ("relu", "gelu", "flexact-penultimate", "flexact-all")
"""The methods of CIFAR that have the most seeds."""
PICKING = ("relu", "flexact-penultimate", "flexact-all")
"""The methods for which the candidates matter, and what they are compared with."""
RIVALS = tuple(method for method in USUAL if method not in MAIN)
FIRST_SEED = 100
"""The first seed of CIFAR and of the benchmark of picks. Lower ones were seen when candidates were chosen."""
PAPERS_FIVE = "relu,sigmoid,tanh,leaky_relu,identity"
_TASKS = ("cola", "mrpc", "stsb", "qnli", "rte", "wnli")


@dataclass(frozen=True)
class Stage:
    """One call of `flexact reproduce STUDY`."""

    study: str
    about: str
    """The cells in words."""
    cells: Sequence[Any]
    """A grid's cells, or the names of the models of a synthetic study."""
    arguments: tuple[str, ...] = ()
    folder: str = ""
    """The folder in --out; stages with the same folder add cells to the same grid."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What the time of a cell depends on, besides the cell."""

    @property
    def place(self) -> str:
        return self.folder or self.study


def stages(budget: str) -> list[Stage]:
    """The stages of a budget: short trains CIFAR for 30 epochs, paper for 200 with the paper's 10 seeds throughout."""
    everything = [_synthetic(name) for name in STUDIES]
    everything.append(Stage("overhead", "ResNet-18 and ResNet-34, all that the device supports", ()))
    return everything + (_short() if budget == "short" else _paper())


def _short() -> list[Stage]:
    return [
        _images("short", MAIN, seeds=10),
        _images("short", PICKING, seeds=10, papers_five=True),
        _images("short", RIVALS, seeds=3),
        _images("short", MAIN, seeds=3, models=("resnet34",)),
        _images("short", MAIN, seeds=3, datasets=("cifar10",)),
        _text(TextGrid(seeds=5)),
        _picks(),
    ]


def _paper() -> list[Stage]:
    models, datasets = ("resnet18", "resnet34"), ("cifar10", "cifar100")
    return [
        _images("paper", USUAL, 10, models, datasets),
        _images("paper", PICKING, 10, models, datasets, papers_five=True),
        _text(TextGrid(_TASKS, seeds=5), "bert-base-uncased"),
        _picks(),
    ]


def _synthetic(name: str) -> Stage:
    study, models = STUDIES[name], STUDIES[name].models
    trained = f"{counted(len(models), 'model')} on {counted(len(study.truths), 'truth')}"
    return Stage(name, f"{trained}, {study.seeds} seeds trained together", models)


def _images(
    budget: str,
    methods: tuple[str, ...],
    seeds: int,
    models: tuple[str, ...] = ("resnet18",),
    datasets: tuple[str, ...] = ("cifar100",),
    papers_five: bool = False,
) -> Stage:
    grid, epochs = ImageGrid(datasets, models, methods, seeds=seeds, first_seed=FIRST_SEED), BUDGETS[budget]
    about = f"{', '.join(datasets)} × {', '.join(models)} × {', '.join(methods)}; {seeds} seeds, {epochs} epochs"
    arguments, folder = ("--budget", budget, *_options(grid)), ""
    if papers_five:
        about += "; the paper's five candidates"
        arguments, folder = (*arguments, "--candidates", PAPERS_FIVE), "cifar-papers-five"
    return Stage("cifar", about, grid.cells, arguments, folder, {"epochs": epochs})


def _text(grid: TextGrid, model: str = "") -> Stage:
    about = f"{', '.join(grid.tasks)} × {', '.join(grid.methods)}; {grid.seeds} seeds; {model or 'the default encoder'}"
    chosen = ("--model", model) if model else ()
    return Stage("glue", about, grid.cells, (*_options(grid), *chosen), settings={"model": model})


def _picks() -> Stage:
    grid = PicksGrid(seeds=5, first_seed=FIRST_SEED)
    about = f"{len(grid.tasks)} tasks × {', '.join(grid.methods)}; {grid.seeds} seeds"
    return Stage("picks", about, grid.cells, _options(grid))


def _options(grid: Choices) -> tuple[str, ...]:
    """The options that name a grid's cells."""
    named = grid.to_dict()
    values = {name: ",".join(value) if isinstance(value, list) else str(value) for name, value in named.items()}
    return tuple(word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", value))
