"""Which modules and functions of a model are activations, and which candidate each of them is.

Known by the path of their type, so that no optional package is imported to recognise its classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from flexact.candidates import lookup, original, plain_setting

# Types whose function is a candidate's when their settings are the ones given here.
_MODULES: dict[str, tuple[str, dict[str, Any]]] = {
    "torch.nn.modules.activation.ReLU": ("relu", {}),
    "torch.nn.modules.activation.LeakyReLU": ("leaky_relu", {"negative_slope": 0.01}),
    "torch.nn.modules.activation.Sigmoid": ("sigmoid", {}),
    "torch.nn.modules.activation.Tanh": ("tanh", {}),
    "torch.nn.modules.activation.GELU": ("gelu", {"approximate": "none"}),
    "torch.nn.modules.activation.SiLU": ("silu", {}),
    "torch.nn.modules.activation.Mish": ("mish", {}),
    "torch.nn.modules.activation.ELU": ("elu", {"alpha": 1.0}),
    "torch.nn.modules.activation.SELU": ("selu", {}),
    "torch.nn.modules.activation.Softplus": ("softplus", {"beta": 1.0, "threshold": 20.0}),
    "torch.nn.modules.activation.Hardswish": ("hardswish", {}),
    "torch.nn.modules.activation.ReLU6": ("relu6", {}),
    "torch.nn.modules.activation.Softsign": ("softsign", {}),
    "torch.nn.modules.linear.Identity": ("identity", {}),
    "timm.layers.activations.Swish": ("silu", {}),
    "timm.layers.activations.Mish": ("mish", {}),
    "timm.layers.activations.Sigmoid": ("sigmoid", {}),
    "timm.layers.activations.Tanh": ("tanh", {}),
    "timm.layers.activations.HardSwish": ("hardswish", {}),
    "timm.layers.activations.GELU": ("gelu", {}),
    "timm.layers.activations_me.SwishMe": ("silu", {}),
    "timm.layers.activations_me.MishMe": ("mish", {}),
    "timm.layers.activations_me.HardSwishMe": ("hardswish", {}),
    "transformers.activations.GELUActivation": ("gelu", {}),
    "transformers.activations.SiLUActivation": ("silu", {}),
    "transformers.activations.MishActivation": ("mish", {}),
    "transformers.activations.ReLUSquaredActivation": ("relu_squared", {}),
    "flexact.candidates.ReLUSquared": ("relu_squared", {}),
    "flexact.candidates.Sine": ("sine", {}),
}

# Elementwise activations without a candidate of their own: sites all the same, with "original" as their function.
_OTHER_MODULES = {
    "timm.layers.activations.GELUTanh",
    "timm.layers.activations.QuickGELU",
    "transformers.activations.GELUTanh",
    "transformers.activations.NewGELUActivation",
    "transformers.activations.FastGELUActivation",
    "transformers.activations.QuickGELUActivation",
    "transformers.activations.ClippedGELUActivation",
    "transformers.activations.AccurateGELUActivation",
    "transformers.activations.LaplaceActivation",
    "transformers.activations.SqrtSoftplusActivation",
}

# Without torch.sin: in most models that call it, it makes positional encodings.
_FUNCTIONS: dict[Callable[..., Any], str] = {
    F.relu: "relu",
    F.relu_: "relu",
    torch.relu: "relu",
    torch.relu_: "relu",
    F.leaky_relu: "leaky_relu",
    F.leaky_relu_: "leaky_relu",
    F.sigmoid: "sigmoid",
    torch.sigmoid: "sigmoid",
    torch.sigmoid_: "sigmoid",
    torch.special.expit: "sigmoid",
    F.tanh: "tanh",
    torch.tanh: "tanh",
    torch.tanh_: "tanh",
    F.gelu: "gelu",
    F.silu: "silu",
    F.mish: "mish",
    F.elu: "elu",
    F.elu_: "elu",
    F.selu: "selu",
    F.selu_: "selu",
    torch.selu: "selu",
    torch.selu_: "selu",
    F.softplus: "softplus",
    F.hardswish: "hardswish",
    F.relu6: "relu6",
    F.softsign: "softsign",
}

_METHODS = {
    "relu": "relu",
    "relu_": "relu",
    "sigmoid": "sigmoid",
    "sigmoid_": "sigmoid",
    "tanh": "tanh",
    "tanh_": "tanh",
}

ELEMENTWISE = {
    *("relu", "relu6", "leaky_relu", "prelu", "rrelu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus"),
    *("softsign", "hardswish", "hardtanh", "tanh", "tanhshrink", "softshrink", "hardshrink", "threshold"),
}
"""How torch calls the functions that may be hidden activations, be they candidates or not."""
SIGMOIDS = {"sigmoid", "special_expit", "hardsigmoid"}
"""Those that are gates and outputs."""

_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "leaky_relu": nn.LeakyReLU,
    "gelu": nn.GELU,
    "elu": nn.ELU,
    "softplus": nn.Softplus,
}


def is_activation(module: nn.Module) -> bool:
    """Whether a module is an activation that a site can take the place of: of a known type and its forward, and
    without tensors."""
    if not is_activation_type(type(module)) or "forward" in vars(module):
        return False
    held = (*vars(module).values(), *module._parameters.values(), *module._buffers.values())
    return not any(isinstance(value, torch.Tensor) for value in held)


def is_activation_type(cls: type) -> bool:
    """Whether modules of a type are. nn.Identity is not: it stands for "nothing here" far more often."""
    path = _type_path(cls)
    return (path in _MODULES or path in _OTHER_MODULES) and cls is not nn.Identity


def key_of(module: nn.Module) -> str:
    """The candidate's name whose function a module computes, or the key of its own function ("original")."""
    name, settings = _MODULES.get(_type_path(type(module)), (None, {}))
    if name is not None and all(plain_setting(getattr(module, key)) == value for key, value in settings.items()):
        return name
    return original(module)


