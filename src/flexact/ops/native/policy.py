"""The probabilities of all sites and the policy's step of their logits, in C; see `flexact.ops.policy_tables`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from flexact.config import Policy
from flexact.ops.native import library
from flexact.ops.policy_tables import Tables, concatenated


class _Settings(ctypes.Structure):
    """The struct Settings of policy.c."""

    _fields_ = (
        ("groups", c_int64),
        ("count", c_int32),
        ("most", c_int32),
        ("pulls", c_int32),
        ("lam", c_float),
        ("mean_rate", c_double),
        ("square_rate", c_double),
    )


_Step = c_void_p * 19
"""The struct Step of policy.c: pointers to `values`, the tables, the statistics and the result."""
_READ = (torch.float32, *[torch.int64] * 4, torch.bool, *[torch.float32] * 6)
"""The dtypes of `values` and the tables. A user's default dtype or an integer setting can cause others."""


def draw(values: Sequence[Tensor], layout: Tensor, alive: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return π and p; see `PolicyKernels.draw`."""
    joined, noise = torch.hstack(tuple(values)).float(), noise.float()
    pi, p = torch.empty_like(noise), torch.empty_like(noise)
    pointers = [tensor.data_ptr() for tensor in (joined, layout, alive, noise, pi, p)]
    library.load().draw(*pointers, *noise.shape)
    return pi, p


def update(
    values: Sequence[Tensor],
    size: int,
    tables: Tables,
    statistics: tuple[Tensor, ...],
    rates: tuple[float, float],
    policy: Policy,
) -> Tensor:
    """Return the changes to subtract from the logits; see `PolicyKernels.update`."""
    pairs = zip((concatenated(values), *tables), _READ, strict=True)
    read = [tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype) for tensor, dtype in pairs]
    found = values[0].new_empty(size, dtype=torch.float32)
    groups, most = len(tables.group_starts) - 1, tables.calls.shape[1] - 2
    settings = _Settings(groups, tables.alive.shape[1], most, policy.pulls_logits, float(policy.lam), *rates)
    tensors = (*read, *statistics, found)
    step = _Step(*[None if tensor is None else tensor.data_ptr() for tensor in tensors])
    library.load().update(ctypes.addressof(step), ctypes.addressof(settings))
    return found


def move(*_: object) -> bool:
    """Return False: torch subtracts the changes; see `PolicyKernels.move`."""
    return False
