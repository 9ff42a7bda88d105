"""The picks of a model and their evidence.

Probabilities here are always the noise-free π, over the candidates that remain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from flexact.errors import FlexActError, missing_extra
from flexact.observe.html_tables import outcome_table
from flexact.observe.selection_rows import TIE, Row, plain, table
from flexact.policy.evidence import Contest
from flexact.routing.layer import FlexAct
from flexact.routing.sharding import whole
from flexact.routing.sites import sites_of

if TYPE_CHECKING:
    import pandas

VERSION = 3


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
    def picks(self) -> dict[str, str | None]:
        """The pick of each site; None where no candidate leads yet. The key of a channel is `site:channel`."""
        return {row.key: row.pick for row in self.rows}

    @property
    def leading(self) -> dict[str, str]:
        """`picks` without the sites where no candidate leads yet."""
        return {row.key: row.pick for row in self.rows if row.pick is not None}

    @property
    def by_site(self) -> dict[str, list[Row]]:
        """The rows of each site: one, or one per channel."""
        sites: dict[str, list[Row]] = {}
        for row in self.rows:
            sites.setdefault(row.site, []).append(row)
        return sites

    @property
    def scalars(self) -> dict[str, float]:
        """All probabilities by their names in the logs of transformers and Lightning, `flexact/SITE/CANDIDATE`."""
        return {f"flexact/{row.key}/{name}": p for row in self.rows for name, p in row.probabilities.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, with the format's version. None stands for a number that is not finite: the margin
        of a candidate that diverged, or a probability in a run that diverged."""
        return {"flexact_selection": VERSION, "rows": [plain(asdict(row)) for row in self.rows]}

    def to_frame(self) -> pandas.DataFrame:
        """A pandas table with one row per site or channel, and one column of probabilities per candidate. The columns
        lead, standard_error, z and steps have the evidence against the runner-up; without evidence they are empty."""
        try:
            import pandas
        except ImportError:
            raise missing_extra("pandas", "frame") from None
        of_lead = {"lead": "margin", "standard_error": "standard_error", "z": "z", "steps": "steps"}
        rows = []
        for row in self.rows:
            fields = {name: value for name, value in vars(row).items() if not isinstance(value, dict)}
            fields |= {column: getattr(row.lead, name, None) for column, name in of_lead.items()}
            rows.append(fields | {f"p({name})": p for name, p in row.probabilities.items()})
        frame: pandas.DataFrame = pandas.DataFrame(rows)
        return frame

    def __str__(self) -> str:
        return table(self.rows)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The table for a notebook."""
        return outcome_table(self.rows)


def selection(model: nn.Module) -> Selection:
    """What each site of a model picks now, and how certain that is; prints as a table.

    Before the commitment, a row shows the probability of the pick and its margin over the runner-up's probability.
    After the commitment, it shows by how much the pick was ahead of the runner-up when the runner-up was dropped.

    >>> import torch, flexact
    >>> model = flexact.convert(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    >>> flexact.selection(model)
    site  pick       probability  margin  runner-up  dropped (at step)
    ------------------------------------------------------------------
    1     undecided  0.200        0.000   -          -
    undecided: no candidate leads yet
    """
    return Selection(tuple(row for site in _named_sites(model) for row in _rows(*site)))


_HOLD_A_MODULE = (nn.parallel.DistributedDataParallel, AveragedModel)
"""Wrappers that keep the model as their `module`."""


def _named_sites(model: nn.Module) -> list[tuple[str, FlexAct]]:
    """The sites in depth order with their names in this model, wrappers' prefixes left out."""
    sites = sites_of(model)
    for site in sites:
        site.update_alive()  # averaging weights, as an EMA does, changes buffers without telling the site
    if not sites:
        raise FlexActError(
            f"this {type(model).__name__} has no FlexAct sites, so nothing is picked; call flexact.convert(model) "
            "first. An extracted model has none left: print its modules."
        )
    names: dict[str, str] = {"": ""}  # name with prefixes -> name without them
    modules = dict(model.named_modules())
    for name in list(modules)[1:]:
        parent, _, attribute = name.rpartition(".")
        wraps = attribute == "_orig_mod" or (attribute == "module" and isinstance(modules[parent], _HOLD_A_MODULE))
        names[name] = names[parent] if wraps else f"{names[parent]}.{attribute}".lstrip(".")
    by_site = {id(module): names[name] or "FlexAct" for name, module in modules.items()}
    return [(by_site[id(site)], site) for site in sites]


def _rows(name: str, site: FlexAct) -> Iterator[Row]:
    by_channel = site.config.granularity == "channel"
    dropped_at, evidence = site.dropped_at.tolist(), site.evidence.tolist()
    logits = whole(site.logits.detach()).view(site.rows, site.k).tolist()
    for channel, pi in enumerate(site.pi().tolist()):
        at = {candidate: step for candidate, step in enumerate(dropped_at[channel]) if step >= 0}
        contests = {k: found for k in at if (found := _contest(evidence[channel][k])) is not None}
        left = sorted((k for k in range(site.k) if k not in at), key=lambda k: -pi[k])
        is_open = not site.committed and not pi[left[0]] - pi[left[-1]] > TIE  # NaN if the run diverged
        second = None if is_open or len(left) == 1 else left[1]
        if site.committed:
            second = _dropped_last(at, contests, logits[channel])
        original = site.original_index
        row = Row(
            site=name,
            channel=channel if by_channel else None,
            original=site.candidates[original] if original >= 0 else None,
            pick=None if is_open else site.candidates[left[0]],
            probability=pi[left[0]],
            runner_up=None if second is None else site.candidates[second],
            margin=pi[left[0]] - (pi[left[1]] if len(left) > 1 else 0.0),
            committed=site.committed,
            decided=False,
            probabilities=dict(zip(site.candidates, pi, strict=True)),
            dropped={site.candidates[k]: step for k, step in at.items()},
            evidence={site.candidates[k]: contest for k, contest in contests.items()},
            trying=None if site.committed or site.router.trying is None else site.candidates[site.router.trying],
        )
        yield replace(row, decided=row.deciding is not None and row.deciding.is_significant)


def _contest(found: list[float]) -> Contest | None:
    """A candidate's row of `FlexAct.evidence`; None if it was dropped without evidence, or after too few steps."""
    margin, error, steps = found
    return None if math.isnan(margin) or not math.isfinite(error) else Contest(margin, error, round(steps))


def _dropped_last(at: Mapping[int, int], contests: Mapping[int, Contest], logits: list[float]) -> int | None:
    """The last dropped candidate; of several, the one with the smallest z or, without evidence, the likeliest one."""
    last = [k for k, step in at.items() if step == max(at.values())]
    return min(last, key=lambda k: (contests[k].z if k in contests else math.inf, -logits[k]), default=None)
