"""The parts of a synthetic study's page, from the files in its folder and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexact.io.csv_rows import read_text
from flexact.io.markdown_tables import PAPERS_ROW, counted
from flexact.io.result_folder import TABLE
from flexact.observe.figures.picture import Picture
from flexact.report.page import Section, escape, markdown
from flexact.studies.synthetic.alpha import ALPHA
from flexact.studies.synthetic.corrections import CORRECTIONS
from flexact.studies.synthetic.regression import SYNTHETIC
from flexact.studies.synthetic.study_run import StudyRun, read_run

STUDIES = {study.name: study for study in (SYNTHETIC, ALPHA, CORRECTIONS)}


def sections(folder: Path, config: dict[str, Any]) -> list[Section]:
    """The table and the figures of a run; of one that is not finished, what there is."""
    study = STUDIES[config["study"]]
    body = markdown(read_text(folder / TABLE), muted=PAPERS_ROW) if (folder / TABLE).is_file() else ""
    run = read_run(folder, config)
    if not run.results:
        body += "<p>No results yet.</p>"
    return [Section(study.question, _right_picks(run) + body, study_pictures(run))]


def study_pictures(run: StudyRun) -> list[Picture]:
    """The figures of a run; those that lack their data are left out."""
    return [picture for picture in STUDIES[run.name].pictures(run) if picture is not None]


def _right_picks(run: StudyRun) -> str:
    """How often each model that picks has picked the truth."""
    lines = []
    for model in run.models if run.name == "synthetic" else ():
        rows = [row for row in run.results if row.model == model]
        if model.startswith("flexact"):
            right = sum(row.pick == row.truth for row in rows)
            lines.append(
                f"<li><b>{escape(model)}</b> picked the true activation in {right} of {counted(len(rows), 'run')}.</li>"
            )
    return f"<ul>{''.join(lines)}</ul>\n" if lines else ""
