"""Checks the Triton forms of custom candidates against their torch functions, at their first use on a device."""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import Tensor
from triton.errors import TritonError

from flexact.candidates.registry import Candidate, lookup
from flexact.errors import FlexActError
from flexact.ops.blending import Blending
from flexact.ops.dispatch import CannotBuild
from flexact.ops.triton import routed

TOLERANCE = 1e-3
"""Allowed error relative to max(1, |value|): a form may be approximate, as the built-in ones are in half precision."""


@functools.cache
def check(key: str, device: torch.device) -> None:
    """Raise if a custom candidate's form does not compile, or does not compute the candidate and its derivative."""
    candidate = lookup(key)
    h = torch.linspace(-5.9, 6.1, 97, device=device)  # avoids round numbers, where functions usually have their kinks
    one = torch.ones(1, 1, device=device)
    blending = Blending(one, one, one[0, 0], (key,), (0,), 1, False)
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    try:
        with on_device, torch.no_grad():
            value, _ = routed.forward(h, blending)
            slope, *_ = routed.backward(torch.ones_like(h), h, blending, False)
    except (CannotBuild, TritonError) as error:
        if isinstance(error.__cause__, OSError | ImportError):  # not the form's fault
            return
        raise FlexActError(
            f"the Triton form of candidate {candidate.name!r} does not compile: {error!s:.500}. Correct it, or "
            "leave it out; its sites then use the closed form."
        ) from error
    exact = h.double()
    expected = candidate.function(exact)
    _compare(candidate, "value", h, value, expected)
    _compare(candidate, "slope", h, slope, candidate.derivative(exact, expected))


def _compare(candidate: Candidate, what: str, h: Tensor, ours: Tensor, expected: Tensor) -> None:
    difference = (ours.double() - expected).abs() / expected.abs().clamp(min=1)
    wrong = ~(difference <= TOLERANCE)
    if bool(wrong.any()):
        at = int(torch.where(difference.isnan(), torch.inf, difference).argmax())
        raise FlexActError(
            f"the Triton form of candidate {candidate.name!r} gives the {what} {ours[at].item():.6g} at h = "
            f"{h[at].item():.4g}, but its function gives {expected[at].item():.6g}. Correct the form, or leave it out."
        )
