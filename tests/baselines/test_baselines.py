import pytest
import torch
from torch import Tensor, nn

from flexact import FlexActError
from flexact.baselines import (
    BASELINES,
    AffineCombination,
    ConvexCombination,
    GeneralParametric,
    PReLU,
    Splash,
    SwishBeta,
    make,
)


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return module


def inputs(*shape: int) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("channels", [None, 4])
def test_prelu_and_its_gradients_are_torchs(channels):
    ours, theirs = randomised(PReLU(channels).double()), nn.PReLU(channels or 1).double()
    theirs.weight.data = ours.learned.data.flatten().clone()
    x = inputs(5, 4, 3).requires_grad_()
    y = x.detach().clone().requires_grad_()
    ours(x).square().sum().backward()
    theirs(y).square().sum().backward()
    torch.testing.assert_close(ours(x), theirs(y))
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(ours.learned.grad.flatten(), theirs.weight.grad)


def test_swish_beta_is_half_a_line_at_0_silu_at_1_and_relu_far_out():
    x, swish = inputs(50), SwishBeta().double()
    torch.testing.assert_close(swish(x), nn.functional.silu(x))
    swish.learned.data.fill_(0.0)
    torch.testing.assert_close(swish(x), x / 2)
    swish.learned.data.fill_(1e6)
    torch.testing.assert_close(swish(x), torch.relu(x))


def test_splash_starts_as_a_relu_and_follows_its_slopes_between_the_hinges():
    splash = Splash().double()
    x = inputs(50)
    torch.testing.assert_close(splash(x), torch.relu(x))
    splash.learned.data = torch.tensor([[1.0, 2.0, -3.0, 4.0, -0.5, 0.0, 1.0, 0.0]], dtype=torch.float64)
    points = torch.tensor([-3.0, -1.5, 0.0, 0.5, 1.5, 2.25, 3.0], dtype=torch.float64)
    by_hand = torch.tensor([-1.5 + 1.0, -0.75, 0.0, 0.5, 1.5 + 1.0, 2.25 + 2.5 - 0.75, 3.0 + 4.0 - 3.0 + 2.0])
    torch.testing.assert_close(splash(points), by_hand.double())


@pytest.mark.parametrize("kind", [AffineCombination, ConvexCombination])
def test_combinations_start_uniform_and_their_weights_always_sum_to_one(kind):
    x = inputs(50)
    torch.testing.assert_close(kind().double()(x), (x + torch.relu(x) + torch.tanh(x)) / 3)
    weights = randomised(kind(6)).weights()
    torch.testing.assert_close(weights.sum(1), torch.ones(6))
    assert bool((weights < 0).any()) == (kind is AffineCombination)


def test_parametric_unit_follows_its_formula_and_starts_as_a_relu():
    unit, x = GeneralParametric().double(), inputs(50)
    torch.testing.assert_close(unit(x), torch.relu(x))
    unit.learned.data = torch.tensor([[2.0, -3.0, 0.5, 7.0]], dtype=torch.float64)
    torch.testing.assert_close(unit(x), -3 * torch.relu(2 * x + 0.5) + 7)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("channels", [None, 3])
def test_gradients_with_respect_to_input_and_parameters_are_correct(name, channels):
    module = randomised(make(name, channels).double())
    names = [n for n, _ in module.named_parameters()]

    def function(h: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (h,))

    values = [p.detach().clone().requires_grad_() for p in module.parameters()]
    assert torch.autograd.gradcheck(function, (inputs(2, 3, 2).requires_grad_(), *values))


@pytest.mark.parametrize("name", BASELINES)
def test_each_channel_equals_a_layer_of_its_own(name):
    many = randomised(make(name, channels=3, channel_dim=-1).double())
    x = inputs(4, 2, 3)
    for c in range(3):
        alone = make(name).double()
        for one, all_of_them in zip(alone.parameters(), many.parameters(), strict=True):
            one.data = all_of_them.data[c : c + 1].clone()
        torch.testing.assert_close(many(x)[..., c], alone(x[..., c]))


def test_bad_input_raises_a_clear_error():
    with pytest.raises(FlexActError, match="did you mean 'splash'"):
        make("spalsh")
    with pytest.raises(FlexActError, match="got channels="):
        make("prelu", channels=0)
    with pytest.raises(FlexActError, match=r"\(2, 4\).* 3 channels"):
        make("prelu", channels=3)(torch.zeros(2, 4))
