"""Launches the Triton kernels of the routed activation, alone or fused with the batch norms and the addition before it.

A fused site saves no more tensors than a ReLU would: its backward recomputes h from the input of the batch norm, which
batch norm saves anyway.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexact.ops.blending import Blending
from flexact.ops.closed_form import dense, with_layout_of
from flexact.ops.triton import kernels
from flexact.ops.triton.basis import Blend, blend, is_fast
from flexact.ops.triton.launch import Launch
from flexact.ops.triton.tiles import FEW_SUMS, FLAT, MANY_SUMS, Tiles, by_channel, flat

_FEW_BASIS_FUNCTIONS = 6
_NOTHING = Blend((), (), 0)


class Norm(NamedTuple):
    """The moments and the optional affine parameters with which one forward normalises."""

    moments: Tensor
    """(2, channels), float32: the mean and 1/√(variance + ε)."""
    weight: Tensor | None
    bias: Tensor | None


class Preactivation(NamedTuple):
    """How one forward computes h = y + residual from y."""

    norm: Norm | None = None
    """The batch norm of y."""
    residual: Tensor | None = None
    residual_norm: Norm | None = None
    batch_statistics: bool = False
    """Whether the moments are those of the batch, so that the gradient goes through them."""

    @property
    def kinds(self) -> tuple[int, int]:
        """The kinds of y and of the residual, as the kernels take them."""
        return _kind(self.norm), kernels.ABSENT.value if self.residual is None else _kind(self.residual_norm)

    def tensors(self, y: Tensor) -> tuple[Tensor, ...]:
        """Return y, the residual and the norms in the order in which every kernel takes them; placeholders for missing
        ones are never read."""
        nothing = (None, None, None)
        given = (self.residual, *(self.norm or nothing), *(self.residual_norm or nothing))
        return y, *[y if one is None else one for one in given]


_UNCHANGED = Preactivation()


def _kind(norm: Norm | None) -> int:
    kind = kernels.PLAIN if norm is None else kernels.NORMALISED if norm.weight is None else kernels.AFFINE
    return int(kind.value)


def forward(h: Tensor, blending: Blending, preactivation: Preactivation = _UNCHANGED) -> tuple[Tensor, Tensor]:
    """Return x = Σ_k w_k σ_k(h) and its sensitivities, (rows, K). See `closed_form.forward`.

    h: the input or, with `preactivation`, y.
    """
    h, weights, parts = dense(h), blending.weights.contiguous(), blend(blending.keys, blending.alive)
    x = torch.empty_like(h)
    if h.numel() == 0:
        return x, weights.new_zeros(weights.shape if blending.statistics else 0)
    tiles = _tiles(h, blending, preactivation, parts)
    choices = (blending.statistics, preactivation.batch_statistics, preactivation.kinds, *weights.shape, is_fast(h))
    sweep, finish, room = tiles.plan(_forward_plan, parts, *choices)
    partials = h.new_empty(room, dtype=torch.float32)
    sweep(*preactivation.tensors(h), weights, x, partials)
    gathered = partials.new_empty(weights.shape if blending.statistics else 0)
    if finish:
        finish(partials, gathered)
    return x, gathered


def backward(
    delta: Tensor, h: Tensor, blending: Blending, need_logits: bool, preactivation: Preactivation = _UNCHANGED
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the gradients w.r.t. h and the residual (None without one), and all others in one flat tensor.

    h: the input or, with `preactivation`, y.
    The flat tensor holds the gradients w.r.t. the bias and the weight of the norm, the weight of a residual norm, and
    the logits, each if there is one; `split_results` splits it.
    """
    h, weights, parts = dense(h), blending.weights.contiguous(), blend(blending.keys, blending.alive)
    delta = with_layout_of(h, delta)
    if h.numel() == 0:
        return torch.empty_like(h), None, weights.new_zeros(weights.numel() if need_logits else 0)
    tiles = _tiles(h, blending, preactivation, parts)
    choices = (need_logits, preactivation.batch_statistics, preactivation.kinds, *weights.shape, is_fast(h))
    sweep, finish, through_norm, *sizes = tiles.plan(_backward_plan, parts, *choices)
    partials, results = [h.new_empty(size, dtype=torch.float32) for size in sizes]
    tensors = (*preactivation.tensors(h), weights)
    norm, residual, residual_norm, _ = preactivation
    to_h = torch.empty_like(h) if norm is None or residual is not None else delta
    sweep(delta, *tensors, to_h, partials)
    if need_logits or through_norm:
        finish(partials, results, blending.probabilities.contiguous(), blending.temperature)
    if through_norm is None:
        return to_h, None, results
    to_y = torch.empty_like(h)
    to_residual = None if residual is None else to_h if residual_norm is None else torch.empty_like(h)
    through_norm(to_h, *tensors, results, to_y, to_y if to_residual is None else to_residual)
    return to_y, to_residual, results


