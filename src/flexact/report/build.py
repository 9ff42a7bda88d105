"""Builds the report of a folder: figures as files, and one page that opens offline.

It uses only the files of a study's folder, or the histories that a Recorder wrote.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from flexact.errors import FlexActError, missing_extra
from flexact.io.atomic_files import write_whole
from flexact.io.csv_rows import read_text
from flexact.io.markdown_tables import counted
from flexact.io.result_folder import TABLE, read_config
from flexact.observe import history
from flexact.observe.figures.history import history_pictures
from flexact.observe.figures.outcomes import outcomes
from flexact.observe.html_tables import outcome_table
from flexact.report.page import Section, markdown, page


class History(NamedTuple):
    """The records that a Recorder wrote, and the header with policy and versions."""

    records: list[dict[str, Any]]
    about: dict[str, Any]


def read_histories(run: Path) -> dict[str, History]:
    """Return the histories in a folder, or that of a single file, by file name. An unfinished last line is skipped."""
    histories = {}
    for path in [run] if run.is_file() else sorted(run.glob("*.jsonl")):
        if path.is_file() and _is_history(path):  # opening a named pipe would wait for a writer
            header, *records = history.parsed(path, history.whole_lines(history.read_text(path)))
            del header[history.KEY]
            if records:
                histories[path.name] = History(records, header)
    return histories


def _is_history(path: Path) -> bool:
    """Return whether a file is a history, rather than one of another program."""
    with path.open("rb") as file:
        return f'"{history.KEY}"'.encode() in file.readline()


_PACKAGES = {"matplotlib": "matplotlib", "markdown_it": "markdown-it-py"}
"""Module and package of each dependency of a report."""


@dataclass(frozen=True)
class Report:
    """The content of a folder's report."""

    folder: Path
    title: str
    facts: Mapping[str, object]
    """Facts in the line under the title."""
    sections: list[Section]
    details: Mapping[str, object]
    """Configuration and versions."""


def build(run: Path) -> Path:
    """Write report.html, figures/*.png and figures/*.svg of a folder or of one history, and return the page's path."""
    report = read(run)
    figures, path = report.folder / "figures", report.folder / "report.html"
    if figures.is_symlink():
        raise FlexActError(
            f"{figures} is a link to {os.readlink(figures)}; remove it, so that figures can be written here."
        )
    figures.mkdir(exist_ok=True)
    for section in report.sections:
        for picture in section.pictures:
            write_whole(figures / f"{picture.slug}.png", picture.png())
            write_whole(figures / f"{picture.slug}.svg", picture.svg())
    write_whole(path, page(report.title, report.facts, report.sections, report.details))
    return path


def check_packages() -> None:
    """Raise if a package that a report needs is missing. A study calls this before it trains."""
    for package in missing_packages():
        raise missing_extra(package, "report")


def missing_packages() -> list[str]:
    """Return the packages that a report needs and that are not installed."""
    return [package for module, package in _PACKAGES.items() if find_spec(module) is None]


def read(run: Path) -> Report:
    """Read the report's content from a folder, or from one history; the report is then written next to it."""
    check_packages()
    run = Path(run)
    if not (run.is_dir() or run.is_file()):
        raise FlexActError(f"there is no {run}; give a folder that a study or a Recorder wrote into, or a history.")
    folder = run.parent if run.is_file() else run
    config = {} if run.is_file() else read_config(run) or {}
    histories = read_histories(run)
    if run.is_file() and not histories:
        raise FlexActError(f"{run} is not a Recorder's history with at least one record; give such a file.")
    if not config and not histories:
        names = sorted(path.name for path in folder.iterdir())
        raise FlexActError(
            f"{folder} holds nothing to report: looked for config.json of a study (flexact reproduce ... --out DIR) "
            "and for *.jsonl with the history of a Recorder (Recorder(model, path=...), at least one record). Found: "
            f"{', '.join(names[:8]) or 'nothing'}."
        )
    sections = _study_sections(folder, config) if config else []
    for name, one in histories.items():
        sections.append(_history_section(name, one, Path(name).stem if len(histories) > 1 else "history"))
    title = str(config.get("title") or f"flexact: {config.get('study') or folder.resolve().name}")
    facts = {name: config.get(name) for name in ("device", "commit", "date")}
    shown = {"flexact_study", "study", "title"}
    details = {name: value for name, value in config.items() if name not in shown and value is not None}
    for name, one in histories.items():
        details |= {f"{name}: {key}": value for key, value in one.about.items()}
    return Report(folder, title, facts, sections, details)


def _study_sections(folder: Path, config: dict[str, Any]) -> list[Section]:
    """Return the sections of the study that wrote the folder. Studies register theirs in `flexact.studies.REPORTS`."""
    name = config["study"]
    modules = importlib.import_module("flexact.studies").REPORTS
    if name not in modules:
        body = markdown(read_text(folder / TABLE)) if (folder / TABLE).is_file() else ""
        return [Section(str(name), body, [])]
    sections: list[Section] = importlib.import_module(modules[name]).sections(folder, config)
    return sections


def _history_section(name: str, history: History, stem: str) -> Section:
    records, found = history.records, outcomes(history.records)
    what = f"{counted(len(records), 'record')} of {counted(len(found), 'site')}"
    body = f"<p>{what}, steps {records[0]['step']} to {records[-1]['step']}.</p>\n"
    return Section(f"Run: {name}", body + outcome_table(found), history_pictures(records, stem))
