"""The inputs of a routed activation besides its tensor h and the logits, in one tuple."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

_SEPARATOR = "\n"


class Blending(NamedTuple):
    """See `flexact.ops.routed_activation`."""

    weights: Tensor
    probabilities: Tensor
    temperature: Tensor
    keys: tuple[str, ...]
    alive: tuple[int, ...]
    channel_dim: int
    statistics: bool


def packed(blending: Blending) -> tuple[Any, ...]:
    """Return the fields as a custom operator takes them. It accepts no list of strings, so the keys are joined."""
    *tensors, keys, alive, channel_dim, statistics = blending
    return *tensors, _SEPARATOR.join(keys), list(alive), channel_dim, statistics


def unpacked(
    weights: Tensor, probabilities: Tensor, temperature: Tensor, keys: str, alive: Sequence[int], *rest: Any
) -> Blending:
    """Return the blending of `packed` fields."""
    return Blending(weights, probabilities, temperature, tuple(keys.split(_SEPARATOR)), tuple(alive), *rest)
