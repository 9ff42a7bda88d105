"""The candidates: value, exact derivative, and the module that replaces a site.

A candidate is elementwise. Its derivative is given the input *and* the value, so that sigmoid, tanh and the like need
no second exponential. At a kink, such as that of relu at 0, the derivative is the one that torch's own backward uses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexact.candidates import elementwise as own
from flexact.errors import FlexActError, suggestion

SELU_ALPHA = 1.6732632423543772848170429916717
SELU_SCALE = 1.0507009873554804934193349852946


@dataclass(frozen=True)
class Candidate:
    """A function that a site can pick."""

    name: str
    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor, Tensor], Tensor]
    """(h, function(h)) -> the derivative at h."""
    module: Callable[[], nn.Module]
    """Builds the plain module that extraction puts in the site's place."""
    init: Callable[[nn.Module], object] | None = None
    """Initialises the layer before the site; see `register_candidate`."""
    triton: Any = None
    """A Triton form of a custom candidate; see `register_candidate`."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"triton": None}  # Triton's functions cannot be pickled


class _Function(nn.Module):
    """The module of a registered candidate that was registered without one."""

    def __init__(self, name: str, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.name, self.function = name, function

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h)

    def extra_repr(self) -> str:
        return self.name


def _by_autograd(function: Callable[[Tensor], Tensor], h: Tensor, value: Tensor) -> Tensor:
    """Return the derivative of an elementwise function at h, by differentiating the sum of its values."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = h.detach().clone().requires_grad_()
        total = function(leaf).sum()
        if not total.requires_grad:  # a constant function
            return torch.zeros_like(h)
        (gradient,) = torch.autograd.grad(total, leaf, materialize_grads=True)
    return gradient


def ones(h: Tensor) -> Tensor:
    """Return an upstream gradient of ones in no memory; with it, torch's backward operators return the derivative."""
    return h.new_ones(()).expand_as(h)


@dataclass(frozen=True)
class Backward:
    """A derivative that one of torch's backward operators computes."""

    operator: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(upstream gradient, h, value) -> the product of the upstream gradient and the derivative."""
    ones: Callable[[Tensor], Tensor] = ones
    """Returns an upstream gradient of ones for h."""

    def __call__(self, h: Tensor, a: Tensor) -> Tensor:
        return self.operator(self.ones(h), h, a)


def _slope_of_shrinkage(h: Tensor, a: Tensor) -> Tensor:
    """Return 1 outside ±0.5, and 0 inside. torch's own backward operator cannot be compiled for dynamic shapes."""
    return (~(h.abs() <= 0.5)).to(h.dtype)


# torch's own backward operators agree with autograd at kinks, and are ten times as fast as torch.where on a CPU. The
# formulas of softsign and tanhshrink avoid the cancellation in torch's own backward, and that of hardsigmoid has 1/6 in
# full precision in float64.
_aten = torch.ops.aten

