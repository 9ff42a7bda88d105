import math

import pytest

from flexact import FlexActError
from flexact.studies.synthetic.options import Options


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": 0}, "--seeds must be a whole number from 1"),
        ({"first_seed": -1}, "--first-seed must be"),
        ({"epochs": 0}, "--epochs must be"),
        ({"distractors": -1}, "--distractors must be"),
        ({"hidden": -2}, "--hidden must be"),
        ({"label_noise": -0.1}, "--label-noise must be a finite number at least 0"),
        ({"label_noise": math.nan}, "--label-noise must be"),
        ({"slope": 0.0}, "--slope 0 leaves nothing to find"),
        ({"target_scale": math.inf}, "--target-scale must be a finite number"),
        ({"policy": "papr"}, "unknown policy 'papr'; did you mean 'paper'"),
        ({"truths": ("tahn",)}, "unknown truth 'tahn'; did you mean 'tanh'"),
        ({"truths": ()}, "--truths names nothing"),
        ({"truths": ("relu", "relu")}, "--truths names relu more than once"),
        ({"candidates": ("relu", "sigmod")}, "unknown candidate 'sigmod'; did you mean 'sigmoid'"),
        ({"candidates": ("relu",)}, "--candidates must name at least two candidates; got relu"),
        ({"candidates": ("relu", "tanh", "relu")}, "--candidates names relu more than once"),
        ({"candidates": ("relu", "original")}, "unknown candidate 'original'"),
        ({"truths": ("original",)}, "unknown truth 'original'"),
        ({"slope": "steep"}, "--slope must be a finite number"),
    ],
)
def test_bad_options_are_refused_with_the_given_value(changes, message):
    with pytest.raises(FlexActError, match=message):
        Options(**changes)


def test_errors_on_the_command_line_do_not_mention_python():
    for changes in ({"truths": ("tahn",)}, {"candidates": ("relu", "sigmod")}):
        with pytest.raises(FlexActError) as caught:
            Options(**changes)
        assert "register_candidate" not in str(caught.value)


def test_options_round_trip_through_plain_types():
    options = Options(seeds=2, models=("relu",), slope=3.0)
    assert Options.from_dict(options.to_dict()) == options
