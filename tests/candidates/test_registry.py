"""Tests of the candidates: their values, their derivatives, and which functions can be registered."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import flexact
from flexact import FlexActError
from flexact.candidates import registry
from flexact.candidates.registry import lookup, original, register_candidate


class Wave(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h.sin()


class Formula(nn.Module):
    """Reimplements a function for which torch has no module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h)


TORCH_MODULES: dict[str, nn.Module] = {
    "relu": nn.ReLU(),
    "leaky_relu": nn.LeakyReLU(0.01),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "identity": nn.Identity(),
    "gelu": nn.GELU(),
    "silu": nn.SiLU(),
    "mish": nn.Mish(),
    "elu": nn.ELU(),
    "selu": nn.SELU(),
    "softplus": nn.Softplus(),
    "hardswish": nn.Hardswish(),
    "relu6": nn.ReLU6(),
    "softsign": nn.Softsign(),
    "relu_squared": Formula(lambda h: nn.ReLU()(h) ** 2),
    "sine": Wave(),
    "hardsigmoid": nn.Hardsigmoid(),
    "hardtanh": nn.Hardtanh(),
    "logsigmoid": nn.LogSigmoid(),
    "tanhshrink": nn.Tanhshrink(),
    "hardshrink": nn.Hardshrink(),
    "softshrink": nn.Softshrink(),
    "gelu_tanh": nn.GELU("tanh"),
    "quick_gelu": Formula(lambda h: h * torch.sigmoid(1.702 * h)),
    "clipped_gelu": Formula(lambda h: nn.GELU()(h).clamp(-10, 10)),
    "hard_mish": Formula(lambda h: 0.5 * h * (h + 2).clamp(min=0, max=2)),
    "laplace": Formula(lambda h: 0.5 * (1 + torch.erf((h - 0.707107) / (0.282095 * math.sqrt(2))))),
    "sqrt_softplus": Formula(lambda h: nn.Softplus()(h).sqrt()),
    "star_relu": Formula(lambda h: 0.8944 * nn.ReLU()(h) ** 2 - 0.4472),
    "snake": Formula(lambda h: h + h.sin() ** 2),
}
OWN_MODULES = {  # torch has none
    "relu_squared": "ReLUSquared()",
    "sine": "Sine()",
    "quick_gelu": "QuickGELU()",
    "clipped_gelu": "ClippedGELU()",
    "hard_mish": "HardMish()",
    "laplace": "Laplace()",
    "sqrt_softplus": "SqrtSoftplus()",
    "star_relu": "StarReLU()",
    "snake": "Snake()",
}
# Derivatives in float64 where autograd's cancels, underflows or overflows.
EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "softsign": lambda h: 1 / (1 + h.abs()).square(),
    "tanhshrink": lambda h: h.tanh().square(),
    "hardsigmoid": lambda h: (h.abs() < 3).double() / 6,  # torch rounds 1/6 to float32 in float64, too
    "sqrt_softplus": lambda h: torch.where(  # below −40 softplus is e^h to all digits
        h < -40, torch.exp(h / 2) / 2, slope_by_autograd(TORCH_MODULES["sqrt_softplus"], h.clamp(min=-40))
    ),
    "gelu_tanh": lambda h: slope_by_autograd(nn.GELU("tanh"), h.clamp(-1e9, 1e9)),
}
KINKS = (0.0, -0.0, 0.5, -0.5, 1.0, -1.0, -2.0, 3.0, -3.0, 6.0, 10.0, 20.0)
EXTREMES = (1e-30, -1e-30, 1e4, -1e4, 1e30, -1e30, 88.0, -88.0, -104.0, 19.999, 20.001)

every_candidate = pytest.mark.parametrize("name", TORCH_MODULES)
floats = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def points(dtype: torch.dtype) -> Tensor:
    ordinary = torch.linspace(-25, 25, 1001, dtype=dtype)
    return torch.cat([ordinary, torch.tensor([*KINKS, *EXTREMES], dtype=dtype)])


