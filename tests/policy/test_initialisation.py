"""Tests of initialisations that belong to candidates: which layers get them, when, and invalid ones."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import flexact
from flexact import FlexActError, FlexConfig, register_candidate

# Without the original among the candidates, the likeliest candidate is picked however weak the evidence.
pytestmark = pytest.mark.filterwarnings("ignore:these functions are not among the candidates")


def siren(layer: nn.Module) -> None:
    """SIREN's initialisation of a hidden layer, with ω in the weights."""
    bound = math.sqrt(6 / layer.weight[0].numel())
    nn.init.uniform_(layer.weight, -bound, bound)
    nn.init.zeros_(layer.bias)


def network(norm: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    middle = [nn.LayerNorm(8), nn.Dropout(0.1)] if norm else []
    return nn.Sequential(nn.Linear(3, 8), *middle, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def blending(name: str = "own_sine", **options: object) -> FlexConfig:
    given = {"pick_by": "blend", "eliminate": "none", "commit_at": 0.5, "rewind": True, "seed": 7} | options
    return FlexConfig(candidates=("relu", name), **given)  # type: ignore[arg-type]


def run(model: nn.Module, steps: int = 8, until: int = 4, pick: int | None = 1) -> flexact.Schedule:
    """Trains until the commitment, in which the sites pick this candidate."""
    optimizer = torch.optim.SGD(flexact.param_groups(model), lr=0.1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*steps are few")
        schedule = flexact.Schedule(model, total_steps=steps, optimizer=optimizer)
    for _ in range(until):
        for site in flexact.routing.sites.sites_of(model):
            if pick is not None:
                with torch.no_grad():
                    site.logits[pick] += 50
        loss = model(torch.randn(4, 3)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(loss.item())
    return schedule


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_parameters() if "logits" not in name}


def test_at_the_rewind_the_preceding_layers_are_initialised_and_the_others_get_their_initial_weights() -> None:
    register_candidate("own_sine", torch.sin, derivative=torch.cos, init=siren)
    model = flexact.convert(network(), config=blending())
    expected = copy.deepcopy(model)
    schedule = run(model)
    assert schedule.rewound_at == 4
    assert flexact.selection(model).picks == {"3": "own_sine", "5": "own_sine"}
    torch.manual_seed(7)
    siren(expected[0])
    siren(expected[4])
    for name, tensor in weights(expected).items():
        assert torch.equal(weights(model)[name], tensor), name
    assert not torch.equal(model[0].weight, network()[0].weight)


def test_it_does_not_change_torchs_random_state() -> None:
    after = []
    for init in (None, siren):
        register_candidate(f"wave_{len(after)}", torch.sin, derivative=torch.cos, init=init)
        model = flexact.convert(network(norm=False), config=blending(f"wave_{len(after)}"))
        torch.manual_seed(3)
        run(model)
        after.append(torch.random.get_rng_state())
    assert torch.equal(*after)


def test_another_pick_gets_the_initial_weights_only() -> None:
    register_candidate("own_sine", torch.sin, derivative=torch.cos, init=siren)
    model = flexact.convert(network(), config=blending())
    run(model, pick=0)
    assert flexact.selection(model).picks == {"3": "relu", "5": "relu"}
    for name, tensor in weights(network()).items():
        assert torch.equal(weights(model)[name], tensor), name


def test_without_a_rewind_nothing_is_initialised_with_a_warning() -> None:
    register_candidate("own_sine", torch.sin, derivative=torch.cos, init=siren)
    calls = []
    register_candidate("watched", torch.sin, derivative=torch.cos, init=calls.append)
    model = flexact.convert(network(), config=blending("watched", rewind=False))
    with pytest.warns(UserWarning, match=r"\(watched\) are not applied.*does not rewind"):
        schedule = run(model)
    assert schedule.committed
    assert schedule.rewound_at is None
    assert calls == []


@pytest.mark.parametrize("place", [1, 0])
def test_in_a_trial_the_candidate_starts_with_it_and_the_others_without(place: int) -> None:
    seen: dict[str, list[Tensor]] = {}
    register_candidate("own_sine", torch.sin, derivative=torch.cos, init=siren)
    names = ["relu", "tanh"]
    names.insert(place, "own_sine")
    config = FlexConfig(candidates=tuple(names), pick_by="trial", seed=7)
    model = flexact.convert(network(norm=False), config=config)
    optimizer = torch.optim.SGD(flexact.param_groups(model), lr=0.0)  # so that the weights keep their initial values
    schedule = flexact.Schedule(model, total_steps=3000, optimizer=optimizer)
    while not schedule.committed:
        trying = names[schedule.router.trying]
        seen.setdefault(trying, []).append(model[0].weight.detach().clone())
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step({"own_sine": 1.0, "relu": 2.0, "tanh": 3.0}[trying] + 0.01 * torch.rand(()).item())
    initial, expected = network(norm=False)[0], network(norm=False)[0]
    torch.manual_seed(7)
    siren(expected)
    assert seen.keys() == set(names)
    for name, own in seen.items():
        for weight in own:
            assert torch.equal(weight, expected.weight if name == "own_sine" else initial.weight), name
    assert set(flexact.selection(model).picks.values()) == {"own_sine"}
    assert torch.equal(model[0].weight, expected.weight)  # with which the winner continues


def test_a_trial_needs_one_candidate_that_starts_with_the_models_own_weights() -> None:
    register_candidate("own_sine", torch.sin, init=siren)
    register_candidate("own_tanh", torch.tanh, init=siren)
    config = FlexConfig(candidates=("own_sine", "own_tanh"), pick_by="trial")
    model = flexact.convert(network(norm=False), config=config)
    with pytest.raises(
        FlexActError, match=r"all candidates \(own_sine, own_tanh\) have an initialisation of their own"
    ):
        flexact.Schedule(model, total_steps=3000)


class Residual(nn.Module):
    """Its forward does not show the order of its modules. Only a run does."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.norm = nn.ReLU(), nn.BatchNorm2d(4)
        self.second, self.first = nn.Conv2d(4, 4, 1), nn.Conv2d(3, 4, 3)
        self.out, self.joined = nn.Linear(4, 1), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norm(self.first(x)))
        h = self.joined(self.second(h) + h)
        return self.out(h.mean((2, 3)))


def test_a_run_on_example_inputs_finds_the_preceding_layer_or_that_there_is_none() -> None:
    register_candidate("own_sine", torch.sin, derivative=torch.cos, init=siren)
    x = torch.randn(2, 3, 5, 5)
    model = flexact.convert(Residual(), config=blending(), example_inputs=x)
    assert model.act.layer_before is model.first
    assert model.joined.layer_before is None  # a sum
    assert copy.deepcopy(model).act.layer_before is not model.first
    assert not any("layer_before" in name for name in model.state_dict())
    with pytest.warns(UserWarning, match=r"the layer before joined is not known"):
        flexact.Schedule(model, total_steps=3000)


def test_without_example_inputs_only_a_sequential_shows_the_preceding_layer() -> None:
    register_candidate("own_sine", torch.sin, derivative=torch.cos, init=siren)
    model = flexact.convert(network(), config=blending())
    assert [model[i].layer_before for i in (3, 5)] == [model[0], model[4]]
    model = flexact.convert(Residual(), config=blending())
    with pytest.warns(UserWarning, match=r"the layer before act, joined is not known.*example_inputs"):
        flexact.Schedule(model, total_steps=3000)
    twice = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.ReLU(), nn.Sequential(nn.Dropout(), nn.ReLU()))
    config = FlexConfig(candidates=("original", "relu", "own_sine"))
    assert [
        site.layer_before for site in flexact.convert(twice, ["2", "3.1"], config).modules() if hasattr(site, "k")
    ] == [None, None]


def test_a_linear_layer_with_more_dimensions_and_without_a_bias_is_found() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate, self.act = nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False), nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.gate(x)) * self.up(x)

    register_candidate("own_sine", torch.sin, derivative=torch.cos, init=siren)
    config = FlexConfig(candidates=("original", "own_sine"))
    model = flexact.convert(Mlp(), config=config, example_inputs=torch.randn(2, 5, 3))
    assert model.act.layer_before is model.gate


def _fails(layer: nn.Module) -> None:
    raise ZeroDivisionError("on purpose")


def test_a_failing_initialisation_is_refused_before_the_run_and_the_model_is_unchanged() -> None:
    register_candidate("own_sine", torch.sin, init=_fails)
    model = flexact.convert(network(), config=blending())
    with pytest.raises(FlexActError, match=r"raised ZeroDivisionError .*before 3, Linear\(.*on purpose"):
        flexact.Schedule(model, total_steps=3000)
    for name, tensor in weights(network()).items():
        assert torch.equal(weights(model)[name], tensor), name


def test_an_initialisation_that_is_not_callable_is_refused() -> None:
    with pytest.raises(FlexActError, match=r"the init of candidate 'own_sine' must be callable; got 'siren'"):
        register_candidate("own_sine", torch.sin, init="siren")  # type: ignore[arg-type]
