"""What `convert` would do to a model, as a table of its activations; the model is unchanged."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn

from flexact.candidates.recognition import function_name, is_kind_of_activation, key_of
from flexact.candidates.registry import ORIGINAL
from flexact.errors import FlexActError, missing_extra
from flexact.io.text_tables import aligned, cut, printable
from flexact.routing.layer import FlexAct
from flexact.surgery.batch_norm_fusion import Fused, find_fused
from flexact.surgery.choosing import Choice, Where, check_convertible, check_where, choose
from flexact.surgery.finding import Found, Place
from flexact.surgery.run_order import Seen

if TYPE_CHECKING:
    import pandas

VERSION = 1
_LONGEST_NAME = 48


@dataclass(frozen=True)
class Activation:
    """One row: an activation of a model, and what `convert` does with it."""

    names: tuple[str, ...]
    """Its names in the model; several for a shared module. Where a method's calls cannot be read or rewritten, the name
    of the submodule that makes them."""
    function: str
    """A candidate's name, or the module with its settings; empty where only a running model would show it."""
    kind: str
    """"module", "call" (F.relu(x) in a method) or "function" (a stored one: self.act = F.relu)."""
    lines: tuple[str, ...]
    """The file and the line of each call in the source, where they are rewritten: "net.py:12"."""
    calls: int | None
    """The number of calls in one forward; None without example inputs."""
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of its inputs in one forward, each once."""
    converted: bool
    reason: str
    """Why it is left alone; empty if it is converted."""
    fused: bool
    """Whether `convert(..., fuse=True)` runs it together with the batch norm before it."""
    why_not_fused: str

    @property
    def name(self) -> str:
        return ", ".join(self.names)


@dataclass(frozen=True)
class Inspection:
    """The activations of a model, in execution order where example inputs were given, else in definition order."""

    rows: tuple[Activation, ...]

    @property
    def converted(self) -> list[str]:
        """The names of the sites that `convert` would make, in the order of the rows."""
        return [row.names[0] for row in self.rows if row.converted]

    def to_dict(self) -> dict[str, Any]:
        """Return the table in plain JSON types, with the version of the format."""
        rows = [{key: _plain(value) for key, value in asdict(row).items()} for row in self.rows]
        return {"flexact_inspection": VERSION, "rows": rows}

    def to_frame(self) -> pandas.DataFrame:
        """Return a pandas table: one row per activation, with the fields of `Activation` as columns."""
        try:
            import pandas
        except ImportError:
            raise missing_extra("pandas", "frame") from None
        frame: pandas.DataFrame = pandas.DataFrame([asdict(row) for row in self.rows])
        return frame

    def __str__(self) -> str:
        if not self.rows:
            return "no activation was found in this model"
        notes: dict[str, int] = {}
        rows = self._cells(notes)
        columns = {title: [row[title] for row in rows] for title in _TITLES}
        columns["name"] = cut(columns["name"], _LONGEST_NAME)
        return "\n".join([*aligned(columns), *(f"{number}: {printable(note)}" for note, number in notes.items())])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        notes: dict[str, int] = {}
        head = "".join(f"<th>{title}</th>" for title in _TITLES)
        rows = ["".join(f"<td>{escape(cell)}</td>" for cell in row.values()) for row in self._cells(notes)]
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        listed = "".join(f"<li>{escape(note)}</li>" for note in notes)  # numbered from 1, as the notes are
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><ol>{listed}</ol>"

    def _cells(self, notes: dict[str, int]) -> list[dict[str, str]]:
        """Return the rows as text. notes: receives the reasons, each with its number in the text."""
        return [
            {
                "name": printable(row.name),
                "function": row.function or "-",
                "kind": row.kind + (f" ({', '.join(dict.fromkeys(row.lines))})" if row.lines else ""),
                "calls": "-" if row.calls is None else str(row.calls),
                "input": " ".join("×".join(map(str, shape)) for shape in row.shapes) or "-",
                "converted": "yes" if row.converted else _noted(row.reason, notes),
                "fused": "yes" if row.fused else _noted(row.why_not_fused, notes) if row.converted else "-",
            }
            for row in self.rows
        ]


_TITLES = ("name", "function", "kind", "calls", "input", "converted", "fused")


def inspect(
    model: nn.Module, where: Where = "all", *, example_inputs: Any = None, per_call: bool = False
) -> Inspection:
    """List every activation of a model, and what `convert` with the same arguments would do with it, and why.

    The result prints as a table. The model is unchanged.

    where, per_call: as for `convert`.
    example_inputs: what the model is called with (a tensor, a tuple, or a dictionary of keywords). With it, a copy of
    the model is run once in eval mode, the rows are in execution order, and calls and input shapes are counted.

    >>> import torch, flexact
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1), torch.nn.Sigmoid())
    >>> flexact.inspect(model, example_inputs=torch.randn(4, 2))
    name  function  kind    calls  input  converted  fused
    -------------------------------------------------------
    1     relu      module  1      4×8    yes        no (1)
    3     sigmoid   module  1      4×1    no (2)     -
    1: the model has no nn.BatchNorm2d without hooks; SyncBatchNorm and other subclasses are left alone
    2: a sigmoid, which is a gate or an output
    """
    if isinstance(model, nn.Module) and any(isinstance(module, FlexAct) for module in model.modules()):
        raise FlexActError(
            "this model has FlexAct sites already, and inspect shows what convert would do with a plain one. "
            "flexact.selection(model) shows the sites and what they pick."
        )
    check_convertible(model, "inspect")
    if any(isinstance(one, Tensor) for one in (where if isinstance(where, (tuple, list)) else [where])):
        raise FlexActError("where must select activations; got a tensor. Give inputs by name: example_inputs=...")
    check_where(where)
    choice = choose(model, where, example_inputs, per_call)
    fused = find_fused(model, choice.sites, choice.findings, choice.findings.rewritten(choice.sites))
    placed = [*_found(model, choice, fused), *_left_alone(model, choice)]
    return Inspection(tuple(row for _, row in sorted(placed, key=lambda one: one[0])))


_Order = tuple[float, Place]


def _found(model: nn.Module, choice: Choice, fused: Fused) -> Iterator[tuple[_Order, Activation]]:
    """Yield the rows of the activations that could be sites, with their positions."""
    chosen = {id(one) for one in choice.sites}
    for one in choice.findings.found:
        is_site = id(one) in chosen
        is_fused = is_site and not fused.sites.isdisjoint(one.names)
        reason = "" if is_site else choice.skipped.get(one.name, "where does not select it")
        obstacle = "it is not converted" if not is_site else "" if is_fused else _obstacle(model, one, fused)
        seen = None if choice.seen is None else choice.seen.get(id(one), _NEVER)
        yield (_first(seen), one.place), _row(one, seen, is_site, reason, is_fused, obstacle)


def _left_alone(model: nn.Module, choice: Choice) -> Iterator[tuple[_Order, Activation]]:
    """Yield the rows of the activations that cannot be sites, and of the submodules that contain such activations."""
    findings = choice.findings
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, reason in findings.left_alone.items():
        one = findings.conflicting.get(name)
        module = modules.get(name, model) if one is None or one.kind == "module" else one.owner
        seen = None if choice.seen is None else choice.seen.get(id(module), _NEVER)
        place = findings.places[name if name in modules else ""] if one is None else one.place
        if one is None and not is_kind_of_activation(module):
            calls = [call for call in findings.readings[id(module)].calls if call.child is None]
            seen_running = re.findall(r"(\w+) in line \d+ of ", reason)  # see `surgery.watching`
            functions = set(seen_running) or {function_name(call.module) for call in calls}
            row = Activation(
                (name,), ", ".join(sorted(functions)), "call", (), None, (), False, reason, False, "it is not converted"
            )
        else:
            one = Found("module", [name], module, model) if one is None else one
            of_module = seen if one.kind == "module" else None
            row = _row(one, of_module, False, reason, False, "it is not converted")
        yield (_first(seen), place), row


_NEVER = Seen(-1, -1, [], set())
"""The calls of an activation that the forward does not reach: none."""


def _first(seen: Seen | None) -> float:
    """Return the position of the first call; the same for all activations if no forward was run."""
    return 0 if seen is None else seen.first if seen.shapes else math.inf


def _row(one: Found, seen: Seen | None, converted: bool, reason: str, fused: bool, obstacle: str) -> Activation:
    places = [next(call.lines) for call in one.calls if one.kind == "call"]
    return Activation(
        tuple(name or type(one.original).__name__ for name in one.names),
        _function(one.original),
        one.kind,
        tuple(f"{Path(file).name}:{line}" for file, line in places),
        None if seen is None else len(seen.shapes),
        () if seen is None else tuple(dict.fromkeys(seen.shapes)),
        converted,
        reason,
        fused,
        obstacle,
    )


def _function(module: nn.Module) -> str:
    """Return the candidate's name, or the module's repr if its settings differ from the candidate's."""
    if module.state_dict():
        return function_name(module)
    key = key_of(module)
    return repr(module) if key.startswith(f"{ORIGINAL}:") else key


def _obstacle(model: nn.Module, one: Found, fused: Fused) -> str:
    """Return why a site is not fused."""
    parts = one.name.split(".")
    around = [model.get_submodule(".".join(parts[:i])) for i in range(len(parts))]
    return fused.obstacles[0 if any(isinstance(module, fx.GraphModule) for module in around) else -1]


def _noted(reason: str, notes: dict[str, int]) -> str:
    return f"no ({notes.setdefault(reason, len(notes) + 1)})"


def _plain(value: Any) -> Any:
    return [_plain(one) for one in value] if isinstance(value, tuple) else value