def slope_by_autograd(module: nn.Module, h: Tensor) -> Tensor:
    leaf = h.clone().requires_grad_()
    (slope,) = torch.autograd.grad(module(leaf).sum(), leaf)
    return slope


def test_the_built_in_names_are_the_documented_ones() -> None:
    assert {candidate.name for candidate in registry.BUILT_IN} == set(TORCH_MODULES)


@every_candidate
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_are_bit_identical_to_torchs(name: str, dtype: torch.dtype) -> None:
    h = torch.cat([points(dtype), torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=dtype)])
    if name == "sqrt_softplus":
        h = h[~(h < -40)]  # transformers' own is the root of a number that may have underflowed
    torch.testing.assert_close(lookup(name).function(h), TORCH_MODULES[name](h), rtol=0, atol=0, equal_nan=True)


def test_the_root_of_a_softplus_is_accurate_where_the_softplus_underflows() -> None:
    h = torch.tensor([-50.0, -100.0, -150.0, -1e4], requires_grad=True)
    value = lookup("sqrt_softplus").function(h)
    (slope,) = torch.autograd.grad(value.sum(), h, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), h)
    exact = torch.exp(h.detach() / 2)
    for ours, factor in ((value, 1.0), (slope, 0.5), (second, 0.25)):
        torch.testing.assert_close(ours.detach(), factor * exact, rtol=1e-6, atol=0)


@every_candidate
def test_the_module_has_torchs_own_type_and_settings_if_there_is_one(name: str) -> None:
    assert repr(lookup(name).module()) == OWN_MODULES.get(name, repr(TORCH_MODULES[name]))


@every_candidate
def test_the_module_is_the_function_without_parameters_and_can_be_pickled(name: str) -> None:
    h, module = points(torch.float32), lookup(name).module()
    again = pickle.loads(pickle.dumps(module))
    assert torch.equal(again(h), lookup(name).function(h))
    assert not module.state_dict()


def test_a_square_that_overflows_half_precision_is_infinite_like_torchs() -> None:
    h = torch.tensor([255.0, 256.0, -256.0, 1e4], dtype=torch.float16)
    assert lookup("relu_squared").function(h).tolist() == [65024.0, torch.inf, 0.0, torch.inf]


@every_candidate
@floats
def test_the_derivative_equals_autograds_also_at_kinks_and_extremes(name: str, dtype: torch.dtype) -> None:
    h, candidate = points(dtype), lookup(name)
    ours = candidate.derivative(h, candidate.function(h))
    exact = EXACT[name](h.double()) if name in EXACT else slope_by_autograd(TORCH_MODULES[name], h)
    eps = torch.finfo(dtype).eps
    # These are sums and differences, whose rounding is relative to 1 where the slope is nearly 0.
    atol = 8 * eps if name in ("snake", "laplace", "quick_gelu", "gelu_tanh", "hard_mish") else 0
    torch.testing.assert_close(ours, exact.to(dtype), rtol=4 * eps, atol=atol)
    assert ours.isfinite().all()


@every_candidate
@settings(max_examples=25)
@given(h=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40))
def test_the_derivative_equals_autograds_everywhere(name: str, h: list[float]) -> None:
    at, candidate = torch.tensor(h, dtype=torch.float64), lookup(name)
    ours = candidate.derivative(at, candidate.function(at))
    exact = EXACT[name](at) if name in EXACT else slope_by_autograd(TORCH_MODULES[name], at)
    torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


@every_candidate
def test_derivative_keeps_shape_and_dtype_for_any_layout(name: str) -> None:
    candidate = lookup(name)
    for h in (torch.randn(()), torch.randn(0, 3), torch.randn(4, 6).t(), torch.randn(4, 6)[:, ::2]):
        slope = candidate.derivative(h, candidate.function(h))
        assert (slope.shape, slope.dtype) == (h.shape, h.dtype)


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(FlexActError, match=r"'sigmod'.*'sigmoid'"):
        lookup("sigmod")
    with pytest.raises(FlexActError, match=r"'swich'.*'swish'"):
        lookup("swich")


