"""Checks the Triton forms of custom candidates against their torch functions, at their first use on a device."""

from __future__ import annotations

import contextlib
import functools
import logging

import torch
import triton
from triton.errors import TritonError

from flexact.candidates.registry import Candidate, lookup
from flexact.errors import FlexActError
from flexact.ops.codegen import checking
from flexact.ops.dispatch import CannotBuild
from flexact.ops.triton import generated
from flexact.ops.triton.basis import blend
from flexact.ops.triton.elementary import evaluate
from flexact.ops.triton.launch import Launch, one

TOLERANCE = 1e-3
"""Allowed error of a user's form relative to max(1, |value|): it may be approximate, as the built-in ones are in half
precision."""
_BLOCK = 1024

_log = logging.getLogger(__name__)


@functools.cache
def works(key: str, device: torch.device) -> bool:
    """Return whether a custom candidate's form compiles, and computes the candidate and its derivative. Raise if a
    user's form does not; a generated one is rejected."""
    candidate = lookup(key)
    cause: Exception | None = None
    try:
        obstacle = _difference(key, candidate, device)
    except (CannotBuild, TritonError) as error:
        if isinstance(error.__cause__, OSError | ImportError):  # not the form's fault
            return True
        cause, obstacle = error, f"does not compile: {error!s:.500}"
    if not obstacle:
        if candidate.triton is None:
            _log.info("candidate %s runs in Triton code that was generated from its function", key)
        return True
    if candidate.triton is not None:
        raise FlexActError(
            f"the Triton form of candidate {candidate.name!r} {obstacle}. Correct it, or leave it out; flexact then "
            "generates one from the function, or uses the closed form."
        ) from cause
    generated.reject(key, f"its generated form {obstacle}")
    return False


def _difference(key: str, candidate: Candidate, device: torch.device) -> str:
    """Describe where a candidate's form differs from its function; empty if it does not."""
    h, tolerance = checking.inputs(), checking.TOLERANCE
    if candidate.triton is not None:
        h, tolerance = torch.linspace(-5.9, 6.1, 97), TOLERANCE  # avoids round numbers, where functions have kinks
    h = h.to(device)
    value, slope = torch.empty_like(h), torch.empty_like(h)
    basis, *_ = blend((key,), (0,)).constants(False)
    launch = Launch(evaluate, (triton.cdiv(h.numel(), _BLOCK),), (h.numel(),), (basis, _BLOCK))
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        one(launch, 3)(h, value, slope)
    return checking.difference(candidate, h, value, slope, tolerance)
