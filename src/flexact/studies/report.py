"""The report of a folder: figures as files, and one page that opens offline.

`build` reads the plain files of a study's folder, or any history that a Recorder wrote, and nothing else.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexact.drawing import STYLE
from flexact.errors import FlexActError, missing_extra
from flexact.picture import Picture
from flexact.plots import final_table, history_pictures
from flexact.studies.report_data import Study, read_histories, read_study
from flexact.studies.report_page import Section, escape, markdown, page, table
from flexact.studies.report_pictures import file_name, study_pictures

_TITLES = {
    "synthetic": "Which activation made the data?",
    "alpha": "How strong should the correction be?",
    "corrections": "Which correction?",
}


def build(folder: Path) -> Path:
    """Write figures/*.png, figures/*.svg and report.html into a folder; the page's path."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FlexActError(f"there is no folder {folder}; give the one that a study or a Recorder wrote into.")
    study = read_study(folder)
    histories = read_histories(folder)
    if study is None and not histories:
        raise FlexActError(
            f"{folder} holds nothing to report: looked for config.json of a study (flexact reproduce ... --out DIR) "
            "and for *.jsonl with the history of a Recorder (Recorder(model, path=...), at least one record). Found: "
            f"{_found(folder)}."
        )
    sections = [] if study is None else [_study_section(study)]
    sections += [_history_section(name, history, len(histories)) for name, history in histories.items()]
    _write_figures(folder / "figures", [picture for section in sections for picture in section.pictures])
    config = {} if study is None else study.config
    title = str(config.get("title") or f"flexact: {study.name if study else folder.resolve().name}")
    facts = {name: config.get(name) for name in ("device", "commit", "date")}
    facts["commit"] = str(facts["commit"] or "")[:10]
    details = {
        name: value
        for name, value in config.items()
        if name not in ("flexact_study", "study", "title") and value is not None
    }
    path = folder / "report.html"
    _write(path, page(title, facts, sections, details).encode("utf-8"))
    return path


def _study_section(study: Study) -> Section:
    body = _right_picks(study) + (markdown(study.table) if study.table else "")
    if not study.results:
        body += "<p>No results yet.</p>"
    return Section(_TITLES.get(study.name, study.name), body, study_pictures(study))


def _right_picks(study: Study) -> str:
    """How often each model that picks has picked the truth."""
    lines = []
    for model in study.models:
        runs = [result for result in study.results if result.model == model]
        if model.startswith("flexact") and runs:
            right = sum(result.pick == result.truth for result in runs)
            lines.append(f"<li><b>{escape(model)}</b> picked the true activation in {right} of {len(runs)} runs.</li>")
    return f"<ul>{''.join(lines)}</ul>\n" if lines and study.name == "synthetic" else ""


def _history_section(name: str, history: list[dict[str, Any]], count: int) -> Section:
    stem = file_name(Path(name).stem) if count > 1 else "history"
    titles = ("site", "pick", "probability", "runner-up", "margin")
    rows = final_table(history)
    body = f"<p>{len(history)} records of {len(rows)} sites, steps {history[0]['step']} to {history[-1]['step']}.</p>\n"
    return Section(f"Run: {name}", body + table(titles, rows), history_pictures(history, stem))


def _found(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "nothing"


def _write_figures(folder: Path, pictures: list[Picture]) -> None:
    try:
        import matplotlib
    except ImportError:
        raise missing_extra("matplotlib", "report") from None
    folder.mkdir(exist_ok=True)
    plain: Mapping[str, Mapping[str, object]] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    for picture in pictures:
        figure = picture.figure()
        for kind, metadata in plain.items():
            data = io.BytesIO()
            with matplotlib.rc_context(STYLE):
                figure.savefig(data, format=kind, dpi=150, metadata=metadata)
            _write(folder / f"{picture.slug}.{kind}", data.getvalue())


def _write(path: Path, data: bytes) -> None:
    """The whole file or nothing: a reader never sees half of it."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        fresh.write_bytes(data)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
