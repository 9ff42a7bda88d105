"""Compares generated code with the torch function that it was made from."""

from __future__ import annotations

import torch
from torch import Tensor

from flexact.candidates.registry import Candidate

TOLERANCE = 1e-4
"""Allowed error relative to max(1, |value|). Correct code is far below it; see the tests."""
_MOST = 1e6
"""Above this size only finiteness is compared: the sine of numbers that are many periods apart is arbitrary."""


def inputs() -> Tensor:
    """Return the float32 numbers at which code is compared: a dense range without the round numbers where functions
    usually have their kinks, all sizes, some round numbers and the extremes."""
    dense, sizes = torch.linspace(-20.3, 20.7, 4001, device="cpu"), torch.logspace(-8, 6, 113, device="cpu")
    special = torch.tensor([0.0, 0.5, 1.0, 2.0, 3.0, 6.0, 1e10, 3e38, torch.inf, torch.nan], device="cpu")
    return torch.cat([dense, sizes, -sizes, special, -special]).float()


def difference(candidate: Candidate, h: Tensor, value: Tensor, slope: Tensor, tolerance: float = TOLERANCE) -> str:
    """Describe where code differs from a candidate or its derivative; empty if it does not.

    It must agree with torch in float32, which may overflow or cancel, or in float64.
    """
    single, double = ((one, candidate.function(one)) for one in (h, h.double()))
    pairs = [(single[1], double[1]), (candidate.derivative(*single), candidate.derivative(*double))]
    for what, ours, references in zip(("value", "slope"), (value, slope), pairs, strict=True):
        agrees = h.isnan() & (what == "slope")  # torch's slope of a kinked function of NaN is arbitrary
        for expected in references:
            error = (ours.double() - expected).abs() / expected.abs().clamp(min=1)
            both_finite = ours.isfinite() & expected.isfinite()
            agrees |= (error <= tolerance) | (ours == expected) | (ours.isnan() & expected.isnan())
            agrees |= both_finite & (h.abs() > _MOST)
        if not bool(agrees.all()):
            at = int(agrees.logical_not().nonzero()[0])
            expected = references[0][at]
            return f"gives the {what} {ours[at]:.6g} at h = {h[at]:.6g}, but its function gives {expected:.6g}"
    return ""
