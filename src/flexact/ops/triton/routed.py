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
from flexact.ops.triton import kernels, pass_operators
from flexact.ops.triton.basis import Blend, blend, is_fast
from flexact.ops.triton.launch import Launch
from flexact.ops.triton.passes import Pass
from flexact.ops.triton.tiles import FEW_SUMS, FLAT, MANY_SUMS, Tiles, by_channel, flat

_FEW_BASIS_FUNCTIONS = 6
_MANY_SUMS_BLOCK = 512
_MOST_PREPARED = 5
"""The kernels of every possible pick are built ahead of the commitment when at most so many candidates are left."""
_NOTHING = Blend((), (), 0)


class Norm(NamedTuple):
    """The moments and the optional affine parameters with which one forward normalises."""

    moments: Tensor
    """(2, channels), float32: the mean and 1/√(variance + ε)."""
    weight: Tensor | None
    bias: Tensor | None


class Fusing(NamedTuple):
    """What is fused with a site."""

    batch_statistics: bool
    """Whether the moments are those of the batch, so that the gradient goes through them."""
    kinds: tuple[int, int]
    """The kinds of y and of the residual, as the kernels take them."""


NOT_FUSED = Fusing(False, (kernels.PLAIN.value, kernels.ABSENT.value))


class Preactivation(NamedTuple):
    """How a fused site computes h = norm(y) + residual in one forward."""

    norm: Norm
    residual: Tensor | None
    residual_norm: Norm | None
    """The batch norm of the residual, if it has one."""
    batch_statistics: bool
    """See `Fusing`."""

    @property
    def fusing(self) -> Fusing:
        kind = kernels.ABSENT if self.residual is None else kernels.PLAIN
        other = kind.value if self.residual_norm is None else kind_of(self.residual_norm.weight)
        return Fusing(self.batch_statistics, (kind_of(self.norm.weight), other))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The residual and the norms in the order in which every kernel takes them, with placeholders."""
        norm, residual, residual_norm, _ = self
        given = (residual, *norm, *(residual_norm or norm))
        return tuple([norm.moments if one is None else one for one in given])


_TENSORS = 7


def kind_of(weight: Tensor | None) -> int:
    """Return the kind of a normalised tensor, by the weight of its norm, as the kernels take it."""
    return int((kernels.NORMALISED if weight is None else kernels.AFFINE).value)


def forward(h: Tensor, blending: Blending, preactivation: Preactivation | None = None) -> tuple[Tensor, Tensor]:
    """Return x = Σ_k w_k σ_k(h) and its sensitivities, (rows, K). See `closed_form.forward`.

    h: the input; for a fused site, the input y of its batch norm, which is dense.
    """
    h = dense(h) if preactivation is None else h
    weights = blending.weights.contiguous()
    if h.numel() == 0:
        return torch.empty_like(h), weights.new_zeros(weights.shape if blending.statistics else 0)
    fusing, tensors = (NOT_FUSED, ()) if preactivation is None else (preactivation.fusing, preactivation.tensors)
    given = (h, weights, *tensors)
    if pass_operators.records(*given):
        x, gathered = pass_operators.run("forward", h.stride(), given, *blending[3:], tuple(fusing))
    else:
        x, gathered = forward_pass(h, blending, fusing).run(*given)
    return x, gathered


def forward_pass(h: Tensor, blending: Blending, fusing: Fusing) -> Pass:
    """Return the pass of `forward` from h, the weights and the tensors of a fused site to x and the sensitivities."""
    tiles, parts, choices = _tiled(h, blending, fusing)
    return tiles.plan(_forward_plan, parts, blending.statistics, *choices)


def backward(
    delta: Tensor, h: Tensor, blending: Blending, need_logits: bool, preactivation: Preactivation | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the gradients w.r.t. h and the residual (None without one), and all others in one flat tensor.

    h: the input; for a fused site, the input y of its batch norm.
    The flat tensor holds the gradients w.r.t. the bias and the weight of the norm, the weight of a residual norm, and
    the logits, each if there is one; `split_results` splits it.
    """
    h = dense(h) if preactivation is None else h
    weights = blending.weights.contiguous()
    delta = with_layout_of(h, delta)
    if h.numel() == 0:
        return torch.empty_like(h), None, weights.new_zeros(weights.numel() if need_logits else 0)
    fusing, tensors = (NOT_FUSED, ()) if preactivation is None else (preactivation.fusing, preactivation.tensors)
    given = (delta, h, weights, blending.probabilities.contiguous(), blending.temperature, *tensors)
    if pass_operators.records(*given):
        found = pass_operators.run("backward", h.stride(), given, *blending[3:], need_logits, tuple(fusing))
    else:
        found = backward_pass(h, blending, need_logits, fusing).run(*given)
    return found[0], found[2] if len(found) == 3 else None, found[1]


