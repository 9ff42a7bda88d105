"""Tests that a site fused with the batch norm before it equals the separate modules, and of the fallback to them.

Triton's kernels run on the CPU under its interpreter, or on a GPU with -m gpu.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flexact
from flexact import FlexAct, FlexActError, FlexConfig, Policy
from flexact.surgery.fused_site import normalised_site
from kernels import using

routed = pytest.importorskip("flexact.ops.triton.routed")  # needs Triton

pytestmark = pytest.mark.usefixtures("triton_kernels")

LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}
QUIET = FlexConfig(policy=Policy(noise=0.0))


@contextmanager
def apart() -> Iterator[None]:
    """Runs the parts one after the other, without fusion."""
    with using("closed_form"):
        yield


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch, launches_from_python: None) -> list[int]:
    """A list that grows by one with each fused call."""
    calls: list[int] = []
    forward = routed.forward

    def counted(h: Tensor, blending: Any, *preactivation: Any) -> Any:
        calls.extend([1] * len(preactivation))  # none is given if a site runs on its own
        return forward(h, blending, *preactivation)

    monkeypatch.setattr(routed, "forward", counted)
    return calls


class Network(nn.Module):
    """A residual block with a batch norm in both of its branches, and a linear layer."""

    def __init__(self, config: FlexConfig = QUIET, **norm: Any) -> None:
        super().__init__()
        channels = 3 if config.granularity == "channel" else None
        self.conv1, self.norm1 = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3, **norm)
        self.conv2, self.norm2 = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3, **norm)
        self.shortcut, self.shortcut_norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, **norm)
        self.site1, self.site2 = (FlexAct(config=config, channels=channels) for _ in range(2))
        self.linear = nn.Linear(3, 5)
        for site in (self.site1, self.site2):
            nn.init.normal_(site.logits)

    def forward(self, x: Tensor) -> Tensor:
        out = normalised_site(self.site1, self.norm1, self.conv1(x))
        out = normalised_site(self.site2, self.norm2, self.conv2(out), self.shortcut(x), self.shortcut_norm)
        return self.linear(out.mean((2, 3)))


def network(device: torch.device, layout: str = "channels last", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Network(**options).to(device, memory_format=LAYOUTS[layout])


def images(device: torch.device, layout: str = "channels last", seed: int = 0) -> Tensor:
    x = torch.randn(3, 3, 2, 4, generator=torch.Generator().manual_seed(seed))
    return x.to(device).contiguous(memory_format=LAYOUTS[layout])


def trained(model: nn.Module, device: torch.device, layout: str = "channels last", steps: int = 3) -> list[float]:
    """The losses of a few steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        loss = F.cross_entropy(model(images(device, layout, step)), torch.arange(3, device=device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_alike(left: nn.Module, right: nn.Module, tolerance: float = 1e-4) -> None:
    """Asserts parameters and buffers of nearly the same value."""
    assert left.state_dict().keys() == right.state_dict().keys()
    for name, value in left.state_dict().items():
        other = right.state_dict()[name]
        torch.testing.assert_close(
            value,
            other,
            rtol=tolerance,
            atol=tolerance,
            equal_nan=name.endswith("evidence"),
            msg=lambda text, name=name: f"{name}: {text}",
        )


# The same network


@pytest.mark.parametrize(("granularity", "layout"), [("layer", "channels last"), ("channel", "contiguous")])
def test_three_steps_of_sgd(granularity: Any, layout: str, device: torch.device, fused_calls: list[int]) -> None:
    config = FlexConfig(granularity=granularity, policy=Policy(noise=1.0))
    model = network(device, layout, config=config)
    unfused = copy.deepcopy(model)
    losses = trained(model, device, layout)
    assert len(fused_calls) == 6
    with apart():
        expected = trained(unfused, device, layout)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert_alike(model, unfused)
    for ours, theirs in ((model.site1, unfused.site1), (model.site2, unfused.site2)):
        for left, right in [(ours.router.sensitivity(), theirs.router.sensitivity())]:
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)
        assert ours.width == theirs.width


def test_a_norm_whose_tensors_are_ordinary_attributes(device: torch.device, fused_calls: list[int]) -> None:
    """FSDP and DataParallel turn the tensors into such attributes."""
    model = network(device)
    expected = model(images(device))
    for norm in (model.norm1, model.norm2, model.shortcut_norm):
        for name, parameter in list(norm.named_parameters()):
            delattr(norm, name)
            setattr(norm, name, parameter.detach().clone())
    torch.testing.assert_close(model(images(device)), expected)
    assert len(fused_calls) == 4


@pytest.mark.parametrize(
    "norm",
    [{"affine": False}, {"momentum": None}, {"track_running_stats": False}, {"eps": 0.1, "momentum": 0.5}],
    ids=lambda norm: ", ".join(norm),
)
def test_settings_of_the_batch_norms(norm: dict[str, Any], device: torch.device, fused_calls: list[int]) -> None:
    model = network(device, **norm)
    unfused = copy.deepcopy(model)
    losses = trained(model, device, steps=2)
    evaluated = model.eval()(images(device))
    assert len(fused_calls) == 6
    with apart():
        assert losses == pytest.approx(trained(unfused, device, steps=2), rel=1e-4)
        torch.testing.assert_close(evaluated, unfused.eval()(images(device)), rtol=1e-4, atol=1e-5)
    assert_alike(model, unfused)


@pytest.mark.parametrize("missing", ["weight", "bias"])
def test_a_batch_norm_with_half_of_its_parameters_runs_on_its_own(
    missing: str, device: torch.device, fused_calls: list[int]
) -> None:
    site, norm = FlexAct(config=QUIET).to(device), nn.BatchNorm2d(3).to(device)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        norm.bias.uniform_(-1, 1)
    norm.register_parameter(missing, None)
    y = images(device)
    expected = site(copy.deepcopy(norm)(y))
    torch.testing.assert_close(normalised_site(site, norm, y), expected)
    assert not fused_calls


@pytest.mark.parametrize("mode", ["pick", "blend"])
def test_eval_mode(mode: Any, device: torch.device, fused_calls: list[int]) -> None:
    model = network(device, config=FlexConfig(eval=mode)).eval()
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        ours = model(images(device))
    assert len(fused_calls) == 2
    with apart(), torch.no_grad():
        torch.testing.assert_close(ours, model(images(device)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0, equal_nan=True)


def test_gradients_in_eval_mode_do_not_go_through_the_moments(device: torch.device, fused_calls: list[int]) -> None:
    model = network(device).eval()
    unfused = copy.deepcopy(model)
    model(images(device)).square().sum().backward()
    assert len(fused_calls) == 2
    with apart():
        unfused(images(device)).square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), unfused.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None and theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("granularity", ["layer", "channel"])
def test_a_committed_site(granularity: Any, device: torch.device, fused_calls: list[int]) -> None:
    model = flexact.commit(network(device, config=FlexConfig(granularity=granularity)))
    assert model.site1.committed
    unfused = copy.deepcopy(model)
    losses = trained(model, device)
    assert len(fused_calls) == 6
    assert model.site1.logits.grad is None
    with apart():
        assert losses == pytest.approx(trained(unfused, device), rel=1e-4)
    assert_alike(model, unfused)


def test_a_committed_model_in_eval_mode_is_bit_identical_to_the_extracted_one(
    device: torch.device, fused_calls: list[int]
) -> None:
    model = flexact.commit(network(device)).eval()
    assert torch.equal(model(images(device)), flexact.extract(model)(images(device)))
    assert not fused_calls


def test_any_subset_of_candidates_alive(device: torch.device, fused_calls: list[int]) -> None:
    model = network(device)
    for site in (model.site1, model.site2):
        site.keep(len(site.alive) - 1, step=1)
        site.keep(len(site.alive) - 1, step=2)
    unfused = copy.deepcopy(model)
    losses = trained(model, device, steps=2)
    assert len(fused_calls) == 4
    with apart():
        assert losses == pytest.approx(trained(unfused, device, steps=2), rel=1e-4)
    assert_alike(model, unfused)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype, device: torch.device, fused_calls: list[int]) -> None:
    site, norm, other = FlexAct(config=QUIET).to(device), nn.BatchNorm2d(3).to(device), nn.BatchNorm2d(3).to(device)
    y, residual = images(device).to(dtype), images(device, seed=1).to(dtype)
    ours = normalised_site(site, norm, y, residual, other)
    assert len(fused_calls) == 1
    assert (ours.dtype, ours.stride()) == (dtype, y.stride())
    with apart():
        exact = normalised_site(site, *(copy.deepcopy(norm).float(), y.float(), residual.float(), copy.deepcopy(other)))
    torch.testing.assert_close(ours.float(), exact, rtol=1e-2, atol=1e-2)


