"""Tests of FlexConfig: bad values are clear errors, and a saved config round-trips."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexact import FlexActError, FlexConfig, Policy
from flexact.config import PAPER_CANDIDATES

NAN, INF = float("nan"), float("inf")
FIELDS = [field.name for field in dataclasses.fields(FlexConfig)]
POLICY_FIELDS = [field.name for field in dataclasses.fields(Policy)]


def test_the_original_is_the_first_of_the_default_candidates() -> None:
    assert FlexConfig().candidates == ("original", "relu", "gelu", "silu", "elu", "tanh")


def test_the_papers_candidates_are_five() -> None:
    assert FlexConfig.paper().candidates == ("relu", "sigmoid", "tanh", "leaky_relu", "identity")


def test_sites_pick_together_by_default_and_independently_in_the_paper() -> None:
    default, paper = FlexConfig(), FlexConfig.paper()
    assert (default.share, default.pick_by, default.rewind) == ("model", "auto", None)
    assert (paper.share, paper.pick_by, paper.rewind) == ("site", "blend", False)


@pytest.mark.parametrize(
    ("changes", "drops"),
    [
        ({}, "half"),
        ({"share": "site"}, "one"),
        ({"granularity": "channel"}, "one"),
        ({"commit_at": None}, "none"),
        ({"eliminate": "one"}, "one"),
        ({"share": "site", "eliminate": "half"}, "half"),
        ({"eliminate": "none"}, "none"),
    ],
    ids=str,
)
def test_a_round_drops_half_if_sites_pick_together_and_one_otherwise(changes: dict[str, Any], drops: str) -> None:
    assert FlexConfig(**changes).elimination == drops


def test_papers_policy_has_the_papers_noise_and_weight() -> None:
    paper, policy = FlexConfig.paper(), Policy.paper()
    assert (policy.noise, policy.alpha, policy.alpha_kind, policy.logit_step) == (1.0, 0.3, "absolute", "optimizer")
    assert (paper.policy, paper.eliminate) == (policy, "none")


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FlexConfig().seed = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        FlexConfig().policy.alpha = 1.0  # type: ignore[misc]


def test_the_literal_policy_is_the_papers_with_the_kl_on_the_sampled_p_and_lambda_tied_to_the_temperature() -> None:
    assert Policy.literal() == Policy.paper(kl_on="p", lam="temperature")


def test_a_field_of_the_policy_given_to_the_config_says_where_it_belongs() -> None:
    with pytest.raises(FlexActError, match=r"give policy=Policy\(alpha=0.3\)"):
        FlexConfig(alpha=0.3)  # type: ignore[call-arg]
    with pytest.raises(FlexActError, match=r"give policy=Policy\(noise=1.0\)"):
        dataclasses.replace(FlexConfig(), noise=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize("value", [None, "paper", {"alpha": 0.3}, FlexConfig()], ids=str)
def test_an_object_that_is_no_policy_is_refused(value: Any) -> None:
    with pytest.raises(FlexActError, match="policy must be a Policy"):
        FlexConfig(policy=value)


def test_fields_of_the_policy_can_be_changed_in_a_copy() -> None:
    config = FlexConfig.paper(seed=4)
    assert config.with_policy(alpha=0.1) == dataclasses.replace(config, policy=Policy.paper(alpha=0.1))


@pytest.mark.parametrize(
    ("policy", "uses_kl", "adds_to_loss", "pulls_logits", "acts"),
    [
        (Policy(), True, False, True, True),
        (Policy.paper(), True, True, False, False),
        (Policy.paper(alpha=0.0), False, False, False, False),
        (Policy.paper(correction="clipped_norm_kl"), True, True, False, False),
        (Policy.paper(correction="clip_logit_gradient"), False, False, False, True),
        (Policy.paper(correction="none", logit_step="schedule"), False, False, False, True),
    ],
    ids=str,
)
def test_where_the_kl_of_a_policy_acts(
    policy: Policy, uses_kl: bool, adds_to_loss: bool, pulls_logits: bool, acts: bool
) -> None:
    assert (policy.uses_kl, policy.adds_to_loss, policy.pulls_logits) == (uses_kl, adds_to_loss, pulls_logits)
    assert policy.acts_before_steps is acts


def test_candidates_become_a_tuple() -> None:
    assert FlexConfig(candidates=["relu", "tanh"]).candidates == ("relu", "tanh")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        (("relu", "tahn"), "unknown candidate 'tahn'; did you mean 'tanh'"),
        ((), "at least two candidates; got 0"),
        (("relu",), "at least two candidates; got 1"),
        (("relu", "tanh", "relu"), r"got relu, tanh, relu\. Repeated: relu\.$"),
        (("elu", "celu"), r"got elu, celu \(= elu\)\. Repeated: elu\.$"),
        ("relu", "must be a sequence of names"),
        (None, "must be a sequence of names"),
        (("relu", 3), "must be a sequence of names"),
        (("relu", abs), "flexact.register_candidate"),
    ],
)
def test_bad_candidates_are_refused(candidates: Any, message: str) -> None:
    with pytest.raises(FlexActError, match=message):
        FlexConfig(candidates=candidates)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [0, 0.0, -1.0, NAN, INF, "hot", None, True]),
        ("final_temperature", [0, -0.5, NAN, INF]),
        ("noise", [-1, NAN, INF, "on", None]),
        ("alpha", [-0.1, NAN, INF, "0.3", None]),
        ("logit_step_size", [0, -1, NAN]),
        ("round_steps", [0, -1, 1.5, True, "400"]),
        ("settle", [-0.1, 1.0, NAN]),
        ("clip", [0, -1, NAN]),
        ("lam", [0, -1, NAN, "tau"]),
        ("init_probability", [0, 1, 1.5, NAN]),
        ("warmup", [-0.1, 1.0, NAN]),
        ("commit_at", [0, 1.1, NAN, "end", True]),
        ("seed", [1.5, "0", None, True]),
        ("channel_dim", [1.0, None]),
        ("trial_steps", [0, -1, 1.5, True, None]),
        ("rewind", [1, "false", 0.5]),
    ],
)
def test_bad_numbers_are_refused_and_shown(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(FlexActError, match=f"{field} must be") as refusal:
            (Policy if field in POLICY_FIELDS else FlexConfig)(**{field: value})
        assert repr(value) in str(refusal.value)


def test_an_error_about_round_steps_names_the_other_choices() -> None:
    with pytest.raises(FlexActError, match=r"from 1 to [0-9]+, 'fill' or None; got 'full'"):
        FlexConfig(round_steps="full")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "nearest"),
    [
        ("forward", "soff", "soft"),
        ("eval", "blnd", "blend"),
        ("correction", "grad_norm", "grad_norm_kl"),
        ("alpha_kind", "relativ", "relative"),
        ("alpha_schedule", "fall", "falling"),
        ("kl_on", "pie", "pi"),
        ("granularity", "channels", "channel"),
        ("init", "orignal", "original"),
        ("share", "modell", "model"),
        ("pick_by", "trail", "trial"),
        ("eliminate", "hal", "half"),
    ],
)
def test_a_misspelt_choice_suggests_the_nearest(field: str, value: str, nearest: str) -> None:
    with pytest.raises(FlexActError, match=f"unknown {field} '{value}'; did you mean '{nearest}'"):
        (Policy if field in POLICY_FIELDS else FlexConfig)(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [True, False, 1])
def test_an_invalid_elimination_is_refused(value: Any) -> None:
    with pytest.raises(FlexActError, match=f"unknown eliminate {value}.*half, one, none"):
        FlexConfig(eliminate=value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup": 0.8}, "warmup=0.8 must end before commit_at=0.7"),
        ({"commit_at": None, "eliminate": "one"}, "eliminate='one' needs a commitment"),
        ({"commit_at": None, "rewind": True}, "rewind=True needs a commitment"),
        ({"pick_by": "trial", "share": "site"}, "share='site'"),
        ({"pick_by": "trial", "granularity": "channel"}, "granularity='channel'"),
        ({"pick_by": "trial", "rewind": False}, "rewind=False"),
        ({"pick_by": "trial", "warmup": 0.1}, "warmup=0.1"),
    ],
    ids=str,
)
def test_contradictory_choices_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FlexActError, match=message):
        FlexConfig(**changes)


def test_a_policy_that_never_commits_accepts_the_other_defaults() -> None:
    assert FlexConfig(commit_at=None).commit_at is None
    assert FlexConfig(commit_at=None, eliminate="none") != FlexConfig(commit_at=None)


policies = st.builds(
    Policy,
    forward=st.sampled_from(["soft", "hard"]),
    noise=st.floats(0, 5),
    temperature=st.floats(0.001, 10),
    correction=st.sampled_from(["none", "grad_norm_kl", "clip_logit_gradient", "clipped_norm_kl", "output_norm"]),
    alpha=st.floats(0, 3),
    lam=st.floats(0.01, 3) | st.just("temperature"),
)
configs = st.builds(
    FlexConfig,
    candidates=st.lists(st.sampled_from([*PAPER_CANDIDATES, "original", "gelu"]), min_size=2, unique=True).map(tuple),
    eval=st.sampled_from(["blend", "pick"]),
    granularity=st.sampled_from(["layer", "channel"]),
    share=st.sampled_from(["model", "site"]),
    eliminate=st.sampled_from(["half", "one", "none", None]),
    trial_steps=st.integers(1, 1000),
    rewind=st.sampled_from([True, False, None]),
    seed=st.integers(),
    policy=policies,
)


@given(config=configs)
def test_a_config_round_trips_through_dictionary_and_json(config: FlexConfig) -> None:
    assert FlexConfig.from_dict(config.to_dict()) == config
    assert FlexConfig.from_json(config.to_json()) == config
    assert json.loads(config.to_json()) == config.to_dict()


def test_a_saved_config_has_its_version() -> None:
    assert FlexConfig().to_dict()["flexact_config"] == 2


def test_fields_not_saved_keep_their_defaults() -> None:
    assert FlexConfig.from_dict({"flexact_config": 2, "seed": 3}) == FlexConfig(seed=3)
    assert FlexConfig.from_dict({"flexact_config": 2, "policy": {"logit_step_size": 2.0}}) == FlexConfig(
        policy=Policy(logit_step_size=2.0)
    )


@pytest.mark.parametrize("version", [1, 3, 0, -1, "2", None, True])
def test_another_version_is_refused(version: Any) -> None:
    with pytest.raises(FlexActError, match="only reads version 2"):
        FlexConfig.from_dict({"flexact_config": version})


@pytest.mark.parametrize("data", [None, [], "text", 3, {}, {"alpha": 0.3}])
def test_an_object_that_is_no_config_is_refused(data: Any) -> None:
    with pytest.raises(FlexActError, match="FlexConfig"):
        FlexConfig.from_dict(data)


def test_an_unknown_field_suggests_the_nearest() -> None:
    with pytest.raises(FlexActError, match="unknown field of Policy 'temprature'; did you mean 'temperature'"):
        FlexConfig.from_dict({"flexact_config": 2, "policy": {"temprature": 1.0}})
    with pytest.raises(FlexActError, match="unknown field of FlexConfig 'rewnd'; did you mean 'rewind'"):
        FlexConfig.from_dict({"flexact_config": 2, "rewnd": True})
    with pytest.raises(FlexActError, match="unknown field of FlexConfig 5"):
        FlexConfig.from_dict({"flexact_config": 2, 5: 1.0})  # type: ignore[dict-item]


@given(length=st.integers(0, len(FlexConfig().to_json()) - 1))
def test_truncated_json_is_refused(length: int) -> None:
    with pytest.raises(FlexActError, match=r"JSON .*line"):
        FlexConfig.from_json(FlexConfig().to_json()[:length])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(10**400, 10**401) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@settings(max_examples=100)
@given(field=st.sampled_from([*FIELDS, *POLICY_FIELDS, "flexact_config"]), value=json_values)
def test_hand_edited_json_is_a_config_or_a_flexact_error(field: str, value: Any) -> None:
    fields = FlexConfig().to_dict()
    (fields["policy"] if field in POLICY_FIELDS else fields)[field] = value
    try:
        config = FlexConfig.from_json(json.dumps(fields))
    except FlexActError:
        return
    assert FlexConfig.from_json(config.to_json()) == config
