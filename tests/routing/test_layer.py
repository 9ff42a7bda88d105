"""Tests of FlexAct: its output in each mode, dropping and committing, and copies and checkpoints."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flexact
from configs import flat_paper
from flexact import FlexAct, FlexActError, FlexConfig, Policy
from flexact.candidates import registry
from flexact.ops import reference
from flexact.routing.channel_picks import ChannelPicks
from flexact.routing.sites import sites_of
from routed_cases import ALL, FIVE

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LOGITS = [0.3, -0.2, 0.9, 0.1, -0.5]


def site_with(logits: list[float] = LOGITS, channels: int | None = None, **changes: Any) -> FlexAct:
    """A site after its start, with the paper's noise and given logits."""
    site = FlexAct(config=flat_paper(**changes), channels=channels)
    with torch.no_grad():
        site.logits.copy_(torch.tensor(logits).repeat(site.rows)[: site.logits.numel()])
    return site


def blend_of_pi(site: FlexAct, h: Tensor) -> Tensor:
    pi = torch.softmax(site.logits.detach(), -1)
    return sum((q * registry.lookup(k).module()(h) for q, k in zip(pi, site.keys, strict=True)), torch.zeros(()))


# Output


@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
@pytest.mark.parametrize("channels", [None, 4], ids=["layer", "channel"])
def test_training_forward_and_gradients_equal_the_references(hard: bool, channels: int | None) -> None:
    h, delta = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)
    site = site_with(
        channels=channels,
        forward="hard" if hard else "soft",
        granularity="channel" if channels else "layer",
        temperature=0.5,
    )
    x = site(h)
    alive = torch.ones(site.rows, 5, dtype=torch.bool)
    logits = site.logits.detach().view(site.rows, 5).requires_grad_()
    expected = reference.routed_activation(h, logits, site.router.noise, 0.5, FIVE, alive, hard)
    torch.testing.assert_close(x, expected)
    to_h, to_logits = torch.autograd.grad(x, (h, site.logits), delta)
    expected_to_h, expected_to_logits = torch.autograd.grad(expected, (h, logits), delta)
    torch.testing.assert_close(to_h, expected_to_h)
    torch.testing.assert_close(to_logits, expected_to_logits.flatten(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("correction", ["none", "grad_norm_kl", "output_norm"])
@pytest.mark.parametrize("mode", ["blend", "pick"])
def test_eval_mode_has_no_noise(correction: str, mode: str) -> None:
    h = torch.randn(20, 3)
    outputs = [
        site_with(correction=correction, eval=mode, seed=seed, temperature=temperature).eval()(h)
        for seed in (0, 1)
        for temperature in (1.0, 0.1)
    ]
    assert all(torch.equal(outputs[0], x) for x in outputs)


@pytest.mark.parametrize("forward", ["soft", "hard"])
def test_eval_blends_by_pi(forward: str) -> None:
    h, site = torch.randn(20), site_with(forward=forward, temperature=0.1).eval()
    torch.testing.assert_close(site(h), blend_of_pi(site, h))


@pytest.mark.parametrize("correction", ["none", "output_norm"])
def test_in_eval_mode_the_pick_is_the_argmax_as_in_the_extracted_network(correction: str) -> None:
    h, site = torch.randn(20, 3), site_with(eval="pick", correction=correction).eval()
    assert torch.equal(site(h), torch.tanh(h))
    assert torch.equal(flexact.extract(site, commit=True)(h), site(h))


def test_eval_mode_does_not_advance_the_draw() -> None:
    site = site_with()
    site.eval()
    for _ in range(3):
        site(torch.zeros(2))
    site.train()(torch.zeros(2))
    assert site.router.step == 1


def test_a_lone_site_repeats_with_its_seed_and_draws_again_each_step() -> None:
    h = torch.randn(20)
    one, again, other = (site_with(seed=seed) for seed in (5, 5, 6))
    first, second = one(h), one(h)
    assert torch.equal(first, again(h))
    assert torch.equal(second, again(h))
    assert not torch.equal(first, second)
    assert not torch.equal(first, other(h))


def test_inplace_is_accepted_and_the_input_is_never_overwritten() -> None:
    h = torch.linspace(-3, 3, 30)
    before = h.clone()
    for site in (FlexAct(ALL, inplace=True), FlexAct(ALL, FlexConfig.paper(), inplace=True)):
        site(h).sum().backward()
        site.eval()(h)
        flexact.commit(site)(h)
        assert torch.equal(h, before)


def test_an_in_place_original_is_blended_without_overwriting() -> None:
    original = nn.LeakyReLU(0.3, inplace=True)
    site = FlexAct(("original", "identity"), original=original)
    h = torch.tensor([-1.0, 2.0], requires_grad=True)
    x = site(h.clone())
    torch.testing.assert_close(x, torch.tensor([-0.65, 2.0]))
    torch.testing.assert_close(*torch.autograd.grad(x.sum(), h), torch.tensor([0.65, 1.0]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64])
def test_integer_and_complex_input_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(FlexActError, match=f"got a tensor of {dtype}; .*h.float()"):
        FlexAct()(torch.ones(3).to(dtype))


def overflows(name: str, dtype: torch.dtype) -> bool:
    """Returns whether a candidate is infinite at 1e4 in a dtype, as torch's own square is."""
    return name in ("relu_squared", "star_relu") and dtype == torch.float16


@settings(max_examples=200)
@given(
    dtype=st.sampled_from(DTYPES),
    temperature=st.sampled_from([10.0, 1.0, 0.1, 0.01, 0.001]),
    forward=st.sampled_from(["soft", "hard"]),
    correction=st.sampled_from(["grad_norm_kl", "output_norm"]),
    channels=st.sampled_from([None, 5]),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.0, 1.0, 100.0]),
)
def test_a_finite_input_never_yields_nan(
    dtype: torch.dtype,
    temperature: float,
    forward: str,
    correction: str,
    channels: int | None,
    seed: int,
    spread: float,
) -> None:
    """For |h| up to 1e4, all candidates and any temperature, output and gradients are finite."""
    config = FlexConfig.paper(
        candidates=[name for name in ALL if not overflows(name, dtype)],
        granularity="channel" if channels else "layer",
        seed=seed,
        policy=Policy.paper(
            temperature=temperature, forward=forward, correction=correction, lam="temperature", kl_on="p"
        ),
    )
    site = FlexAct(config=config, channels=channels)
    with torch.no_grad():
        site.logits.copy_(spread * torch.randn(site.logits.shape, generator=torch.Generator().manual_seed(seed)))
    sizes = torch.tensor([0.0, 1e-8, 1e-4, 0.01, 1.0, 3.0, 6.0, 20.0, 100.0, 1e4])
    h = torch.cat([sizes, -sizes]).repeat(4, 5, 1).to(dtype).requires_grad_()
    x = site(h)
    loss = x.float().square().mean() + flexact.penalty(site)
    assert x.dtype == dtype
    gradients = torch.autograd.grad(loss, (h, site.logits))
    assert not any(value.isnan().any() for value in (x, loss, *gradients))
    assert not site.eval()(h).isnan().any()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("forward", ["soft", "hard"])
