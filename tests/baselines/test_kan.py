"""Tests of the Kolmogorov-Arnold layer: its splines against scipy's, and the layer against an explicit sum."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.interpolate import BSpline
from torch import nn

from flexact.baselines import KolmogorovArnoldLayer, SplineEdge
from flexact.baselines.kan import HIGH, INTERVALS, LOW, ORDER, splines


def test_the_splines_are_scipys_on_the_extended_grid() -> None:
    width = (HIGH - LOW) / INTERVALS
    knots = np.linspace(LOW - ORDER * width, HIGH + ORDER * width, INTERVALS + 2 * ORDER + 1)
    x = np.linspace(-2.5, 2.5, 501)
    for number, spline in enumerate(splines(torch.from_numpy(x))):
        theirs = BSpline.basis_element(knots[number : number + ORDER + 2], extrapolate=False)(x)
        torch.testing.assert_close(spline, torch.from_numpy(np.nan_to_num(theirs)), rtol=0, atol=1e-12)
    assert len(splines(torch.zeros(1))) == INTERVALS + ORDER


def test_the_splines_sum_to_one_on_the_grid_and_vanish_far_from_it() -> None:
    x = torch.linspace(LOW, HIGH, 101, dtype=torch.float64)
    torch.testing.assert_close(torch.stack(splines(x)).sum(0), torch.ones_like(x))
    assert not torch.stack(splines(torch.tensor([-9.0, 9.0]))).any()


def test_an_edge_starts_as_silu_and_has_nine_parameters() -> None:
    x = torch.linspace(-3, 3, 61)
    torch.testing.assert_close(SplineEdge()(x), nn.functional.silu(x))
    assert sum(parameter.numel() for parameter in SplineEdge().parameters()) == 1 + INTERVALS + ORDER == 9


def test_a_layer_is_the_sum_of_its_edges() -> None:
    layer = KolmogorovArnoldLayer(3, 2, networks=4).double()
    nn.init.normal_(layer.edges.learned)
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    y = layer(x)
    assert y.shape == (5, 4, 2)
    assert sum(parameter.numel() for parameter in layer.parameters()) == 4 * 3 * 2 * 9
    table = layer.edges.learned.reshape(4, 3, 2, 9)
    for network in range(4):
        for output in range(2):
            total = torch.zeros(5, dtype=torch.float64)
            for place in range(3):
                edge = SplineEdge().double()
                edge.learned.data = table[network, place, output].unsqueeze(0)
                total = total + edge(x[:, network, place])
            torch.testing.assert_close(y[:, network, output], total)


def test_the_gradients_of_a_layer_are_correct() -> None:
    layer = KolmogorovArnoldLayer(2, 2).double()
    x = torch.randn(3, 1, 2, dtype=torch.float64, requires_grad=True)
    edge = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)

    def function(x: torch.Tensor, edge: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"edges.learned": edge}, (x,))

    assert torch.autograd.gradcheck(function, (x, edge))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_layers_base_weights_are_drawn_from_torchs_generator(seed: int) -> None:
    torch.manual_seed(seed)
    first = KolmogorovArnoldLayer(4, 3).edges.learned
    torch.manual_seed(seed)
    assert torch.equal(first, KolmogorovArnoldLayer(4, 3).edges.learned)
    assert first[:, 0].unique().numel() == 12
    assert first[:, 0].abs().max() <= 0.5
    assert not first[:, 1:].any()
