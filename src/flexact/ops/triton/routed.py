"""Launches the Triton kernels of the routed activation, alone or fused with the batch norms and the addition before it.

A fused site saves no more tensors than a ReLU would: its backward recomputes h from the input of the batch norm, which
batch norm saves anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexact.ops.blending import Blending
from flexact.ops.closed_form import dense, with_layout_of
from flexact.ops.triton import kernels
from flexact.ops.triton.basis import Blend, blend, is_fast
from flexact.ops.triton.launch import Launch, Launches
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
    """How a fused site computes h = norm(y) + residual in one forward."""

    norm: Norm
    residual: Tensor | None
    residual_norm: Norm | None
    """The batch norm of the residual, if it has one."""
    batch_statistics: bool
    """Whether the moments are those of the batch, so that the gradient goes through them."""

    @property
    def kinds(self) -> tuple[int, int]:
        """The kinds of y and of the residual, as the kernels take them."""
        return _kind(self.norm), kernels.ABSENT.value if self.residual is None else _kind(self.residual_norm)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The residual and the norms in the order in which every kernel takes them, with placeholders."""
        norm, residual, residual_norm, _ = self
        given = (residual, *norm, *(residual_norm or norm))
        return tuple([norm.moments if one is None else one for one in given])


_TENSORS = 7
_NOT_FUSED = (kernels.PLAIN.value, kernels.ABSENT.value)


def _kind(norm: Norm | None) -> int:
    kind = kernels.PLAIN if norm is None else kernels.NORMALISED if norm.weight is None else kernels.AFFINE
    return int(kind.value)


def forward(h: Tensor, blending: Blending, preactivation: Preactivation | None = None) -> tuple[Tensor, Tensor]:
    """Return x = Σ_k w_k σ_k(h) and its sensitivities, (rows, K). See `closed_form.forward`.

    h: the input; for a fused site, the input y of its batch norm, which is dense.
    """
    h = dense(h) if preactivation is None else h
    weights, parts = blending.weights.contiguous(), blend(blending.keys, blending.alive)
    x = torch.empty_like(h)
    if h.numel() == 0:
        return x, weights.new_zeros(weights.shape if blending.statistics else 0)
    tiles, choices, tensors = _tiled(h, blending, preactivation, parts)
    launches, room = tiles.plan(_forward_plan, parts, blending.statistics, *choices)
    partials = h.new_empty(room, dtype=torch.float32)
    gathered = partials.new_empty(weights.shape if blending.statistics else 0)
    launches(*tensors, h, weights, x, partials, gathered)
    return x, gathered


