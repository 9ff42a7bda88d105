"""Tests of the policy in C on tables written by hand: ties, numbers that are not finite, and dtypes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexact import Policy
from flexact.ops import dispatch
from flexact.ops.native import policy as native
from flexact.ops.policy_tables import Tables
from flexact.routing.gumbel import log_pi, probabilities

pytestmark = pytest.mark.skipif(not dispatch.c_compiler(), reason="there is no C compiler")

ODD = (torch.nan, torch.inf, -torch.inf)
RATES = (0.1, 0.01)


def drawn(logits: Tensor, alive: Tensor, noise: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns π and p of a table, whose rows are sites."""
    rows, k = logits.shape
    values = torch.cat([logits.flatten(), torch.full((rows,), temperature)])
    row = torch.arange(rows)
    layout = torch.stack([k * row, torch.full_like(row, k), rows * k + row], dim=1)
    return native.draw(values, layout, alive, noise)


def plain(logits: Tensor, alive: Tensor, noise: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns the same in torch operations."""
    of_pi = log_pi(logits, alive)
    return of_pi.exp(), probabilities(of_pi, noise, torch.tensor(temperature))


@st.composite
def tables(draw: st.DrawFn, numbers: st.SearchStrategy[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Draws logits, a mask that may drop a whole row, and noise."""
    rows, k = draw(st.integers(1, 3)), draw(st.integers(1, 16))

    def table(of: st.SearchStrategy[float]) -> Tensor:
        return torch.tensor(draw(st.lists(of, min_size=rows * k, max_size=rows * k))).view(rows, k)

    return table(numbers), table(st.sampled_from([1.0, 1.0, 0.0])) > 0, table(st.sampled_from([0.0, 0.5]))


@settings(max_examples=60)
@given(
    case=tables(st.integers(-100, 100).map(lambda n: n / 7) | st.sampled_from(ODD)),
    temperature=st.floats(2**-20, 100, width=32),
)
def test_rows_that_are_not_finite_or_empty_are_nan_as_in_torch(
    case: tuple[Tensor, Tensor, Tensor], temperature: float
) -> None:
    for ours, theirs in zip(drawn(*case, temperature), plain(*case, temperature), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=3e-5, atol=1e-6, equal_nan=True)
        assert torch.equal(ours == 0, theirs == 0) or temperature < 1


@settings(max_examples=60)
@given(case=tables(st.sampled_from([0.1, 0.3, 3.7])), temperature=st.sampled_from([0.01, 0.7, 1.0, 3.0]))
def test_equal_logits_have_equal_probabilities_and_the_first_is_picked(
    case: tuple[Tensor, Tensor, Tensor], temperature: float
) -> None:
    logits, alive, noise = case
    alive[:, 0] = True
    for ours, theirs in zip(drawn(*case, temperature), plain(*case, temperature), strict=True):
        assert torch.equal(ours.argmax(1), theirs.argmax(1))
        for own, mask, score, add in zip(ours, alive, logits, noise, strict=True):
            for key in {(float(a), float(b)) for a, b in zip(score, add, strict=True)}:
                same = own[mask & (score == key[0]) & (add == key[1])]
                assert (same == same[:1]).all()


class Step:
    """A step of rows that are groups of their own, with one call each."""

    def __init__(self, gradient: Tensor, sensitivity: Tensor, **tables: Tensor) -> None:
        rows, k = gradient.shape
        row = torch.arange(rows)
        self.values = torch.cat([gradient.flatten(), sensitivity.flatten()])
        self.statistics = (
            *(torch.zeros(rows, k), torch.zeros(rows, 1, dtype=torch.float64), torch.zeros(rows, 2)),
            *(torch.zeros(rows, 1), torch.zeros(rows, k), torch.zeros(rows, k, k)),
        )
        p, one = torch.full((rows, k), 1 / k), torch.ones(rows, dtype=torch.int64)
        self.tables = Tables(
            layout=torch.stack([k * row, k * one, rows * k + row], dim=1),
            calls=torch.stack([one, one, rows * k + k * row], dim=1),
            grouped_rows=row,
            group_starts=torch.arange(rows + 1),
            alive=torch.ones(rows, k, dtype=torch.bool),
            p=p,
            q=p,
            width=torch.full((rows, 1), 3.0),
            alpha=torch.tensor(1.3),
            step_size=torch.tensor(0.05),
            factors=None,
        )._replace(**tables)

    def run(self, policy: Policy | None = None) -> Tensor:
        """Returns the changes of the logits, as a table."""
        size = self.tables.p.numel()
        found = native.update(self.values, size, self.tables, self.statistics, RATES, policy or Policy())
        return found.view(self.tables.p.shape)


def test_the_first_step_is_the_formula_of_the_policy() -> None:
    gradient, sensitivity = torch.randn(3, 5, dtype=torch.float64), torch.rand(3, 5, dtype=torch.float64)
    step = Step(gradient.float(), sensitivity.float())
    size = gradient.square().mean(1, keepdim=True).sqrt()
    target = torch.softmax(-sensitivity / 0.3, 1)
    expected = 0.05 * (gradient + 1.3 * size / 3 * (1 / 5 - target)) / size
    torch.testing.assert_close(step.run().double(), expected, rtol=1e-5, atol=1e-6)
    advantage = gradient / gradient.norm(dim=1, keepdim=True)
    mean, square, weights, count, total, products = (one.double() for one in step.statistics)
    torch.testing.assert_close(mean, 0.1 * gradient, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(square, 0.01 * size.square(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(weights, torch.tensor([RATES] * 3, dtype=torch.float64), rtol=1e-6, atol=0)
    assert bool((count == 1).all())
    torch.testing.assert_close(total, advantage, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(products, advantage.unsqueeze(2) * advantage.unsqueeze(1), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("k", range(2, 17))
def test_candidates_with_equal_gradients_and_sensitivities_move_equally(k: int) -> None:
    torch.manual_seed(k)
    gradient, sensitivity = torch.randn(4, 1).repeat(1, k), torch.rand(4, 1).repeat(1, k)
    gradient[:, -1], sensitivity[:, -1] = 0.3, 0.7
    step = Step(gradient, sensitivity)
    for _ in range(3):
        found = step.run()
        for table in (found, step.statistics[0], step.statistics[4]):
            assert torch.equal(table[:, :-1], table[:, :1].expand(-1, k - 1))


@pytest.mark.parametrize(
    ("where", "odd"), [*((where, odd) for where in ("gradient", "sensitivity") for odd in ODD), ("p", torch.nan)]
)
def test_a_number_that_is_not_finite_stays_in_its_row(where: str, odd: float) -> None:
    torch.manual_seed(0)
    given = {"gradient": torch.randn(3, 4), "sensitivity": torch.rand(3, 4)}
    p = torch.softmax(torch.randn(3, 4), 1)
    clean = Step(**given, p=p.clone(), q=p.clone())
    expected = clean.run()
    {**given, "p": p}[where][1, 2] = odd
    step = Step(**given, p=p, q=p)
    found = step.run()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    for ours, theirs in zip(step.statistics, clean.statistics, strict=True):
        assert torch.equal(ours[[0, 2]], theirs[[0, 2]])
    if where == "gradient":
        assert found[1].isnan().any()
    elif where == "p":
        assert step.statistics[4][1].isnan().any()


def test_a_row_with_a_factor_of_0_does_not_move_whatever_its_gradient() -> None:
    gradient, factors = torch.tensor([[1.0, -2.0], [torch.nan, torch.inf]]), torch.tensor([[2.0], [0.0]])
    step = Step(gradient, torch.rand(2, 2), factors=factors)
    found = step.run()
    assert bool(found[0].all())
    assert not found[1].any()
    assert step.statistics[3].tolist() == [[1], [0]]
    assert not any(bool(table[1].any()) for table in step.statistics)
    torch.testing.assert_close(step.statistics[0][0], 0.1 * torch.tensor([2.0, -4.0]))


def test_tables_of_other_dtypes_are_converted() -> None:
    torch.manual_seed(0)
    gradient, sensitivity = torch.randn(2, 3), torch.rand(2, 3)
    policy = Policy(alpha=1)
    expected = Step(gradient, sensitivity, alpha=torch.tensor(1.0), factors=torch.ones(2, 1)).run(policy)
    tables = {"alpha": torch.tensor(1), "factors": torch.ones(2, 1, dtype=torch.float64)}
    step = Step(gradient, sensitivity, **tables)
    step.values = step.values.double()
    assert torch.equal(step.run(policy), expected)
