"""What the figures of the synthetic studies share: probabilities over epochs, and colours."""

from __future__ import annotations

from flexact.observe.figures.description import Line, Panel, candidate_colours, candidate_dash
from flexact.studies.averages import mean_and_deviation
from flexact.studies.synthetic.names import title
from flexact.studies.synthetic.study_run import StudyRun

HOW_TO_READ = (
    "The bold line is the truth. A line is the mean over seeds, with a band of one standard deviation until the picks "
    "are made; from then on it is the share of seeds with that pick."
)
"""What stands under probabilities over epochs."""


def probability_panel(run: StudyRun, model: str, truth: str, heading: str = "") -> Panel | None:
    """How likely each candidate is over the epochs of one model; None where that was not kept."""
    of_model = run.history.get((model, truth))
    if not of_model:
        return None
    epochs = sorted(next(iter(of_model.values())))
    picked = {
        epoch for epoch in epochs if all(p in (0.0, 1.0) for by_epoch in of_model.values() for p in by_epoch[epoch])
    }
    colours = run_colours(run)
    lines = []
    for candidate, by_epoch in of_model.items():
        spread = [mean_and_deviation(by_epoch[epoch]) for epoch in epochs]
        spread = [(mean, 0.0 if e in picked else std) for e, (mean, std) in zip(epochs, spread, strict=True)]
        band = ([max(0.0, mean - std) for mean, std in spread], [min(1.0, mean + std) for mean, std in spread])
        width = 3.0 if candidate == truth else 1.8
        means = [mean for mean, _ in spread]
        lines.append(Line(candidate, epochs, means, colours[candidate], candidate_dash(candidate), width, band))
    return Panel(heading or f"{title(model)}, truth: {truth}", "epoch", "probability", lines, value_range=(-0.02, 1.02))


def final_probabilities(run: StudyRun, model: str, truth: str) -> dict[str, float]:
    """Candidate → probability in the last epoch, mean over seeds."""
    of_model = run.history.get((model, truth), {})
    return {candidate: mean_and_deviation(by_epoch[max(by_epoch)])[0] for candidate, by_epoch in of_model.items()}


def run_colours(run: StudyRun) -> dict[str, str]:
    """One colour a candidate, the same in all figures of the study."""
    return candidate_colours([*run.options.candidates, *run.options.truths])