def test_names_of_other_libraries_are_accepted_as_aliases() -> None:
    h = points(torch.float32)
    for alias, name in registry.ALIASES.items():
        assert lookup(alias) is lookup(name)
    assert torch.equal(lookup("celu").function(h), nn.CELU()(h))
    config = flexact.FlexConfig(candidates=("original", "swish", "gelu_new", "relu2"))
    assert config.candidates == ("original", "silu", "gelu_tanh", "relu_squared")
    assert flexact.FlexAct(("swish", "tanh")).candidates == ("silu", "tanh")


def test_an_alias_is_neither_repeated_nor_registered() -> None:
    with pytest.raises(FlexActError, match="Repeated: silu"):
        flexact.FlexConfig(candidates=("silu", "swish"))
    with pytest.raises(FlexActError, match=r"'swish' is already a name of the candidate 'silu'"):
        register_candidate("swish", torch.sin)


def test_star_relu_has_mean_0_and_variance_1_of_a_normal_input() -> None:
    h = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = lookup("star_relu").function(h)
    assert abs(float(x.mean())) < 0.005
    assert float(x.var()) == pytest.approx(1, abs=0.01)


def test_a_function_alone_gets_its_derivative_by_autograd_and_a_module() -> None:
    register_candidate("wave", torch.sin)
    h = torch.linspace(-4, 4, 50, dtype=torch.float64)
    wave = lookup("wave")
    torch.testing.assert_close(wave.derivative(h, wave.function(h)), torch.cos(h))
    module = wave.module()
    assert torch.equal(module(h), torch.sin(h))
    assert repr(module) == "_Function(wave)"


def test_autograd_derivative_works_where_gradients_are_off() -> None:
    register_candidate("wave", torch.sin)
    with torch.no_grad():
        assert torch.equal(lookup("wave").derivative(torch.zeros(3), torch.zeros(3)), torch.ones(3))
    with torch.inference_mode():
        assert torch.equal(lookup("wave").derivative(torch.zeros(3), torch.zeros(3)), torch.ones(3))


def test_a_constant_function_has_derivative_zero() -> None:
    register_candidate("one", lambda h: torch.ones_like(h))
    assert torch.equal(lookup("one").derivative(torch.randn(3), torch.ones(3)), torch.zeros(3))


def test_given_derivative_and_module_are_used() -> None:
    register_candidate("wave", torch.sin, derivative=lambda h: torch.cos(h) + 1e-7, module=Wave)
    assert float(lookup("wave").derivative(torch.zeros((), dtype=torch.float64), torch.zeros(()))) == 1 + 1e-7
    assert isinstance(lookup("wave").module(), Wave)


def test_a_registered_candidate_can_be_used_in_a_site() -> None:
    register_candidate("cube", lambda h: h**3, derivative=lambda h: 3 * h * h)
    h = torch.linspace(-2, 2, 20, requires_grad=True)
    x = flexact.FlexAct(candidates=("cube", "identity"))(h)
    torch.testing.assert_close(x, (h**3 + h) / 2)
    (gradient,) = torch.autograd.grad(x.sum(), h)
    torch.testing.assert_close(gradient, (3 * h * h + 1) / 2)


def test_a_derivative_that_returns_its_input_does_not_get_it_overwritten() -> None:
    register_candidate("half_square", lambda h: h * h / 2, derivative=lambda h: h)
    h = torch.linspace(-2, 2, 20)
    before = h.clone()
    flexact.FlexAct(candidates=("half_square", "identity"))(h)
    assert torch.equal(h, before)


