"""Selects the kernels of `policy_tables` for a model."""

from __future__ import annotations

import torch
from torch import Tensor

from flexact.ops import dispatch
from flexact.ops.native import library
from flexact.ops.native import policy as native_policy
from flexact.ops.operators import is_traced
from flexact.ops.policy_tables import PolicyKernels


def chosen(logits: Tensor, k: int) -> PolicyKernels | None:
    """Return the kernels for k candidates and these logits; None if they run in plain torch."""
    if k > dispatch.MOST_CANDIDATES or logits.dtype != torch.float32 or is_traced(logits):
        return None
    name = dispatch.active(logits.device).name
    if name == "triton":
        from flexact.ops.triton import policy as triton_policy  # needs Triton

        return triton_policy
    return native_policy if name == "native" and library.loads() else None
