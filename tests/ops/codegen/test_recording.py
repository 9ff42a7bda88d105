"""Tests of recorded programs: in-place operations, shared subexpressions, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from custom_activations import UNSUPPORTED, Function, register_unchecked
from flexact.candidates.registry import BUILT_IN, Candidate, lookup
from flexact.ops.codegen.recording import Program, Unsupported, record


def recorded(function: Function, slope: Function = torch.ones_like) -> Program:
    return record(Candidate("test", function, lambda h, value: slope(h), torch.nn.Identity))


def written_through_an_alias(h: Tensor) -> Tensor:
    x = h * 2
    alias = x.detach()
    x.mul_(3)
    return alias - h


def test_an_alias_sees_what_is_written_in_place() -> None:
    program = recorded(written_through_an_alias)
    assert [line.operands for line in program.lines] == [("h", 2.0), ("t0", 3.0), ("t1", "h")]
    assert program.value == "t2"


def test_an_expression_is_assigned_once() -> None:
    program = recorded(lambda h: torch.exp(-h) + torch.exp(-h), lambda h: -2 * torch.exp(-h))
    assert len(program.lines) == 4


def test_operations_on_numbers_alone_are_evaluated() -> None:
    program = recorded(lambda h: h * (torch.full_like(h, 0.25).sqrt() + 1))
    assert [line.operands for line in program.lines] == [("h", 1.5)]
    assert program.slope == 1.0


@pytest.mark.parametrize("name", [name for name in UNSUPPORTED if name != "by_size"])
def test_functions_that_are_no_straight_line_of_known_operations_are_refused(name: str) -> None:
    register_unchecked(name, UNSUPPORTED[name][0])
    with pytest.raises(Unsupported):
        record(lookup(name))


@pytest.mark.parametrize(
    "function",
    [
        lambda h: torch.div(h, 2, rounding_mode="floor"),
        lambda h: h.cumsum(0),
        lambda h: (h > 0) * (h < 1) * h,
        lambda h: h[:1] * h,
        lambda h: torch.from_numpy(h.numpy() * 2) + h,
        lambda h: h * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]),
        lambda h: h - h.mean(),
    ],
    ids=["rounded", "cumulative", "product of masks", "a slice", "numpy", "a table", "a mean"],
)
def test_unknown_options_types_and_tensors_are_refused(function: Function) -> None:
    with pytest.raises(Unsupported):
        recorded(function)


@pytest.mark.parametrize("candidate", BUILT_IN, ids=lambda candidate: candidate.name)
def test_every_built_in_candidate_has_a_program(candidate: Candidate) -> None:
    assert record(candidate).value is not None