BUILT_IN = (
    Candidate("relu", F.relu, Backward(lambda g, h, a: _aten.threshold_backward(g, h, 0)), nn.ReLU),
    Candidate(
        "leaky_relu", F.leaky_relu, Backward(lambda g, h, a: _aten.leaky_relu_backward(g, h, 0.01, False)), nn.LeakyReLU
    ),
    Candidate("sigmoid", torch.sigmoid, Backward(lambda g, h, a: _aten.sigmoid_backward(g, a)), nn.Sigmoid),
    Candidate("tanh", torch.tanh, Backward(lambda g, h, a: _aten.tanh_backward(g, a)), nn.Tanh),
    Candidate("identity", lambda h: h, Backward(lambda g, h, a: g, torch.ones_like), nn.Identity),
    # oneDNN's backward operator of gelu copies `ones`.
    Candidate("gelu", F.gelu, Backward(lambda g, h, a: _aten.gelu_backward(g, h), torch.ones_like), nn.GELU),
    Candidate("silu", F.silu, Backward(lambda g, h, a: _aten.silu_backward(g, h)), nn.SiLU),
    Candidate("mish", F.mish, Backward(lambda g, h, a: _aten.mish_backward(g, h)), nn.Mish),
    Candidate("elu", F.elu, Backward(lambda g, h, a: _aten.elu_backward(g, 1, 1, 1, False, h)), nn.ELU),
    Candidate(
        "selu", F.selu, Backward(lambda g, h, a: _aten.elu_backward(g, SELU_ALPHA, SELU_SCALE, 1, False, h)), nn.SELU
    ),
    Candidate("softplus", F.softplus, Backward(lambda g, h, a: _aten.softplus_backward(g, h, 1, 20)), nn.Softplus),
    Candidate("hardswish", F.hardswish, Backward(lambda g, h, a: _aten.hardswish_backward(g, h)), nn.Hardswish),
    Candidate("relu6", F.relu6, Backward(lambda g, h, a: _aten.hardtanh_backward(g, h, 0, 6)), nn.ReLU6),
    Candidate("softsign", F.softsign, lambda h, a: (1 + h.abs()).reciprocal().square(), nn.Softsign),
    Candidate("relu_squared", own.relu_squared, lambda h, a: 2 * F.relu(h), own.ReLUSquared),
    Candidate("sine", torch.sin, lambda h, a: torch.cos(h), own.Sine),
    Candidate("hardsigmoid", own.hardsigmoid, lambda h, a: (h.abs() < 3).to(h.dtype) / 6, nn.Hardsigmoid),
    Candidate("hardtanh", F.hardtanh, Backward(lambda g, h, a: _aten.hardtanh_backward(g, h, -1, 1)), nn.Hardtanh),
    Candidate("logsigmoid", F.logsigmoid, lambda h, a: torch.sigmoid(-h), nn.LogSigmoid),
    Candidate("tanhshrink", F.tanhshrink, lambda h, a: torch.tanh(h).square(), nn.Tanhshrink),
    Candidate("hardshrink", F.hardshrink, _slope_of_shrinkage, nn.Hardshrink),
    Candidate("softshrink", F.softshrink, _slope_of_shrinkage, nn.Softshrink),
    Candidate("gelu_tanh", partial(F.gelu, approximate="tanh"), own.gelu_tanh_derivative, partial(nn.GELU, "tanh")),
    Candidate("quick_gelu", own.quick_gelu, own.quick_gelu_derivative, own.QuickGELU),
    Candidate("clipped_gelu", own.clipped_gelu, own.clipped_gelu_derivative, own.ClippedGELU),
    Candidate("hard_mish", own.hard_mish, own.hard_mish_derivative, own.HardMish),
    Candidate("laplace", own.laplace, own.laplace_derivative, own.Laplace),
    Candidate("sqrt_softplus", own.sqrt_softplus, own.sqrt_softplus_derivative, own.SqrtSoftplus),
    Candidate("star_relu", own.star_relu, lambda h, a: 2 * own.STAR_RELU_SCALE * F.relu(h), own.StarReLU),
    Candidate("snake", own.snake, lambda h, a: 1 + torch.sin(2 * h), own.Snake),
)

ALIASES = {
    "swish": "silu",
    "hard_swish": "hardswish",
    "hard_sigmoid": "hardsigmoid",
    "celu": "elu",  # with its default α, which is 1
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_10": "clipped_gelu",
    "relu2": "relu_squared",
    "squared_relu": "relu_squared",
    "sqrtsoftplus": "sqrt_softplus",
    "linear": "identity",
    "sin": "sine",
}
"""Other names of built-in candidates, in torch, timm and transformers."""

ORIGINAL = "original"
"""In a config: the function that a site replaced. In a selection: that function, if it is not a built-in candidate."""

_registry: dict[str, Candidate] = {candidate.name: candidate for candidate in BUILT_IN}
_originals: dict[str, Candidate] = {}


def known_names() -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_registry)


def lookup(key: str) -> Candidate:
    """Return the candidate with this name, alias, or key of a model's own function (see `original`)."""
    found = _registry.get(ALIASES.get(key, key)) or _originals.get(key)
    if found is None:
        meant = suggestion(key, [*_registry, *ALIASES])
        known = f" Known: {', '.join(known_names())}, and {ORIGINAL!r} in a converted model." if meant == "." else ""
        raise FlexActError(f"unknown candidate {key!r}{meant}{known} Add your own with flexact.register_candidate.")
    return found


