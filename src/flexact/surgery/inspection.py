"""What `convert` would do to a model, as a table of its activations; the model is unchanged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from flexact.candidates.recognition import function_name, key_of
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

_LONGEST_NAME = 48


@dataclass(frozen=True)
class Activation:
    """One row: an activation of a model, and what `convert` does with it."""

    names: tuple[str, ...]
    """Its names in the model; several for a shared module. Where a method's calls cannot be read or rewritten, the name
    of the submodule that makes them."""
    function: str
    """A candidate's name, or the module with its settings; empty if it is known only when the model runs."""
    kind: str
    """"module", "call" (F.relu(x) in a method) or "function" (a stored one: self.act = F.relu)."""
    lines: tuple[str, ...] = ()
    """The file and the line of each call of a function in the source, such as "net.py:12"."""
    calls: int | None = None
    """The number of calls in one forward; None without example inputs."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """The shapes of its inputs in one forward, each once."""
    converted: bool = False
    reason: str = ""
    """Why it is left alone; empty if it is converted."""
    fused: bool = False
    """Whether `convert(..., fuse=True)` runs it together with the batch norm before it."""
    why_not_fused: str = "it is not converted"

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

    def to_frame(self) -> pandas.DataFrame:
        """Return a pandas table: one row per activation, with the fields of `Activation` as columns."""
        try:
            import pandas
        except ImportError:
            raise missing_extra("pandas", "frame") from None
        frame: pandas.DataFrame = pandas.DataFrame([vars(row) for row in self.rows])
        return frame

    def __str__(self) -> str:
        if not self.rows:
            return "no activation was found in this model"
        notes: dict[str, int] = {}
        rows = self._cells(notes)
        columns = {title: [row[title] for row in rows] for title in rows[0]}
        columns["name"] = cut(columns["name"], _LONGEST_NAME)
        return "\n".join([*aligned(columns), *(f"{number}: {printable(note)}" for note, number in notes.items())])

    __repr__ = __str__

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
    check_where(where)
    choice = choose(model, where, example_inputs, per_call)
    fused = find_fused(model, choice.sites, choice.findings, choice.findings.rewritten(choice.sites))
    rows = sorted(_placed_rows(choice, fused), key=lambda one: one[0])
    return Inspection(tuple(row for _, row in rows))


_Order = tuple[float, Place]


def _placed_rows(choice: Choice, fused: Fused) -> Iterator[tuple[_Order, Activation]]:
    """Yield the rows of all activations with their positions."""
    for one in choice.findings.all:
        ran = one if not one.reason else one.original if one.kind == "module" else one.owner
        seen = None if choice.seen is None else choice.seen.get(id(ran), _NEVER)
        if one in choice.sites:
            is_fused = not fused.sites.isdisjoint(one.names)
            row = _row(one, seen, converted=True, fused=is_fused, why_not_fused="" if is_fused else fused.obstacle)
        else:
            reason = one.reason or choice.skipped.get(one.name, "where does not select it")
            is_counted = one.kind == "module" or not one.reason
            row = _row(one, seen if is_counted else None, reason=reason)
        yield (_first(seen), one.place), row


_NEVER = Seen(-1, -1, [], set())
"""The calls of an activation that the forward does not reach: none."""


def _first(seen: Seen | None) -> float:
    """Return the position of the first call; the same for all activations if no forward was run."""
    return 0 if seen is None else seen.first if seen.shapes else math.inf


def _row(one: Found, seen: Seen | None, **outcome: Any) -> Activation:
    places = [next(call.lines) for call in one.calls if one.kind == "call"]
    return Activation(
        tuple(name or type(one.original).__name__ for name in one.names),
        _function(one),
        one.kind,
        tuple(f"{Path(file).name}:{line}" for file, line in places),
        None if seen is None else len(seen.shapes),
        () if seen is None else tuple(dict.fromkeys(seen.shapes)),
        **outcome,
    )


def _function(one: Found) -> str:
    """Return the candidate's name, or the module's repr if its settings differ from the candidate's."""
    if one.reason and one.kind == "call":
        return ", ".join(sorted({function_name(call.module) for call in one.calls}))
    if one.original.state_dict():
        return function_name(one.original)
    key = key_of(one.original)
    return repr(one.original) if key.startswith(f"{ORIGINAL}:") else key


def _noted(reason: str, notes: dict[str, int]) -> str:
    return f"no ({notes.setdefault(reason, len(notes) + 1)})"
