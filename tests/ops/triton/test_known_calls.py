"""A call that the extension repeats computes the same as one that is looked up, also after anything has changed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flexact
import interpreted_extension
from flexact import FlexAct
from flexact.ops import dispatch
from flexact.ops.known_calls import KnownCalls
from flexact.ops.triton import extension, nodes

CANDIDATES = ("relu", "tanh", "gelu")


@pytest.fixture(autouse=True)
def _with_extension(triton_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted_extension.use(monkeypatch)


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The inputs of the calls that are not repeated."""
    inputs: list[Tensor] = []
    original = nodes.routed

    def noticed(h: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        inputs.append(h)
        return original(h, *rest)

    monkeypatch.setattr(nodes, "routed", noticed)
    return inputs


def converted(**options: Any) -> nn.Module:
    """Return a model with two sites that were called twice, so that their calls are repeated."""
    torch.manual_seed(0)
    config = flexact.FlexConfig(candidates=CANDIDATES, **options)
    plain = nn.Sequential(nn.Conv1d(2, 3, 1), nn.ReLU(), nn.Conv1d(3, 3, 1), nn.ReLU())
    model = flexact.convert(plain, config=config, example_inputs=torch.zeros(1, 2, 1))
    for _ in range(2):
        model(sample()).sum().backward()
    model.zero_grad()
    return model


def sample(length: int = 5) -> Tensor:
    return torch.linspace(-2, 3, 4 * 2 * length).view(4, 2, length)


def site(model: nn.Module) -> FlexAct:
    (first, _) = [module for module in model.modules() if isinstance(module, FlexAct)]
    return first


def look_up(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the functions in Python run all calls of a model from now on."""
    monkeypatch.setattr(extension, "ready", lambda: None)
    site(model).router.known_calls = [KnownCalls() for _ in site(model).router.sites]


def results(model: nn.Module, run: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
    h = torch.linspace(-2, 3, 60).view(4, 3, 5).requires_grad_()
    x = run(model, h)
    found = [x]
    if x.requires_grad:
        (x * torch.linspace(-1, 1, x.numel()).view_as(x)).sum().backward()
        own = site(model)
        found += [*([] if h.grad is None else [h.grad]), *([] if own.logits.grad is None else [own.logits.grad])]
    statistics = site(model).router.call_statistics
    return [*found, *[table for _, table in statistics._calls], torch.tensor(site(model).width)]


def call(model: nn.Module, h: Tensor) -> Tensor:
    """Call the site outside of the model's forward."""
    x: Tensor = site(model)(h)
    return x


@torch.no_grad()
def write_logits(model: nn.Module) -> None:
    site(model).logits.copy_(torch.tensor([2.0, -1.0, 0.5]))


def replace_logits(model: nn.Module) -> None:
    site(model).logits = nn.Parameter(torch.tensor([2.0, -1.0, 0.5]))


def drop(model: nn.Module) -> None:
    site(model).drop(torch.tensor([[True, False, False]]), step=3)


def copy_buffer(model: nn.Module) -> None:
    site(model).dropped_at.copy_(torch.tensor([[-1, 4, -1]]))


def replace_buffer(model: nn.Module) -> None:
    site(model).dropped_at = torch.tensor([[-1, 4, 5]]).add_(0)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "nothing": lambda model: None,
    "logits written": write_logits,
    "logits replaced": replace_logits,
    "logits frozen": lambda model: site(model).logits.requires_grad_(False),
    "dropped": drop,
    "buffer copied": copy_buffer,
    "buffer replaced": replace_buffer,
    "committed": lambda model: site(model).commit(3),
    "evaluated": lambda model: model.eval(),
    "warming up": lambda model: setattr(site(model).router, "warming_up", True),
    "a trial": lambda model: setattr(site(model).router, "trying", 2),
    "a step": lambda model: site(model).router.go_to(9),
    "temperature": lambda model: site(model).temperature.fill_(3.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("inside", [True, False])
def test_a_call_after_a_change_is_that_of_a_model_that_looks_it_up(
    change: Callable[[nn.Module], Any], inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(model: nn.Module, h: Tensor) -> Tensor:
        x: Tensor = model(sample()) if inside else call(model, h)
        return x

    model, other = converted(), converted()
    change(model), change(other)
    found = results(model, run)
    look_up(other, monkeypatch)
    expected = results(other, run)
    assert len(found) == len(expected)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def with_hooks(model: nn.Module, h: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return call(model, h)


def with_other_logits(model: nn.Module, h: Tensor) -> Tensor:
    logits = {"logits": torch.tensor([2.0, -1.0, 0.5])}
    x: Tensor = torch.func.functional_call(site(model), logits, (h,))
    return x


def counted(model: nn.Module, h: Tensor) -> Tensor:
    with FlopCounterMode(display=False):
        return call(model, h)


CALLS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "other size": lambda model, h: call(model, h[:2]),
    "other shape": lambda model, h: call(model, h.reshape(2, 6, 5)),
    "transposed": lambda model, h: call(model, h.mT),
    "not dense": lambda model, h: call(model, h[..., ::2]),
    "other dtype": lambda model, h: call(model, h.double()).float(),
    "without gradients": torch.no_grad()(call),
    "inference": lambda model, h: torch.inference_mode()(call)(model, h).clone(),
    "checkpointed": lambda model, h: checkpoint(site(model), h, use_reentrant=False),
    "hooks of saved tensors": with_hooks,
    "other logits": with_other_logits,
    "a dispatch mode": counted,
    "torch.func": lambda model, h: torch.func.vmap(lambda row: call(model, row))(h),
    "a gradient of torch.func": lambda model, h: torch.func.grad(lambda h: call(model, h).sum())(h.detach()),
    "a tangent": lambda model, h: torch.func.jvp(lambda h: call(model, h), (h.detach(),), (h.detach(),))[1],
    "a parameter": lambda model, h: call(model, nn.Parameter(h.detach())),
    "a graph": lambda model, h: make_fx(lambda h: call(model, h))(h)(h),
}


@pytest.mark.parametrize("run", CALLS.values(), ids=CALLS)
def test_another_call_is_that_of_a_model_that_looks_it_up(
    run: Callable[[nn.Module, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = converted(), converted()
    for one in (model, other):
        results(one, call)  # now the calls of these inputs are repeated
        one.zero_grad()
    found = results(model, run)
    look_up(other, monkeypatch)
    expected = results(other, run)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_calls_like_earlier_ones_are_not_looked_up(looked_up: list[Tensor]) -> None:
    model = converted()
    assert len(looked_up) == 2  # of the first of two forwards
    model(sample(7))
    assert len(looked_up) == 4
    for length in (5, 7, 5):
        model(sample(length))
    assert len(looked_up) == 4


def test_a_call_of_picks_per_channel_is_repeated(looked_up: list[Tensor]) -> None:
    converted(granularity="channel")
    assert len(looked_up) == 2


def test_a_choice_of_other_kernels_takes_effect_at_the_next_call(looked_up: list[Tensor]) -> None:
    model = converted()
    before = len(looked_up)
    dispatch.use("closed_form")
    model(sample())
    assert len(looked_up) == before  # neither repeated nor run by the kernels
    assert interpreted_extension.Kernels.launched > 0
    launched = interpreted_extension.Kernels.launched
    model(sample())
    assert interpreted_extension.Kernels.launched == launched
    dispatch.use("triton")
    model(sample())
    assert len(looked_up) == before + 2


def test_a_repeated_call_of_a_changed_number_of_samples_updates_the_width() -> None:
    model = converted()
    own = site(model)
    for shape in ((4, 3, 5), (2, 6, 5), (4, 3, 5)):
        call(model, torch.ones(shape, requires_grad=True))
        assert own.width == shape[1] * shape[2]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_whose_calls_are_repeated_can_be_copied(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = converted()
    twin = copied(model)
    for one in (model, twin):
        site(one).router.go_to(5)
        site(one).router.scheduled = True
    torch.testing.assert_close(twin(sample()), model(sample()), rtol=0, atol=0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.other = (nn.BatchNorm2d(3) for _ in range(3))
        self.act1, self.act2, self.act3 = nn.ReLU(), nn.ReLU(), nn.ReLU()

    def forward(self, y: Tensor, residual: Tensor) -> Tensor:
        h = self.act1(self.first(y))
        h = self.act2(self.second(h) + residual)
        return self.act3(self.first(h) + self.other(residual))


def block() -> nn.Module:
    """Return a block of fused sites that was called twice."""
    torch.manual_seed(0)
    model = flexact.convert(Block(), config=flexact.FlexConfig(candidates=CANDIDATES), fuse=True)
    for _ in range(2):
        model(*images()).sum().backward()
    model.zero_grad()
    return model


def images() -> tuple[Tensor, Tensor]:
    y = torch.linspace(-2, 3, 2 * 3 * 20).view(2, 3, 4, 5)
    return y, y.flip(0)


def in_eval(model: Any) -> None:
    model.first.eval()


def set_momentum(model: Any) -> None:
    model.second.momentum = 0.5


def stop_tracking(model: Any) -> None:
    model.other.running_mean = model.other.running_var = None


@torch.no_grad()
def replace_weight(model: Any) -> None:
    model.first.weight = nn.Parameter(torch.tensor([3.0, 1.0, 2.0]))


FUSED_CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: None,
    "a step": lambda model: model.act1.router.go_to(9),
    "logits written": lambda model: model.act2.logits.data.add_(torch.tensor([0.0, 1.0, 2.0])),
    "dropped": lambda model: model.act2.drop(torch.tensor([[True, False, False]]), step=3),
    "committed": lambda model: [act.commit(3) for act in (model.act1, model.act2, model.act3)],
    "evaluated": lambda model: model.eval(),
    "a trial": lambda model: setattr(model.act1.router, "trying", 2),
    "norm in eval mode": in_eval,
    "momentum": set_momentum,
    "no running statistics": stop_tracking,
    "weight replaced": replace_weight,
    "weight frozen": lambda model: model.first.weight.requires_grad_(False),
    "doubled norm": lambda model: model.second.register_forward_hook(lambda *given: 2 * given[-1]),
    "doubled site": lambda model: model.act2.register_forward_hook(lambda *given: 2 * given[-1]),
}
LAYOUTS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "the same": lambda y, r: (y, r),
    "channels last": lambda y, r: (
        y.contiguous(memory_format=torch.channels_last),
        r.contiguous(memory_format=torch.channels_last),
    ),
    "only one channels last": lambda y, r: (y, r.contiguous(memory_format=torch.channels_last)),
    "another size": lambda y, r: (y[..., :4].contiguous(), r[..., :4].contiguous()),
}


def trained_twice(model: Any, y: Tensor, residual: Tensor) -> list[Tensor]:
    found = []
    for _ in range(2):
        given = [one.clone().requires_grad_() for one in (y, residual)]
        x = model(*given)
        found.append(x)
        if x.requires_grad:
            (x * torch.linspace(-1, 1, x.numel()).view_as(x)).sum().backward()
            found += [one.grad for one in given]
    found += [p.grad for p in model.parameters() if p.grad is not None]
    found += [table for _, table in model.act1.router.call_statistics._calls]
    return [*found, *model.state_dict().values(), torch.tensor([act.width for act in (model.act1, model.act2)])]


@pytest.mark.parametrize(
    ("change", "layout"),
    [*((change, "the same") for change in FUSED_CHANGES), *(("nothing", layout) for layout in list(LAYOUTS)[1:])],
)
def test_fused_calls_after_a_change_are_those_of_a_model_that_looks_them_up(
    change: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = block(), block()
    FUSED_CHANGES[change](model), FUSED_CHANGES[change](other)
    given = LAYOUTS[layout](*images())
    found = trained_twice(model, *given)
    monkeypatch.setattr(extension, "ready", lambda: None)
    other.act1.router.alive_changed()  # forgets the calls
    expected = trained_twice(other, *given)
    assert len(found) == len(expected)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("committed", [False, True])
def test_fused_calls_like_earlier_ones_are_not_looked_up(committed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = block()
    if committed:
        for act in (model.act1, model.act2, model.act3):
            act.commit(3)
        for _ in range(2):  # the first compiles, as the kernels are others
            model(*images()).sum().backward()
    looked_up = []
    original = nodes.normalised

    def noticed(*given: Any) -> Any:
        looked_up.append(given)
        return original(*given)

    monkeypatch.setattr(nodes, "normalised", noticed)
    model(*images()).sum().backward()
    assert not looked_up
    model.first.momentum = 0.5
    model(*images()).sum().backward()
    assert len(looked_up) == 2


def test_an_empty_batch_can_be_repeated() -> None:
    model = converted()
    for _ in range(3):
        h = torch.empty(0, 3, 5, requires_grad=True)
        x = call(model, h)
        x.sum().backward()
        assert x.shape == h.shape
    assert site(model).width == 1