def test_a_wrong_derivative_is_refused_and_the_error_shows_where_it_differs() -> None:
    with pytest.raises(FlexActError, match=r"h = -?[\d.]+: .*-?[\d.]+") as refusal:
        register_candidate("wave", torch.sin, derivative=torch.sin)
    assert "wave" in str(refusal.value)
    with pytest.raises(FlexActError, match="unknown"):
        lookup("wave")


@given(at=st.floats(-5.5, 5.0), off=st.sampled_from([1.0, -0.1, torch.nan]))
def test_a_derivative_wrong_in_one_place_is_refused_there(at: float, off: float) -> None:
    def wrong(h: Tensor) -> Tensor:
        return torch.where((h > at) & (h < at + 0.5), torch.cos(h) + off, torch.cos(h))

    with pytest.raises(FlexActError, match="h = ") as refusal:
        register_candidate("wave", torch.sin, derivative=wrong)
    shown = float(str(refusal.value).split("worst at h = ")[1].split(":")[0])
    assert at - 1e-3 <= shown <= at + 0.5 + 1e-3


def test_a_kink_of_the_users_function_is_not_reported_as_a_wrong_derivative() -> None:
    register_candidate("abs", torch.abs, derivative=torch.sign)
    register_candidate("shrink", F.hardshrink)  # jumps
    assert "abs" in registry.known_names()


def test_a_derivative_of_another_shape_is_refused() -> None:
    with pytest.raises(FlexActError, match="shape"):
        register_candidate("wave", torch.sin, derivative=lambda h: torch.cos(h).sum())


@pytest.mark.parametrize(
    "function",
    [
        lambda h: torch.softmax(h.flatten(), 0).reshape(h.shape),
        lambda h: h - h.mean(),
        lambda h: h / (h.norm() + 1),
        lambda h: h.flatten().cumsum(0).reshape(h.shape),
        lambda h: F.dropout(h, 0.5),
    ],
    ids=["softmax", "centred", "normed", "cumsum", "dropout"],
)
def test_a_function_that_is_not_elementwise_is_refused(function: object) -> None:
    with pytest.raises(FlexActError, match="elementwise"):
        register_candidate("mixing", function)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        (torch.sum, r"\(\)"),
        (lambda h: h.float(), r".*float32"),
        (lambda h: 1.0, "float"),
        (lambda h: h[:2], r"\(2, 7\)"),
    ],
    ids=["sum", "dtype", "number", "slice"],
)
def test_another_shape_or_dtype_is_refused_and_shown(function: object, shown: str) -> None:
    with pytest.raises(FlexActError, match=f"shape and dtype.*{shown}"):
        register_candidate("odd", function)  # type: ignore[arg-type]


def test_a_function_that_overwrites_its_input_is_refused() -> None:
    with pytest.raises(FlexActError, match="overwrites"):
        register_candidate("inplace", lambda h: h.relu_())


@pytest.mark.parametrize(
    "arguments", [{"fn": None}, {"fn": torch.sin, "derivative": 1}, {"fn": torch.sin, "module": 1}]
)
def test_an_object_that_is_not_callable_is_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(FlexActError, match="callable"):
        register_candidate("uncallable", **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "two words", "9lives", "original", "a-b", None, 3, "line\nbreak"])
def test_bad_names_are_refused(name: object) -> None:
    with pytest.raises(FlexActError, match="identifier"):
        register_candidate(name, torch.sin)  # type: ignore[arg-type]


def test_a_name_is_registered_once() -> None:
    with pytest.raises(FlexActError, match=r"'relu' .*already"):
        register_candidate("relu", torch.sin)


def test_originals_of_one_type_and_settings_are_one_function() -> None:
    assert original(nn.LeakyReLU(0.2)) == original(nn.LeakyReLU(0.2, inplace=True))
    assert original(nn.LeakyReLU(0.2)) != original(nn.LeakyReLU(0.3))


