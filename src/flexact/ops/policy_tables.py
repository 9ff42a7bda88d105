"""The interface of kernels that process all sites of a model in one call: the probabilities, and the policy's step of
the logits.

Both do little arithmetic on a (rows, K) table, for which plain torch needs about forty operations. On a GPU they are
Triton kernels (`ops.triton.policy`), on a CPU functions in C (`ops.native.policy`). `routing.router` and
`policy.logit_updates` are the readable reference in plain torch, and the oracle of the tests. The logit step has a
kernel only for policies that `has_kernel` accepts, such as the default one; the others run in plain torch.

The numbers of all sites are concatenated without padding into one flat tensor, from the tensors `values`. Two integer
tables hold the offsets of each row in it:

- layout, (rows, 3): offset of the row's first number, number of candidates, offset of the temperature;
- calls, (rows, 2 + maximum number of calls): whether the row was called, number of calls, and offset of the
  sensitivities of each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flexact.config import Policy


class Tables(NamedTuple):
    """The tables that a logit step reads; the docstring of this module describes `layout` and `calls`.

    alive, p and q are (rows, K); width and factors are (rows, 1); alpha and step_size are scalars.
    """

    layout: Tensor
    calls: Tensor
    """Not read if the policy needs no statistics."""
    grouped_rows: Tensor
    """(rows,), the rows in the order of their groups."""
    group_starts: Tensor
    """(groups + 1,), the position of each group's first row in `grouped_rows`; the last entry is the number of rows."""
    alive: Tensor
    p: Tensor
    """The probabilities of the blend."""
    q: Tensor
    """The distribution that the KL acts on."""
    width: Tensor
    alpha: Tensor
    step_size: Tensor
    factors: Tensor | None
    """What the gradients are multiplied by; 0 in rows that do not move. None if all are 1."""


class PolicyKernels(Protocol):
    """A module with both kernels."""

    def draw(self, values: Sequence[Tensor], layout: Tensor, alive: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return π and p = softmax((log π + g)/τ), each (rows, K).

        values: all logits, then one temperature per site. alive, noise: (rows, K).
        """

    def update(
        self,
        values: Sequence[Tensor],
        size: int,
        tables: Tables,
        statistics: tuple[Tensor, ...],
        rates: tuple[float, float],
        policy: Policy,
    ) -> Tensor:
        """Return the changes to subtract from the logits, flat, without padding.

        values: all gradients, `size` numbers; then the sensitivities of each call, (its rows, its candidates).
        statistics: `RoundStatistics.tensors` of `flexact.policy.evidence`, updated in place.
        rates: the weights of a new gradient in the running mean, and of its square in the running square.
        """

    def move(
        self,
        logits: Sequence[Tensor],
        sensitivities: Sequence[Tensor],
        size: int,
        tables: Tables,
        statistics: tuple[Tensor, ...],
        rates: tuple[float, float],
        policy: Policy,
    ) -> bool:
        """Do `update` with the gradients of the logits, subtract the changes from the logits, and set their gradients
        to None. Return False, having done nothing, if that cannot be one call, as without a gradient of some logits.
        """


def concatenated(values: Sequence[Tensor]) -> Tensor:
    """Return the numbers of some tensors as one flat tensor."""
    return torch.cat([tensor.flatten() for tensor in values])


def has_kernel(policy: Policy) -> bool:
    """Return whether the logit step has a kernel for a policy: its Schedule moves the logits, its correction clips
    nothing, and its λ is a number."""
    is_supported = policy.correction in ("none", "grad_norm_kl", "output_norm")
    return policy.moves_logits and is_supported and policy.lam != "temperature"