def test_each_candidate_stays_finite_up_to_1e4(name: str, dtype: torch.dtype, forward: str) -> None:
    other = "sigmoid" if name == "tanh" else "tanh"
    size = 200.0 if overflows(name, dtype) else 1e4
    for temperature in (10.0, 1.0, 0.001):
        config = FlexConfig.paper(
            candidates=(name, other), policy=Policy.paper(temperature=temperature, forward=forward)
        )
        site = FlexAct(config=config)
        h = torch.linspace(-size, size, 41).to(dtype).requires_grad_()
        x = site(h)
        gradients = torch.autograd.grad(x.float().sum(), (h, site.logits))
        assert all(value.isfinite().all() for value in (x, *gradients))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("forward", ["soft", "hard"])
def test_nan_stays_at_its_element(training: bool, forward: str) -> None:
    site = site_with(forward=forward).train(training)
    x = site(torch.tensor([1.0, torch.nan, -2.0]))
    assert x.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_infinity_passes_as_the_sum_of_the_candidates_would(value: float) -> None:
    h = torch.tensor([value])
    site = site_with().eval()
    torch.testing.assert_close(site(h), blend_of_pi(site, h), equal_nan=True)


# Dtypes and recomputation


@pytest.mark.parametrize(
    "convert",
    [
        nn.Module.half,
        nn.Module.double,
        nn.Module.bfloat16,
        lambda m: m.to(torch.bfloat16),
        lambda m: m.type(torch.half),
    ],
    ids=["half", "double", "bfloat16", "to", "type"],
)
def test_logits_stay_float32_when_the_model_changes_precision(convert: Callable[[nn.Module], nn.Module]) -> None:
    model = flexact.convert(nn.Sequential(nn.Linear(3, 4), nn.ReLU()))
    convert(model)
    (site,) = sites_of(model)
    assert (site.logits.dtype, site.temperature.dtype, site.dropped_at.dtype) == (
        torch.float32,
        torch.float32,
        torch.int64,
    )
    weight = model[0].weight
    x = model(torch.randn(5, 3).to(weight.dtype))
    x.float().sum().backward()
    assert x.dtype == weight.dtype
    assert site.logits.grad is not None
    assert site.logits.grad.dtype == torch.float32