def backward_pass(h: Tensor, blending: Blending, need_logits: bool, fusing: Fusing) -> Pass:
    """Return the pass of `backward` from δ, h, the weights, the probabilities, the temperature and the tensors of a
    fused site to the gradient w.r.t. h, the flat tensor and, if there is a residual, the gradient w.r.t. it."""
    tiles, parts, choices = _tiled(h, blending, fusing)
    return tiles.plan(_backward_plan, parts, need_logits, *choices)


def _made_forward(tensors: Sequence[Tensor], *choices: Any) -> Pass:
    (h, weights, *_), (*routing, fusing) = tensors, choices
    return forward_pass(h, Blending(weights, weights, weights, *routing), Fusing(*fusing))


def _made_backward(tensors: Sequence[Tensor], *choices: Any) -> Pass:
    (_, h, weights, *_), (*routing, need_logits, fusing) = tensors, choices
    return backward_pass(h, Blending(weights, weights, weights, *routing), need_logits, Fusing(*fusing))


pass_operators.makers |= {"forward": _made_forward, "backward": _made_backward}


def split_results(results: Tensor, channels: int, has_residual_norm: bool) -> tuple[Tensor, ...]:
    """Split the flat result of a fused `backward` into the gradients w.r.t. bias, weight, residual weight (if any),
    logits."""
    sizes = [channels] * (3 if has_residual_norm else 2)
    return torch.split_with_sizes(results, [*sizes, results.numel() - sum(sizes)])


def _tiled(h: Tensor, blending: Blending, fusing: Fusing) -> tuple[Tiles, Blend, tuple[Any, ...]]:
    """Return the tiles of h, its blend, and the choices that the plans of all passes share."""
    parts, (rows, k) = blend(blending.keys, blending.alive), blending.weights.shape
    # With many sums per channel, fewer programs keep the final reduction short.
    cut = FEW_SUMS if len(parts.basis) <= _FEW_BASIS_FUNCTIONS or (parts.has_many and rows == 1) else MANY_SUMS
    if fusing != NOT_FUSED:
        tiles = by_channel(h, 1, cut)
    else:
        tiles = flat(h, FLAT) if rows == 1 else by_channel(h, blending.channel_dim, cut)
    return tiles, parts, (*fusing, rows, k, is_fast(h))


def _forward_plan(
    tiles: Tiles, parts: Blend, statistics: bool, batch_statistics: bool, kinds: tuple[int, int], rows: int, k: int,
    fast: bool,
) -> Pass:  # fmt: skip
    sweep, finish = _forward_launches(tiles, parts, statistics, batch_statistics, kinds, rows, k, fast)
    steps, h, weights = Pass(2 if kinds == NOT_FUSED.kinds else 2 + _TENSORS), 0, 1
    x, partials = steps.like(h), steps.floats(tiles.room(len(parts.basis) if statistics else 0))
    gathered = steps.floats(*((rows, k) if statistics else (0,)))
    steps.launch(sweep, (*range(2, steps.inputs), h, weights, x, partials))
    if finish is not None:
        steps.launch(finish, (partials, gathered))
    if statistics if kinds == NOT_FUSED.kinds else batch_statistics:
        _prepare_training(sweep, tiles, parts, batch_statistics, kinds, rows, k, fast)
    steps.outputs = (x, gathered)
    return steps


