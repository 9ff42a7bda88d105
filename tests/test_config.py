"""FlexConfig: every bad value is an error that says so, and what is saved comes back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexact import FlexActError, FlexConfig
from flexact.config import PAPER_CANDIDATES

NAN, INF = float("nan"), float("inf")
FIELDS = [field.name for field in dataclasses.fields(FlexConfig)]


def test_the_original_is_the_first_of_the_default_candidates() -> None:
    assert FlexConfig().candidates == ("original", "relu", "gelu", "silu", "elu", "tanh")


def test_the_papers_candidates_are_five() -> None:
    assert FlexConfig.paper().candidates == ("relu", "sigmoid", "tanh", "leaky_relu", "identity")


def test_sites_pick_together_by_default_and_each_for_itself_in_the_paper() -> None:
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
def test_a_round_drops_half_where_sites_pick_together_and_one_elsewhere(changes: dict[str, Any], drops: str) -> None:
    assert FlexConfig(**changes).elimination == drops


def test_papers_policy_has_the_papers_noise_and_weight() -> None:
    paper = FlexConfig.paper()
    assert (paper.noise, paper.alpha, paper.alpha_kind, paper.eliminate) == (1.0, 0.3, "absolute", "none")
    assert FlexConfig.paper(alpha=0.1, seed=4) == dataclasses.replace(paper, alpha=0.1, seed=4)


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FlexConfig().alpha = 1.0  # type: ignore[misc]


def test_candidates_become_a_tuple() -> None:
    assert FlexConfig(candidates=["relu", "tanh"]).candidates == ("relu", "tanh")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("candidates", "told"),
    [
        (("relu", "tahn"), "unknown candidate 'tahn'; did you mean 'tanh'"),
        ((), "at least two candidates; got 0"),
        (("relu",), "at least two candidates; got 1"),
        (("relu", "tanh", "relu"), "repeated: relu"),
        ("relu", "must be a sequence of names"),
        (None, "must be a sequence of names"),
        (("relu", 3), "given by its name; got 3"),
        (("relu", abs), "flexact.register_candidate"),
    ],
)
def test_bad_candidates_are_refused(candidates: Any, told: str) -> None:
    with pytest.raises(FlexActError, match=told):
        FlexConfig(candidates=candidates)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [0, 0.0, -1.0, NAN, INF, "hot", None, True]),
        ("final_temperature", [0, -0.5, NAN, INF]),
        ("noise", [-1, NAN, INF, "on", None]),
        ("alpha", [-0.1, NAN, INF, "0.3", None]),
        ("pace", [0, -1, NAN]),
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
        with pytest.raises(FlexActError, match=field) as refusal:
            FlexConfig(**{field: value})
        assert repr(value) in str(refusal.value)


@pytest.mark.parametrize(
    ("field", "value", "nearest"),
    [
        ("forward", "soff", "soft"),
        ("eval", "blnd", "blend"),
        ("anneal", "exponental", "exponential"),
        ("correction", "grad_norm", "grad_norm_kl"),
        ("advantage", "normalised", "normalized"),
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
    with pytest.raises(FlexActError, match=f"{field}='{value}'.*'{nearest}'"):
        FlexConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [True, False, 1])
def test_an_elimination_that_is_no_choice_is_refused(value: Any) -> None:
    with pytest.raises(FlexActError, match=f"eliminate={value} .*half, one, none"):
        FlexConfig(eliminate=value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"warmup": 0.8}, "warmup=0.8 must end before commit_at=0.7"),
        ({"commit_at": None, "eliminate": "one"}, "eliminate='one' ends in a commitment"),
        ({"commit_at": None, "rewind": True}, "rewind=True happens at the commitment"),
        ({"pick_by": "trial", "share": "site"}, "share='site'"),
        ({"pick_by": "trial", "granularity": "channel"}, "granularity='channel'"),
        ({"pick_by": "trial", "rewind": False}, "rewind=False"),
    ],
    ids=str,
)
def test_choices_that_contradict_each_other_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(FlexActError, match=told):
        FlexConfig(**changes)


def test_a_policy_that_never_commits_needs_no_other_choice() -> None:
    assert FlexConfig(commit_at=None).commit_at is None
    assert FlexConfig(commit_at=None, eliminate="none") != FlexConfig(commit_at=None)


configs = st.builds(
    FlexConfig,
    candidates=st.lists(st.sampled_from([*PAPER_CANDIDATES, "original", "gelu"]), min_size=2, unique=True).map(tuple),
    forward=st.sampled_from(["soft", "hard"]),
    eval=st.sampled_from(["blend", "pick"]),
    noise=st.floats(0, 5),
    temperature=st.floats(0.001, 10),
    correction=st.sampled_from(["none", "grad_norm_kl", "clip_logit_gradient", "clipped_norm_kl", "output_norm"]),
    alpha=st.floats(0, 3),
    lam=st.floats(0.01, 3) | st.just("temperature"),
    granularity=st.sampled_from(["layer", "channel"]),
    share=st.sampled_from(["model", "site"]),
    eliminate=st.sampled_from(["half", "one", "none", None]),
    trial_steps=st.integers(1, 1000),
    rewind=st.sampled_from([True, False, None]),
    seed=st.integers(),
)


@given(config=configs)
def test_dictionary_and_json_give_the_same_config_back(config: FlexConfig) -> None:
    assert FlexConfig.from_dict(config.to_dict()) == config
    assert FlexConfig.from_json(config.to_json()) == config
    assert json.loads(config.to_json()) == config.to_dict()


def test_saved_config_says_its_version() -> None:
    assert FlexConfig().to_dict()["flexact_config"] == 1


def test_fields_not_saved_keep_their_defaults() -> None:
    assert FlexConfig.from_dict({"flexact_config": 1, "seed": 3}) == FlexConfig(seed=3)


def test_a_newer_version_asks_for_an_update() -> None:
    with pytest.raises(FlexActError, match="version 2"):
        FlexConfig.from_dict({**FlexConfig().to_dict(), "flexact_config": 2})


@pytest.mark.parametrize("version", [0, -1, "1", 1.0, None, True])
def test_a_version_that_is_none_is_refused(version: Any) -> None:
    with pytest.raises(FlexActError, match="version"):
        FlexConfig.from_dict({"flexact_config": version})


@pytest.mark.parametrize("data", [None, [], "text", 3, {}, {"alpha": 0.3}])
def test_what_is_no_config_is_refused(data: Any) -> None:
    with pytest.raises(FlexActError, match="FlexConfig"):
        FlexConfig.from_dict(data)


def test_an_unknown_field_suggests_the_nearest() -> None:
    with pytest.raises(FlexActError, match=r"'temprature'.*'temperature'"):
        FlexConfig.from_dict({"flexact_config": 1, "temprature": 1.0})
    with pytest.raises(FlexActError, match="field 5"):
        FlexConfig.from_dict({"flexact_config": 1, 5: 1.0})  # type: ignore[dict-item]


@given(length=st.integers(0, len(FlexConfig().to_json()) - 1))
def test_truncated_json_is_refused(length: int) -> None:
    with pytest.raises(FlexActError, match=r"JSON .*line"):
        FlexConfig.from_json(FlexConfig().to_json()[:length])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(10**400, 10**401) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@settings(max_examples=300)
@given(field=st.sampled_from([*FIELDS, "flexact_config"]), value=json_values)
def test_hand_edited_json_is_a_config_or_an_error_of_ours(field: str, value: Any) -> None:
    edited = json.dumps({**FlexConfig().to_dict(), field: value})
    try:
        config = FlexConfig.from_json(edited)
    except FlexActError:
        return
    assert FlexConfig.from_json(config.to_json()) == config
