"""What a model of transformers says about its activations in its configuration, and how it says what was picked.

A configuration has one setting, such as `hidden_act`, for the activations of all layers. Where it can say what the
sites picked, it does, and the checkpoint needs nothing of flexact. Where it cannot, the setting becomes `LOUD`, which
transformers does not know: `from_pretrained` then fails, naming it, instead of building the wrong network. With this
module imported, it builds a network that raises an error until `flexact.load_picks` has put the picks in.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from flexact.activations import is_activation
from flexact.errors import FlexActError, missing_extra
from flexact.picks_file import Unpicked, described

if find_spec("transformers") is None:
    raise missing_extra("transformers", "transformers")
from transformers.activations import ACT2FN

SETTINGS = ("hidden_act", "hidden_activation", "activation_function", "activation")
"""How configurations call it."""
LOUD = "picked by flexact: import flexact.integrations.transformers first, then call flexact.load_picks(model, folder)"
"""What the setting says where no name of transformers would be true."""
PICKS = "flexact"
"""The field of a configuration that holds the picks then; it travels with `save_pretrained`."""

ACT2FN[LOUD] = Unpicked

_NAMES = {"identity": "linear"}
"""Of candidates that transformers calls otherwise."""


def setting_of(model: nn.Module) -> str | None:
    """The name of the setting that says a model's activation; None where flexact knows of none."""
    config = getattr(model, "config", None)
    return next((name for name in SETTINGS if isinstance(getattr(config, name, None), str)), None)


def check_says_so(model: nn.Module) -> None:
    """Refuse a model whose configuration cannot be made to keep `from_pretrained` from building the wrong network."""
    setting = setting_of(model)
    built = None if setting is None else _built(model, {setting: LOUD})
    if built is None or not any(isinstance(module, Unpicked) for module in built.modules()):
        raise FlexActError(
            f"the configuration of {type(model).__name__} has no setting for its activations that flexact knows "
            f"({', '.join(SETTINGS)}), so from_pretrained would build a saved checkpoint with the wrong ones. Give "
            "FlexActCallback extract=False, and save what flexact.extract(model) returns in your own way."
        )


def unsay_picks(model: Any) -> None:
    """Take back what an earlier run made the configuration say, before another begins: it then says what the model had
    before that run, as a configuration can."""
    config = getattr(model, "config", None)
    earlier = getattr(config, PICKS, None)
    if isinstance(earlier, dict):
        for setting, value in earlier.get("original", {}).items():
            setattr(config, setting, value)
        delattr(config, PICKS)


def say_picks(model: nn.Module, picks: Mapping[str, str]) -> dict[str, Any] | None:
    """Make an extracted model's configuration say what was picked; what flexact.json has to hold where it cannot."""
    setting = setting_of(model)
    assert setting is not None
    config: Any = model.config
    before = getattr(config, setting)
    names = dict.fromkeys([before, *(_NAMES.get(pick, pick) for pick in picks.values())])
    for name in names:
        if name in ACT2FN and _says(model, _built(model, {setting: name}), picks):
            setattr(config, setting, name)
            return None
    description = describe(model, picks, committed=True)
    _say_loudly(config, description)
    return description


def describe(model: nn.Module, picks: Mapping[str, str], committed: bool) -> dict[str, Any]:
    """What flexact.json holds of a model whose configuration still says what it had before."""
    setting = setting_of(model)
    return described(picks, {} if setting is None else {setting: getattr(model.config, setting)}, committed)


@contextmanager
def loud(model: nn.Module, description: dict[str, Any]) -> Iterator[None]:
    """For as long as it lasts, the configuration of a model with sites says that it has them."""
    config: Any = model.config
    before = dict(description["original"])
    _say_loudly(config, description)
    try:
        yield
    finally:
        for setting, value in before.items():
            setattr(config, setting, value)
        delattr(config, PICKS)


def _say_loudly(config: Any, description: dict[str, Any]) -> None:
    for setting in description["original"]:
        setattr(config, setting, LOUD)
    setattr(config, PICKS, description)


def _built(model: nn.Module, settings: Mapping[str, str]) -> nn.Module | None:
    """What `from_pretrained` would build with these settings, without memory; None where that fails."""
    config = copy.deepcopy(model.config)
    for name, value in settings.items():
        setattr(config, name, value)
    with suppress(Exception), torch.device("meta"):
        return type(model)(config)
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