def split_results(results: Tensor, channels: int, has_residual_norm: bool) -> tuple[Tensor, ...]:
    """Split the flat result of a fused `backward` into the gradients w.r.t. bias, weight, residual weight (if any),
    logits."""
    sizes = [channels] * (3 if has_residual_norm else 2)
    return torch.split_with_sizes(results, [*sizes, results.numel() - sum(sizes)])


def _tiles(h: Tensor, blending: Blending, preactivation: Preactivation, parts: Blend) -> Tiles:
    if len(blending.weights) == 1 and preactivation.norm is None:
        return flat(h, FLAT)
    # With many sums per channel, fewer programs keep the final reduction short.
    cut = FEW_SUMS if len(parts.basis) <= _FEW_BASIS_FUNCTIONS else MANY_SUMS
    return by_channel(h, blending.channel_dim if preactivation.norm is None else 1, cut)


def _forward_plan(
    tiles: Tiles, parts: Blend, statistics: bool, batch_statistics: bool, kinds: tuple[int, int], rows: int, k: int,
    fast: bool,
) -> tuple[Launch, Launch | None, int]:  # fmt: skip
    """Return the main launch, the launch that reduces its partial sums, if any, and the number of partial sums."""
    constants = (*parts.constants(fast), statistics, *kinds, rows > 1, *tiles.constants)
    sweep, finish = Launch(kernels.forward, tiles.grid, (*tiles.sizes, k), constants), None
    if statistics:
        numbers = (parts.alive, rows, k, *tiles.parts(rows), tiles.numel // rows)
        finish = Launch(kernels.finish_forward, (rows,), numbers, (*parts.constants(False), 1024))
        sweep.prepares(finish, lambda *dtypes: (dtypes[-1], dtypes[-1]))
    is_fused = kinds[0] >= kernels.NORMALISED.value
    if batch_statistics if is_fused else statistics:
        _prepare_training(sweep, tiles, parts, batch_statistics, kinds, rows, k, fast)
    return sweep, finish, tiles.room(len(parts.basis) if statistics else 0)


def _backward_plan(
    tiles: Tiles, parts: Blend, need_logits: bool, batch_statistics: bool, kinds: tuple[int, int], rows: int, k: int,
    fast: bool,
) -> tuple[Launch, Launch, Launch | None, int, int]:  # fmt: skip
    """Return the main launch, the one that reduces its partial sums, the one that continues through the norms, if any,
    the number of partial sums, and the number of results.

    Both numbers count first the sums over each channel, then those of the routing.
    """
    every = (*kinds, rows > 1, *tiles.constants)
    of_y, of_residual = (kind >= kernels.NORMALISED.value for kind in kinds)
    count = (3 if of_residual else 2) if of_y else 0
    by_norm, by_routing = tiles.room(count), tiles.room(len(parts.basis) if need_logits else 0)
    constants = (*parts.constants(fast), need_logits, *every)
    sweep = Launch(kernels.backward, tiles.grid, (by_norm, *tiles.sizes, k), constants)
    channels = tiles.channels if of_y else 0
    numbers = (by_norm, parts.alive, channels, *tiles.parts(tiles.channels), rows, *tiles.parts(rows), k)
    block, warps = (256, 1) if of_y else (1024, 4)
    grid = (channels + (rows if need_logits else 0),)
    finish = Launch(kernels.finish_backward, grid, numbers, (*parts.constants(fast), count, block), warps)
    through_norm = None
    if of_y:
        needed = _NOTHING if kinds[1] else parts  # with a residual, ∂h is stored: one kernel for all bases
        constants = (*needed.constants(fast), batch_statistics, *every)
        sizes = (*tiles.sizes, k, tiles.numel // channels)
        through_norm = Launch(kernels.backward_through_norm, tiles.grid, sizes, constants)
    return sweep, finish, through_norm, by_norm + by_routing, count * channels + (rows * k if need_logits else 0)


def _prepare_training(
    sweep: Launch, tiles: Tiles, parts: Blend, batch_statistics: bool, kinds: tuple[int, int], rows: int, k: int,
    fast: bool,
) -> None:  # fmt: skip
    """Build what follows a forward in training ahead: the backward, an evaluation and, if fused, the commitment."""
    choices, picks = (kinds, rows, k, fast), parts.picks()
    need_logits = len(picks) > 1
    backward, finish, through_norm, *_ = tiles.plan(_backward_plan, parts, need_logits, batch_statistics, *choices)
    sweep.prepares(backward, lambda y, *rest: (y, y, *rest))
    if need_logits or through_norm:
        sweep.prepares(finish, lambda *dtypes: (dtypes[-1],) * 4)
    if through_norm:
        sweep.prepares(through_norm, lambda y, *rest: (y, y, *rest[:-2], rest[-1], y, y))
    later = [(parts, False)] if need_logits else []
    later += [(pick, True) for pick in picks] if through_norm and len(picks) == 2 else []
    for other, trains in later:
        evaluation, *_ = tiles.plan(_forward_plan, other, False, trains, *choices)
        sweep.prepares(evaluation, lambda *dtypes: dtypes)