def original(module: nn.Module) -> str:
    """Make the function that a model had at a site available as a candidate, and return its key.

    The module must be elementwise and hold no tensors. Modules of one type with equal settings are the same function.
    """
    key = f"{ORIGINAL}:{type(module).__module__}.{type(module).__qualname__}{settings_of(module)}"
    if key not in _originals:
        function = bare_copy(module)
        if getattr(function, "inplace", False):  # a blend needs its input for every candidate
            function.inplace = False  # type: ignore[assignment]
        slope = partial(_by_autograd, function)
        _originals[key] = Candidate(ORIGINAL, function, slope, partial(copy.deepcopy, function))
    return key


def settings_of(module: nn.Module) -> dict[str, bool | int | float | str]:
    """Return the settings of a module's function: its public plain attributes, without `training` and `inplace`."""
    public = {name: plain_setting(value) for name, value in sorted(vars(module).items()) if not name.startswith("_")}
    return {
        name: value
        for name, value in public.items()
        if isinstance(value, (bool, int, float, str)) and name not in ("training", "inplace")
    }


def plain_setting(value: Any) -> Any:
    """Return a numpy scalar as a Python number, and any other setting unchanged."""
    is_number = getattr(value, "shape", None) == () and not isinstance(value, Tensor)
    return value.item() if is_number else value


def bare_copy(module: nn.Module) -> nn.Module:
    """Return a copy without the module's own hooks, which may hold references to the whole model."""
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
    init: Callable[[nn.Module], object] | None = None,
    triton: Any = None,
) -> None:
    """Register an elementwise function as a candidate that sites can pick.

    fn: an elementwise function that maps a tensor to one of the same shape and dtype.
    derivative: its derivative at h; computed by autograd if it is omitted.
    module: builds the plain module that extraction puts in the site's place; by default one that calls `fn`.
    init: an initialisation that changes a given linear layer or convolution in place, such as SIREN's for a sine. It
    is called on the layer before a site when this candidate starts alone from the initial weights: at the rewind after
    a commitment to it, and at its start in a trial. The other layers keep the weights that the run began with.

    triton: a function with the decorator `triton.jit` that maps a block of float32 numbers to a tuple: the values of
    `fn` and those of its derivative. Without it, flexact generates one, as it generates C code for a CPU. If it cannot,
    sites on a GPU fall back to the closed form, which is slower. The logger `flexact` says at level INFO what runs.

    `fn` and `derivative` must not change: code that was generated from them is used for the rest of the process.

    At registration, the derivative is checked against a numerical one, and the module against the function, so that no
    network is trained with a wrong one. A Triton form is checked against the function at its first use.

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
    if name in ALIASES or name in _registry:
        raise FlexActError(f"{name!r} is already a name of the candidate {lookup(name).name!r}; choose another name.")
    for role, given in (("function", fn), ("derivative", derivative), ("module", module), ("init", init)):
        if not callable(given) and (given is not None or role == "function"):
            raise FlexActError(f"the {role} of candidate {name!r} must be callable; got {given!r}.")
    slope = partial(_by_autograd, fn) if derivative is None else partial(_at, derivative)
    try:
        _check_function(name, fn)
        _check_derivative(name, fn, slope)
        if module is not None:
            _check_module(name, fn, module)
        if triton is not None:
            _check_form(name, triton)
    except FlexActError:
        raise
    except Exception as error:
        raise FlexActError(
            f"candidate {name!r} raised {type(error).__name__} while it was checked: {error}. Its function, derivative "
            "and module must take a float64 tensor of any shape; `module` must be a function that returns a module."
        ) from error
    build = module if module is not None else partial(_Function, name, fn)
    _registry[name] = Candidate(name, fn, slope, build, init, triton)


def registered_candidates() -> dict[str, Candidate]:
    """Return the candidates that were registered in this process, for `restore_candidates` in another one."""
    return {name: one for name, one in _registry.items() if one not in BUILT_IN}


def restore_candidates(candidates: Mapping[str, Candidate]) -> None:
    """Register candidates of another process, except under names that are already registered in this one."""
    for name, one in candidates.items():
        _registry.setdefault(name, one)


def _at(derivative: Callable[[Tensor], Tensor], h: Tensor, value: Tensor) -> Tensor:
    return derivative(h)


def _check_function(name: str, fn: Callable[[Tensor], Tensor]) -> None:
    """Raise if a function is not elementwise, writes to its input, or is not finite."""
    h = torch.linspace(-6, 6, 49, dtype=torch.float64).reshape(7, 7)
    given = h.clone()
    value = fn(given)
    if not torch.equal(given, h):
        raise FlexActError(
            f"candidate {name!r} overwrites its input, which the other candidates still need; write it without "
            "in-place operations."
        )
    if not isinstance(value, Tensor) or value.shape != h.shape or value.dtype != h.dtype:
        got = f"{tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise FlexActError(
            f"candidate {name!r} must map a tensor to one of the same shape and dtype; for {tuple(h.shape)}, {h.dtype} "
            f"it gave {got}. Write it with elementwise torch operations."
        )
    alone = torch.stack([fn(element) for element in h.flatten()]).reshape(h.shape)
    if not torch.allclose(value, alone, equal_nan=True):
        raise FlexActError(
            f"candidate {name!r} is not elementwise: its value at one element depends on the others. Only elementwise "
            "functions can be picked."
        )
    if bool((bad := ~value.isfinite()).any()):
        raise FlexActError(
            f"candidate {name!r} is {value[bad][0].item()} at h = {h[bad][0].item():g}; a candidate must be finite for "
            "every finite h."
        )


def _check_derivative(
    name: str, fn: Callable[[Tensor], Tensor], derivative: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Raise if a derivative differs from central differences."""
    # These points are not round numbers, where functions usually have their kinks.
    h = torch.linspace(-6.1234567, 6.2345678, 400, dtype=torch.float64)
    step = 1e-6
    numerical = (fn(h + step) - fn(h - step)) / (2 * step)
    # One grid point may straddle a kink of the user's function; a wrong formula is wrong at many.
    _check_equal(f"the derivative of candidate {name!r}", h, derivative(h, fn(h)), numerical, allowed=2)


