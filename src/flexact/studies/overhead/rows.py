"""The rows of the study's CSV files, and how they are written and read."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from flexact.errors import FlexActError
from flexact.studies.overhead.timing import Spread
from flexact.studies.store import text
from flexact.writing import write_whole

OVERHEAD, OPERATION, CANDIDATES, DEPTH = "overhead.csv", "operation.csv", "candidates.csv", "depth.csv"
LAUNCHES, PROFILE = "launches.csv", "profile.csv"

Row = TypeVar("Row")


@dataclass(frozen=True)
class Cell:
    """One network of the table, run in one mode."""

    network: str
    placement: str
    """"relu" (nothing is routed), "penultimate" or "all"."""
    way: str
    mode: str

    @property
    def compiled(self) -> bool:
        return self.mode.startswith("compiled")

    @property
    def captured(self) -> bool:
        return self.mode.endswith("graph")


@dataclass(frozen=True)
class OverheadRow:
    """What a cell costs. Times in milliseconds a batch; a field is None where it was not measured."""

    network: str
    placement: str
    way: str
    mode: str
    batch: int
    width: int
    dtype: str
    sites: int | None = None
    extra_parameters: int | None = None
    train_ms: float | None = None
    train_ms_p10: float | None = None
    train_ms_p90: float | None = None
    train_ratio: float | None = None
    """To the network with ReLU in the same mode."""
    train_ratio_p10: float | None = None
    train_ratio_p90: float | None = None
    train_ratio_to_compiled_graph: float | None = None
    """To the compiled network with ReLU, replayed from a graph; for cells that are replayed from one too."""
    inference_ms: float | None = None
    """After extraction, which leaves the same network whatever the way."""
    inference_ms_p10: float | None = None
    inference_ms_p90: float | None = None
    inference_ratio: float | None = None
    inference_ratio_p10: float | None = None
    inference_ratio_p90: float | None = None
    same_modules: bool | None = None
    """Whether the extracted network is the one with ReLU, module by module."""
    memory_mb: float | None = None
    memory_ratio: float | None = None
    memory_kind: str = ""
    repeats: int = 0
    error: str = ""

    @property
    def cell(self) -> Cell:
        return Cell(self.network, self.placement, self.way, self.mode)


@dataclass(frozen=True)
class OperationRow:
    """The operation alone on one large tensor."""

    operation: str
    """"copy", "relu", "gelu", or the way of a routed activation."""
    direction: str
    """"forward", "backward" or "both"."""
    mode: str
    elements: int
    dtype: str
    candidates: int | None = None
    ms: float | None = None
    ms_p10: float | None = None
    ms_p90: float | None = None
    ratio: float | None = None
    """To ReLU in the same direction and mode."""
    ratio_p10: float | None = None
    ratio_p90: float | None = None
    gb_per_s: float | None = None
    """The fewest bytes that the direction must move, each input read once and each output written once, over time."""
    of_copy: float | None = None
    """That, as a share of what a copy moves."""
    error: str = ""


@dataclass(frozen=True)
class SweepRow:
    """One point of cost against the number of candidates, or against depth."""

    what: str
    """"operation" (forward and backward alone) or "step" (a training step, all sites)."""
    network: str
    way: str
    mode: str
    candidates: int
    layers: int
    sites: int
    ms: float | None = None
    ms_p10: float | None = None
    ms_p90: float | None = None
    ratio: float | None = None
    """To ReLU."""
    ratio_p10: float | None = None
    ratio_p90: float | None = None
    ratio_to_five: float | None = None
    """To the same with the paper's five candidates."""
    error: str = ""


@dataclass(frozen=True)
class LaunchRow:
    """How many launches a network's step has, and how many of them are the draw's and the policy's."""

    layers: int
    sites: int
    way: str
    counted: str
    """"kernels" on a GPU, "operators" elsewhere."""
    draw: int | None = None
    """Logits to probabilities, at the start of the forward."""
    policy: int | None = None
    """What is done to the logits before the optimizer's step."""
    schedule: int | None = None
    """The schedule's step."""
    step: int | None = None
    """The whole training step."""
    relu_step: int | None = None
    error: str = ""


@dataclass(frozen=True)
class ProfileRow:
    """Where a step's time goes: on the device by kernel, on the host by function."""

    network: str
    placement: str
    way: str
    candidates: int
    """1 with ReLU."""
    mode: str
    kernel: str
    calls: int
    microseconds: float


def with_times(values: Spread, prefix: str) -> dict[str, float]:
    """A spread as the fields of a row.

    >>> with_times(Spread(2.0, 1.0, 3.0), "ms")
    {'ms': 2.0, 'ms_p10': 1.0, 'ms_p90': 3.0}
    """
    return {prefix: values.median, f"{prefix}_p10": values.low, f"{prefix}_p90": values.high}


def told(error: BaseException) -> str:
    """An exception as it stands in a row: its type and the start of its message, on one line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}"[:400]


def write(path: Path, rows: Iterable[Any], made: Mapping[str, str]) -> None:
    """Write rows of one kind whole, each with where it comes from."""
    rows = list(rows)
    if not rows:
        return
    columns = [field.name for field in dataclasses.fields(rows[0])]
    content = io.StringIO()
    writer = csv.writer(content, lineterminator="\n")
    writer.writerow([*columns, *made])
    for row in rows:
        writer.writerow([*(_text(getattr(row, column)) for column in columns), *made.values()])
    write_whole(path, content.getvalue())


def read(path: Path, kind: type[Row]) -> list[Row]:
    """The rows of a file that `write` wrote; none where there is no file."""
    if not path.is_file():
        return []
    types = get_type_hints(kind)
    rows = []
    for number, line in enumerate(csv.DictReader(path.read_text(encoding="utf-8").splitlines()), start=2):
        try:
            fields = {name: _value(line[name], str(types[name])) for name in types}
        except (KeyError, ValueError) as error:
            raise FlexActError(f"{path}, line {number}: {told(error)}; the file was edited or damaged.") from None
        rows.append(kind(**fields))
    return rows


def _text(value: Any) -> str:
    return "" if value is None else text(value)


def _value(given: str, kind: str) -> Any:
    if "None" in kind and given == "":
        return None
    if "bool" in kind:
        return given == "True"
    if "int" in kind:
        return int(given)
    return float(given) if "float" in kind else given
