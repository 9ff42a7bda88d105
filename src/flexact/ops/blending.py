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
    """Return the fields as a custom operator takes them. It accepts no list of strings, so the keys are joined, and
    weights that are the probabilities are None: a compiled graph may pass two tensors where one was given twice."""
    weights, probabilities, temperature, keys, alive, channel_dim, statistics = blending
    own = None if weights is probabilities else weights
    return own, probabilities, temperature, _SEPARATOR.join(keys), list(alive), channel_dim, statistics


def unpacked(
    weights: Tensor | None, probabilities: Tensor, temperature: Tensor, keys: str, alive: Sequence[int], *rest: Any
) -> Blending:
    """Return the blending of `packed` fields."""
    weights = probabilities if weights is None else weights
    return Blending(weights, probabilities, temperature, tuple(keys.split(_SEPARATOR)), tuple(alive), *rest)