def test_an_original_in_place_module_does_not_overwrite_its_input() -> None:
    module = nn.LeakyReLU(0.2, inplace=True)
    h = torch.tensor([-1.0, 2.0])
    candidate = lookup(original(module))
    value = candidate.function(h)
    assert torch.equal(h, torch.tensor([-1.0, 2.0]))
    assert torch.equal(value, torch.tensor([-0.2, 2.0]))
    assert torch.equal(candidate.derivative(h, value), torch.tensor([0.2, 1.0]))
    assert candidate.module().negative_slope == 0.2
    assert module.inplace


def test_an_original_has_no_hooks_of_the_model_in_which_it_was_first_found() -> None:
    fired = []
    module = nn.LeakyReLU(0.375)
    module.register_forward_hook(lambda *_: fired.append("forward"))
    module.register_forward_pre_hook(lambda *_: fired.append("before"))
    candidate = lookup(original(module))
    candidate.function(torch.ones(2))
    candidate.module()(torch.ones(2))
    assert fired == []
    module(torch.ones(2))
    assert fired == ["before", "forward"]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Tanh, r"is wrong at .* points.*; worst at h = "),
        (lambda: torch.sin, "must be a function that returns a module"),
        (lambda: nn.Linear(1, 1), "raised RuntimeError"),
        (lambda wanted: Wave(), "raised TypeError"),
        (lambda: nn.Flatten(0, -1), "is wrong at"),
    ],
)
def test_a_module_that_is_not_the_function_is_refused(module: object, message: str) -> None:
    with pytest.raises(FlexActError, match=message):
        register_candidate("bad_module", torch.sin, module=module)
    with pytest.raises(FlexActError, match="unknown"):
        lookup("bad_module")


def test_a_module_with_weights_and_one_that_overwrites_its_input_are_accepted() -> None:
    register_candidate("quarter_leak", lambda h: torch.where(h > 0, h, h * 0.25), module=nn.PReLU)
    register_candidate("another_relu", torch.relu, module=lambda: nn.ReLU(inplace=True))
    assert isinstance(lookup("quarter_leak").module(), nn.PReLU)


def _fails(h: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize("arguments", [{"fn": _fails}, {"fn": torch.sin, "derivative": _fails}])
def test_an_error_raised_by_a_function_is_reported(arguments: dict[str, object]) -> None:
    with pytest.raises(FlexActError, match=r"'failing' .*ZeroDivisionError.*on purpose"):
        register_candidate("failing", **arguments)


@pytest.mark.parametrize(
    ("function", "message"),
    [(torch.log, "is nan at h = -6"), (torch.sqrt, "is nan at h = -6"), (torch.reciprocal, "is inf at h = 0")],
)
def test_a_function_that_is_not_finite_at_a_finite_point_is_refused_with_the_point(
    function: object, message: str
) -> None:
    with pytest.raises(FlexActError, match=message):
        register_candidate("infinite", function)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("Swish", "swish"), ("ReLU", "relu"), ("GELU", "gelu"), ("LeakyReLU", "leaky_relu")],
)
def test_the_names_of_other_libraries_suggest_ours(given: str, meant: str) -> None:
    with pytest.raises(FlexActError, match=f"unknown candidate '{given}'; did you mean '{meant}'"):
        flexact.FlexAct(candidates=("tanh", given))


def test_all_names_are_listed_only_if_none_is_similar() -> None:
    for wrong, meant in (("ReLU", "relu"), ("GELU", "gelu"), ("SiLU", "silu")):
        with pytest.raises(FlexActError, match=f"did you mean '{meant}'") as caught:
            flexact.FlexConfig(candidates=(wrong, "tanh"))
        assert "Known" not in str(caught.value)
    with pytest.raises(FlexActError, match=r"unknown candidate 'qqqqq'\. Known: clipped_gelu, elu"):
        flexact.FlexConfig(candidates=("qqqqq", "tanh"))