def _check_module(name: str, fn: Callable[[Tensor], Tensor], build: Callable[[], nn.Module]) -> None:
    """Raise if the module, which extraction inserts, does not compute the function that is trained."""
    h = torch.linspace(-6, 6, 49, dtype=torch.float64)
    with torch.no_grad():
        value = copy.deepcopy(build()).double()(h.clone())
        _check_equal(f"the module of candidate {name!r}", h, value, fn(h))


def _check_equal(what: str, h: Tensor, value: Any, expected: Tensor, allowed: int = 0) -> None:
    """Raise unless a value at h equals the expected one, except at a number of allowed points."""
    if not isinstance(value, Tensor) or value.shape != h.shape:
        raise FlexActError(f"{what} must keep its input's shape {tuple(h.shape)}.")
    difference = (value - expected).abs()
    wrong = ~(difference <= 1e-4 * (1 + expected.abs()))
    if int(wrong.sum()) > allowed:
        worst = int(torch.where(difference.isnan(), torch.inf, difference).argmax())
        raise FlexActError(
            f"{what} is wrong at {int(wrong.sum())} of {h.numel()} points in [{h[0]:.2f}, {h[-1]:.2f}]; worst at h = "
            f"{h[worst]:.4f}: given {value[worst]:.6g}, expected {expected[worst]:.6g}. Correct it, or leave it out."
        )


def _check_form(name: str, form: Any) -> None:
    """Raise if a Triton form is not a Triton function of one argument, or if another form has the same qualified name,
    by which Triton identifies functions in a kernel."""
    function = getattr(form, "fn", None)
    if function is None or len(getattr(form, "arg_names", ())) != 1:
        raise FlexActError(
            f"the Triton form of candidate {name!r} must be a function with the decorator triton.jit that takes one "
            f"argument, the input, and returns a tuple of the value and the derivative; got {form!r:.80}."
        )
    full_name = (function.__module__, function.__qualname__)
    for other in _registry.values():
        theirs = getattr(other.triton, "fn", None)
        if theirs not in (None, function) and full_name == (theirs.__module__, theirs.__qualname__):
            raise FlexActError(
                f"the Triton form of candidate {name!r} has the same name as that of {other.name!r}, "
                f"{'.'.join(full_name)}. Give one of the functions another name."
            )
