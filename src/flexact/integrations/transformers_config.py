"""What a model of transformers says about its activations in its configuration, and how it says what was picked.

A configuration has one setting, such as `hidden_act`, for the activations of all layers. Where it can say what the
sites picked, it does, and the checkpoint needs nothing of flexact. Where it cannot, and for as long as the sites are
picking, the setting is `LOUD`, which transformers does not know: `from_pretrained` then fails, naming it, instead of
building the wrong network. With this module imported, it builds a network that raises an error until
`flexact.load_picks` has put the picks in.
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

from flexact.activations import is_activation
from flexact.errors import FlexActError, missing_extra
from flexact.surgery.picks_file import CONFIG_FIELD, Unpicked, built_with, described

if find_spec("transformers") is None:
    raise missing_extra("transformers", "transformers")
from transformers.activations import ACT2FN

SETTINGS = (
    ("hidden_act",),
    ("hidden_activation",),
    ("activation_function",),
    ("activation",),
    ("feed_forward_proj", "dense_act_fn"),  # of T5 and its like: "relu" or "gated-relu", and what follows from it
    ("dense_act_fn",),
)
"""How configurations call it."""
LOUD = "picked by flexact: import flexact.integrations.transformers first, then call flexact.load_picks(model, folder)"
"""What the setting says where no name of transformers would be true."""

ACT2FN[LOUD] = Unpicked

_NAMES = {"identity": "linear"}
"""Of candidates that transformers calls otherwise."""
_GATED = "gated-"
_INITIALISERS = ("__init__", "_init_weights")


def settings_of(model: nn.Module) -> dict[str, str]:
    """The settings that say a model's activation, with what they say; empty where flexact knows of none."""
    config = getattr(model, "config", None)
    for names in SETTINGS:
        values = {name: getattr(config, name, None) for name in names}
        found = {name: value for name, value in values.items() if isinstance(value, str)}
        if len(found) == len(names):
            return found
    return {}


def reason_not_to_say(model: nn.Module) -> str | None:
    """Why a model's configuration cannot be made to keep `from_pretrained` from building the wrong network; None where
    it can."""
    settings = settings_of(model)
    built = _built(model, _naming(settings, LOUD)) if settings else None
    if built is None or not any(isinstance(module, Unpicked) for module in built.modules()):
        known = dict.fromkeys(name for names in SETTINGS for name in names)
        return f"has no setting for its activations that flexact knows ({', '.join(known)})"
    reader = _other_reader(built, _built(model, settings), settings)
    return reader and f"has {' and '.join(settings)} for its activations, which {reader} reads too"


def check_says_so(model: nn.Module) -> None:
    """Refuse a model whose configuration cannot."""
    reason = reason_not_to_say(model)
    if reason is not None:
        raise FlexActError(
            f"the configuration of {type(model).__name__} {reason}, so from_pretrained would build a saved checkpoint "
            "with the wrong ones. Give FlexActCallback extract=False, and save what flexact.extract(model) returns in "
            "your own way."
        )


def _other_reader(loud: nn.Module, plain: nn.Module | None, settings: Mapping[str, str]) -> str | None:
    """What reads a setting besides the activation modules: an attribute that differs between two networks built with
    different settings, as that of Mamba's mixer, or a method that reads it each time."""
    theirs = {} if plain is None else dict(plain.named_modules())
    own = {name: module for name, module in loud.named_modules() if not isinstance(module, Unpicked)}
    for name, module in own.items():
        others = vars(theirs.get(name, module))
        for attribute, value in vars(module).items():
            if isinstance(value, (bool, int, float, str)) and others.get(attribute) != value:
                return f"{name}.{attribute}"
    for cls in dict.fromkeys(cls for module in own.values() for cls in type(module).__mro__):
        for function in filter(inspect.isfunction, vars(cls).values()):
            if function.__name__ not in _INITIALISERS and _reads(inspect.unwrap(function), settings):
                return f"{cls.__name__}.{function.__name__}"
    return None


def _reads(function: Any, settings: Mapping[str, str]) -> bool:
    """Whether a function reads one of these settings of a `config`."""
    loaded = [instruction.argval for instruction in dis.get_instructions(function)]
    return any(owner == "config" and name in settings for owner, name in itertools.pairwise(loaded))


def unsay_picks(model: Any) -> None:
    """Take back what a run made the configuration say: it then says what the model had before that run, as a
    configuration can."""
    config = getattr(model, "config", None)
    earlier = getattr(config, CONFIG_FIELD, None)
    if isinstance(earlier, dict):
        for setting, value in earlier.get("original", {}).items():
            setattr(config, setting, value)
        delattr(config, CONFIG_FIELD)


def say_picks(model: nn.Module, picks: Mapping[str, str]) -> dict[str, Any] | None:
    """Make the configuration of a model whose sites are committed or extracted say what was picked; what flexact.json
    has to hold where it cannot."""
    unsay_picks(model)
    before = settings_of(model)
    names = dict.fromkeys(_NAMES.get(pick, pick) for pick in picks.values())
    for settings in (before, *(_naming(before, name) for name in names if name in ACT2FN)):
        if _says(model, _built(model, settings), picks):
            for setting, value in settings.items():
                setattr(model.config, setting, value)
            return None
    return say_loudly(model, picks, committed=True)


def say_loudly(model: nn.Module, picks: Mapping[str, str], committed: bool) -> dict[str, Any]:
    """Make a configuration say that `from_pretrained` alone is not enough; what flexact.json has to hold."""
    unsay_picks(model)
    original = settings_of(model)
    description = described(picks, original, committed)
    for setting, value in _naming(original, LOUD).items():
        setattr(model.config, setting, value)
    setattr(model.config, CONFIG_FIELD, description)
    return description


def _naming(settings: Mapping[str, str], name: str) -> dict[str, str]:
    """The same settings with another activation in them."""
    return {setting: f"{_GATED}{name}" if value.startswith(_GATED) else name for setting, value in settings.items()}


def _built(model: nn.Module, settings: Mapping[str, str]) -> nn.Module | None:
    """What `from_pretrained` would build with these settings, without memory; None where that fails."""
    with suppress(Exception):
        return built_with(model, settings)
    return None


def _says(model: nn.Module, built: nn.Module | None, picks: Mapping[str, str]) -> bool:
    """Whether the network that a configuration builds has the activations of the extracted one, everywhere."""
    if built is None or type(built) is not type(model):
        return False
    ours, theirs = dict(model.named_modules()), dict(built.named_modules())
    if ours.keys() != theirs.keys():
        return False
    places = {name for name, module in ours.items() if is_activation(module)} | (picks.keys() & ours.keys())
    rewritten = picks.keys() - ours.keys()  # calls in a forward; extraction leaves those that kept their function
    return all(_same(ours[name], theirs[name]) for name in places) and all(
        type(ours[name.rpartition(".")[0]]) is type(theirs[name.rpartition(".")[0]]) for name in rewritten
    )


def _same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two activations compute the same, to the bit, on a grid of values."""
    h = torch.linspace(-8, 8, 1025)
    try:
        with torch.no_grad():
            return torch.equal(one(h), other(h))
    except (RuntimeError, TypeError, FlexActError):  # the last: activations that are not in place yet
        return False
