"""The derivatives of the routed activation at one input in Triton, for `higher_order`."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from torch import Tensor

from flexact.ops.blending import Blending
from flexact.ops.closed_form import dense, with_layout_of
from flexact.ops.closed_form_blends import ClosedFormBlends
from flexact.ops.fallback import run
from flexact.ops.triton import higher_kernels, kernels
from flexact.ops.triton.basis import Blend, blend, is_fast
from flexact.ops.triton.launch import Launch
from flexact.ops.triton.passes import Pass
from flexact.ops.triton.tiles import FLAT, MANY_SUMS, Tiles, by_channel, flat

Orders = tuple[bool, ...]
"""Whether δ_0, δ_1 and δ_2 are given."""


class TritonBlends:
    """See `higher_order.Blends`. Every candidate must be built in, and h not empty."""

    def __init__(self, h: Tensor, blending: Blending) -> None:
        h = dense(h)
        self._h, self._blending = h, blending
        self._weights = blending.weights.contiguous()
        rows, k = self._weights.shape
        self._tiles = flat(h, FLAT) if rows == 1 else by_channel(h, blending.channel_dim, MANY_SUMS)
        self._choices = blend(blending.keys, blending.alive), rows, k, is_fast(h)

    def blend(self, n: int) -> Tensor:
        """Return B_n."""
        return run(self._blend, lambda _, n: self._fallback.blend(n), self._h, n)

    def gradients(self, deltas: Mapping[int, Tensor], need_logits: bool) -> tuple[Tensor, Tensor]:
        """Return the gradients of Σ_n ⟨δ_n, B_n⟩ with respect to h and the logits."""
        return run(self._gradients, lambda _, *rest: self._fallback.gradients(*rest), self._h, deltas, need_logits)

    @functools.cached_property
    def _fallback(self) -> ClosedFormBlends:
        return ClosedFormBlends(self._h, self._blending)

    def _blend(self, h: Tensor, n: int) -> Tensor:
        (found,) = self._tiles.plan(_blend_plan, *self._choices, n).run(h, self._weights)
        return found.as_strided(h.shape, h.stride())

    def _gradients(self, h: Tensor, deltas: Mapping[int, Tensor], need_logits: bool) -> tuple[Tensor, Tensor]:
        given = [with_layout_of(h, deltas[n]) if n in deltas else h for n in range(3)]  # h is not read
        steps = self._tiles.plan(_gradients_plan, *self._choices, tuple([n in deltas for n in range(3)]), need_logits)
        _, probabilities, temperature, *_ = self._blending
        to_h, to_logits = steps.run(h, self._weights, *given, probabilities.contiguous(), temperature)
        return to_h, to_logits


def _blend_plan(tiles: Tiles, parts: Blend, rows: int, k: int, fast: bool, n: int) -> Pass:
    """Return the pass from h and the weights to B_n, flat."""
    launch = _blend_launch(tiles, parts, rows, k, fast, n)
    if n == 1:  # what a loss with a second derivative needs
        launch.prepares(_blend_launch(tiles, parts, rows, k, fast, 2), lambda *dtypes: dtypes)
        sweep, finish = _gradients_launches(tiles, parts, rows, k, fast, (True, True, True), True)
        launch.prepares(sweep, lambda h, floats, _: (h, floats, h, floats, floats, h, floats))
        launch.prepares(finish, lambda h, floats, _: (floats,) * 4)
    steps = Pass(2)
    found = steps.floats(tiles.numel)
    steps.launch(launch, range(3))
    steps.outputs = (found,)
    return steps


def _gradients_plan(
    tiles: Tiles, parts: Blend, rows: int, k: int, fast: bool, orders: Orders, need_logits: bool
) -> Pass:
    """Return the pass from h, the weights, the three δ, the probabilities and the temperature to the gradients w.r.t. h
    and the logits."""
    sweep, finish = _gradients_launches(tiles, parts, rows, k, fast, orders, need_logits)
    steps = Pass(7)
    h, p, temperature = 0, 5, 6
    to_h, partials = steps.like(h), steps.floats(tiles.room(len(parts.basis) if need_logits else 0))
    to_logits = steps.floats(rows * k if need_logits else 0)
    steps.launch(sweep, (*range(5), to_h, partials))
    if need_logits:
        steps.launch(finish, (partials, to_logits, p, temperature))
    steps.outputs = (to_h, to_logits)
    return steps


def _blend_launch(tiles: Tiles, parts: Blend, rows: int, k: int, fast: bool, n: int) -> Launch:
    return Launch(
        higher_kernels.blend, tiles.grid, (*tiles.sizes, k), (*parts.constants(fast), n, rows > 1, *tiles.constants)
    )


def _gradients_launches(
    tiles: Tiles, parts: Blend, rows: int, k: int, fast: bool, orders: Orders, need_logits: bool
) -> tuple[Launch, Launch]:
    constants = (*parts.constants(fast), *orders, need_logits, rows > 1, *tiles.constants)
    sweep = Launch(higher_kernels.gradients, tiles.grid, (*tiles.sizes, k), constants)
    numbers = (0, parts.alive, 0, *tiles.parts(tiles.channels), rows, *tiles.parts(rows), k)
    return sweep, Launch(kernels.finish_backward, (rows,), numbers, (*parts.constants(fast), 0, 1024))
