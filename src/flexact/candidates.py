"""The functions one can pick: value, exact derivative, and the module that replaces a site.

A candidate is elementwise. Its derivative is given the input *and* the value, so that sigmoid, tanh and their like need
no second exponential. At a kink (relu at 0) the derivative is the one torch's own backward uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

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


def autograd_derivative(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The derivative of an elementwise function, by differentiating the sum of its values."""

    def derivative(h: Tensor, value: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = h.detach().clone().requires_grad_()
            total = function(leaf).sum()
            if not total.requires_grad:  # a constant function
                return torch.zeros_like(h)
            (gradient,) = torch.autograd.grad(total, leaf, allow_unused=True)
        return torch.zeros_like(h) if gradient is None else gradient

    return derivative


def _step(h: Tensor) -> Tensor:
    return (h > 0).to(h.dtype)


def _gelu_derivative(h: Tensor, value: Tensor) -> Tensor:
    cdf = 0.5 * (1 + torch.erf(h * math.sqrt(0.5)))
    return cdf + h * torch.exp(-0.5 * h * h) / math.sqrt(2 * math.pi)


def _silu_derivative(h: Tensor, value: Tensor) -> Tensor:
    gate = torch.sigmoid(h)
    return gate * (1 + h * (1 - gate))


def _mish_derivative(h: Tensor, value: Tensor) -> Tensor:
    gate = torch.tanh(F.softplus(h))
    return gate + h * torch.sigmoid(h) * (1 - gate * gate)


def _elu_derivative(h: Tensor, value: Tensor) -> Tensor:
    return torch.where(h > 0, torch.ones_like(h), value + 1)


def _selu_derivative(h: Tensor, value: Tensor) -> Tensor:
    return torch.where(h > 0, torch.full_like(h, SELU_SCALE), value + SELU_SCALE * SELU_ALPHA)


def _softplus_derivative(h: Tensor, value: Tensor) -> Tensor:
    # torch's softplus is the identity past its threshold of 20, and so is its derivative.
    return torch.where(h > 20, torch.ones_like(h), torch.sigmoid(h))


def _hardswish_derivative(h: Tensor, value: Tensor) -> Tensor:
    # Follows torch's backward at the kinks: 0 at -3, the middle branch's 1.5 at 3.
    inner = torch.where(h <= 3, h / 3 + 0.5, torch.ones_like(h))
    return torch.where(h <= -3, torch.zeros_like(h), inner)


def _softsign_derivative(h: Tensor, value: Tensor) -> Tensor:
    return 1 / (1 + h.abs()).square()


def _softsign(h: Tensor) -> Tensor:
    return F.softsign(h)


_BUILT_IN = (
    Candidate("relu", F.relu, lambda h, a: _step(h), nn.ReLU),
    Candidate("leaky_relu", F.leaky_relu, lambda h, a: torch.where(h > 0, 1.0, 0.01).to(h.dtype), nn.LeakyReLU),
    Candidate("sigmoid", torch.sigmoid, lambda h, a: a * (1 - a), nn.Sigmoid),
    Candidate("tanh", torch.tanh, lambda h, a: 1 - a * a, nn.Tanh),
    Candidate("identity", lambda h: h, lambda h, a: torch.ones_like(h), nn.Identity),
    Candidate("gelu", F.gelu, _gelu_derivative, nn.GELU),
    Candidate("silu", F.silu, _silu_derivative, nn.SiLU),
    Candidate("mish", F.mish, _mish_derivative, nn.Mish),
    Candidate("elu", F.elu, _elu_derivative, nn.ELU),
    Candidate("selu", F.selu, _selu_derivative, nn.SELU),
    Candidate("softplus", F.softplus, _softplus_derivative, nn.Softplus),
    Candidate("hardswish", F.hardswish, _hardswish_derivative, nn.Hardswish),
    Candidate("relu6", F.relu6, lambda h, a: ((h > 0) & (h < 6)).to(h.dtype), nn.ReLU6),
    Candidate("softsign", _softsign, _softsign_derivative, nn.Softsign),
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
            f"unknown candidate {key!r};{suggestion(key, _registry)} Known: {', '.join(known_names())}, and "
            f"{ORIGINAL!r} in a converted model. Add your own with flexact.register_candidate."
        )
    return found


def original(module: nn.Module) -> str:
    """Make the function that a model had at a site available as a candidate, and return its key.

    The module must be elementwise and hold no tensors; two of one type with the same settings are the same function.
    """
    settings = {
        name: value
        for name, value in sorted(vars(module).items())
        if isinstance(value, (bool, int, float, str))
        and not name.startswith("_")
        and name not in ("training", "inplace")
    }
    key = f"{ORIGINAL}:{type(module).__module__}.{type(module).__qualname__}{settings}"
    _originals.setdefault(key, Candidate(ORIGINAL, module, autograd_derivative(module), lambda: module))
    return key


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

    The derivative is compared with a numerical one here, so that a wrong one never trains a network.

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
    _check_elementwise(name, fn)
    if derivative is None:
        slope = autograd_derivative(fn)
    else:
        given = derivative

        def slope(h: Tensor, value: Tensor) -> Tensor:
            return given(h)

    _check_derivative(name, fn, slope)
    build = module if module is not None else (lambda: _Function(name, fn))
    _registry[name] = Candidate(name, fn, slope, build)


def _check_elementwise(name: str, fn: Callable[[Tensor], Tensor]) -> None:
    for shape in ((7,), (2, 3, 5)):
        h = torch.linspace(-3, 3, math.prod(shape), dtype=torch.float64).reshape(shape)
        value = fn(h)
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
