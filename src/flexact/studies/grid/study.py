"""The interface between a grid and its study: protocols, cells, their options, and the rows of results.csv."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from flexact.config import PAPER_CANDIDATES, FlexConfig
from flexact.errors import FlexActError
from flexact.io.value_checks import check_known, check_names, check_whole, number

VERSION = 1
POLICIES: tuple[str, ...] = ("default", "paper")
PRECISIONS: tuple[str, ...] = ("bf16", "float32")
_KEY = "flexact_protocol"

Own = TypeVar("Own", bound="GridProtocol")


class Setting(NamedTuple):
    """An annotation that makes a field of a protocol or of a grid an option of the command."""

    help: str
    default: str = ""
    """The default in words, if they say more than the value."""
    at_least: float | None = None
    known: tuple[str, ...] = ()
    """The names that a grid's field can have."""


def settings_of(kind: type[Any]) -> dict[str, tuple[Any, Setting]]:
    """The fields of a dataclass that have a `Setting`, each with its type."""
    hints = get_type_hints(kind, include_extras=True).items()
    return {name: get_args(hint) for name, hint in hints if get_origin(hint) is Annotated}


@dataclass(frozen=True)
class GridProtocol:
    """Settings that are checked and can be saved as a dictionary."""

    def __post_init__(self) -> None:
        """Check the numbers: an int is at least 1, and a float is finite and at least 0."""
        for name, kind in get_type_hints(type(self)).items():
            if kind is float:
                number(name, getattr(self, name), at_least=0)
            elif kind is int or (kind == int | None and getattr(self, name) is not None):
                value = getattr(self, name)
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise FlexActError(f"{name} must be a whole number of at least 1; got {value!r}.")

    def epochs_of(self, dataset: str) -> int:
        """The epochs of a cell on a data set; 0 in a study whose cells have no curve over epochs."""
        return 0

    def about(self) -> list[str]:
        """What `--status` prints about the protocol, besides its epochs."""
        return []

    def to_dict(self) -> dict[str, Any]:
        """The settings, with the version of the format."""
        return {_KEY: VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls: type[Own], data: dict[str, Any]) -> Own:
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

    policy: Annotated[str, Setting("Flex-Act's policy: default (FlexConfig()) or paper.")] = "default"
    candidates: tuple[str, ...] | None = None
    """The candidates of every site; None for the study's own."""
    changes: dict[str, Any] = field(default_factory=dict, hash=False)
    """Other fields of the policy's `FlexConfig` to change."""
    precision: str = "bf16"
    """The precision on a GPU; a CPU computes in float32."""

    OWN_CANDIDATES: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(POLICIES, PAPER_CANDIDATES)
    """The default candidates of each policy."""
    OWN_CHANGES: ClassVar[Mapping[str, Any]] = {}
    """The fields that the study changes in every policy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_known("policy", self.policy, POLICIES)
        check_known("precision", self.precision, PRECISIONS)
        if self.candidates is None:
            object.__setattr__(self, "candidates", self.OWN_CANDIDATES[self.policy])
        elif not isinstance(self.candidates, str):
            object.__setattr__(self, "candidates", tuple(self.candidates))
        self.config(seed=0)  # checks the candidates and the changes

    def config(self, seed: int) -> FlexConfig:
        """The policy of the methods that pick."""
        base = FlexConfig() if self.policy == "default" else FlexConfig.paper()
        fields = {**base.to_dict(), "candidates": self.candidates, "seed": seed, **self.OWN_CHANGES, **self.changes}
        if isinstance(fields["policy"], dict):
            fields["policy"] = base.to_dict()["policy"] | fields["policy"]
        return FlexConfig.from_dict(fields)

    @property
    def policy_and_changes(self) -> str:
        """The name of the policy and what is changed in it, such as "default, share=site"."""
        return ", ".join([self.policy, *(f"{name}={value}" for name, value in self.changes.items())])

    def about(self) -> list[str]:
        return [f"policy {self.policy_and_changes}", f"candidates {', '.join(self.candidates or ())}"]


MAX_SEEDS = 1000

Grid = TypeVar("Grid", bound="Choices")


@dataclass(frozen=True)
class Choices:
    """The choice of a grid's cells. A study adds one field per name in its cells; its `Setting` has the known names."""

    seeds: Annotated[int, Setting("Number of seeds.")] = field(default=3, kw_only=True)
    first_seed: Annotated[int, Setting("The first seed.")] = field(default=0, kw_only=True)

    CELL: ClassVar[type[Any]]
    """The `GridCell` of the study, made of one name from each field, and a seed."""

    def __post_init__(self) -> None:
        for name, (_, setting) in settings_of(type(self)).items():
            if setting.known:
                check_names(name, getattr(self, name), setting.known)
        check_whole("seeds", self.seeds, 1, MAX_SEEDS)
        check_whole("first-seed", self.first_seed, 0, 2**40)

    @property
    def each_seed(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    def cells(self) -> Sequence[Any]:
        """Each cell once, in the order in which they run: seed by seed, so that an interrupted grid has all methods for
        the first seeds."""
        varied = [getattr(self, name) for name, (_, setting) in settings_of(type(self)).items() if setting.known]
        return [self.CELL(*names, seed) for seed in self.each_seed for names in product(*varied)]

    @classmethod
    def from_dict(cls: type[Grid], data: dict[str, Any]) -> Grid:
        """The inverse of `dataclasses.asdict`, also after a round trip through JSON."""
        if not isinstance(data, dict) or data.keys() != {one.name for one in dataclasses.fields(cls)}:
            raise FlexActError(f"not a grid of cells: {data!r:.80}.")
        fields: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        return cls(**fields)

    @classmethod
    def asked_for(cls: type[Grid], chosen: Mapping[str, Any], before: Mapping[str, Any] | None) -> list[Grid]:
        """The grids that options ask for.

        chosen: the fields that were given. On resuming, each grid of the folder provides the others, and no grid is
        added if none were given.
        before: config.json of the folder to resume; None for a new grid.
        """
        if before is None:
            return [cls(**chosen)]
        if not chosen:
            return []
        return list(dict.fromkeys(replace(cls.from_dict(one), **chosen) for one in before.get("grids", [])))


FIXED = "fixed"
"""Stands for the fixed methods of all candidates."""
PREFIX = "fixed-"


def fixed(candidate: str) -> str:
    """Return the method with a candidate at every site.

    >>> fixed("relu")
    'fixed-relu'
    """
    return PREFIX + candidate


def candidate_of(method: str) -> str | None:
    """Return the candidate of a fixed method; None for any other method.

    >>> candidate_of("fixed-relu"), candidate_of("race")
    ('relu', None)
    """
    return method.removeprefix(PREFIX) if method.startswith(PREFIX) else None


LOCK = "run.lock"
"""The file in a cell's folder that is locked while the cell runs; it stays there."""

Train = Callable[..., Any]
"""(cell, protocol, data, folder, device, stop=) -> the cell's `Row`, without what the grid adds: device (if it is
empty), torch, commit and date. Resumes from a checkpoint in the folder."""
Load = Callable[[str, Path, Any], Any]
"""(name, folder of all data sets, protocol) -> data set, with its digest as `sha256`. Raises if the protocol cannot
train on it."""


class GridCell:
    """One run of a study. Its subclass is a frozen dataclass, whose fields identify the run: `method`, `seed` and what
    is trained."""

    @property
    def data_name(self) -> str:
        """The name of the data set that the grid loads for the cell; empty if there is none."""
        return ""

    @property
    def name(self) -> str:
        """A unique name, for file names."""
        return "-".join(map(str, self.to_dict().values()))

    def to_dict(self) -> dict[str, Any]:
        """The columns that identify the cell, in plain JSON types."""
        return dataclasses.asdict(self)  # type: ignore[call-overload,no-any-return]


DONE, FAILED = "done", "failed"
"""The states of a row."""
Row = Any
"""One line of results.csv, a NamedTuple: the cell's columns, its state, its results, and their provenance. The defaults
are the values of a failed cell. Its property `cell` is the cell."""


def picked(picks: str) -> dict[str, str]:
    """The pick of each site, from the column `picks` of results.csv.

    >>> picked("layer1.0=relu layer1.1=tanh")
    {'layer1.0': 'relu', 'layer1.1': 'tanh'}
    """
    return dict(pair.rsplit("=", 1) for pair in picks.split())


def picks_column(picks: Mapping[str, str]) -> str:
    """The inverse of `picked`."""
    return " ".join(f"{site}={pick}" for site, pick in picks.items())


@dataclass(frozen=True)
class GridStudy:
    """A study whose cells a grid runs."""

    name: str
    """The name of its command."""
    title: str
    """The title of its page."""
    grid: type[Choices]
    protocol: type[GridProtocol]
    row: type[Row]
    """The `Row` of its results.csv."""
    table: Callable[[Sequence[Any], Any, Sequence[Any]], str]
    """(rows, protocol, cells that were asked for) -> table.md."""
    train: Train
    summary: Callable[[Any], str]
    """The result of a finished cell in a few words, from its row."""
    load: Load | None = None
    """None if no cell has a data set."""
    data: Path = Path("data")
    """The default folder of its data."""
    command: str = ""
    """Its command line if it is not `flexact reproduce` and its name."""
    operational: Sequence[str] = ("checkpoint_minutes",)
    """The fields of the protocol that do not affect results, and may change when a grid is resumed."""
    folders: Sequence[str] = ()
    """Folders that cells write besides their own; `--overwrite` removes them."""

    def asked(self, config: Mapping[str, Any]) -> list[Any]:
        """All cells that a folder's config.json asks for, each once."""
        return list(dict.fromkeys(cell for one in config.get("grids", []) for cell in self.grid.from_dict(one).cells))