@pytest.mark.parametrize("correction", ["grad_norm_kl", "output_norm"])
def test_autocast_routes_half_precision_with_float32_logits(correction: str) -> None:
    model = flexact.convert(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)),
        config=FlexConfig.paper(policy=Policy.paper(correction=correction)),
    )
    (site,) = sites_of(model)
    seen: list[torch.dtype] = []
    site.register_forward_hook(lambda module, inputs, output: seen.extend((inputs[0].dtype, output.dtype)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(5, 3)).float().square().mean() + flexact.penalty(model)
    loss.backward()
    assert seen == [torch.bfloat16, torch.bfloat16]
    assert site.logits.grad is not None
    assert site.logits.grad.dtype == torch.float32
    assert site.logits.grad.isfinite().all()


class Blocks(nn.Module):
    """Two blocks whose forward is recomputed in the backward pass if use_reentrant is given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)) for _ in range(2))
        self.recompute: bool | None = None  # use_reentrant of the checkpoints; None: no checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return x


@pytest.mark.parametrize(
    "changes", [{}, {"forward": "hard"}, {"alpha_kind": "relative"}, {"correction": "output_norm"}]
)
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_uses_the_same_draw(reentrant: bool, changes: dict[str, Any]) -> None:
    def run(recompute: bool | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = flexact.convert(Blocks(), config=flat_paper(**changes))
        model.recompute = recompute
        optimizer = torch.optim.SGD(flexact.param_groups(model, lr=0.1))
        schedule = flexact.Schedule(model, total_steps=8, optimizer=optimizer)
        kept = []
        for _ in range(3):
            x = torch.randn(4, 6, requires_grad=True)
            (model(x).square().mean() + flexact.penalty(model)).backward()
            kept += [x.grad, *(parameter.grad.clone() for parameter in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return kept

    for plain, recomputed in zip(run(None), run(reentrant), strict=True):
        assert torch.equal(plain, recomputed)


# Dropping and committing


def test_dropped_candidates_do_not_contribute() -> None:
    site, h = site_with(noise=0.0), torch.randn(20, requires_grad=True)
    site.drop(torch.tensor([[False, True, False, False, True]]), step=3)
    assert site.dropped_at.tolist() == [[-1, 3, -1, -1, 3]]
    assert site.alive == (0, 2, 3)
    x = site(h)
    alone = FlexAct(("relu", "tanh", "leaky_relu"), FlexConfig.paper(policy=Policy.paper(noise=0.0)))
    with torch.no_grad():
        alone.logits.copy_(torch.tensor(LOGITS)[[0, 2, 3]])
    torch.testing.assert_close(x, alone(h))
    (to_logits,) = torch.autograd.grad(x.sum(), site.logits)
    assert to_logits[[1, 4]].tolist() == [0, 0]
    assert site.pi()[0, [1, 4]].tolist() == [0, 0]
    assert not site.committed


def test_the_weakest_is_dropped_first_until_one_is_left() -> None:
    site = site_with()
    for step, left in enumerate([(0, 1, 2, 3), (0, 2, 3), (0, 2), (2,)]):
        assert not site.committed
        site.keep(len(site.alive) - 1, step=step)
        assert site.alive == left
    assert site.dropped_at.tolist() == [[3, 1, -1, 2, 0]]
    assert site.committed
    site.keep(1, 9)
    assert site.alive == (2,)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_of_equally_likely_candidates_the_first_are_kept(count: int) -> None:
    site = FlexAct(candidates=("relu", "tanh", "sigmoid", "gelu"))
    assert int(site.likeliest()) == 0
    site.keep(count, 9)
    assert site.alive == tuple(range(count))


def test_a_site_keeps_at_least_one_candidate() -> None:
    site = site_with()
    with pytest.raises(FlexActError, match="at least one"):
        site.drop(torch.ones(1, 5, dtype=torch.bool), step=0)
    assert site.alive == (0, 1, 2, 3, 4)


def test_a_drop_is_recorded_once() -> None:
    site = site_with()
    gone = torch.tensor([[True, False, False, False, False]])
    site.drop(gone, step=1)
    site.drop(gone, step=2)
    assert site.dropped_at[0, 0] == 1


@pytest.mark.parametrize("name", ALL)
def test_committed_site_is_the_function_itself(name: str) -> None:
    site = FlexAct(ALL)
    with torch.no_grad():
        site.logits[ALL.index(name)] = 1.0
    flexact.commit(site)
    assert (site.committed, site.picks) == (True, (name,))
    h = torch.randn(50, requires_grad=True)
    plain = registry.lookup(name).module()
    for mode in (True, False):
        assert torch.equal(site.train(mode)(h), plain(h))
    assert torch.equal(*(torch.autograd.grad(module(h).sum(), h)[0] for module in (site, plain)))
    assert type(site.picked) is type(plain)


def test_a_committed_site_has_no_routing_and_no_statistics_and_saves_what_its_function_does() -> None:
    site = flexact.commit(site_with())
    step = site.router.step
    saved: list[Tensor] = []
    h = torch.randn(50, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        x = site(h)
    assert len(saved) == 1
    assert saved[0].data_ptr() == x.data_ptr()
    assert site.router.step == step
    x.sum().backward()
    assert site.logits.grad is None


def channelwise(picks: tuple[str, ...], channel_dim: int = 1) -> FlexAct:
    config = FlexConfig(candidates=FIVE, granularity="channel", channel_dim=channel_dim)
    site = FlexAct(config=config, channels=len(picks))
    with torch.no_grad():
        for row, name in enumerate(picks):
            site.logits.view(site.rows, site.k)[row, FIVE.index(name)] = 1.0
    return site


@settings(max_examples=50)
@given(picks=st.lists(st.sampled_from(FIVE), min_size=1, max_size=6), channel_dim=st.sampled_from([0, 1, 2, -1]))
def test_mixed_picks_apply_each_function_to_its_channel(picks: list[str], channel_dim: int) -> None:
    site = flexact.commit(channelwise(tuple(picks), channel_dim))
    assert site.picks == tuple(picks)
    shape = [3, 3, 3]
    shape[channel_dim] = len(picks)
    h = torch.randn(shape, requires_grad=True)
    x = site(h)
    functions = [registry.lookup(name).module() for name in picks]
    expected = torch.stack([f(part) for f, part in zip(functions, h.unbind(channel_dim), strict=True)], channel_dim)
    torch.testing.assert_close(x, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), h)[0] for y in (x, expected)))


def test_channels_that_agree_commit_to_the_plain_module() -> None:
    assert type(flexact.commit(channelwise(("tanh", "tanh"))).picked) is nn.Tanh


def test_mixed_picks_add_nothing_to_a_state_dict_and_move_with_the_model() -> None:
    site = flexact.commit(channelwise(("tanh", "relu")))
    assert isinstance(site.picked, ChannelPicks)
    assert not site.picked.state_dict()
    site.to("meta")
    assert {buffer.device.type for buffer in site.picked.buffers()} == {"meta"}


def test_one_channel_may_commit_before_another() -> None:
    site = channelwise(("tanh", "relu"))
    goes = torch.tensor([[True, True, False, True, True], [False] * 5])
    site.drop(goes, step=0)
    assert not site.committed
    assert site.alive == (0, 1, 2, 3, 4)
    h = torch.randn(6, 2)
    assert torch.equal(site(h)[:, 0], torch.tanh(h[:, 0]))


def test_an_input_with_other_channels_is_refused() -> None:
    site = channelwise(("tanh", "relu"))
    for shape in ((4, 3), (2,), ()):
        with pytest.raises(FlexActError, match="2 channels in dimension 1"):
            site(torch.randn(shape))


# Construction


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(FlexActError, match="did you mean 'tanh'"):
        FlexAct(("relu", "tahn"))
    with pytest.raises(FlexActError, match="sequence of names"):
        FlexAct("relu")
    with pytest.raises(FlexActError, match="'relu' is the only one"):
        FlexAct(("relu", "original"))
    with pytest.raises(FlexActError, match="'original'"):
        FlexAct(config=FlexConfig(init="original"))
    with pytest.raises(FlexActError, match="channels=None"):
        FlexAct(config=FlexConfig(granularity="channel"))
    with pytest.raises(FlexActError, match="'relu' is the only one"):
        FlexAct(("relu", "original"), original=nn.ReLU())


def test_init_original_adds_the_function_and_starts_at_it_with_the_chosen_probability() -> None:
    config = FlexConfig(candidates=FIVE, init="original", init_probability=0.8)
    site = FlexAct(config=config, original=nn.GELU())
    assert site.candidates == (*FIVE, "gelu")
    torch.testing.assert_close(site.pi()[0], torch.tensor([0.04] * 5 + [0.8]))
    among = FlexAct(config=FlexConfig(candidates=FIVE, init="original"), original=nn.Tanh())
    assert among.candidates == FIVE
    assert among.pi()[0, 2].item() == pytest.approx(0.999)


@pytest.mark.parametrize(
    ("original", "candidates"),
    [
        (None, ("relu", "gelu", "silu", "elu", "tanh")),
        (nn.ReLU(), ("relu", "gelu", "silu", "elu", "tanh")),
        (nn.Tanh(), ("relu", "gelu", "silu", "elu", "tanh")),
        (nn.Mish(), ("mish", "relu", "gelu", "silu", "elu", "tanh")),
    ],
    ids=["alone", "ReLU", "Tanh", "Mish"],
)
def test_default_candidates_have_one_order_and_the_original_once(
    original: nn.Module | None, candidates: tuple[str, ...]
) -> None:
    site = FlexAct(original=original)
    assert site.candidates == candidates
    expected = -1 if original is None else candidates.index(type(original).__name__.lower())
    assert site.original_index == expected


def test_an_original_that_is_not_listed_is_no_candidate() -> None:
    assert FlexAct(FIVE, original=nn.Mish()).original_index == -1


def test_init_uniform_starts_undecided() -> None:
    torch.testing.assert_close(FlexAct().pi(), torch.full((1, 5), 0.2))


def test_committing_to_the_original_restores_the_same_module() -> None:
    original = nn.LeakyReLU(0.2, inplace=True)
    site = flexact.commit(FlexAct(config=FlexConfig(init="original"), original=original))
    assert site.kept_original
    assert site.picked is original


def test_only_the_logits_are_parameters_and_they_are_one_dimensional() -> None:
    site = FlexAct(original=nn.GELU("tanh"))
    assert [name for name, _ in site.named_parameters()] == ["logits"]
    assert site.logits.dim() == 1
    assert not list(site.children())


def test_repr_shows_candidates_and_pick() -> None:
    site = FlexAct(("relu", "tanh"))
    assert repr(site) == "FlexAct(candidates=('relu', 'tanh'))"
    assert repr(flexact.commit(site)) == "FlexAct(candidates=('relu', 'tanh'), picked=relu)"
    assert "picked=by channel" in repr(flexact.commit(channelwise(("tanh", "relu"))))


# Copies and checkpoints


def travelled(site: FlexAct, how: str) -> FlexAct:
    return copy.deepcopy(site) if how == "deepcopy" else pickle.loads(pickle.dumps(site))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_computes_the_same_and_is_independent(how: str) -> None:
    h, site = torch.randn(20), site_with()
    site(h)
    other = travelled(site, how)
    assert torch.equal(site(h), other(h)), "the copy continues with the same draws"
    with torch.no_grad():
        other.logits.add_(torch.arange(5.0))
    other.commit()
    assert not site.committed
    assert site.logits.tolist() == pytest.approx(LOGITS)
    assert other.router is not site.router
    assert other.router.sites == [other]


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_committed_copy_stays_committed(how: str) -> None:
    h = torch.randn(6, 2)
    for site in (site_with(), channelwise(("tanh", "relu"))):
        other = travelled(flexact.commit(site), how)
        assert other.committed
        assert torch.equal(other(h), site(h))
    kept = flexact.commit(FlexAct(config=FlexConfig(init="original"), original=nn.ELU(alpha=0.5)))
    assert travelled(kept, how).kept_original


def test_a_pickled_original_is_known_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    site = FlexAct(("original", "identity"), original=nn.LeakyReLU(0.37))
    text, h = pickle.dumps(site), torch.randn(20)
    expected = site(h)
    monkeypatch.setattr(registry, "_originals", {})  # as in a process that has not met the function
    assert torch.equal(pickle.loads(text)(h), expected)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_converted_model_is_copied_with_its_router(how: str) -> None:
    model = flexact.convert(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh()), "*")
    other = travelled(model, how)
    first, second = sites_of(other)
    assert first.router is second.router
    assert first.router.sites == [first, second]
    assert first.router is not sites_of(model)[0].router
    x = torch.randn(5, 3)
    assert torch.equal(other(x), model(x))


@pytest.mark.parametrize("committed", [False, True])
def test_state_dict_round_trip(committed: bool) -> None:
    h, site = torch.randn(20), site_with(noise=0.0)
    site.drop(torch.tensor([[False, True, False, False, True]]), step=3)
    site.temperature.fill_(0.25)
    if committed:
        site.commit(step=5)
    other = FlexAct(config=FlexConfig.paper(policy=Policy.paper(noise=0.0)))
    other.load_state_dict(site.state_dict())
    assert other.committed is committed
    assert other.alive == site.alive
    torch.testing.assert_close(dict(site.state_dict()), dict(other.state_dict()), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(other(h), site(h))


def test_loading_an_earlier_state_undoes_a_commitment() -> None:
    site = site_with()
    before = copy.deepcopy(site.state_dict())
    site.commit()
    site.load_state_dict(before)
    assert not site.committed
    assert site.alive == (0, 1, 2, 3, 4)


def untouched_by(model: nn.Module, load: Callable[[], object], message: str) -> None:
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FlexActError, match=message):
        load()
    torch.testing.assert_close(dict(before), dict(model.state_dict()), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("other", [("relu", "gelu"), ("tanh", "relu"), ("relu", "tanh", "elu")])
def test_state_of_other_candidates_is_refused_and_nothing_changes(other: tuple[str, ...]) -> None:
    site = FlexAct(("relu", "tanh"))
    state = FlexAct(other).state_dict()
    untouched_by(site, lambda: site.load_state_dict(state), f"saved with the candidates {', '.join(other)}; this model")
    untouched_by(site, lambda: site.load_state_dict(state, strict=False), "Build it with the same candidates")


def test_state_of_a_model_with_other_candidates_is_refused_before_any_weight_is_loaded() -> None:
    def model(*names: str) -> nn.Module:
        plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh())
        return flexact.convert(plain, "*", config=FlexConfig(candidates=names))

    ours, theirs = model("relu", "tanh"), model("relu", "silu")
    untouched_by(ours, lambda: ours.load_state_dict(theirs.state_dict()), "site '1' was saved with .* relu, silu")


def test_state_of_another_granularity_is_refused() -> None:
    site = FlexAct(FIVE)
    untouched_by(
        site, lambda: site.load_state_dict(channelwise(("tanh", "relu")).state_dict()), r"has logits of shape \(10,\)"
    )


def test_state_of_an_unregistered_function_is_refused() -> None:
    state = FlexAct(("relu", "original"), original=nn.ELU(alpha=0.123)).state_dict()
    site = FlexAct(("relu", "tanh"))
    untouched_by(site, lambda: site.load_state_dict(state), "relu, an unregistered function")


def test_an_input_on_another_device_is_refused() -> None:
    with pytest.raises(FlexActError, match=r"cpu .*meta"):
        FlexAct()(torch.empty(3, device="meta"))


def test_torch_export_does_not_change_the_model() -> None:
    model = flexact.convert(nn.Sequential(nn.Linear(3, 4), nn.ReLU())).eval()
    x = torch.randn(2, 3)
    program = torch.export.export(model, (x,))  # the model's first forward
    assert type(model(x)) is torch.Tensor
    torch.testing.assert_close(program.module()(x), model(x))
    flexact.Schedule(model, 10).step()
    model.train()(x).sum().backward()
