"""Tests of the colours of a report: one per method or candidate in all figures, distinct for colour-blind readers
too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
import torch

from flexact.config import PAPER_CANDIDATES
from flexact.observe.figures.colours import candidate_colours
from flexact.studies.cifar import study as pictures
from flexact.studies.cifar.methods import FIXED, METHODS
from flexact.studies.cifar.protocol import RECTIFIERS
from flexact.studies.glue.study import COLOURS as TEXT_COLOURS

SEEN: dict[str, list[list[float]]] = {
    "all": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    "no red": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no green": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "no blue": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
"""Matrices from linear RGB to what is seen: Machado, Oliveira and Fernandes (2009), severity 1."""
XYZ = torch.tensor([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour: str, seen: Sequence[Sequence[float]]) -> torch.Tensor:
    """Returns CIE L*a*b* of a colour as a colour-blind reader sees it."""
    values = torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = torch.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    xyz = XYZ @ (torch.tensor(seen) @ linear).clamp(0, 1) / XYZ.sum(1)
    f = torch.where(xyz > 0.008856, xyz ** (1 / 3), 7.787 * xyz + 16 / 116)
    return torch.stack([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize(
    "colours",
    [
        {method: pictures.COLOURS[method] for method in METHODS},
        TEXT_COLOURS,
        candidate_colours([*PAPER_CANDIDATES, *RECTIFIERS]),
    ],
    ids=["images", "text", "candidates"],
)
def test_colours_are_distinct_for_colour_blind_readers(colours: dict[str, str]) -> None:
    for (one, first), (other, second) in combinations(colours.items(), 2):
        for eyes, seen in SEEN.items():
            apart = (lab(first, seen) - lab(second, seen)).norm().item()
            assert apart > 15, f"{one} and {other}, {eyes}"  # Okabe and Ito's own are at least 16 apart


def test_the_most_compared_methods_have_clearly_distinct_colours() -> None:
    compared = [pictures.COLOURS[method] for method in ("relu", "flexact-penultimate", "flexact-all")]
    for first, second in combinations(compared, 2):
        assert min((lab(first, seen) - lab(second, seen)).norm().item() for seen in SEEN.values()) > 35


def test_a_method_has_one_colour_in_all_figures_of_both_reports() -> None:
    for method in ("flexact-penultimate", "flexact-all"):
        assert TEXT_COLOURS[method] == pictures.COLOURS[method]


def test_a_fixed_activation_has_its_candidates_colour_and_a_dash_of_its_own() -> None:
    assert {name: pictures.COLOURS[name] for name in FIXED} == candidate_colours(FIXED)
    looks = [(pictures.COLOURS[name], pictures.DASHES.get(name, "-")) for name in METHODS + FIXED]
    assert len(set(looks)) == len(looks)
