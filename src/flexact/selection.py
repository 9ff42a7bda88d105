"""What was picked, and its history over training.

Probabilities here are always the noise-free π, over the candidates still in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from flexact.errors import FlexActError, missing_extra
from flexact.layer import FlexAct, sites_of

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
                row.site if row.channel is None else f"{row.site}:{row.channel}",
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


def _named_sites(model: nn.Module) -> list[tuple[str, FlexAct]]:
    """The sites in depth order with their names in this model, wrappers' prefixes left out."""
    sites = sites_of(model)
    if not sites:
        raise FlexActError(
            f"this {type(model).__name__} has no FlexAct sites, so nothing is picked; call flexact.convert(model) "
            "first. An extracted model has none left: print its modules."
        )
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, FlexAct):
            parts = [part for part in name.split(".") if part not in ("_orig_mod", "_fsdp_wrapped_module")]
            names[id(module)] = ".".join(parts) or "FlexAct"
    return [(names[id(site)], site) for site in sites]


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