def test_a_residual_in_another_layout(device: torch.device, fused_calls: list[int]) -> None:
    site, norm, y = FlexAct(config=QUIET).to(device), nn.BatchNorm2d(3).to(device), images(device)
    for residual in (images(device, "contiguous", 1), images(device, seed=1)[:, :, :1].expand_as(y)):
        ours = normalised_site(site, norm, y, residual)
        with apart():
            torch.testing.assert_close(ours, normalised_site(site, copy.deepcopy(norm), y, residual))
    assert len(fused_calls) == 2


# Gradients


def test_only_what_needs_a_gradient_gets_one(device: torch.device, fused_calls: list[int]) -> None:
    site, norm, other = FlexAct(config=QUIET).to(device), nn.BatchNorm2d(3).to(device), nn.BatchNorm2d(3).to(device)
    norm.weight.requires_grad_(False)
    site.logits.requires_grad_(False)
    y, residual = images(device), images(device, seed=1).requires_grad_()
    normalised_site(site, norm, y, residual, other).square().sum().backward()
    assert len(fused_calls) == 1
    assert y.grad is None
    assert norm.weight.grad is None
    assert site.logits.grad is None
    for tensor in (residual, norm.bias, other.weight, other.bias):
        assert tensor.grad is not None
        assert bool(tensor.grad.any())


