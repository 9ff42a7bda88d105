import pytest
import torch
from torch import nn

from flexact import FlexAct, FlexActError, FlexConfig
from flexact.baselines import BASELINES
from flexact.studies.models import activation, check, policy
from flexact.studies.options import Options


def test_names_stand_for_policies():
    options = Options(first_seed=7, candidates=("relu", "tanh", "gelu"))
    default, paper = policy("flexact-default", options), policy("flexact-a0.3", options)
    assert default.alpha == FlexConfig().alpha
    assert default.candidates == ("relu", "tanh", "gelu")
    assert default.seed == 7
    assert (paper.alpha, paper.noise) == (0.3, FlexConfig.paper().noise)
    assert policy("flexact-a0", options).alpha == 0
    assert policy("output_norm", options).correction == "output_norm"
    assert policy("relu", options) is None


def test_literal_reads_the_formulas_as_they_stand():
    config = policy("flexact-a0.3", Options(policy="literal"))
    assert (config.kl_on, config.lam, config.alpha, config.alpha_schedule) == ("p", "temperature", 0.3, "constant")
    assert config.noise == 1.0
    assert not config.eliminate
    assert policy("flexact-a0.3", Options(policy="default")).eliminate == FlexConfig().eliminate


@pytest.mark.parametrize("name", ["flexact-default", "flexact-a0.3", "none", "relu", *BASELINES])
def test_a_models_activation_serves_all_its_replicas(name):
    options = Options(truths=("relu", "tanh"), seeds=2)
    assert activation(name, options)(torch.randn(3, 4, 1)).shape == (3, 4, 1)


def test_fixed_models_are_the_plain_modules():
    assert isinstance(activation("leaky_relu", Options()), nn.LeakyReLU)
    assert isinstance(activation("flexact-default", Options()), FlexAct)


def test_an_unknown_model_is_told_with_the_nearest():
    with pytest.raises(FlexActError, match="unknown model 'flexact-defualt'; did you mean 'flexact-default'"):
        check(["flexact-defualt"], ["flexact-default", "relu"])
    check(["flexact-a0.25", "gelu", "splash", "none"], [])
