"""Tests of fusing a site with the batch norm and the addition before it: the network computes the same, and
extraction restores it.
"""

from __future__ import annotations

import copy
import inspect
import logging
import operator
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flexact
from flexact import FlexConfig, convert, extract
from flexact.studies.cifar_resnets import BLOCKS, ResNet
from flexact.surgery.fused_site import normalised_site
from flexact.surgery.rewriting import Rewritten

IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
ORIGINAL = FlexConfig(init="original")

pytestmark = pytest.mark.filterwarnings("ignore:flexact.convert left these as they are")


def _torchvision(name: str) -> nn.Module:
    import torchvision

    return torchvision.models.get_model(name, weights=None, num_classes=10)


def _timm(name: str) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False, num_classes=10)


# The constructor of each model, and the numbers of sites' calls right after a batch norm, and after one and an
# addition.
MODELS: dict[str, tuple[Callable[[ModuleType], nn.Module], int]] = {
    "resnet18": (lambda _: _torchvision("resnet18"), 17),
    "resnet50": (lambda _: _torchvision("resnet50"), 49),
    "vgg11_bn": (lambda _: nn.Sequential(_torchvision("vgg11_bn").features, nn.Flatten()), 8),
    "mobilenet_v3_small": (lambda _: _torchvision("mobilenet_v3_small"), 23),
    "timm_resnet18": (lambda _: _timm("resnet18"), 17),
    "shared": (lambda resnets: resnets.SharedResNet(), 17),
    "functional": (lambda resnets: resnets.FunctionalResNet(), 17),
}
SMALL = ["mobilenet_v3_small", "shared", "functional"]


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest, resnets: ModuleType) -> tuple[nn.Module, int]:
    """Returns a plain model, and how many places in it can be fused."""
    make, places = MODELS[request.param]
    torch.manual_seed(0)
    return trained(make(resnets)), places


def trained(model: nn.Module) -> nn.Module:
    """Returns the model with batch norms like a trained one's, and without dropout, whose random numbers would
    differ.
    """
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
        elif isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@contextmanager
def counted() -> Iterator[list[FrameType]]:
    """Records the calls of `normalised_site`."""
    calls: list[FrameType] = []
    code = inspect.unwrap(normalised_site).__code__

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is code:
            calls.append(frame)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def places(model: nn.Module, x: Tensor) -> int:
    with counted() as calls, torch.no_grad():
        copy.deepcopy(model)(x)
    return len(calls)