def test_gradients_of_parameters_share_no_memory(device: torch.device) -> None:
    site, norm, other = FlexAct(config=QUIET).to(device), nn.BatchNorm2d(3).to(device), nn.BatchNorm2d(3).to(device)
    normalised_site(site, norm, images(device), images(device, seed=1), other).square().sum().backward()
    gradients = [parameter.grad for module in (norm, other) for parameter in module.parameters()]
    for one in gradients:
        before = [gradient.clone() for gradient in gradients if gradient is not one]
        one.zero_()
        after = [gradient for gradient in gradients if gradient is not one]
        assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))


def test_gradients_accumulate(device: torch.device) -> None:
    model = network(device)
    unfused = copy.deepcopy(model)
    for step in range(2):
        model(images(device, seed=step)).square().sum().backward()
    with apart():
        for step in range(2):
            unfused(images(device, seed=step)).square().sum().backward()
    for ours, theirs in zip(model.parameters(), unfused.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_only_the_inputs_and_small_tensors_are_saved(device: torch.device) -> None:
    site, norm, other = FlexAct(config=QUIET).to(device), nn.BatchNorm2d(3).to(device), nn.BatchNorm2d(3).to(device)
    y, residual = images(device).requires_grad_(), images(device, seed=1).requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        normalised_site(site, norm, y, residual, other)
    large = {tensor.untyped_storage().data_ptr() for tensor in saved if tensor.numel() >= y.numel()}
    assert large == {tensor.untyped_storage().data_ptr() for tensor in (y, residual)}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable, device: torch.device, fused_calls: list[int]) -> None:
    model = network(device)
    with mode():
        ours = model(images(device))
    assert len(fused_calls) == 2
    assert not ours.requires_grad
    assert bool(model.norm1.running_mean.any())
    trained(model, device, steps=1)


