"""Which figures belong to which study."""

from __future__ import annotations

from collections.abc import Callable

from flexact.picture import Picture
from flexact.studies import report_alpha, report_corrections, report_synthetic
from flexact.studies.report_data import StudyRun

PICTURES: dict[str, Callable[[StudyRun], list[Picture | None]]] = {
    "synthetic": report_synthetic.pictures,
    "alpha": report_alpha.pictures,
    "corrections": report_corrections.pictures,
}
"""The studies whose runs the report reads, each with what makes its figures."""


def study_pictures(run: StudyRun) -> list[Picture]:
    """The figures of a study; those that lack their data are left out."""
    return [picture for picture in PICTURES[run.name](run) if picture is not None]