def both(plain: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Returns a model converted without fusion, and a fused one."""
    return convert(copy.deepcopy(plain), **options), convert(copy.deepcopy(plain), fuse=True, **options)


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def assert_the_same(apart: nn.Module, fused: nn.Module, x: Tensor) -> None:
    """Makes a forward and backward in training mode. Returns the results, the model's state, and its output in eval
    mode.
    """
    results = [model.train()(x) for model in (apart, fused)]
    close(*results)
    for result in results:
        result.square().mean().backward()
    for (name, left), (other, right) in zip(apart.named_parameters(), fused.named_parameters(), strict=True):
        assert name == other
        assert (left.grad is None) == (right.grad is None)
        if left.grad is not None:
            close(left.grad, right.grad)
    assert list(apart.state_dict()) == list(fused.state_dict())
    for name, value in apart.state_dict().items():
        if name.endswith("evidence"):  # of drops, of which there are none
            assert value.isnan().all()
            assert fused.state_dict()[name].isnan().all()
        else:
            close(fused.state_dict()[name], value)
    close(apart.eval()(x), fused.eval()(x))


def described(model: nn.Module) -> list[tuple[str, type]]:
    return [(name, type(module)) for name, module in model.named_modules(remove_duplicate=False)]


# Whole models


def test_a_fused_model_trains_and_evaluates_like_the_unfused_one(case: Any) -> None:
    plain, expected = case
    apart, fused = both(plain, config=ORIGINAL)
    assert (places(apart, IMAGES), places(fused, IMAGES)) == (0, expected)
    assert places(fused.eval(), IMAGES) == expected
    assert_the_same(apart, fused, IMAGES)


def test_committed_to_the_original_the_model_is_restored(case: Any, pick: Callable) -> None:
    plain, expected = case
    model = flexact.commit(pick(convert(copy.deepcopy(plain), config=ORIGINAL, fuse=True), None))
    assert places(model, IMAGES) == expected
    back = extract(model).eval()
    assert described(back) == described(plain)
    assert b"flexact" not in pickle.dumps(back).replace(b"flexact_test_resnets", b"")
    assert torch.equal(back(IMAGES), plain.eval()(IMAGES))
    assert torch.equal(model.eval()(IMAGES), back(IMAGES))


def test_another_pick_is_extracted_without_the_fused_calls(case: Any, pick: Callable) -> None:
    plain, _ = case
    model = flexact.commit(pick(convert(copy.deepcopy(plain), config=ORIGINAL, fuse=True), "tanh")).eval()
    extracted = extract(model)
    assert torch.equal(extracted(IMAGES), model(IMAGES))
    assert places(extracted, IMAGES) == 0
    assert b"flexact.fus" not in pickle.dumps(extracted)
    assert not any(isinstance(module, flexact.FlexAct) for module in extracted.modules())
    assert [type(m) for m in extracted.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)] == [
        nn.BatchNorm2d for m in plain.modules() if isinstance(m, nn.BatchNorm2d)
    ]
    assert list(extracted.state_dict()) == list(plain.state_dict())
    copy.deepcopy(plain).load_state_dict(extracted.state_dict(), strict=True)
    if not any(isinstance(module, Rewritten) for module in extracted.modules()):
        changed = {
            now for (_, now), (_, first) in zip(described(extracted), described(plain), strict=True) if now != first
        }
        assert changed == {nn.Tanh}


def test_a_rewritten_forward_calls_the_parts_one_after_the_other_after_extraction(
    resnets: ModuleType, pick: Callable
) -> None:
    apart, fused = both(resnets.FunctionalResNet())
    extracted = [extract(pick(model, "tanh"), commit=True) for model in (apart, fused)]
    assert [type(one) for one in extracted[0].modules()] == [type(one) for one in extracted[1].modules()]
    assert places(extracted[1], IMAGES) == 0


@pytest.mark.parametrize("case", SMALL, indirect=True)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copy_is_fused_too_and_can_be_extracted(case: Any, copied: Callable, pick: Callable) -> None:
    plain, expected = case
    model = convert(copy.deepcopy(plain), config=ORIGINAL, fuse=True).eval()
    duplicate = copied(model)
    assert torch.equal(duplicate(IMAGES), model(IMAGES))
    assert repr(duplicate) == repr(model)
    assert places(duplicate, IMAGES) == expected
    assert described(extract(pick(duplicate, None), commit=True)) == described(plain)


NETWORK = """
import torch
import torch.nn.functional as F
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)) + x)