def test_a_recomputed_forward(device: torch.device, fused_calls: list[int]) -> None:
    model = network(device)
    unfused = copy.deepcopy(model)
    checkpoint(model, images(device), use_reentrant=False).square().sum().backward()
    assert len(fused_calls) == 4
    with apart():
        checkpoint(unfused, images(device), use_reentrant=False).square().sum().backward()
    for ours, theirs in zip(model.parameters(), unfused.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    assert_alike(model, unfused)


# Fallback to the parts


def falls_back(site: FlexAct, norm: nn.BatchNorm2d, *inputs: Any) -> Tensor:
    """Returns the output, which must be bit-identical to that of the parts."""
    modules = [module for module in (site, norm, *inputs) if isinstance(module, nn.Module)]
    unfused_site, unfused_norm, *unfused_inputs = copy.deepcopy((site, norm, *inputs))
    ours = normalised_site(site, norm, *inputs)
    with apart():
        expected = normalised_site(unfused_site, unfused_norm, *unfused_inputs)
    assert torch.equal(ours, expected)
    for module, unfused in zip(
        modules, (m for m in (unfused_site, unfused_norm, *unfused_inputs) if isinstance(m, nn.Module)), strict=True
    ):
        torch.testing.assert_close(list(module.buffers()), list(unfused.buffers()), rtol=0, atol=0, equal_nan=True)
    return ours


@pytest.fixture
def untouched(fused_calls: list[int]) -> Iterator[None]:
    """Disables fusion and the sites' own kernels, so that results can be bit-identical."""
    yield
    assert not fused_calls


@pytest.mark.usefixtures("untouched")
class TestLeftToTheParts:
    def test_float64(self, device: torch.device) -> None:
        site, norm = FlexAct(config=QUIET).to(device), nn.BatchNorm2d(3).double().to(device)
        assert falls_back(site, norm, images(device).double()).dtype == torch.float64

    def test_another_number_of_dimensions(self, device: torch.device) -> None:
        site, norm = FlexAct(config=QUIET).to(device), nn.BatchNorm2d(3).to(device)
        with pytest.raises(ValueError, match="expected 4D input"):
            normalised_site(site, norm, images(device)[0])

    def test_one_value_a_channel(self, device: torch.device) -> None:
        site, norm = FlexAct(config=QUIET).to(device), nn.BatchNorm2d(3).to(device)
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            normalised_site(site, norm, images(device)[:1, :, :1, :1])

    @pytest.mark.parametrize("channels", [2, 4])
    def test_a_norm_for_other_channels(self, channels: int, device: torch.device) -> None:
        site, right, wrong = FlexAct(config=QUIET).to(device), nn.BatchNorm2d(3), nn.BatchNorm2d(channels)
        with pytest.raises(RuntimeError, match="running_mean"):
            normalised_site(site, wrong.to(device), images(device))
        with pytest.raises(RuntimeError, match="running_mean"):
            normalised_site(site, right.to(device), images(device), images(device), wrong.to(device))

    @pytest.mark.parametrize("training", [False, True])
    def test_norms_in_different_modes(self, training: bool, device: torch.device) -> None:
        model, y, residual = network(device), images(device), images(device, seed=1)
        norm, other = model.norm2.train(training), model.shortcut_norm.train(not training)
        ours = normalised_site(model.site2, norm, y, residual, other)
        unfused_norms = copy.deepcopy((norm, other))
        with apart():
            expected = normalised_site(
                model.site2, unfused_norms[0].train(training), y, residual, unfused_norms[1].train(not training)
            )
        torch.testing.assert_close(ours, expected)

    def test_a_broadcast_residual(self, device: torch.device) -> None:
        model = network(device)
        ours = normalised_site(model.site2, model.norm2, images(device), images(device)[:1])
        with apart():
            expected = model.site2(copy.deepcopy(model.norm2)(images(device)) + images(device)[:1])
        torch.testing.assert_close(ours, expected)

    def test_a_residual_of_another_dtype(self, device: torch.device) -> None:
        model = network(device)
        ours = normalised_site(model.site2, model.norm2, images(device), images(device).double())
        assert ours.dtype == torch.float64

    def test_strides_with_gaps(self, device: torch.device) -> None:
        model, y = network(device), torch.randn(4, 3, 4, 8, device=device)[..., ::2]
        ours = normalised_site(model.site1, model.norm1, y)
        with apart():
            torch.testing.assert_close(ours, model.site1(copy.deepcopy(model.norm1)(y)))

    def test_channels_in_another_dimension(self, device: torch.device) -> None:
        config = FlexConfig(granularity="channel", channel_dim=-1, policy=Policy(noise=0.0))
        site, norm = FlexAct(config=config, channels=4).to(device), nn.BatchNorm2d(3).to(device)
        ours = normalised_site(site, norm, images(device))
        with apart():
            torch.testing.assert_close(ours, site(copy.deepcopy(norm)(images(device))))

    def test_the_correction_that_normalises_each_candidate(self, device: torch.device) -> None:
        site = FlexAct(config=FlexConfig(policy=Policy(noise=0.0, correction="output_norm"))).to(device)
        falls_back(site, nn.BatchNorm2d(3).to(device), images(device))

    def test_a_candidate_without_a_triton_form(self, device: torch.device) -> None:
        flexact.register_candidate("wave", lambda h: torch.sin(h.double()).to(h.dtype))
        site = FlexAct(("relu", "wave"), config=QUIET).to(device)
        falls_back(site, nn.BatchNorm2d(3).to(device), images(device))

    def test_an_override_by_the_closed_form(self, device: torch.device) -> None:
        model = network(device)
        with apart():
            falls_back(model.site1, model.norm1, images(device))


def test_a_dropped_candidate_without_a_triton_form_does_not_prevent_fusion(
    device: torch.device, fused_calls: list[int]
) -> None:
    flexact.register_candidate("wave", lambda h: torch.sin(h.double()).to(h.dtype))
    site, norm = FlexAct(("relu", "wave", "tanh"), config=QUIET).to(device), nn.BatchNorm2d(3).to(device)
    site.drop(torch.tensor([[False, True, False]]), 1)
    ours = normalised_site(site, norm, images(device))
    assert len(fused_calls) == 1
    with apart():
        torch.testing.assert_close(ours, site(copy.deepcopy(norm)(images(device))), rtol=1e-5, atol=1e-6)


def test_norms_of_which_one_has_no_running_statistics(device: torch.device) -> None:
    """In eval mode, the norm without statistics uses the batch's moments, and the gradient flows through them."""
    site, norm = FlexAct(config=QUIET).to(device).eval(), nn.BatchNorm2d(3).to(device).eval()
    other = nn.BatchNorm2d(3, track_running_stats=False).to(device).eval()
    gradients = []
    for context in (torch.enable_grad, apart):
        y, residual = images(device).requires_grad_(), images(device, seed=1).requires_grad_()
        with context():
            normalised_site(site, norm, y, residual, other).pow(3).sum().backward()
        gradients.append(residual.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_a_second_derivative_is_refused_if_fused_and_works_on_the_parts(device: torch.device) -> None:
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).to(device)
    model = network(device)
    with pytest.raises(FlexActError, match=r"second derivative.*fuse=True"):
        torch.autograd.grad(model(x).square().sum(), [model.conv1.weight], create_graph=True)
    with apart():
        (first,) = torch.autograd.grad(model(x).square().sum(), [model.conv1.weight], create_graph=True)
        first.square().sum().backward()
    assert model.conv1.weight.grad.isfinite().all()


def test_until_a_warm_up_ends_the_parts_run_as_before_the_conversion(
    resnets: ModuleType, fused_calls: list[int]
) -> None:
    plain = resnets.SharedBlock(3, 3, 1)
    model = flexact.convert(copy.deepcopy(plain), config=FlexConfig(init="original", warmup=0.5), fuse=True)
    schedule = flexact.Schedule(model, total_steps=2)
    x = torch.randn(4, 3, 5, 5)
    assert torch.equal(model(x), plain(x))
    assert not fused_calls
    schedule.step()
    torch.testing.assert_close(model(x), plain(x), rtol=0.01, atol=0.01)
    assert fused_calls


@pytest.mark.parametrize("fuse", [False, True])
def test_under_torch_func_and_torch_jit_the_parts_run_and_nothing_leaks(resnets: ModuleType, fuse: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 5)
    model = flexact.convert(resnets.SharedBlock(3, 3, 1), fuse=fuse).eval()
    found = torch.func.grad(lambda x: model(x).square().sum())(x)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(made(x), model(x))
    assert flexact.extract(copy.deepcopy(model), commit=True)(x).shape == x.shape
    wanted = x.clone().requires_grad_()
    model(wanted).square().sum().backward()
    torch.testing.assert_close(found, wanted.grad)
    torch.testing.assert_close(torch.jit.trace(model, x)(x), model(x))


def test_global_hooks_run_for_every_part(resnets: ModuleType) -> None:
    model = flexact.convert(resnets.SharedBlock(3, 3, 1), fuse=True)
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    model(torch.randn(2, 3, 5, 5))
    handle.remove()
    assert seen.count("BatchNorm2d") == seen.count("FlexAct") == 2


def test_a_batch_norm_of_another_precision_gives_torchs_error(resnets: ModuleType) -> None:
    model = flexact.convert(resnets.SharedBlock(3, 3, 1), fuse=True)
    model.bn1.double()
    with pytest.raises(RuntimeError, match=r"expected|dtype|type"):
        model(torch.randn(2, 3, 5, 5))
