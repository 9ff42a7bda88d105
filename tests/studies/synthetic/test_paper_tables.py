"""Tests that the paper's numbers are shown only next to results for the same task and policy."""

from dataclasses import replace

import pytest

from flexact.studies.synthetic.options import Options
from flexact.studies.synthetic.tables import VARIANTS, synthetic_row, variants

OTHER_TASKS = [
    {"slope": 3.0},
    {"label_noise": 0.05},
    {"distractors": 10},
    {"target_scale": 10.0},
    {"hidden": 4},
    {"epochs": 50},
]
OTHER_POLICIES = [{"policy": "default"}, {"candidates": ("relu", "sigmoid", "tanh")}]


def test_on_the_papers_task_there_is_a_number_for_every_truth() -> None:
    for options in (Options(), Options(policy="literal"), Options(seeds=20, first_seed=1000)):
        assert synthetic_row("flexact-a0.3", options)["sigmoid"] == "0.0011 ± 0.0006"
        assert variants(replace(options, truths=("sigmoid",))) == VARIANTS


@pytest.mark.parametrize("changes", OTHER_TASKS + OTHER_POLICIES)
def test_another_task_or_policy_has_no_number_of_the_paper(changes: dict[str, object]) -> None:
    options = Options(**changes)
    assert synthetic_row("flexact-a0.3", options) == {}
    assert variants(replace(options, truths=("sigmoid",))) == {}


def test_a_fixed_activation_depends_on_the_task_only() -> None:
    for changes in OTHER_POLICIES:
        assert synthetic_row("relu", Options(**changes))["tanh"] == "0.4328 ± 0.4287"
    for changes in OTHER_TASKS:
        assert synthetic_row("relu", Options(**changes)) == {}


def test_numbers_that_the_paper_lacks_are_left_out() -> None:
    assert synthetic_row("relu", Options(truths=("gelu", "tanh"))) == {"tanh": "0.4328 ± 0.4287"}
    assert synthetic_row("relu", Options(truths=("gelu",))) == {}
    assert synthetic_row("flexact-default", Options()) == {}
    assert variants(Options(truths=("relu",))) == variants(Options()) == {}
