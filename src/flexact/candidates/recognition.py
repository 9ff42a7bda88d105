"""Which modules and functions of a model are activations, and which candidate each of them is.

Types are recognised by their import path, so that optional packages need not be imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from flexact.candidates.registry import BUILT_IN, original, plain_setting, settings_of


def _type_path(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


_Kinds = tuple[tuple[str, dict[str, Any]], ...]


def _own_modules() -> dict[str, _Kinds]:
    """Return the built-in candidates by the path of their module type, with their settings; two share nn.GELU."""
    found: dict[str, _Kinds] = {}
    for own in BUILT_IN:
        module = own.module()
        path = _type_path(type(module))
        found[path] = (*found.get(path, ()), (own.name, settings_of(module)))
    return found


# Module types that compute a candidate's function, and the settings with which they do so.
_MODULES: dict[str, _Kinds] = {
    **_own_modules(),
    "torch.nn.modules.activation.CELU": (("elu", {"alpha": 1.0}),),
    "timm.layers.activations.Swish": (("silu", {}),),
    "timm.layers.activations.Mish": (("mish", {}),),
    "timm.layers.activations.Sigmoid": (("sigmoid", {}),),
    "timm.layers.activations.Tanh": (("tanh", {}),),
    "timm.layers.activations.HardSwish": (("hardswish", {}),),
    "timm.layers.activations.HardSigmoid": (("hardsigmoid", {}),),
    "timm.layers.activations.HardMish": (("hard_mish", {}),),
    "timm.layers.activations.GELU": (("gelu", {}),),
    "timm.layers.activations.GELUTanh": (("gelu_tanh", {}),),
    "timm.layers.activations.QuickGELU": (("quick_gelu", {}),),
    "timm.layers.activations_me.SwishMe": (("silu", {}),),
    "timm.layers.activations_me.MishMe": (("mish", {}),),
    "timm.layers.activations_me.HardSwishMe": (("hardswish", {}),),
    "timm.layers.activations_me.HardSigmoidMe": (("hardsigmoid", {}),),
    "timm.layers.activations_me.HardMishMe": (("hard_mish", {}),),
    "transformers.activations.GELUActivation": (("gelu", {}),),
    "transformers.activations.SiLUActivation": (("silu", {}),),
    "transformers.activations.MishActivation": (("mish", {}),),
    "transformers.activations.ReLUSquaredActivation": (("relu_squared", {}),),
    "transformers.activations.GELUTanh": (("gelu_tanh", {}),),
    "transformers.activations.NewGELUActivation": (("gelu_tanh", {}),),
    "transformers.activations.FastGELUActivation": (("gelu_tanh", {}),),
    "transformers.activations.AccurateGELUActivation": (("gelu_tanh", {}),),
    "transformers.activations.QuickGELUActivation": (("quick_gelu", {}),),
    "transformers.activations.ClippedGELUActivation": (("clipped_gelu", {"min": -10, "max": 10}),),
    "transformers.activations.LaplaceActivation": (("laplace", {}),),
    "transformers.activations.SqrtSoftplusActivation": (("sqrt_softplus", {}),),
}

# Functions, and the module types that compute the same. torch.sin is left out, because most models that call it compute
# positional encodings.
_FUNCTIONS: dict[Callable[..., Any], Callable[..., nn.Module]] = {
    getattr(home, name + suffix): build
    for name, build in [*((own.name, own.module) for own in BUILT_IN), ("celu", nn.CELU)]
    for home in (F, torch)
    for suffix in ("", "_")
    if hasattr(home, name + suffix)
} | {torch.special.expit: nn.Sigmoid}

_METHODS = {
    name + suffix: build
    for name, build in (("relu", nn.ReLU), ("sigmoid", nn.Sigmoid), ("tanh", nn.Tanh))
    for suffix in ("", "_")
}
_WITH_SETTINGS = (nn.LeakyReLU, nn.GELU, nn.ELU, nn.CELU, nn.Softplus, nn.Hardtanh, nn.Hardshrink, nn.Softshrink)

ELEMENTWISE = {
    *("relu", "relu6", "leaky_relu", "prelu", "rrelu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus"),
    *("softsign", "hardswish", "hardtanh", "tanh", "tanhshrink", "softshrink", "hardshrink", "threshold"),
    "log_sigmoid",
}
"""torch's names of the functions that may be hidden activations, whether or not they are candidates."""
SIGMOIDS = {"sigmoid", "special_expit", "hardsigmoid"}
"""torch's names of the functions that are treated as gates or outputs."""


def is_activation(module: nn.Module) -> bool:
    """Return whether a module is an activation that a site can replace: it has a known type, its forward was not
    replaced, and it holds no tensors."""
    if not is_activation_type(type(module)) or "forward" in vars(module):
        return False
    held = (*vars(module).values(), *module._parameters.values(), *module._buffers.values())
    return not any(isinstance(value, torch.Tensor) for value in held)


def is_activation_type(cls: type) -> bool:
    """Return whether modules of a type are activations. nn.Identity is not: it usually stands for a missing layer."""
    return _type_path(cls) in _MODULES and cls is not nn.Identity


def key_of(module: nn.Module) -> str:
    """Return the name of the candidate whose function a module computes with its settings, or the key of the module's
    own function (see `registry.original`)."""
    for name, settings in _MODULES.get(_type_path(type(module)), ()):
        if all(plain_setting(getattr(module, key)) == value for key, value in settings.items()):
            return name
    return original(module)


def module_of_call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module | None:
    """Return a module that computes the same as a call; None if the call is not an activation.

    target: a function, the name of a tensor's method, or a module; args: those after the tensor. A call whose settings
    are not constants (a learned slope), or that takes a tensor to write to (`out=`), is not an activation.
    """
    args = tuple(plain_setting(arg) for arg in args)
    settings = {key: plain_setting(value) for key, value in kwargs.items() if key not in ("inplace", "input")}
    if isinstance(target, nn.Module):
        return None if args or settings else target
    build = _METHODS.get(target) if isinstance(target, str) else _FUNCTIONS.get(target)
    if build is None or not all(isinstance(value, (int, float, str)) for value in (*args, *settings.values())):
        return None
    return (
        build(*[arg for arg in args if not isinstance(arg, bool)], **settings) if build in _WITH_SETTINGS else build()
    )


def is_activation_function(value: Any) -> bool:
    """Return whether a plain function (an attribute such as `self.activation = F.relu`) is an activation."""
    try:
        return value in _FUNCTIONS
    except Exception:  # not hashable, or no comparison
        return False


def function_name(module: nn.Module) -> str:
    """Return the name of a module's function, whatever its settings: the candidate's, or the type's in lower case."""
    cls = type(module)
    return _MODULES[_type_path(cls)][0][0] if _type_path(cls) in _MODULES else cls.__name__.lower()


def spelling(name: str) -> str:
    """Return the name of a function or of its module in one spelling: "leakyrelu" for leaky_relu_ and LeakyReLU."""
    return "sigmoid" if name == "special_expit" else name.replace("_", "").lower()


def is_kind_of_activation(module: nn.Module) -> bool:
    """Return whether a module is an elementwise activation of torch, timm or transformers, candidate or not."""
    return type(module).__module__ in _HOMES_OF_ACTIVATIONS and not isinstance(module, _NOT_ELEMENTWISE)


_HOMES_OF_ACTIVATIONS = (
    "torch.nn.modules.activation",
    "timm.layers.activations",
    "timm.layers.activations_me",
    "transformers.activations",
)
_NOT_ELEMENTWISE = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin, nn.GLU, nn.MultiheadAttention)
