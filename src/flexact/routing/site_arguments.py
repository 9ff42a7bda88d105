"""What the arguments of a FlexAct mean: its config, its candidates and its number of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn

from flexact.activations import key_of
from flexact.candidates import ORIGINAL
from flexact.config import FlexConfig
from flexact.errors import FlexActError


def config_of(candidates: Sequence[str] | None, config: Any) -> FlexConfig:
    """The config of a site, with these candidates where they are given."""
    config = FlexConfig() if config is None else config
    if not isinstance(config, FlexConfig):
        raise FlexActError(f"config must be a FlexConfig; got {type(config).__name__}. Try FlexConfig.from_dict.")
    if candidates is None:
        return config
    return dataclasses.replace(config, candidates=candidates)  # type: ignore[arg-type]  # checked there


def check_original(original: Any) -> None:
    """Refuse an original that cannot be a candidate."""
    if original is not None and not isinstance(original, nn.Module):
        raise FlexActError(f"original must be a torch.nn.Module; got {original!r:.80}.")
    if original is not None and original.state_dict():
        raise FlexActError(f"{type(original).__name__} has tensors of its own, so it cannot be a candidate.")


def keys_of(config: FlexConfig, original: nn.Module | None) -> tuple[str, ...]:
    """The registry keys of a site's candidates, with the original function's in the place of "original"."""
    if original is None and config.init == "original":
        raise FlexActError(
            "this FlexAct stands in the place of nothing, so routing cannot start at its 'original' function; use "
            "init='uniform', or let flexact.convert build it."
        )
    wanted = list(config.candidates)
    if config.init == "original" and ORIGINAL not in wanted:
        wanted.append(ORIGINAL)
    keys = [name for name in wanted if name != ORIGINAL]
    own = None if original is None else key_of(original)
    if ORIGINAL in wanted and own is not None and own not in keys:
        keys.insert(wanted.index(ORIGINAL), own)
    if len(keys) < 2:
        raise FlexActError(
            f"a pick needs at least two candidates; with the original function counted once there is {keys[0]!r} alone."
        )
    return tuple(keys)


def rows_of(config: FlexConfig, channels: int | None) -> int:
    """The number of rows of a site: 1 for the layer, or one per channel."""
    if config.granularity == "layer":
        return 1
    if not isinstance(channels, int) or channels < 1:
        raise FlexActError(
            f"granularity='channel' needs the number of channels; got channels={channels!r}. Give FlexAct "
            "channels=..., or convert with example_inputs=... so that they are seen."
        )
    return channels
