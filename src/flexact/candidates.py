"""The candidates: value, exact derivative, and the module that replaces a site.

A candidate is elementwise. Its derivative is given the input *and* the value, so that sigmoid, tanh and their like need
no second exponential. At a kink (relu at 0) the derivative is the one torch's own backward uses.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexact.errors import FlexActError, suggestion

SELU_ALPHA = 1.6732632423543772848170429916717
SELU_SCALE = 1.0507009873554804934193349852946


@dataclass(frozen=True)
class Candidate:
    """One function a site can pick."""

    name: str
    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor, Tensor], Tensor]
    """(h, function(h)) -> the derivative at h."""
    module: Callable[[], nn.Module]
    """Builds the plain module that extraction puts in the site's place."""


class _Function(nn.Module):
    """Stands for a registered candidate that came without a module of its own."""

    def __init__(self, name: str, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.name, self.function = name, function

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h)

    def extra_repr(self) -> str:
        return self.name


class ReLUSquared(nn.Module):
    """max(h, 0)², the module of the candidate "relu_squared": torch has none."""

    def forward(self, h: Tensor) -> Tensor:
        return relu_squared(h)


class Sine(nn.Module):
    """sin(h), the module of the candidate "sine": torch has none. A frequency belongs to the weights before it."""

    def forward(self, h: Tensor) -> Tensor:
        return torch.sin(h)


def relu_squared(h: Tensor) -> Tensor:
    """max(h, 0)²; infinite where that overflows, in float16 from 256 on."""
    return torch.square(F.relu(h))


