"""The arguments of a FlexAct, checked: its config, its candidates and its number of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn

from flexact.candidates.recognition import key_of
from flexact.candidates.registry import ORIGINAL
from flexact.config import FlexConfig
from flexact.errors import FlexActError


def config_of(candidates: Sequence[str] | None, config: Any) -> FlexConfig:
    """Return the config of a site, with these candidates if they are given."""
    config = FlexConfig() if config is None else config
    if not isinstance(config, FlexConfig):
        raise FlexActError(
            f"config must be a FlexConfig; got {config!r:.80}. Make one with "
            "FlexConfig(...) or FlexConfig.from_dict(...)."
        )
    if candidates is None:
        return config
    return dataclasses.replace(config, candidates=candidates)  # type: ignore[arg-type]  # checked there


def check_original(original: Any) -> None:
    """Raise if an original cannot be a candidate."""
    if original is not None and (not isinstance(original, nn.Module) or original.state_dict()):
        raise FlexActError(f"original must be a torch.nn.Module without parameters or buffers; got {original!r:.80}.")


def keys_of(config: FlexConfig, original: nn.Module | None) -> tuple[str, ...]:
    """Return the registry keys of a site's candidates, with "original" replaced by the key of the original function."""
    if original is None and config.init == "original":
        raise FlexActError(
            "this FlexAct replaces no activation, so routing cannot start at its 'original' function; use "
            "init='uniform', or let flexact.convert create it."
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
            f"a pick needs at least two candidates, but {keys[0]!r} is the only one, counting the original function."
        )
    return tuple(keys)


def rows_of(config: FlexConfig, channels: int | None) -> int:
    """Return the number of rows of a site: 1 for the layer, or one per channel."""
    if config.granularity == "layer":
        return 1
    if not isinstance(channels, int) or channels < 1:
        raise FlexActError(
            f"granularity='channel' needs the number of channels; got channels={channels!r}. Give FlexAct "
            "channels=..., or pass example_inputs=... to convert, which counts them."
        )
    return channels
