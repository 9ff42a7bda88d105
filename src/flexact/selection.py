"""What was picked, and its history over training.

Probabilities here are always the noise-free π, over the candidates still in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from flexact.errors import FlexActError, missing_extra
from flexact.layer import FlexAct
from flexact.sites import sites_of

if TYPE_CHECKING:
    import pandas

VERSION = 1


@dataclass(frozen=True)
class Row:
    """One site, or one channel of it: its pick, how likely it is, and by how much it leads the runner-up."""

    site: str
    channel: int | None
    pick: str
    probability: float
    runner_up: str | None
    margin: float
    committed: bool
    probabilities: dict[str, float]
    dropped: dict[str, int]
    """When each candidate that is out was dropped, in steps."""


@dataclass(frozen=True)
class Selection:
    """The rows of all sites in depth order; prints as a table."""

    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    @property
    def picks(self) -> dict[str, str]:
        """Pick by site; a channel's key has its number behind a colon."""
        return {row.site if row.channel is None else f"{row.site}:{row.channel}": row.pick for row in self.rows}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, with the format's version."""
        return {"flexact_selection": VERSION, "rows": [asdict(row) for row in self.rows]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Selection:
        """The inverse of `to_dict`."""
        version = data.get("flexact_selection") if isinstance(data, dict) else None
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise FlexActError(f"not a Selection: expected {{'flexact_selection': {VERSION}, ...}}; got {data!r:.80}.")
        if version > VERSION:
            raise FlexActError(f"this selection has version {version}, and this flexact reads up to {VERSION}; update.")
        rows = data.get("rows")
        if not isinstance(rows, list):
            raise FlexActError(f"a selection needs 'rows', a list; got {rows!r:.80}.")
        return cls(tuple(_row(number, row) for number, row in enumerate(rows)))

    def to_frame(self) -> pandas.DataFrame:
        """A pandas table: one row a site, one column a candidate's probability."""
        try:
            import pandas
        except ImportError:
            raise missing_extra("pandas", "frame") from None
        flat = [
            {key: value for key, value in asdict(row).items() if key not in ("probabilities", "dropped")}
            | {f"p({name})": p for name, p in row.probabilities.items()}
            for row in self.rows
        ]
        frame: pandas.DataFrame = pandas.DataFrame(flat)
        return frame

    def __str__(self) -> str:
        titles = ["site", "pick", "probability", "margin", "runner-up", "dropped (at step)"]
        lines = [
            [
                _printable(row.site) + ("" if row.channel is None else f":{row.channel}"),
                row.pick + ("" if row.committed else " ?"),
                f"{row.probability:.3f}",
                f"{row.margin:.3f}",
                row.runner_up or "-",
                ", ".join(f"{name} ({step})" for name, step in sorted(row.dropped.items(), key=lambda d: d[1])) or "-",
            ]
            for row in self.rows
        ]
        widths = [max(len(line[i]) for line in [titles, *lines]) for i in range(len(titles))]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in [titles, *lines]
        ]
        text.insert(1, "-" * max(map(len, text)))
        if any(not row.committed for row in self.rows):
            text.append("? not committed yet")
        return "\n".join(text)

    __repr__ = __str__


def selection(model: nn.Module) -> Selection:
    """What each site of a model picks now: a table of site, pick, probability and margin to the runner-up.

    >>> import torch, flexact
    >>> model = flexact.convert(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    >>> flexact.selection(model)
    site  pick    probability  margin  runner-up  dropped (at step)
    ---------------------------------------------------------------
    1     relu ?  0.200        0.000   sigmoid    -
    ? not committed yet
    """
    return Selection(tuple(row for site in _named_sites(model) for row in _rows(*site)))


def _printable(name: str) -> str:
    """A name as one line that leaves the terminal alone."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


_HOLD_A_MODULE = (nn.parallel.DistributedDataParallel, AveragedModel)
"""Wrappers that keep the model as their `module`."""


def _named_sites(model: nn.Module) -> list[tuple[str, FlexAct]]:
    """The sites in depth order with their names in this model, wrappers' prefixes left out."""
    if not isinstance(model, nn.Module):
        raise FlexActError(f"selection needs a torch.nn.Module; got {model!r}.")
    sites = sites_of(model)
    for site in sites:
        site.update_alive()  # what averages weights, as an EMA does, copies buffers without notice
    if not sites:
        raise FlexActError(
            f"this {type(model).__name__} has no FlexAct sites, so nothing is picked; call flexact.convert(model) "
            "first. An extracted model has none left: print its modules."
        )
    names: dict[str, str] = {"": ""}  # without prefixes, by the name with them
    modules = dict(model.named_modules())
    for name in list(modules)[1:]:
        parent, _, attribute = name.rpartition(".")
        wraps = attribute in ("_orig_mod", "_fsdp_wrapped_module") or (
            attribute == "module" and isinstance(modules[parent], _HOLD_A_MODULE)
        )
        names[name] = names[parent] if wraps else f"{names[parent]}.{attribute}".lstrip(".")
    by_site = {id(module): names[name] or "FlexAct" for name, module in modules.items()}
    return [(by_site[id(site)], site) for site in sites]


def _rows(name: str, site: FlexAct) -> Iterator[Row]:
    by_channel = site.config.granularity == "channel"
    dropped_at = site.dropped_at.tolist()
    for channel, pi in enumerate(site.pi().tolist()):
        dropped = {site.candidates[k]: step for k, step in enumerate(dropped_at[channel]) if step >= 0}
        ranked = sorted(range(site.k), key=lambda k: (site.candidates[k] in dropped, -pi[k]))
        second = ranked[1] if len(ranked) > len(dropped) + 1 else None
        yield Row(
            site=name,
            channel=channel if by_channel else None,
            pick=site.candidates[ranked[0]],
            probability=pi[ranked[0]],
            runner_up=None if second is None else site.candidates[second],
            margin=pi[ranked[0]] - (0.0 if second is None else pi[second]),
            committed=site.committed,
            probabilities=dict(zip(site.candidates, pi, strict=True)),
            dropped=dropped,
        )


def _row(number: int, data: Any) -> Row:
    """A row of `Selection.to_dict`, with every field checked."""
    if not isinstance(data, dict) or data.keys() != _FIELDS.keys():
        raise FlexActError(f"row {number} of a selection needs the fields {', '.join(_FIELDS)}; got {data!r:.80}.")
    for name, value in data.items():
        is_right = isinstance(value, _FIELDS[name]) and (name == "committed" or not isinstance(value, bool))
        if name in _NUMBERS_BY_NAME and is_right:
            kinds = _NUMBERS_BY_NAME[name]
            is_right = all(isinstance(key, str) and isinstance(one, kinds) for key, one in value.items())
        if not is_right:
            raise FlexActError(f"row {number} of a selection: {name} cannot be {value!r:.80}.")
    fields: dict[str, Any] = {name: dict(value) if isinstance(value, dict) else value for name, value in data.items()}
    return Row(**fields)


_FIELDS: dict[str, tuple[type, ...]] = {
    "site": (str,),
    "channel": (int, type(None)),
    "pick": (str,),
    "probability": (float, int),
    "runner_up": (str, type(None)),
    "margin": (float, int),
    "committed": (bool,),
    "probabilities": (dict,),
    "dropped": (dict,),
}
_NUMBERS_BY_NAME: dict[str, tuple[type, ...]] = {"probabilities": (float, int), "dropped": (int,)}
