"""Putting sites in the place of activations, and what they picked in the place of sites."""

from __future__ import annotations

from torch import nn

from flexact.candidates import bare_copy
from flexact.routing.layer import FlexAct
from flexact.routing.sites import unbind
from flexact.surgery.batch_norm_fusion import unfused_class
from flexact.surgery.finding import Found
from flexact.surgery.rewriting import Rewritten, children_of, first_class
from flexact.surgery.watching import unwatch

_NESTED = "flexact_used_nested_tensor"


def swap_in(model: nn.Module, chosen: list[Found], sites: list[FlexAct]) -> nn.Module:
    """Put each site in the places of the activation that it replaces; returns the model."""
    for one, site in zip(chosen, sites, strict=True):
        for name in one.names:
            if name == "":  # the model is an activation itself
                return site
            parent, _, attribute = name.rpartition(".")
            owner = model.get_submodule(parent)
            _place(owner, attribute, site)
            if isinstance(owner, nn.TransformerEncoderLayer):
                owner.activation_relu_or_gelu = 0  # its fused inference path knows only these two
    for encoder in _encoders(model):
        if any(isinstance(module, FlexAct) for module in encoder.modules()):
            vars(encoder)[_NESTED] = encoder.use_nested_tensor
            encoder.use_nested_tensor = False  # only the fused path takes a nested tensor
    return model


def swap_out(model: nn.Module) -> nn.Module:
    """Put what each site picked in its place; returns the model, or the pick where the model is a site itself."""
    if isinstance(model, FlexAct):
        return _picked(model)
    for owner in list(model.modules()):
        unbind(owner)  # a submodule may have been converted on its own
        unwatch(owner)
        sites = {name: child for name, child in owner._modules.items() if isinstance(child, FlexAct)}
        if isinstance(owner, Rewritten):
            owner.__class__ = unfused_class(owner)
            rewritten = [site for site in sites.values() if site.rewritten]
            if rewritten and all(site.kept_original for site in rewritten):
                owner.__class__ = first_class(owner)
        for name, site in sites.items():
            _put_back(owner, name, site)
    for encoder in _encoders(model):
        if vars(encoder).pop(_NESTED, False):
            encoder.use_nested_tensor = all(layer.activation_relu_or_gelu for layer in encoder.layers)
    return model


def take_over_hooks(source: nn.Module, target: nn.Module) -> None:
    """Let the hooks of one module run for another. The two share the dictionaries, so that the handles that were
    returned when the hooks were registered still remove them."""
    for name in _hook_names(source):
        setattr(target, name, getattr(source, name))
    target._is_full_backward_hook = source._is_full_backward_hook


def without_hooks(module: nn.Module) -> nn.Module:
    """The module, or a copy without hooks where it has any: a site runs them, and then the module within it."""
    return bare_copy(module) if any(getattr(module, name) for name in _hook_names(module)) else module


def _hook_names(module: nn.Module) -> list[str]:
    """The dictionaries of a module's hooks, without those for loading a state: an activation has none to load."""
    return [name for name in vars(module) if "_hooks" in name and "load_state_dict" not in name]


def _place(owner: nn.Module, name: str, module: nn.Module) -> None:
    """Make a module a child. Where the owner's type has its own `__setstate__`, it is an attribute too: that of
    nn.TransformerDecoderLayer puts F.relu into each copy that does not have one."""
    owner._modules[name] = module
    vars(owner).pop(name, None)
    if type(owner).__setstate__ is not nn.Module.__setstate__:
        vars(owner)[name] = module


def _put_back(owner: nn.Module, name: str, site: FlexAct) -> None:
    """Put what a site picked in its place; what was no module before is none again where the original was picked."""
    if site.function is not None and site.kept_original:
        del owner._modules[name]
        vars(owner)[name] = site.function
    elif site.added and name not in children_of(owner):
        del owner._modules[name]
        vars(owner).pop(name, None)
    else:
        _place(owner, name, _picked(site))
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
