"""Records picks in the configuration of a transformers model.

A configuration has one setting, such as `hidden_act`, for the activations of all layers. If the setting can express the
picks, it is changed to them, and the checkpoint loads without flexact. Otherwise, and while the sites are picking, it
is `UNPICKED`, a name that transformers does not know: `from_pretrained` fails and shows that name, instead of silently
building the wrong network. If this module is imported, `from_pretrained` succeeds, but the model raises an error until
`flexact.load_picks` has loaded the picks.
"""

from __future__ import annotations

import dis
import inspect
import itertools
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from flexact.candidates.recognition import is_activation
from flexact.candidates.registry import ALIASES
from flexact.errors import FlexActError, missing_extra
from flexact.surgery.picks_file import CONFIG_FIELD, Unpicked, built_with, described

if find_spec("transformers") is None:
    raise missing_extra("transformers", "transformers")
from transformers.activations import ACT2FN

SETTINGS = (
    "hidden_act",
    "hidden_activation",
    "activation_function",
    "activation",
    "feed_forward_proj",  # T5: "relu" or "gated-relu", from which dense_act_fn is derived
    "dense_act_fn",
)
"""Names of the activation setting in configurations. If a configuration has several of them, all are set together."""
UNPICKED = (
    "picked by flexact: import flexact.integrations.transformers first, then call flexact.load_picks(model, folder)"
)
"""Value of the setting if no activation name of transformers is correct."""

ACT2FN[UNPICKED] = Unpicked

_GATED = "gated-"


def settings_of(config: Any) -> dict[str, str]:
    """Return the activation settings of a configuration with their values; empty if it has none."""
    values = {name: getattr(config, name, None) for name in SETTINGS}
    return {name: value for name, value in values.items() if isinstance(value, str)}


def problem_with_recording(model: nn.Module) -> str | None:
    """Return why a model's configuration cannot prevent `from_pretrained` from building the wrong network, or None."""
    settings = settings_of(getattr(model, "config", None))
    built = _built(model, with_activation(settings, UNPICKED))
    if built is None or not any(isinstance(module, Unpicked) for module in built.modules()):
        reason = f"has no activation setting that flexact knows ({', '.join(SETTINGS)})"
    elif (reader := _other_reader(built, built_with(model, settings), settings)) is not None:
        reason = f"has {' and '.join(settings)}, which is also read by {reader}"
    else:
        return None
    return (
        f"the configuration of {type(model).__name__} {reason}, so from_pretrained would silently load a saved "
        "checkpoint with the wrong activations. With FlexActCallback(extract=False), save "
        "flexact.selection(model).to_dict() as JSON beside the checkpoint, and load it with flexact.load_picks."
    )


def _other_reader(marked: nn.Module, plain: nn.Module, settings: Mapping[str, str]) -> str | None:
    """Return what reads a setting besides the activation modules, or None.

    It is an attribute that differs between two networks built with different settings, as in Mamba's mixer, or a method
    that reads the setting in every call.
    """
    plain_modules = dict(plain.named_modules())
    marked_modules = {name: module for name, module in marked.named_modules() if not isinstance(module, Unpicked)}
    for name, module in marked_modules.items():
        others = vars(plain_modules.get(name, module))
        for attribute, value in vars(module).items():
            if isinstance(value, (bool, int, float, str)) and others.get(attribute) != value:
                return f"{name}.{attribute}"
    for cls in dict.fromkeys(cls for module in marked_modules.values() for cls in type(module).__mro__):
        for function in filter(inspect.isfunction, vars(cls).values()):
            if function.__name__ not in ("__init__", "_init_weights") and _reads(inspect.unwrap(function), settings):
                return f"{cls.__name__}.{function.__name__}"
    return None


def _reads(function: Any, settings: Mapping[str, str]) -> bool:
    """Return whether a function reads one of these settings from an object called `config`."""
    loaded = [instruction.argval for instruction in dis.get_instructions(function)]
    return any(owner == "config" and name in settings for owner, name in itertools.pairwise(loaded))


def restore_settings(model: Any) -> None:
    """Restore the settings that the configuration had before flexact changed them."""
    config = getattr(model, "config", None)
    description = getattr(config, CONFIG_FIELD, None)
    if isinstance(description, dict):
        for setting, value in description.get("original", {}).items():
            setattr(config, setting, value)
        delattr(config, CONFIG_FIELD)


def record_picks(model: nn.Module, picks: Mapping[str, str]) -> None:
    """Record the picks of a committed or extracted model in its configuration: in a setting that expresses them, or as
    `require_load_picks` does."""
    restore_settings(model)
    original = settings_of(getattr(model, "config", None))
    own = dict.fromkeys(picks.values())
    names = [name for name in (*own, *ALIASES) if name in ACT2FN and ALIASES.get(name, name) in own]
    for settings in (original, *(with_activation(original, name) for name in names)):
        if _has_picks(model, _built(model, settings), picks):
            for setting, value in settings.items():
                setattr(model.config, setting, value)
            return
    require_load_picks(model, picks, committed=True)


def require_load_picks(model: nn.Module, picks: Mapping[str, str], committed: bool) -> None:
    """Set the configuration so that a checkpoint needs `flexact.load_picks`, and record the picks in it."""
    restore_settings(model)
    original = settings_of(getattr(model, "config", None))
    for setting, value in with_activation(original, UNPICKED).items():
        setattr(model.config, setting, value)
    setattr(model.config, CONFIG_FIELD, described(picks, original, committed))


def with_activation(settings: Mapping[str, str], name: str) -> dict[str, str]:
    """Return the settings with another activation."""
    return {setting: f"{_GATED}{name}" if value.startswith(_GATED) else name for setting, value in settings.items()}


def _built(model: nn.Module, settings: Mapping[str, str]) -> nn.Module | None:
    """Build the network that `from_pretrained` would, with these settings, on the meta device; None if it fails."""
    with suppress(Exception):
        return built_with(model, settings)
    return None


def _has_picks(model: nn.Module, built: nn.Module | None, picks: Mapping[str, str]) -> bool:
    """Return whether a network built from a configuration has the same activations as the extracted one."""
    if built is None or type(built) is not type(model):
        return False
    extracted, rebuilt = dict(model.named_modules()), dict(built.named_modules())
    if extracted.keys() != rebuilt.keys():
        return False
    places = {name for name, module in extracted.items() if is_activation(module)} | (picks.keys() & extracted.keys())
    rewritten = picks.keys() - extracted.keys()  # calls in a forward; extraction restores those whose function was kept
    return all(_same(extracted[name], rebuilt[name]) for name in places) and all(
        type(extracted[name.rpartition(".")[0]]) is type(rebuilt[name.rpartition(".")[0]]) for name in rewritten
    )


def _same(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two activations are bit-identical on a grid of values."""
    h = torch.linspace(-8, 8, 1025)
    try:
        with torch.no_grad():
            return torch.equal(one(h), other(h))
    except (RuntimeError, TypeError, FlexActError):  # FlexActError: from an `Unpicked` activation
        return False
