import math

import pytest

from flexact import FlexActError
from flexact.studies.options import Options


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": 0}, "--seeds must be a whole number from 1"),
        ({"first_seed": -1}, "--first-seed must be"),
        ({"epochs": 0}, "--epochs must be"),
        ({"distractors": -1}, "--distractors must be"),
        ({"hidden": -2}, "--hidden must be"),
        ({"label_noise": -0.1}, "--label-noise must be a number of at least 0"),
        ({"label_noise": math.nan}, "--label-noise must be"),
        ({"slope": 0.0}, "--slope 0 leaves nothing to find"),
        ({"target_scale": math.inf}, "--target-scale must be a finite number"),
        ({"policy": "papr"}, "unknown policy 'papr'; did you mean 'paper'"),
        ({"truths": ("tahn",)}, "unknown truth 'tahn'; did you mean 'tanh'"),
        ({"truths": ()}, "--truths names nothing"),
        ({"truths": ("relu", "relu")}, "--truths may name each once; repeated: relu"),
        ({"candidates": ("relu", "sigmod")}, "unknown candidate 'sigmod'; did you mean 'sigmoid'"),
        ({"candidates": ("relu",)}, "at least two candidates"),
    ],
)
def test_bad_options_are_refused_with_what_was_given(changes, message):
    with pytest.raises(FlexActError, match=message):
        Options(**changes)


def test_options_describe_the_task_and_know_the_papers():
    assert Options().is_papers_task
    options = Options(slope=3.0, label_noise=0.05, distractors=10, target_scale=10.0, hidden=16)
    assert not options.is_papers_task
    assert (options.task.slope, options.task.label_noise, options.task.distractors) == (3.0, 0.05, 10)
    assert (options.task.target_scale, options.task.hidden) == (10.0, 16)
