"""The arguments of a FlexAct and its inputs, checked: its config, its candidates, its number of rows, its tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexact.activations import key_of
from flexact.candidates import ORIGINAL
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
    if original is not None and not isinstance(original, nn.Module):
        raise FlexActError(f"original must be a torch.nn.Module; got {original!r:.80}.")
    if original is not None and original.state_dict():
        raise FlexActError(f"{type(original).__name__} has parameters or buffers, so it cannot be a candidate.")


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


def check_input(h: Tensor, label: str, device: torch.device, config: FlexConfig, rows: int) -> None:
    """Raise if the site of this label, on this device and with this number of rows, does not support an input."""
    if not isinstance(h, Tensor) or not h.is_floating_point():
        got = f"a tensor of {h.dtype}" if isinstance(h, Tensor) else f"a {type(h).__name__}"
        raise FlexActError(
            f"{label} got {got}; activations need a real floating-point tensor "
            "(float64, float32, bfloat16 or float16). Convert it first, for example with h.float()."
        )
    if h.layout is not torch.strided or h.is_nested:
        raise FlexActError(
            f"{label} got {'a nested' if h.is_nested else 'a sparse'} tensor; activations need a dense one. "
            "Convert it first, for example with h.to_padded_tensor(0.0) or h.to_dense()."
        )
    if h.device != device:
        raise FlexActError(
            f"{label} is on {device} but got a tensor on {h.device}; move the model "
            "or the tensor, for example with model.to(h.device)."
        )
    dim = config.channel_dim
    by_channel = config.granularity == "channel"
    if by_channel and (not -h.dim() <= dim < h.dim() or h.shape[dim] != rows):
        raise FlexActError(
            f"{label} picks for {rows} channels in dimension {dim}, but its input has "
            f"shape {tuple(h.shape)}. Set FlexConfig(channel_dim=...) to the dimension of the channels, or "
            "convert with per_call=True if this activation is used with several numbers of channels."
        )
