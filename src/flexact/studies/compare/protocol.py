"""What a comparison runs: its methods, its cells, and the settings that identify it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from flexact.candidates.registry import ORIGINAL
from flexact.config import FlexConfig
from flexact.io.value_checks import check_names
from flexact.studies.grid.study import FIXED, Choices, GridCell, GridProtocol, Setting, fixed

FLEXACT = "flexact"
"""The network that picks while it trains."""
ALONE = "flexact-alone"
"""The picks of `FLEXACT`, trained from the start in a plain network."""
USUAL: tuple[str, ...] = (ORIGINAL, FIXED, FLEXACT, ALONE)


def methods_of(candidates: Sequence[str], asked: Sequence[str] = USUAL, original: str | None = None) -> tuple[str, ...]:
    """The methods that names stand for, in the order of the table; "fixed" stands for each candidate at every site.

    original: the candidate that the network has at every site already. "fixed" omits it, as "original" trains it.

    >>> methods_of(("original", "relu", "gelu"), original="relu")
    ('original', 'fixed-gelu', 'flexact', 'flexact-alone')
    """
    every = [fixed(candidate) for candidate in candidates if candidate != ORIGINAL]
    check_names("methods", asked, (ORIGINAL, FIXED, *every, FLEXACT, ALONE))
    wanted = set(asked) | {one for one in every if FIXED in asked and one != fixed(original or "")}
    if ALONE in wanted:
        wanted.add(FLEXACT)  # which makes the picks
    return tuple(one for one in (ORIGINAL, *every, FLEXACT, ALONE) if one in wanted)


@dataclass(frozen=True)
class Cell(GridCell):
    """One run of `train`.

    >>> Cell("fixed-relu", 0).name
    'fixed-relu-0'
    """

    method: str
    seed: int


@dataclass(frozen=True)
class Grid(Choices):
    """The selected methods and seeds.

    >>> [cell.name for cell in Grid(("original", "fixed-relu"), seeds=1).cells]
    ['original-0', 'fixed-relu-0']
    """

    methods: Annotated[
        tuple[str, ...],
        Setting(
            "original, fixed (each candidate at every site), fixed-CANDIDATE, flexact, flexact-alone.",
            "original, fixed, flexact, flexact-alone",
        ),
    ] = USUAL
    """Only `methods_of` checks the names, because a candidate may be registered only in another process."""
    seeds: Annotated[int, Setting("Number of seeds.")] = field(default=5, kw_only=True)

    @property
    def cells(self) -> list[Cell]:
        """All cells, seed by seed. A cell that needs the picks of another one comes after it."""
        return [Cell(method, seed) for seed in self.each_seed for method in self.methods]


@dataclass(frozen=True)
class Protocol(GridProtocol):
    """The settings that all runs of a comparison share."""

    build: str
    """The function that builds the network, as "module:name"."""
    train: str
    architecture: str
    """Digest of what `build` makes."""
    config: dict[str, Any] = field(hash=False)
    """Flex-Act's `FlexConfig` as a dictionary; each run has its own seed."""
    where: str | list[str] = field(hash=False)
    """The sites, as in `convert`; the name of a function if it is one."""
    sites: list[str] = field(hash=False)
    """The names of the sites."""

    def about(self) -> list[str]:
        return [f"build {self.build}", f"train {self.train}", f"candidates {', '.join(self.config['candidates'])}"]

    @property
    def flexact(self) -> FlexConfig:
        """Flex-Act's settings."""
        return FlexConfig.from_dict(self.config)


class Result(NamedTuple):
    """One row of results.csv. A failed run has an error, and NaN or 0 in place of its results."""

    method: str
    seed: int
    state: str
    score: float = math.nan
    """What `train` returned."""
    seconds: float = 0.0
    """Time spent in `train`."""
    picks: str = ""
    """Picks by site, such as "1=relu 3=gelu"; empty for a network that does not pick, and if the sites are not
    committed."""
    note: str = ""
    error: str = ""
    device: str = ""
    torch: str = ""
    commit: str = ""
    date: str = ""

    @property
    def cell(self) -> Cell:
        return Cell(self.method, self.seed)