def autograd_derivative(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The derivative of an elementwise function, by differentiating the sum of its values."""

    def derivative(h: Tensor, value: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            leaf = h.detach().clone().requires_grad_()
            total = function(leaf).sum()
            if not total.requires_grad:  # a constant function
                return torch.zeros_like(h)
            (gradient,) = torch.autograd.grad(total, leaf, allow_unused=True)
        return torch.zeros_like(h) if gradient is None else gradient

    return derivative


def _one(h: Tensor) -> Tensor:
    """The gradient that makes torch's backward operators give the derivative itself; it takes no memory."""
    return h.new_ones(()).expand_as(h)


def _softsign_derivative(h: Tensor, value: Tensor) -> Tensor:
    return (1 + h.abs()).reciprocal().square()


# torch's own backward operators: the same at every kink, and ten times as fast as a torch.where on a CPU.
_aten = torch.ops.aten

_BUILT_IN = (
    Candidate("relu", F.relu, lambda h, a: _aten.threshold_backward(_one(h), h, 0), nn.ReLU),
    Candidate(
        "leaky_relu", F.leaky_relu, lambda h, a: _aten.leaky_relu_backward(_one(h), h, 0.01, False), nn.LeakyReLU
    ),
    Candidate("sigmoid", torch.sigmoid, lambda h, a: _aten.sigmoid_backward(_one(h), a), nn.Sigmoid),
    Candidate("tanh", torch.tanh, lambda h, a: _aten.tanh_backward(_one(h), a), nn.Tanh),
    Candidate("identity", lambda h: h, lambda h, a: torch.ones_like(h), nn.Identity),
    Candidate("gelu", F.gelu, lambda h, a: _aten.gelu_backward(_one(h), h), nn.GELU),
    Candidate("silu", F.silu, lambda h, a: _aten.silu_backward(_one(h), h), nn.SiLU),
    Candidate("mish", F.mish, lambda h, a: _aten.mish_backward(_one(h), h), nn.Mish),
    Candidate("elu", F.elu, lambda h, a: _aten.elu_backward(_one(h), 1, 1, 1, False, h), nn.ELU),
    Candidate("selu", F.selu, lambda h, a: _aten.elu_backward(_one(h), SELU_ALPHA, SELU_SCALE, 1, False, h), nn.SELU),
    Candidate("softplus", F.softplus, lambda h, a: _aten.softplus_backward(_one(h), h, 1, 20), nn.Softplus),
    Candidate("hardswish", F.hardswish, lambda h, a: _aten.hardswish_backward(_one(h), h), nn.Hardswish),
    Candidate("relu6", F.relu6, lambda h, a: _aten.hardtanh_backward(_one(h), h, 0, 6), nn.ReLU6),
    Candidate("softsign", F.softsign, _softsign_derivative, nn.Softsign),
    Candidate("relu_squared", relu_squared, lambda h, a: 2 * F.relu(h), ReLUSquared),
    Candidate("sine", torch.sin, lambda h, a: torch.cos(h), Sine),
)

ORIGINAL = "original"
"""The name of what a site had before, where that is none of the registered candidates."""

_registry: dict[str, Candidate] = {candidate.name: candidate for candidate in _BUILT_IN}
_originals: dict[str, Candidate] = {}


def known_names() -> list[str]:
    """The registered names, sorted."""
    return sorted(_registry)


def lookup(key: str) -> Candidate:
    """The candidate registered under a name, or under the key of a model's own function (see `original`)."""
    found = _registry.get(key) or _originals.get(key)
    if found is None:
        raise FlexActError(
            f"unknown candidate {key!r}{suggestion(key, _registry)} Known: {', '.join(known_names())}, and "
            f"{ORIGINAL!r} in a converted model. Add your own with flexact.register_candidate."
        )
    return found


def original(module: nn.Module) -> str:
    """Make the function that a model had at a site available as a candidate, and return its key.

    The module must be elementwise and hold no tensors; two of one type with the same settings are the same function.
    """
    public = {name: plain_setting(value) for name, value in sorted(vars(module).items()) if not name.startswith("_")}
    settings = {
        name: value
        for name, value in public.items()
        if isinstance(value, (bool, int, float, str)) and name not in ("training", "inplace")
    }
    key = f"{ORIGINAL}:{type(module).__module__}.{type(module).__qualname__}{settings}"
    if key not in _originals:
        function = bare_copy(module)
        if getattr(function, "inplace", False):  # a blend needs its input for every candidate
            function.inplace = False  # type: ignore[assignment]
        _originals[key] = Candidate(ORIGINAL, function, autograd_derivative(function), lambda: copy.deepcopy(function))
    return key


def plain_setting(value: Any) -> Any:
    """A setting as a number of Python where it is one of numpy's; anything else as it is."""
    is_number = getattr(value, "shape", None) == () and not isinstance(value, Tensor)
    return value.item() if is_number else value


def bare_copy(module: nn.Module) -> nn.Module:
    """A copy without the hooks that a user put on this one module; they may hold the whole model."""
    bare = copy.copy(module)
    for name, value in vars(module).items():
        if "_hooks" in name and isinstance(value, dict):
            setattr(bare, name, type(value)())
    return copy.deepcopy(bare)


def register_candidate(
    name: str,
    fn: Callable[[Tensor], Tensor],
    derivative: Callable[[Tensor], Tensor] | None = None,
    module: Callable[[], nn.Module] | None = None,
) -> None:
    """Add an elementwise function to what a site can pick.

    fn: from a tensor to a tensor of the same shape and dtype.
    derivative: its derivative at h; by autograd where it is left out.
    module: builds the plain module that extraction puts in place; by default one that calls `fn`.

    The derivative is compared with a numerical one here, and the module with the function, so that a wrong one never
    trains a network.

    >>> import torch, flexact
    >>> flexact.register_candidate("doctest_sine", torch.sin, derivative=torch.cos)
    >>> flexact.FlexAct(candidates=("relu", "doctest_sine"))(torch.zeros(3))
    tensor([0., 0., 0.], grad_fn=...)
    """
    if not isinstance(name, str) or not name.isidentifier() or name == ORIGINAL:
        raise FlexActError(
            f"a candidate's name must be a Python identifier other than {ORIGINAL!r}; got {name!r}. Try "
            "'my_activation'."
        )
    if name in _registry:
        raise FlexActError(f"candidate {name!r} is registered already; choose another name.")
    for role, given in (("function", fn), ("derivative", derivative), ("module", module)):
        if not callable(given) and (given is not None or role == "function"):
            raise FlexActError(f"the {role} of candidate {name!r} must be callable; got {given!r}.")
    slope = autograd_derivative(fn) if derivative is None else _without_value(derivative)
    try:
        _check_function(name, fn)
        _check_derivative(name, fn, slope)
        if module is not None:
            _check_module(name, fn, module)
    except FlexActError:
        raise
    except Exception as error:
        raise FlexActError(
            f"candidate {name!r} raised {type(error).__name__} while it was checked: {error}. Its function, derivative "
            "and module must take a float64 tensor of any shape."
        ) from error
    build = module if module is not None else (lambda: _Function(name, fn))
    _registry[name] = Candidate(name, fn, slope, build)


def _without_value(derivative: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda h, value: derivative(h)


def _check_function(name: str, fn: Callable[[Tensor], Tensor]) -> None:
    """Refuse a function that is not elementwise, writes to its input, or is not finite."""
    for shape in ((7,), (2, 3, 5)):
        h = torch.linspace(-3, 3, math.prod(shape), dtype=torch.float64).reshape(shape)
        untouched = h.clone()
        value = fn(h)
        if not torch.equal(h, untouched):
            raise FlexActError(
                f"candidate {name!r} overwrites its input, which the other candidates still need; write it without "
                "in-place operations."
            )
        if not isinstance(value, Tensor) or value.shape != h.shape or value.dtype != h.dtype:
            got = f"{tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise FlexActError(
                f"candidate {name!r} must map a tensor to one of the same shape and dtype; for {shape}, {h.dtype} it "
                f"gave {got}. Write it with elementwise torch operations."
            )
        alone = torch.stack([fn(element) for element in h.flatten()]).reshape(shape)
        if not torch.allclose(value, alone, equal_nan=True):
            raise FlexActError(
                f"candidate {name!r} is not elementwise: its value at one element depends on the others. Only "
                "elementwise functions can be picked."
            )
    h = torch.linspace(-6, 6, 49, dtype=torch.float64)
    value = fn(h)
    bad = torch.nonzero(~value.isfinite()).flatten()
    if bad.numel():
        at = int(bad[0])
        raise FlexActError(
            f"candidate {name!r} is {value[at].item()} at h = {h[at].item():g}; a candidate must be finite for every "
            "finite h."
        )


def _check_module(name: str, fn: Callable[[Tensor], Tensor], build: Callable[[], nn.Module]) -> None:
    """What extraction puts in place must compute the function that was trained."""
    module = build()
    if not isinstance(module, nn.Module):
        raise FlexActError(f"the module of candidate {name!r} must build a torch.nn.Module; it gave {module!r}.")
    h = torch.linspace(-6, 6, 49, dtype=torch.float64)
    with torch.no_grad():
        expected, value = fn(h), copy.deepcopy(module).double()(h.clone())
    if not isinstance(value, Tensor) or value.shape != h.shape:
        raise FlexActError(f"the module of candidate {name!r} does not keep its input's shape {tuple(h.shape)}.")
    difference = (value - expected).abs()
    if not torch.allclose(value, expected, rtol=1e-4, atol=1e-6):
        worst = int(torch.where(difference.isnan(), torch.inf, difference).argmax())
        raise FlexActError(
            f"the module of candidate {name!r} is another function than the one given: at h = {h[worst]:.4g} it gives "
            f"{value[worst]:.6g}, the function {expected[worst]:.6g}."
        )


def _check_derivative(
    name: str, fn: Callable[[Tensor], Tensor], derivative: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Compare with central differences off the usual kinks; irrational spacing keeps clear of round numbers."""
    h = torch.linspace(-6.1234567, 6.2345678, 400, dtype=torch.float64)
    step = 1e-6
    numerical = (fn(h + step) - fn(h - step)) / (2 * step)
    given = derivative(h, fn(h))
    if not isinstance(given, Tensor) or given.shape != h.shape:
        raise FlexActError(f"the derivative of candidate {name!r} must have its input's shape {tuple(h.shape)}.")
    difference = (given - numerical).abs()
    wrong = ~(difference <= 1e-4 * (1 + numerical.abs()))
    # One grid point may straddle a kink of the user's function; a wrong formula is wrong at many.
    if int(wrong.sum()) > 2:
        worst = int(torch.where(difference.isnan(), torch.inf, difference).argmax())
        raise FlexActError(
            f"the derivative of candidate {name!r} is wrong at {int(wrong.sum())} of {h.numel()} points in "
            f"[{h[0]:.2f}, {h[-1]:.2f}]; worst at h = {h[worst]:.4f}: given {given[worst]:.6g}, numerical "
            f"{numerical[worst]:.6g}. Correct it, or leave it out to have it by autograd."
        )
