"""The three synthetic studies of the paper, which differ in their models, tables and figures, and their pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexact.baselines import BASELINES
from flexact.config import PAPER_CANDIDATES
from flexact.io.csv_rows import read_text
from flexact.io.markdown_tables import PAPERS_ROW
from flexact.io.result_folder import TABLE
from flexact.observe.figures.picture import Picture
from flexact.report.page import Section, markdown
from flexact.studies.synthetic import pictures, tables
from flexact.studies.synthetic.options import DEFAULT, Options, canonical
from flexact.studies.synthetic.paper import CORRECTIONS as PAPER_CORRECTIONS
from flexact.studies.synthetic.store import Part, Result, read_options, read_parts


@dataclass(frozen=True)
class Study:
    """One table of the paper."""

    name: str
    title: str
    question: str
    """The heading of its page."""
    seeds: int
    truths: tuple[str, ...]
    models: Callable[[tuple[str, ...]], tuple[str, ...]]
    """The default models, given the candidates."""
    table: Callable[[Options, list[Result]], str]
    """Markdown, from the rows of results.csv."""
    pictures: tuple[Callable[[Options, dict[str, Part]], Picture | None], ...]
    """The figures of the finished models; each returns None if its data is missing."""


SYNTHETIC = Study(
    name="synthetic",
    title="Synthetic regression: the paper's first table",
    question="Which activation made the data?",
    seeds=5,
    truths=PAPER_CANDIDATES,
    models=lambda candidates: (DEFAULT, "flexact-a0.3", "flexact-a0", *candidates, *BASELINES),
    table=tables.regression_table,
    pictures=(pictures.selection, pictures.curves),
)
ALPHA = Study(
    name="alpha",
    title="The weight of the correction: the paper's sweep of α",
    question="How strong should the correction be?",
    seeds=3,
    truths=("sigmoid",),
    models=lambda candidates: tuple(canonical(f"flexact-a{tenths / 10}") for tenths in range(11)),
    table=tables.alpha_table,
    pictures=(pictures.curves, pictures.errors, pictures.final_probabilities),
)
CORRECTIONS = Study(
    name="corrections",
    title="Corrections of the routing: the paper's ablation",
    question="Which correction?",
    seeds=5,
    truths=("sigmoid",),
    models=lambda candidates: tuple(PAPER_CORRECTIONS),
    table=tables.corrections_table,
    pictures=(pictures.errors, pictures.selection),
)
STUDIES = {study.name: study for study in (SYNTHETIC, ALPHA, CORRECTIONS)}


def sections(folder: Path, config: dict[str, Any]) -> list[Section]:
    """Return the table and the figures of a run. An unfinished run shows its finished models."""
    study, options = STUDIES[config["study"]], read_options(folder, config)
    parts = read_parts(folder, study.name, options)
    body = markdown(read_text(folder / TABLE), muted=PAPERS_ROW) if (folder / TABLE).is_file() else ""
    if not parts:
        body += "<p>No results yet.</p>"
    drawn = [draw(options, parts) for draw in study.pictures]
    return [Section(study.question, body, [one for one in drawn if one is not None])]
