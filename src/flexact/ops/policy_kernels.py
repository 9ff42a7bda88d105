"""Selects the kernels of `policy_tables` for a model."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flexact.ops import dispatch
from flexact.ops.native import library
from flexact.ops.native import policy as native_policy
from flexact.ops.operators import is_traced
from flexact.ops.policy_tables import PolicyKernels


@functools.cache  # an import takes longer than the rest of `chosen`, even if the module is loaded
def _triton_policy() -> PolicyKernels:
    from flexact.ops.triton import policy  # needs Triton

    return policy


def chosen(logits: Tensor, k: int) -> PolicyKernels | None:
    """Return the kernels for k candidates and these logits; None if they run in plain torch."""
    if k > dispatch.MOST_CANDIDATES or logits.dtype != torch.float32 or is_traced(logits):
        return None
    name = dispatch.active(logits.device).name
    if name == "triton":
        return _triton_policy()
    return native_policy if name == "native" and library.loads() else None
