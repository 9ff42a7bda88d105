"""The three synthetic studies of the paper. They differ in their models, their tables and their figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flexact.baselines import BASELINES
from flexact.config import PAPER_CANDIDATES
from flexact.observe.figures.picture import Picture
from flexact.studies.synthetic import pictures, tables
from flexact.studies.synthetic.names import DEFAULT, KAN, canonical
from flexact.studies.synthetic.options import Options
from flexact.studies.synthetic.paper import CORRECTIONS as PAPER_CORRECTIONS
from flexact.studies.synthetic.store import Part, Result


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


MODERN = ("gelu", "silu", "mish")
"""Fixed activations that are common today, besides the candidates."""
SYNTHETIC = Study(
    name="synthetic",
    title="Synthetic regression: the paper's first table",
    question="Which activation made the data?",
    seeds=5,
    truths=PAPER_CANDIDATES,
    models=lambda candidates: tuple(
        dict.fromkeys((DEFAULT, "flexact-a0.3", "flexact-a0", *candidates, *MODERN, *BASELINES, KAN))
    ),
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
