import pytest
import torch
from torch import nn

from flexact import FlexAct, FlexActError, FlexConfig, Policy
from flexact.baselines import BASELINES
from flexact.studies.synthetic.options import Options, activation_of, check_models, learned, policy
from flexact.studies.synthetic.replicas import Replicas


def test_names_stand_for_policies():
    options = Options(first_seed=7, candidates=("relu", "tanh", "gelu"))
    default, paper = policy("flexact-default", options), policy("flexact-a0.3", options)
    assert default.policy == FlexConfig().policy
    assert default.candidates == ("relu", "tanh", "gelu")
    assert default.seed == 7
    assert paper.policy == Policy.paper(alpha=0.3)
    assert policy("flexact-a0", options).policy.alpha == 0
    assert policy("output_norm", options).policy.correction == "output_norm"
    assert policy("relu", options) is None


def test_literal_follows_the_formulas_of_the_paper():
    config = policy("flexact-a0.3", Options(policy="literal"))
    assert (config.policy, config.commit_at) == (Policy.literal(alpha=0.3), None)
    assert config.eliminate == "none"
    assert policy("flexact-a0.3", Options(policy="default")).eliminate == FlexConfig().eliminate


@pytest.mark.parametrize("name", ["flexact-default", "flexact-a0.3", "none", "relu", *BASELINES])
def test_all_replicas_of_a_model_share_its_activation(name):
    options = Options(truths=("relu", "tanh"), seeds=2)
    assert activation_of(name, options)(torch.randn(3, 4, 1)).shape == (3, 4, 1)


@pytest.mark.parametrize("hidden", [0, 3])
def test_a_kolmogorov_arnold_layer_replaces_the_unit_and_is_the_same_on_every_call(hidden):
    options = Options(truths=("relu", "tanh"), seeds=2, hidden=hidden, models=("kan",))
    check_models(options)
    layer = activation_of("kan", options)
    network = Replicas(options, layer)
    network(torch.randn(3, 4, 4)).sum().backward()
    assert network.weight.grad is None
    assert layer.edges.learned.grad is not None
    before = torch.get_rng_state()
    assert torch.equal(activation_of("kan", options).edges.learned, layer.edges.learned)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_parameters_of_an_activation_are_counted_for_one_replica():
    counts = {name: learned(name, Options(seeds=2)) for name in ("gelu", "prelu", "deu", "nmode", "spline", "kan")}
    assert counts == {"gelu": 0, "prelu": 1, "deu": 5, "nmode": 2, "spline": 9, "kan": 4 * 9}
    assert learned("flexact-default", Options()) == 5


def test_fixed_models_are_the_plain_modules():
    assert isinstance(activation_of("leaky_relu", Options()), nn.LeakyReLU)
    assert isinstance(activation_of("flexact-default", Options()), FlexAct)


def test_an_unknown_model_is_reported_with_the_nearest():
    with pytest.raises(FlexActError, match=r"'flexact-defualt'.*'flexact-default'"):
        check_models(Options(models=("flexact-defualt",)))
    check_models(Options(models=("flexact-a0.25", "gelu", "splash", "none")))


def test_a_truth_that_is_no_candidate_is_refused_for_models_that_pick():
    options = {"truths": ("relu", "gelu"), "candidates": ("relu", "tanh")}
    with pytest.raises(FlexActError, match=r"flexact-a0 picks from relu, tanh, and can never find the truth gelu"):
        check_models(Options(models=("prelu", "flexact-a0"), **options))
    check_models(Options(models=("prelu", "tanh"), **options))