def _forward_launches(
    tiles: Tiles, parts: Blend, statistics: bool, batch_statistics: bool, kinds: tuple[int, int], rows: int, k: int,
    fast: bool,
) -> tuple[Launch, Launch | None]:  # fmt: skip
    """Return the main launch, and the launch that reduces its partial sums, if any."""
    constants = (*parts.constants(fast), statistics, *kinds, rows > 1, *tiles.constants)
    missing = _TENSORS if kinds == NOT_FUSED.kinds else 0
    sweep, finish = Launch(kernels.forward, tiles.grid, (*tiles.sizes, k), constants, missing=missing), None
    if statistics:
        numbers = (parts.alive, rows, k, *tiles.parts(rows), tiles.numel // rows)
        block = _MANY_SUMS_BLOCK if parts.has_many else 1024
        finish = Launch(kernels.finish_forward, (rows,), numbers, (*parts.constants(False), block))
        sweep.prepares(finish, lambda *dtypes: (dtypes[-1], dtypes[-1]))
    return sweep, finish


def _backward_plan(
    tiles: Tiles, parts: Blend, need_logits: bool, batch_statistics: bool, kinds: tuple[int, int], rows: int, k: int,
    fast: bool,
) -> Pass:  # fmt: skip
    sweep, finish, through_norm = _backward_launches(tiles, parts, need_logits, batch_statistics, kinds, rows, k, fast)
    is_fused, has_residual = kinds != NOT_FUSED.kinds, kinds[1] != kernels.ABSENT.value
    steps = Pass(5 + (_TENSORS if is_fused else 0))
    delta, h, weights, p, temperature, *tensors = range(steps.inputs)
    count, basis = _sums_per_channel(kinds), len(parts.basis) if need_logits else 0
    # Sums over each channel come first, then those of the routing.
    partials = steps.floats(tiles.room(count) + tiles.room(basis))
    results = steps.floats(count * tiles.channels + (rows * k if need_logits else 0))
    stores = not is_fused or has_residual or parts.has_many
    to_h = steps.like(h) if stores else delta
    steps.launch(sweep, (*tensors, delta, h, weights, to_h, partials))
    if finish is not None:
        steps.launch(finish, (partials, results, p, temperature))
    if through_norm is None:
        steps.outputs = (to_h, results)
        return steps
    # ∂y overwrites ∂h, unless that is the gradient of the residual.
    to_y = to_h if stores and kinds[1] != kernels.PLAIN.value else steps.like(h)
    to_residual = steps.like(h) if kinds[1] >= kernels.NORMALISED.value else to_h
    to_r = to_residual if has_residual else to_y
    steps.launch(through_norm, (*tensors, to_h, h, weights, results, to_y, to_r))
    steps.outputs = (to_y, results, to_residual) if has_residual else (to_y, results)
    return steps


def _sums_per_channel(kinds: tuple[int, int]) -> int:
    """Return how many sums over each channel the gradients of the norms need."""
    return 0 if kinds == NOT_FUSED.kinds else 2 + (kinds[1] >= kernels.NORMALISED.value)


def _backward_launches(
    tiles: Tiles, parts: Blend, need_logits: bool, batch_statistics: bool, kinds: tuple[int, int], rows: int, k: int,
    fast: bool,
) -> tuple[Launch, Launch | None, Launch | None]:  # fmt: skip
    """Return the main launch, the one that reduces its partial sums, and the one that continues through the norms, each
    if needed."""
    every = (*kinds, rows > 1, *tiles.constants)
    is_fused, count = kinds != NOT_FUSED.kinds, _sums_per_channel(kinds)
    by_norm = tiles.room(count)
    constants = (*parts.constants(fast), need_logits, *every)
    numbers: tuple[int, ...] = (by_norm, *tiles.sizes, k)
    sweep = Launch(kernels.backward, tiles.grid, numbers, constants, missing=0 if is_fused else _TENSORS)
    if not (need_logits or is_fused):
        return sweep, None, None
    channels = tiles.channels if is_fused else 0
    numbers = (by_norm, parts.alive, channels, *tiles.parts(tiles.channels), rows, *tiles.parts(rows), k)
    grid = (channels + (rows if need_logits else 0),)
    summed = parts if need_logits else _NOTHING  # one kernel for all picks
    block, warps = (256, 1) if is_fused else (1024, 4)
    if summed.has_many:
        block, warps = _MANY_SUMS_BLOCK, 4
    finish = Launch(kernels.finish_backward, grid, numbers, (*summed.constants(fast), count, block), warps)
    if not is_fused:
        return sweep, finish, None
    needed = _NOTHING if kinds[1] or parts.has_many else parts  # where ∂h is stored: one kernel for all bases
    constants = (*needed.constants(fast), batch_statistics, *every)
    numbers = (*tiles.sizes, k, tiles.numel // channels)
    return sweep, finish, Launch(kernels.backward_through_norm, tiles.grid, numbers, constants)


def _prepare_training(
    sweep: Launch, tiles: Tiles, parts: Blend, batch_statistics: bool, kinds: tuple[int, int], rows: int, k: int,
    fast: bool,
) -> None:  # fmt: skip
    """Build what follows a forward in training ahead: the backward, an evaluation and, if fused, the commitment."""
    choices, picks = (batch_statistics, kinds, rows, k, fast), parts.picks()
    _prepare_backward(sweep, tiles, parts, len(picks) > 1, choices)
    if len(picks) == 1:
        return
    evaluation, _ = _forward_launches(tiles, parts, False, False, kinds, rows, k, fast)
    sweep.prepares(evaluation, lambda *dtypes: dtypes)
    if kinds == NOT_FUSED.kinds or len(picks) > _MOST_PREPARED:
        return
    for pick in picks:
        if pick.is_built_in:  # another process cannot compile custom forms
            committed, _ = _forward_launches(tiles, pick, False, *choices)
            sweep.prepares(committed, lambda *dtypes: dtypes, later=True)
            _prepare_backward(sweep, tiles, pick, False, choices, later=True)


def _prepare_backward(
    sweep: Launch, tiles: Tiles, parts: Blend, need_logits: bool, choices: tuple[Any, ...], later: bool = False
) -> None:
    """Build the backward that follows a forward ahead."""
    backward, finish, through_norm = _backward_launches(tiles, parts, need_logits, *choices)
    sweep.prepares(backward, lambda *dtypes: (*dtypes[:-4], dtypes[-4], *dtypes[-4:]), later)
    if finish:
        sweep.prepares(finish, lambda *dtypes: (dtypes[-1],) * 4, later)
    if through_norm:
        sweep.prepares(through_norm, _dtypes_through_norm, later)


def _dtypes_through_norm(*dtypes: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the dtypes of the tensors of `backward_through_norm` from those of `forward`."""
    *tensors, y, weights, _, partials = dtypes
    return *tensors, y, y, weights, partials, y, y