def network():
    return nn.Sequential(Block(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
"""

LOADER = """
import torch
model = torch.load("model.pt", weights_only=False)
torch.save(model.eval()(torch.load("x.pt")), "y.pt")
import flexact
flexact.extract(model, commit=True)
"""


def test_a_saved_model_works_in_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "network.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "network", raising=False)
    import network

    model = convert(network.network(), fuse=True).eval()
    x = torch.randn(2, 3, 8, 8)
    assert places(model, x) == 2
    torch.save(x, tmp_path / "x.pt")
    torch.save(model, tmp_path / "model.pt")
    subprocess.run([sys.executable, "-c", LOADER], cwd=tmp_path, check=True)
    assert torch.equal(torch.load(tmp_path / "y.pt"), model(x))


@pytest.mark.parametrize("spelling", ["shared", "functional"])
@pytest.mark.parametrize("config", [FlexConfig(), FlexConfig(granularity="channel")], ids=["layer", "channel"])
def test_sites_per_call_are_fused_too(resnets: ModuleType, spelling: str, config: FlexConfig) -> None:
    torch.manual_seed(0)
    plain = trained(resnets.SPELLINGS[spelling]())
    apart, fused = both(plain, config=config, per_call=True, example_inputs=IMAGES)
    assert sum(isinstance(module, flexact.FlexAct) for module in fused.modules()) == 17
    assert places(fused, IMAGES) == 17
    assert_the_same(apart, fused, IMAGES)


def test_only_the_chosen_sites_are_fused(resnets: ModuleType) -> None:
    for make in resnets.SPELLINGS.values():
        assert places(convert(make(), "layer4.*", fuse=True), IMAGES) == 4
        assert places(convert(make(), "penultimate", fuse=True), IMAGES) == 2


def test_every_call_in_the_resnet_of_the_studies_is_fused() -> None:
    model = convert(ResNet(BLOCKS["resnet18"], 10, width=8), config=ORIGINAL, fuse=True)
    assert places(model, IMAGES) == 17


def test_a_graph_module_is_not_fused_and_is_named() -> None:
    model = torch.fx.symbolic_trace(NoAddition())
    with pytest.warns(UserWarning, match=r"NoAddition: .*torch\.fx\.GraphModule"):
        assert places(convert(model, fuse=True), X) == 0


def test_a_fused_model_compiles_without_graph_breaks(resnets: ModuleType) -> None:
    plain = nn.Sequential(resnets.SharedBlock(3, 3, 1), nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
    model = convert(plain, fuse=True).eval()
    assert places(model, IMAGES) == 3
    close(torch.compile(model, backend="eager", fullgraph=True)(IMAGES), model(IMAGES))


# One block


class Block(nn.Module):
    """A batch norm, a residual branch, and a forward that combines their outputs in a given way."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.branch = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
        self.skip = nn.Identity()
        self.act = nn.ReLU()


class NoAddition(Block):
    def forward(self, x):
        h = self.norm(self.conv(x))
        return self.act(h)


class Operator(Block):
    def forward(self, x):
        h = self.norm(self.conv(x))
        return self.act(h + x)


class Statement(Block):
    def forward(self, x):
        h = self.norm(self.conv(x))
        h += x
        return self.act(h)


class Renamed(Block):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.norm(self.conv(x))
        h += x
        y = self.act(h)
        return y


class Function(Block):
    def forward(self, x):
        h = self.norm(self.conv(x))
        return self.act(torch.add(h, x))


class Method(Block):
    def forward(self, x):
        h = self.norm(self.conv(x))
        return self.act(h.add(x))


class ResidualFirst(Block):
    def forward(self, x):
        h = self.norm(self.conv(x))
        return self.act(x + h)


class Functional(Block):
    def forward(self, x):
        h = self.norm(self.conv(x))
        return F.silu(h + x)


class Kept(Block):
    def __init__(self):
        super().__init__()
        del self.act
        self.act = F.relu

    def forward(self, x):
        h = self.norm(self.conv(x))
        return self.act(h + x)


class BehindIdentities(Block):
    def forward(self, x):
        h = self.norm(self.conv(x))
        return self.act(self.skip(self.skip(h) + x))


class Branch(Block):
    def forward(self, x):
        h = self.norm(self.conv(x))
        return self.act(h + self.branch(x))


class BranchFirst(Block):
    def forward(self, x):
        branch = self.branch(x)
        return self.act(self.norm(self.conv(x)) + branch)


class NestedBranch(Block):
    def __init__(self):
        super().__init__()
        pooled = nn.Sequential(nn.AvgPool2d(1), nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Identity()))
        self.branch = nn.Sequential(nn.Identity(), pooled)

    def forward(self, x):
        h = self.norm(self.conv(x))
        return self.act(h + self.branch(x))


class TwoNorms(Block):
    def __init__(self):
        super().__init__()
        self.other = nn.BatchNorm2d(3)

    def forward(self, x):
        h = self.norm(self.conv(x))
        return self.act(h + self.other(x))


class OnlyBranch(Block):
    """The batch norm is the last module of a Sequential that contains another site."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Tanh(), *self.branch)

    def forward(self, x):
        return self.act(self.branch(x) + x)


class SumAsResidual(Block):
    def forward(self, x):
        h = self.norm(self.conv(x))
        return self.act((x + 1) + h)


class KeywordChild(Block):
    """A child whose name is a keyword of Python."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleDict({"in": nn.Conv2d(3, 3, 1)})

    def forward(self, x):
        return self.act(self.norm(self.convs["in"](x)))


class Stepwise(Block):
    def forward(self, x):
        shortcut = x
        h = self.conv(x)
        h = self.norm(h)
        h = self.skip(h)
        if self.branch is not None:
            shortcut = self.branch(shortcut)
        h += shortcut
        h = self.act(h)
        return h


class BySetting(Block):
    """torchvision's RegNet has such a block."""

    def forward(self, x):
        if self.branch is not None:  # noqa: SIM108
            h = self.norm(self.conv(x)) + self.branch(x)
        else:
            h = x + self.norm(self.conv(x))
        return self.act(h)


class ByChoice(Block):
    """As in RegNet, but the input decides, and the batch norm is called in both branches."""

    def forward(self, x):
        if x.shape[0] > 1:  # noqa: SIM108
            h = self.norm(self.conv(x)) + self.branch(x)
        else:
            h = x + self.norm(self.conv(x))
        return self.act(h)


class Later(Block):
    """One of its parts is added later."""

    def __init__(self):
        super().__init__()
        self.gate = None

    def forward(self, x):
        h = self.norm(self.conv(x))
        if self.gate is not None:
            h = self.gate(h) * h
        return self.act(h)


class ByMode(Block):
    """Adds in one of its modes only."""

    def forward(self, x):
        h = self.norm(self.conv(x))
        if self.training:
            h = h + x
        return self.act(h)


class OperatorInPlace(Block):
    def forward(self, x):
        return self.act(operator.iadd(self.norm(self.conv(x)), x))


class MethodInPlace(Block):
    def forward(self, x):
        return self.act(self.norm(self.conv(x)).add_(x))


class InAnotherMethod(Block):
    def forward(self, x):
        return self.tail(self.norm(self.conv(x)), x)

    def tail(self, h, x):
        return self.act(h + x)


FITS = [
    *(NoAddition, Operator, Statement, Renamed, ResidualFirst, Functional, Kept, BehindIdentities, Branch),
    *(BranchFirst, NestedBranch, TwoNorms, OnlyBranch, SumAsResidual, KeywordChild, Stepwise, BySetting, Later),
]
X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("cls", FITS, ids=lambda cls: cls.__name__)
def test_every_fusible_spelling_is_fused_and_restored(cls: type[Block], pick: Callable) -> None:
    torch.manual_seed(0)
    plain = trained(cls())
    apart, fused = both(plain, config=ORIGINAL)
    assert places(fused, X) == places(fused.eval(), X) == (2 if cls is OnlyBranch else 1)
    assert_the_same(apart, fused, X)
    back = extract(pick(fused, None), commit=True)
    assert described(back) == described(plain)
    assert b"flexact" not in pickle.dumps(back).replace(__name__.encode(), b"")


class UsedTwice(Block):
    def forward(self, x):
        h = self.norm(self.conv(x))
        return self.act(h) + h


class SumUsedTwice(Block):
    def forward(self, x):
        h = self.norm(self.conv(x))
        h = h + x
        return self.act(h) * h


class AddedToItself(Block):
    def forward(self, x):
        h = self.norm(self.conv(x))
        return self.act(h + h)


class Scaled(Block):
    def forward(self, x):
        h = self.norm(self.conv(x))
        return self.act(torch.add(h, x, alpha=2))


class Shifted(Block):
    def forward(self, x):
        h = self.norm(self.conv(x))
        return self.act(h + 1.0)


class IntoTheResidual(Block):
    def forward(self, x):
        h = self.norm(self.conv(x))
        x = x.clone()
        y = x.add_(h)
        return self.act(y) + x


class ResidualOverwritten(Block):
    def forward(self, x):
        h = self.norm(self.conv(x))
        residual = x * 1
        h = h + residual
        residual.mul_(2.0)
        return self.act(h) + residual


class OwnNorm(nn.BatchNorm2d):
    pass


class Subclassed(NoAddition):
    def __init__(self):
        super().__init__()
        self.norm = OwnNorm(3)


class Hooked(NoAddition):
    def __init__(self):
        super().__init__()
        self.norm.register_forward_hook(double)


class PreHooked(NoAddition):
    def __init__(self):
        super().__init__()
        self.norm.register_forward_pre_hook(double_input)


class HookedBackward(NoAddition):
    def __init__(self):
        super().__init__()
        self.norm.register_full_backward_hook(double_gradient)


class HookedBranch(Block):
    def __init__(self):
        super().__init__()
        self.branch.register_forward_hook(double)

    def forward(self, x):
        return self.act(self.branch(x) + x)


class HookedIdentity(Block):
    def __init__(self):
        super().__init__()
        self.skip.register_forward_hook(double)

    def forward(self, x):
        h = self.norm(self.conv(x))
        return self.act(self.skip(h))


class Patched(NoAddition):
    def __init__(self):
        super().__init__()
        self.norm.forward = torch.sin


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def double_input(module: nn.Module, args: Any) -> Any:
    return (2 * args[0],)


def double_gradient(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    return (2 * grad_input[0],)


STAYS = [
    Function,
    Method,
    ByMode,
    OperatorInPlace,
    MethodInPlace,
    InAnotherMethod,
    UsedTwice,
    SumUsedTwice,
    AddedToItself,
    Scaled,
    Shifted,
    IntoTheResidual,
    ResidualOverwritten,
    Subclassed,
    Hooked,
    PreHooked,
    HookedBackward,
    HookedBranch,
    HookedIdentity,
    Patched,
]


@pytest.mark.parametrize("cls", STAYS, ids=lambda cls: cls.__name__)
def test_other_blocks_are_not_fused(cls: type[Block]) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleList([trained(cls()), NoAddition()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apart, fused = both(plain)
    assert type(fused[0]) is cls
    assert isinstance(fused[1], Rewritten)
    assert_the_same(apart[0], fused[0], X)


class SumOfOneNorm(Block):
    def forward(self, x):
        h = self.norm(self.conv(x))
        return self.act(h + self.norm(x))


class OneNormCrosswise(Block):
    def forward(self, x):
        y, z = 2 * x, self.conv(x)
        first, second = self.norm(y), self.norm(z)
        return self.act(second) + self.act(first)


@pytest.mark.filterwarnings("ignore:flexact.convert fused nothing")
@pytest.mark.parametrize(("cls", "expected"), [(SumOfOneNorm, 1), (OneNormCrosswise, 0), (ByChoice, 0)])
def test_a_norm_that_is_called_twice_keeps_the_order_of_its_calls(cls: type[Block], expected: int) -> None:
    """Its running statistics depend on the order, so the first of the two calls does not move behind the second."""
    apart, fused = both(trained(cls()))
    assert places(fused, X) == expected
    assert_the_same(apart, fused, X)


class TwoSitesOfOneNorm(Block):
    """Both sites need the batch norm's result, which is computed once."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.ReLU()

    def forward(self, x):
        h = self.norm(self.conv(x))
        first = self.act(h)
        second = self.other(h)
        return first * second


class ASiteInEitherBranch(TwoSitesOfOneNorm):
    def forward(self, x):
        h = self.norm(self.conv(x))
        if self.training:
            y = self.act(h)
        else:
            y = self.other(h)
            y = y + 1.0
        return y


@pytest.mark.filterwarnings("ignore:flexact.convert fused nothing")
@pytest.mark.parametrize("cls", [TwoSitesOfOneNorm, ASiteInEitherBranch])
def test_a_norm_in_front_of_two_sites_is_not_fused(cls: type[Block]) -> None:
    apart, fused = both(trained(cls()))
    assert places(fused, X) == 0
    assert_the_same(apart, fused, X)


class InputOverwritten(Block):
    """The batch norm's input has been overwritten when the site runs, which autograd allows only without gradients."""

    def forward(self, x):
        y = self.conv(x)
        h = self.norm(y)
        y.mul_(2.0)
        return self.act(h)


class InputAddedTo(Block):
    def forward(self, x):
        y = self.conv(x)
        h = self.norm(y)
        y += 1.0
        return self.act(h)


@pytest.mark.parametrize("cls", [InputOverwritten, InputAddedTo])
def test_a_norm_whose_input_may_be_overwritten_before_the_site_is_not_fused(cls: type[nn.Module]) -> None:
    with pytest.warns(UserWarning, match="fused nothing in this model"):
        apart, fused = both(trained(cls()).eval())
    with torch.no_grad():
        close(fused(X), apart(X))


def test_synchronised_batch_norms_are_not_fused() -> None:
    model = convert(nn.SyncBatchNorm.convert_sync_batchnorm(nn.ModuleList([Operator(), NoAddition()])))
    with pytest.warns(UserWarning, match="SyncBatchNorm"):
        fused = convert(nn.SyncBatchNorm.convert_sync_batchnorm(nn.ModuleList([Operator(), NoAddition()])), fuse=True)
    assert described(fused) == described(model)


class OneActivationByTwoNames(Block):
    def __init__(self):
        super().__init__()
        self.other = nn.Sequential(*self.branch, self.act)

    def forward(self, x):
        h = self.norm(self.conv(x))
        return self.act(h) + self.other(x)


def test_an_activation_by_two_names_is_one_site_or_two(pick: Callable) -> None:
    plain = trained(OneActivationByTwoNames())
    apart, fused = both(plain)
    assert places(fused, X) == 2
    assert_the_same(apart, fused, X)
    apart, fused = both(plain, per_call=True)
    for model in (apart, fused):
        pick(model.act, "tanh")
    assert places(fused, X) == 2
    assert_the_same(apart, fused, X)


# Containers


def sequence() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Identity(), nn.ReLU(), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)]
    return trained(nn.Sequential(*layers))


def test_a_sequential_can_still_be_sliced_and_extended() -> None:
    apart, fused = both(sequence())
    changes: list[Callable[[nn.Sequential], nn.Sequential]] = [
        lambda model: model[:2],
        lambda model: model[1:],
        lambda model: model.append(nn.Tanh()),
        lambda model: model.insert(2, nn.Conv2d(3, 3, 1)),
        lambda model: model + nn.Sequential(nn.Sigmoid()),
        lambda model: nn.Sequential(*list(model)),
    ]
    for change in changes:
        results = []
        for model in (apart, fused):
            torch.manual_seed(1)
            changed = change(copy.deepcopy(model)).eval()
            results.append(changed(X))
        close(*results)


def test_a_hook_or_another_norm_added_later_to_a_sequential_takes_effect() -> None:
    apart, fused = both(sequence())
    for model in (apart, fused):
        model[1].register_forward_hook(double)
    assert places(fused, X) == 0
    close(fused.eval()(X), apart.eval()(X))


def test_hooks_of_a_sequential_itself_stay() -> None:
    plain = sequence()
    plain.register_forward_hook(double)
    apart, fused = both(plain)
    assert places(fused, X) == 1
    close(fused.eval()(X), apart.eval()(X))


class Doubled(nn.Sequential):
    """A Sequential with a forward of its own."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.filterwarnings("ignore:flexact.convert fused nothing")
def test_a_sequential_subclass_runs_its_own_forward() -> None:
    apart, fused = both(Doubled(*sequence()))
    assert places(fused, X) == 0
    assert_the_same(apart, fused, X)


# Messages of convert, and failures


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "the model has no nn.BatchNorm2d without hooks"),
        (
            lambda: nn.Sequential(nn.BatchNorm2d(3), nn.MaxPool2d(2), nn.ReLU()),
            "no nn.BatchNorm2d has an output that only a site reads",
        ),
        (UsedTwice, "no nn.BatchNorm2d has an output that only a site reads"),
        (lambda: torch.fx.symbolic_trace(UsedTwice()), "UsedTwice: a torch.fx.GraphModule has no source to rewrite"),
        (nn.ReLU, "the model has no nn.BatchNorm2d without hooks"),
    ],
)
def test_convert_logs_in_one_line_why_nothing_was_fused(make: Callable[[], nn.Module], expected: str) -> None:
    with pytest.warns(UserWarning, match="fused nothing") as caught:
        convert(make(), fuse=True)
    assert len(caught) == 1
    assert expected in str(caught[0].message)
    assert "\n" not in str(caught[0].message)


def test_the_log_says_how_many_sites_were_fused_and_why_others_were_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="flexact")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(nn.ModuleList([NoAddition(), OnlyBranch()]), fuse=True)
        convert(nn.ModuleList([NoAddition(), UsedTwice()]), fuse=True)
    whole, rest = (record.getMessage() for record in caplog.records)
    assert whole == "fused 3 of 3 sites"
    assert rest.startswith("fused 1 of 2 sites; the others: no nn.BatchNorm2d has an output that only a site reads")


class Setting(Block):
    def __init__(self):
        super().__init__()
        self.scale, self.gate = 2.0, None

    def forward(self, x, mask=None):
        h = self.norm(self.conv(x))
        if self.gate is not None:
            h = h * self.gate(h)
        h = self.act(h)
        return h * self.scale if mask is None else h * mask


def test_settings_and_parts_that_change_later_take_effect() -> None:
    apart, fused = both(trained(Setting()))
    assert places(fused, X) == 1
    for model in (apart, fused):
        model.scale, model.gate = 3.0, nn.AvgPool2d(1)
    assert_the_same(apart, fused, X)
    close(fused(X, mask=2.0), apart(X, mask=2.0))


class OptionalSite(Block):
    def __init__(self):
        super().__init__()
        self.has_act = True

    def forward(self, x):
        h = self.norm(self.conv(x))
        if self.has_act:
            h = self.act(h)
        return h


def test_a_site_that_a_setting_skips_later_leaves_the_result_of_the_batch_norm() -> None:
    apart, fused = both(trained(OptionalSite()))
    assert places(fused, X) == 1
    for model in (apart, fused):
        model.has_act = False
    close(fused(X), apart(X))


class OptionalResidual(Block):
    def __init__(self):
        super().__init__()
        self.has_residual = False

    def forward(self, x):
        h = self.norm(self.conv(x))
        if self.has_residual:
            h += x
        return self.act(h)


def test_a_residual_that_a_setting_adds_later_is_added() -> None:
    apart, fused = both(trained(OptionalResidual()))
    assert places(fused, X) == 1
    for model in (apart, fused):
        model.has_residual = True
    assert_the_same(apart, fused, X)


class ResidualAddedToAnotherValue(Block):
    def forward(self, x):
        h = 2 * self.norm(self.conv(x))
        h += self.branch(x)
        return self.act(h)


@pytest.mark.filterwarnings("ignore:flexact.convert fused nothing")
def test_inspect_says_fused_only_where_the_site_runs_fused() -> None:
    assert places(convert(ResidualAddedToAnotherValue(), fuse=True), X) == 0
    assert [row.fused for row in flexact.inspect(ResidualAddedToAnotherValue()).rows] == [False]


def test_a_failure_leaves_the_model_unchanged(resnets: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(resnets.FunctionalBlock(3, 3, 1), sequence(), nn.Linear(1, 1), nn.RReLU())
    before = pickle.dumps(model)

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(warnings, "warn", fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        convert(model, fuse=True)
    assert type(model[0]) is resnets.FunctionalBlock
    assert type(model[1]) is nn.Sequential
    assert pickle.dumps(model) == before


def test_an_extracted_model_can_be_fused_again(resnets: ModuleType, pick: Callable) -> None:
    """Its blocks keep a forward with the first picks, which the second conversion rewrites and restores."""
    first = extract(pick(convert(trained(resnets.FunctionalResNet()), fuse=True), "tanh"), commit=True).eval()
    apart, fused = both(first, config=ORIGINAL)
    assert places(fused, IMAGES) == 17
    back = extract(pick(copy.deepcopy(fused), None), commit=True)
    assert described(back) == described(first)
    assert torch.equal(back(IMAGES), first(IMAGES))
    assert_the_same(apart, fused, IMAGES)


class ReadsTheNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        batches = self.bn.num_batches_tracked * 1.0
        return self.act(y) * batches


def test_a_norm_whose_state_is_read_before_the_site_runs_is_not_deferred() -> None:
    torch.manual_seed(0)
    plain = ReadsTheNorm()
    config = flexact.FlexConfig(init="original")
    with pytest.warns(UserWarning, match="fused nothing"):
        converted = flexact.commit(flexact.convert(copy.deepcopy(plain), fuse=True, config=config))
    x = torch.randn(2, 3, 5, 5)
    assert torch.equal(converted(x), plain(x))
