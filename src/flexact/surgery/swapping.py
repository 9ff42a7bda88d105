"""Replacing activations by sites, and sites by their picks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from flexact.routing.layer import FlexAct
from flexact.routing.sites import unbind
from flexact.surgery.finding import Found
from flexact.surgery.rewriting import Rewritten, children_of, class_without
from flexact.surgery.watching import unwatch

_NESTED = "flexact_used_nested_tensor"


def swap_in(model: nn.Module, chosen: list[Found], sites: Sequence[nn.Module]) -> nn.Module:
    """Replace activations by sites, or by other modules, under all of their names, and return the model."""
    for one, site in zip(chosen, sites, strict=True):
        for name in one.names:
            if name == "":  # the model is an activation itself
                return site
            parent, _, attribute = name.rpartition(".")
            owner = model.get_submodule(parent)
            _set_child(owner, attribute, site)
            if isinstance(owner, nn.TransformerEncoderLayer):
                owner.activation_relu_or_gelu = 0  # disables the fused inference path, which supports only these two
    for encoder in _encoders(model):
        if not set(sites).isdisjoint(encoder.modules()):
            vars(encoder)[_NESTED] = encoder.use_nested_tensor
            encoder.use_nested_tensor = False  # only the fused path supports nested tensors
    return model


def swap_out(model: nn.Module) -> nn.Module:
    """Replace each site by its pick, and return the model, or the pick if the model is a site itself."""
    if isinstance(model, FlexAct):
        return _picked(model)
    for owner in list(model.modules()):
        unbind(owner)  # a submodule may have been converted on its own
        unwatch(owner)
        sites = {name: child for name, child in owner._modules.items() if isinstance(child, FlexAct)}
        if isinstance(owner, Rewritten):
            rewritten = {name: site for name, site in sites.items() if site.rewritten}
            kept_original = all(site.kept_original for site in rewritten.values())
            cls = class_without(owner, set(rewritten) if kept_original else set())
            object.__setattr__(owner, "__class__", cls)
        for name, site in sites.items():
            _replace_by_pick(owner, name, site)
    for encoder in _encoders(model):
        if vars(encoder).pop(_NESTED, False):
            encoder.use_nested_tensor = all(layer.activation_relu_or_gelu for layer in encoder.layers)
    return model


def take_over_hooks(source: nn.Module, target: nn.Module) -> None:
    """Make one module run the hooks of another. Both share the dictionaries of hooks, so that the handles that were
    returned at registration still remove them."""
    for name in vars(source):
        if "_hooks" in name and "load_state_dict" not in name:  # those check the site's own state
            setattr(target, name, getattr(source, name))
    target._is_full_backward_hook = source._is_full_backward_hook


def _set_child(owner: nn.Module, name: str, module: nn.Module) -> None:
    """Set a child module. It is stored as a plain attribute as well if what it replaces hid an attribute of the class,
    or if the class has its own `__setstate__`: that of nn.TransformerDecoderLayer sets F.relu in a copy that has no
    such attribute."""
    owner._modules[name] = module
    was_attribute = vars(owner).pop(name, None) is not None
    is_hidden = was_attribute and any(name in vars(cls) for cls in type(owner).__mro__)
    if is_hidden or type(owner).__setstate__ is not nn.Module.__setstate__:
        vars(owner)[name] = module


def _replace_by_pick(owner: nn.Module, name: str, site: FlexAct) -> None:
    """Replace a site by its pick. If the original was picked and was not a module, restore the function or call."""
    if site.function is not None and site.kept_original:
        del owner._modules[name]
        vars(owner)[name] = site.function
    elif site.added and name not in children_of(owner):
        del owner._modules[name]
        vars(owner).pop(name, None)
    else:
        _set_child(owner, name, _picked(site))
    if isinstance(owner, nn.TransformerEncoderLayer):
        fused = {nn.ReLU: 1, nn.GELU: 2} if site.kept_original else {}
        owner.activation_relu_or_gelu = fused.get(type(site.picked), 0)


def _picked(site: FlexAct) -> nn.Module:
    assert site.picked is not None
    unbind(site)
    take_over_hooks(site, site.picked)
    return site.picked


def _encoders(model: nn.Module) -> list[nn.TransformerEncoder]:
    return [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]