def _type_path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def module_of_call(kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module | None:
    """The module that does what a functional call does to its first argument; None if it is no activation.

    kind: "call_function" or "call_method", as torch.fx has it; args: those after the tensor. A call whose settings are
    computed (a learnt slope), or that writes to a tensor of the caller's, is none.
    """
    name = _METHODS.get(target) if kind == "call_method" else _FUNCTIONS.get(target) if callable(target) else None
    args = tuple(plain_setting(arg) for arg in args)
    settings = {key: plain_setting(value) for key, value in kwargs.items() if key not in ("inplace", "input")}
    if name is None or not all(isinstance(value, (int, float, str)) for value in (*args, *settings.values())):
        return None
    build = _BUILDERS.get(name)
    if build is None:
        return lookup(name).module()
    return build(*[arg for arg in args if not isinstance(arg, bool)], **settings)


def is_activation_function(value: Any) -> bool:
    """Whether a plain function (an attribute such as `self.activation = F.relu`) is an activation."""
    try:
        return value in _FUNCTIONS
    except TypeError:  # not hashable
        return False


def is_method(name: str) -> bool:
    """Whether a tensor's method of this name is an activation."""
    return name in _METHODS


def function_name(module: nn.Module) -> str:
    """How a module's function is called: the candidate's name, or the type's."""
    name, _ = _MODULES.get(_type_path(type(module)), (None, {}))
    return name if name is not None else type(module).__name__.lower()


def is_kind_of_activation(module: nn.Module) -> bool:
    """Whether a module is an elementwise activation of torch, timm or transformers, be it a candidate or not."""
    return type(module).__module__ in _HOMES_OF_ACTIVATIONS and not isinstance(module, _NOT_ELEMENTWISE)


_HOMES_OF_ACTIVATIONS = (
    "torch.nn.modules.activation",
    "timm.layers.activations",
    "timm.layers.activations_me",
    "transformers.activations",
)
_NOT_ELEMENTWISE = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin, nn.GLU, nn.MultiheadAttention)