def backward(
    delta: Tensor, h: Tensor, blending: Blending, need_logits: bool, preactivation: Preactivation | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the gradients w.r.t. h and the residual (None without one), and all others in one flat tensor.

    h: the input; for a fused site, the input y of its batch norm.
    The flat tensor holds the gradients w.r.t. the bias and the weight of the norm, the weight of a residual norm, and
    the logits, each if there is one; `split_results` splits it.
    """
    h = dense(h) if preactivation is None else h
    weights, parts = blending.weights.contiguous(), blend(blending.keys, blending.alive)
    delta = with_layout_of(h, delta)
    if h.numel() == 0:
        return torch.empty_like(h), None, weights.new_zeros(weights.numel() if need_logits else 0)
    tiles, choices, tensors = _tiled(h, blending, preactivation, parts)
    launches, *sizes = tiles.plan(_backward_plan, parts, need_logits, *choices)
    partials, results = [h.new_empty(size, dtype=torch.float32) for size in sizes]
    is_fused = preactivation is not None
    is_stored = preactivation is None or preactivation.residual is not None
    to_h = torch.empty_like(h) if is_stored else delta
    to_y = torch.empty_like(h) if is_fused else to_h
    to_residual = to_h if is_fused and is_stored else None
    if preactivation is not None and preactivation.residual_norm is not None:
        to_residual = torch.empty_like(h)
    to_r = to_y if to_residual is None else to_residual
    routing = (blending.probabilities.contiguous(), blending.temperature)
    launches(*tensors, delta, h, weights, to_h, partials, results, *routing, to_y, to_r)
    return to_y, to_residual, results


def split_results(results: Tensor, channels: int, has_residual_norm: bool) -> tuple[Tensor, ...]:
    """Split the flat result of a fused `backward` into the gradients w.r.t. bias, weight, residual weight (if any),
    logits."""
    sizes = [channels] * (3 if has_residual_norm else 2)
    return torch.split_with_sizes(results, [*sizes, results.numel() - sum(sizes)])


def _tiled(
    h: Tensor, blending: Blending, preactivation: Preactivation | None, parts: Blend
) -> tuple[Tiles, tuple[Any, ...], tuple[Tensor, ...]]:
    """Return the tiles of h, the choices that the plans of all passes share, and the tensors of a fused site."""
    rows, k = blending.weights.shape
    # With many sums per channel, fewer programs keep the final reduction short.
    cut = FEW_SUMS if len(parts.basis) <= _FEW_BASIS_FUNCTIONS else MANY_SUMS
    if preactivation is not None:
        choices = (preactivation.batch_statistics, preactivation.kinds, rows, k, is_fast(h))
        return by_channel(h, 1, cut), choices, preactivation.tensors
    tiles = flat(h, FLAT) if rows == 1 else by_channel(h, blending.channel_dim, cut)
    return tiles, (False, _NOT_FUSED, rows, k, is_fast(h)), ()


def _forward_plan(
    tiles: Tiles, parts: Blend, statistics: bool, batch_statistics: bool, kinds: tuple[int, int], rows: int, k: int,
    fast: bool,
) -> tuple[Launches, int]:  # fmt: skip
    """Return the launches, and the number of partial sums."""
    sweep, finish = _forward_launches(tiles, parts, statistics, batch_statistics, kinds, rows, k, fast)
    first = 0 if kinds == _NOT_FUSED else _TENSORS
    steps: list[tuple[Launch, Sequence[int]]] = [(sweep, range(first + 4))]
    if finish is not None:
        steps.append((finish, range(first + 3, first + 5)))
    if statistics if kinds == _NOT_FUSED else batch_statistics:
        _prepare_training(sweep, tiles, parts, batch_statistics, kinds, rows, k, fast)
    return Launches(first + 5, *steps), tiles.room(len(parts.basis) if statistics else 0)


def _forward_launches(
    tiles: Tiles, parts: Blend, statistics: bool, batch_statistics: bool, kinds: tuple[int, int], rows: int, k: int,
    fast: bool,
) -> tuple[Launch, Launch | None]:  # fmt: skip
    """Return the main launch, and the launch that reduces its partial sums, if any."""
    constants = (*parts.constants(fast), statistics, *kinds, rows > 1, *tiles.constants)
    missing = _TENSORS if kinds == _NOT_FUSED else 0
    sweep, finish = Launch(kernels.forward, tiles.grid, (*tiles.sizes, k), constants, missing=missing), None
    if statistics:
        numbers = (parts.alive, rows, k, *tiles.parts(rows), tiles.numel // rows)
        finish = Launch(kernels.finish_forward, (rows,), numbers, (*parts.constants(False), 1024))
        sweep.prepares(finish, lambda *dtypes: (dtypes[-1], dtypes[-1]))
    return sweep, finish


def _backward_plan(
    tiles: Tiles, parts: Blend, need_logits: bool, batch_statistics: bool, kinds: tuple[int, int], rows: int, k: int,
    fast: bool,
) -> tuple[Launches, int, int]:  # fmt: skip
    """Return the launches, the number of partial sums, and the number of results.

    Both numbers count first the sums over each channel, then those of the routing.
    """
    sweep, finish, through_norm = _backward_launches(tiles, parts, need_logits, batch_statistics, kinds, rows, k, fast)
    first, channels = (0, 0) if kinds == _NOT_FUSED else (_TENSORS, tiles.channels)
    partials, results = first + 4, first + 5
    steps: list[tuple[Launch, Sequence[int]]] = [(sweep, range(partials + 1))]
    if finish is not None:
        steps.append((finish, range(partials, partials + 4)))
    if through_norm is not None:
        steps.append(
            (through_norm, (*range(first), first + 3, first + 1, first + 2, results, results + 3, results + 4))
        )
    count, basis = _sums_per_channel(kinds), len(parts.basis) if need_logits else 0
    sizes = tiles.room(count) + tiles.room(basis), count * channels + (rows * k if need_logits else 0)
    return Launches(first + 10, *steps), *sizes


def _sums_per_channel(kinds: tuple[int, int]) -> int:
    """Return how many sums over each channel the gradients of the norms need."""
    return 0 if kinds == _NOT_FUSED else 2 + (kinds[1] >= kernels.NORMALISED.value)


def _backward_launches(
    tiles: Tiles, parts: Blend, need_logits: bool, batch_statistics: bool, kinds: tuple[int, int], rows: int, k: int,
    fast: bool,
) -> tuple[Launch, Launch | None, Launch | None]:  # fmt: skip
    """Return the main launch, the one that reduces its partial sums, and the one that continues through the norms, each
    if needed."""
    every = (*kinds, rows > 1, *tiles.constants)
    is_fused, count = kinds != _NOT_FUSED, _sums_per_channel(kinds)
    by_norm = tiles.room(count)
    constants = (*parts.constants(fast), need_logits, *every)
    numbers: tuple[int, ...] = (by_norm, *tiles.sizes, k)
    sweep = Launch(kernels.backward, tiles.grid, numbers, constants, missing=0 if is_fused else _TENSORS)
    if not (need_logits or is_fused):
        return sweep, None, None
    channels = tiles.channels if is_fused else 0
    numbers = (by_norm, parts.alive, channels, *tiles.parts(tiles.channels), rows, *tiles.parts(rows), k)
    block, warps = (256, 1) if is_fused else (1024, 4)
    grid = (channels + (rows if need_logits else 0),)
    finish = Launch(kernels.finish_backward, grid, numbers, (*parts.constants(fast), count, block), warps)
    if not is_fused:
        return sweep, finish, None
    needed = _NOTHING if kinds[1] else parts  # with a residual, ∂h is stored: one kernel for all bases
    constants = (*needed.constants(fast), batch_statistics, *every)
    numbers = (*tiles.sizes, k, tiles.numel // channels)
    return sweep, finish, Launch(kernels.backward_through_norm, tiles.grid, numbers, constants)


def _prepare_training(
    sweep: Launch, tiles: Tiles, parts: Blend, batch_statistics: bool, kinds: tuple[int, int], rows: int, k: int,
    fast: bool,
) -> None:  # fmt: skip
    """Build what follows a forward in training ahead: the backward, an evaluation and, if fused, the commitment."""
    choices, picks = (kinds, rows, k, fast), parts.picks()
    need_logits = len(picks) > 1
    backward, finish, through_norm = _backward_launches(
        tiles, parts, need_logits, batch_statistics, kinds, rows, k, fast
    )
    sweep.prepares(backward, lambda *dtypes: (*dtypes[:-4], dtypes[-4], *dtypes[-4:]))
    if finish:
        sweep.prepares(finish, lambda *dtypes: (dtypes[-1],) * 4)
    if through_norm:
        sweep.prepares(through_norm, _dtypes_through_norm)
    later = [(parts, False)] if need_logits else []
    later += [(pick, True) for pick in picks] if through_norm and len(picks) == 2 else []
    for other, trains in later:
        evaluation, _ = _forward_launches(tiles, other, False, trains, *choices)
        sweep.prepares(evaluation, lambda *dtypes: dtypes)


def _dtypes_through_norm(*dtypes: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the dtypes of the tensors of `backward_through_norm` from those of `forward`."""
    *tensors, y, weights, _, partials = dtypes
    return *tensors, y, y, weights, partials, y, y
