"""The Recorder, which keeps the history of the picks over training."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import IO, Any

import torch
from torch import Tensor, nn

from flexact.errors import FlexActError
from flexact.io import value_checks
from flexact.io.atomic_files import write_whole
from flexact.io.json_input import path_of
from flexact.io.markdown_tables import counted
from flexact.observe import history
from flexact.observe.history import DECISIONS, DROPS, RESERVED, TRYING
from flexact.observe.live import LiveTable, notebook_html
from flexact.observe.selection import Selection, selection
from flexact.observe.selection_rows import Row, plain
from flexact.observe.tensorboard import Board
from flexact.routing.sites import routers_of, sites_of


class Recorder:
    """Keeps the probabilities of all sites over training, in memory and, if asked to, on disk.

    path: a JSON-lines file with one line per record. Its first line has the config and the versions, for
    `flexact report`. If it has records already, choose: `resume=True` appends to them, `overwrite=True` replaces them.
    tensorboard: a folder for TensorBoard (needs flexact[tensorboard]), or a `SummaryWriter` of your own: it gets
    curves and histograms by site with every record, and heat maps by site and step at `close`.
    live: show the picks as a table that each record updates, in a notebook or in a terminal (needs flexact[cli]). If
    the last line of a notebook cell is a recorder, the cell also shows curves of the loss and of the probabilities.

    A record has the numbers that were given to `record` and these keys; the last three are left out if they are empty:

    - "step": int.
    - "sites": {site: {candidate: probability}}. The probabilities of a site that picks per channel are means.
    - "picks": {site: candidate} of the sites where a candidate leads. The key of a channel is `site:channel`.
    - "drops": {site: {candidate: {"step": int, "margin": float, "standard_error": float, "steps": int}}} since the
      previous record, with the keys of "picks". The last three values are None without evidence.
    - "decisions": {site: {"original": candidate, "runner_up": candidate, "decided": bool}} since the previous record.
    - "trying": the candidate that the last step of a trial trained.

    >>> import torch, flexact
    >>> model = flexact.convert(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    >>> recorder = flexact.Recorder(model)
    >>> recorder.record(step=0, loss=1.5)
    >>> recorder.history[0]["picks"], recorder.history[0]["loss"]
    ({}, 1.5)
    """

    def __init__(
        self,
        model: nn.Module,
        path: str | Path | None = None,
        tensorboard: Any = None,
        *,
        live: bool = False,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        self.model = model
        self.history: list[dict[str, Any]] = []
        self._file: IO[str] | None = None
        self._outputs: list[Board | LiveTable] = []
        if resume and overwrite:
            raise FlexActError("give only one of resume=True and overwrite=True.")
        now = selection(model)
        if path is not None:
            self._path = path_of(path, "a history")
            self.history = history.to_continue(self._path, resume, overwrite)
            self._check_sites(set(now.by_site))
        self._recorded = _recorded(self.history)
        if live:
            self._outputs.append(LiveTable())
        if tensorboard is not None:
            self._outputs.append(Board(tensorboard, model))
        if path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._rewrite()
            except OSError as error:
                raise FlexActError(f"cannot write {self._path}: {error.strerror}; give another path.") from error

    def record(self, step: int, **values: float) -> None:
        """Record the current picks, with any numbers of your own, such as accuracy and learning
        rate. The page of the history has a panel for each of them.

        step: the number of optimizer steps done, `schedule.steps_done`. The loss is that of the last
        `schedule.step(loss)` unless you give it.
        """
        step = value_checks.integer("step", step)
        if step > value_checks.MAX_STEPS:  # the file could not be read again
            raise FlexActError(f"step must be the number of optimizer steps done; got {step!r:.80}.")
        if self.history and step <= self.history[-1]["step"]:
            raise FlexActError(
                f"step {step} is not after step {self.history[-1]['step']}; record each step once, in order. To resume "
                "from an earlier checkpoint, cut the history first with recorder.rewind(step)."
            )
        router = next((router for router in routers_of(sites_of(self.model)) if router.loss is not None), None)
        given = values if router is None else {"loss": router.loss} | values
        numbers = {name: _number(name, value) for name, value in given.items()}
        now = selection(self.model)
        entry: dict[str, Any] = {
            "step": step,
            "sites": {site: _mean(rows) for site, rows in now.by_site.items()},
            "picks": now.leading,
            **self._news(now),
            **({} if router is None or router.tried is None else {TRYING: router.sites[0].candidates[router.tried]}),
            **numbers,
        }
        self.history.append(entry)
        self._recorded |= _recorded([entry])
        if self._file is not None:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
        for output in self._outputs:
            output.show(self.history, now)

    def _check_sites(self, sites: set[str]) -> None:
        """Raise if the records of a file have other sites than the model."""
        recorded = set(self.history[-1]["sites"]) if self.history else sites
        if recorded != sites:
            raise FlexActError(
                f"{self._path} is the history of another network, with {counted(len(recorded), 'site')} "
                f"({', '.join(sorted(recorded)):.80}); this model has {len(sites)} ({', '.join(sorted(sites)):.80}). "
                "Give another path, or overwrite=True to replace it."
            )

    def _news(self, now: Selection) -> dict[str, Any]:
        """The drops and decisions that no record has yet. A site that picks per channel is decided if all of its
        channels are."""
        news: dict[str, Any] = {DROPS: {}, DECISIONS: {}}
        for row in now:
            drops = {name: _drop(row, name) for name in row.dropped if (row.key, name) not in self._recorded}
            if drops:
                news[DROPS][row.key] = drops
        for site, rows in now.by_site.items():
            if all(row.committed for row in rows) and (site, None) not in self._recorded:
                decided = all(row.decided for row in rows)
                rivals = {"original": rows[0].original, "runner_up": rows[0].runner_up if len(rows) == 1 else None}
                news[DECISIONS][site] = rivals | {"decided": decided}
        return {name: value for name, value in news.items() if value}

    def rewind(self, step: int) -> None:
        """Remove what was recorded after a step, to resume from an earlier checkpoint."""
        last = value_checks.integer("step", step)
        self.history = [entry for entry in self.history if entry["step"] <= last]
        self._recorded = _recorded(self.history)
        if self._file is not None:
            self._rewrite()

    def close(self) -> None:
        """Close the files; the history stays."""
        if self._file is not None:
            self._file.close()
            self._file = None
        while self._outputs:
            self._outputs.pop().close(self.history)

    def _repr_html_(self) -> str:
        """The curves and the picks, for a notebook."""
        return notebook_html(self.history, selection(self.model))

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @staticmethod
    def load(path: str | Path) -> list[dict[str, Any]]:
        """The records of a JSON-lines file that a Recorder wrote. An incomplete last line is skipped.

        >>> import flexact
        >>> flexact.Recorder.load("nowhere.jsonl")
        Traceback (most recent call last):
        ...
        flexact.errors.FlexActError: cannot read nowhere.jsonl: No such file or directory. ...
        """
        return history.read(path_of(path, "a history")).records

    def _rewrite(self) -> None:
        """Replace the file atomically, and append to it from then on."""
        if self._file is not None:
            self._file.close()
        lines = [_header(self.model), *self.history]
        write_whole(self._path, "".join(json.dumps(line) + "\n" for line in lines))
        self._file = self._path.open("a", encoding="utf-8")


def _recorded(records: history.Records) -> set[tuple[str, str | None]]:
    """The drops that records have, as (site, candidate), and the decisions, as (site, None)."""
    drops = {(site, name) for entry in records for site, one in entry.get(DROPS, {}).items() for name in one}
    return drops | {(site, None) for entry in records for site in entry.get(DECISIONS, {})}


def _mean(rows: Sequence[Row]) -> dict[str, float]:
    """The probabilities of a site: those of its only row, or their means over its channels."""
    return {name: fmean(row.probabilities[name] for row in rows) for name in rows[0].probabilities}


def _drop(row: Row, candidate: str) -> dict[str, Any]:
    """When a candidate was dropped, and on what evidence, in plain JSON types."""
    contest = row.evidence.get(candidate)
    fields = dict.fromkeys(("margin", "standard_error", "steps")) if contest is None else plain(asdict(contest))
    return {"step": row.dropped[candidate], **fields}


def _header(model: nn.Module) -> dict[str, Any]:
    """The first line of a file: its format version, the config, and the versions of the packages."""
    config = sites_of(model)[0].config.to_dict()
    del config["candidates"]  # each record has those of each site
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    with suppress(PackageNotFoundError):  # a source tree that is not installed has no version
        versions["flexact"] = version("flexact")
    return {history.KEY: history.VERSION, "config": config, "versions": versions}


def _number(name: str, value: Any) -> float:
    if name in RESERVED:
        raise FlexActError(f"{name!r} is a reserved name in a record; give your number another name.")
    try:
        return float(value.item() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise FlexActError(f"a record takes numbers; got {name}={value!r:.80}.") from None
