"""Tests of `selection`: noise-free probabilities, margins, and when and why a candidate was dropped."""

from __future__ import annotations

import builtins
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import flexact
from flexact import FlexAct, FlexActError, FlexConfig, Policy, convert, selection
from flexact.policy.evidence import Contest

FIVE = ("relu", "sigmoid", "tanh", "leaky_relu", "identity")
BY_SITE = FlexConfig(candidates=FIVE, share="site", pick_by="blend", rewind=False)


def network(config: FlexConfig = BY_SITE) -> nn.Sequential:
    return convert(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh()), "*", config=config)


def set_logits(site: FlexAct, logits: list[float]) -> None:
    with torch.no_grad():
        site.logits.copy_(torch.tensor(logits))


def test_rows_have_the_softmax_of_the_logits_and_the_lead_over_the_runner_up() -> None:
    model = network()
    logits = [0.5, -1.0, 2.0, 1.5, 0.0]
    set_logits(model[3], logits)
    row = selection(model)[1]
    p = torch.softmax(torch.tensor(logits, dtype=torch.float64), 0).tolist()
    assert (row.site, row.channel, row.pick, row.runner_up) == ("3", None, "tanh", "leaky_relu")
    assert row.probability == pytest.approx(p[2], rel=1e-6)
    assert row.margin == pytest.approx(p[2] - p[3], rel=1e-5)
    assert list(row.probabilities) == ["relu", "sigmoid", "tanh", "leaky_relu", "identity"]
    assert list(row.probabilities.values()) == pytest.approx(p, rel=1e-6)
    assert row.dropped == {}
    assert not row.committed


def test_noise_and_temperature_do_not_affect_the_selection() -> None:
    model = network(FlexConfig(candidates=FIVE, policy=Policy(noise=5.0, temperature=0.01)))
    set_logits(model[1], [0.1, 0.2, 0.3, 0.4, 0.5])
    before = selection(model).to_dict()
    for _ in range(5):
        model(torch.randn(2, 3))
        assert selection(model).to_dict() == before
    assert selection(model)[0].pick == "identity"


def test_a_dropped_candidate_has_no_probability_and_a_step() -> None:
    model = network()
    set_logits(model[1], [0.0, 3.0, 1.0, 2.0, -1.0])
    model[1].keep(len(model[1].alive) - 1, step=7)
    model[1].keep(len(model[1].alive) - 1, step=9)
    row = selection(model)[0]
    assert row.dropped == {"identity": 7, "relu": 9}
    assert row.probabilities["identity"] == row.probabilities["relu"] == 0
    left = torch.softmax(torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64), 0).tolist()
    assert [row.probabilities[name] for name in ("sigmoid", "tanh", "leaky_relu")] == pytest.approx(left, rel=1e-6)
    assert (row.pick, row.runner_up) == ("sigmoid", "leaky_relu")


def test_a_site_that_was_committed_by_hand_is_undecided_and_has_no_lead() -> None:
    """Its runner-up is the likeliest of the candidates that were dropped last."""
    model = network()
    set_logits(model[1], [0.0, 0.0, 0.1, 0.05, 0.0])
    model[1].commit(step=12)
    row = selection(model)[0]
    assert (row.pick, row.probability, row.margin, row.runner_up) == ("tanh", 1.0, 1.0, "leaky_relu")
    assert (row.committed, row.decided, row.lead, row.evidence) == (True, False, None, {})
    assert set(row.dropped.values()) == {12}
    assert "tanh (undecided)" in str(selection(model))


def lone_site(**choices: object) -> nn.Sequential:
    """A ReLU between two candidates. Its input is the network's input."""
    config = FlexConfig(candidates=("original", "tanh"), round_steps=20, commit_at=0.5, rewind=False, pick_by="blend")
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.zero_()
    return convert(model, config=dataclasses.replace(config, **choices))


def blended(signs: Sequence[int], **choices: object) -> tuple[nn.Module, list[float]]:
    """Trains a model until it commits, one step per sign. Returns tanh's lead over relu in each step.

    The loss is the site's output, x = p·relu + (1 − p)·tanh, or its negative. The advantages of the two are (1 − p)·D
    and −p·D, where D = Σ relu − tanh > 0. Scaled to norm 1, they differ by 1 / √(p² + (1 − p)²).
    """
    model = lone_site(**choices)
    optimizer = torch.optim.SGD(flexact.param_groups(model, lr=0.0))
    schedule = flexact.Schedule(model, total_steps=2 * len(signs), optimizer=optimizer)
    ahead = []
    for sign in signs:
        p = selection(model)[0].probabilities["relu"]
        ahead.append(sign / math.sqrt(p**2 + (1 - p) ** 2))
        (sign * model(torch.tensor([[-1.0], [2.0]])).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert schedule.committed
    return model, ahead


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    n, mean = len(values), sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)


def test_a_blend_keeps_the_mean_lead_its_standard_error_and_the_steps() -> None:
    model, ahead = blended([1, 1, 1, -1, 1] * 4)
    row = selection(model)[0]
    margin, error = mean_and_error(ahead)
    assert (row.pick, row.runner_up, row.dropped) == ("tanh", "relu", {"relu": 20})
    assert row.lead is row.evidence["relu"]
    assert row.lead.margin == pytest.approx(margin, rel=1e-4)
    assert row.lead.standard_error == pytest.approx(error, rel=1e-3)
    assert row.lead.steps == 20
    assert row.lead.z == pytest.approx(margin / error, rel=1e-3)
    assert margin > 2 * error
    assert row.decided


@pytest.mark.parametrize("eliminate", [None, "none"])
def test_a_site_without_significant_evidence_is_undecided_and_keeps_its_original(eliminate: str | None) -> None:
    """The lead over a candidate that was ahead, but not significantly, is negative."""
    model, ahead = blended([1, -1, 1, 1, -1] * 4, eliminate=eliminate)
    row = selection(model)[0]
    margin, error = mean_and_error(ahead)
    assert 0 < margin < 2 * error
    assert (row.pick, row.runner_up, row.decided) == ("relu", "tanh", False)
    assert row.lead.margin == pytest.approx(-margin, rel=1e-4)
    assert row.lead.standard_error == pytest.approx(error, rel=1e-3)
    assert "relu (undecided)" in str(selection(model))


def test_the_original_is_decided_on_significant_evidence() -> None:
    model, ahead = blended([-1, -1, -1, 1, -1] * 4)
    row = selection(model)[0]
    assert (row.pick, row.runner_up, row.decided) == ("relu", "tanh", True)
    assert row.lead.margin == pytest.approx(-mean_and_error(ahead)[0], rel=1e-4)
    assert "undecided" not in str(selection(model))


def tried(*losses: Sequence[float], candidates: tuple[str, ...] = ("original", "tanh")) -> nn.Module:
    """Returns a model whose candidates had these losses in a trial."""
    steps = len(losses[0])
    model = lone_site(candidates=candidates, pick_by="trial", trial_steps=steps, rewind=None)
    optimizer = torch.optim.SGD(flexact.param_groups(model, lr=0.0))
    schedule = flexact.Schedule(model, total_steps=10 * steps, optimizer=optimizer)
    for loss in [one for of_candidate in losses for one in of_candidate]:
        optimizer.step()
        schedule.step(loss)
    assert schedule.committed
    return model


RELU = [9.0] * 8 + [1.0, 2.0, 1.5, 1.2]  # the last third is compared
BETTER, BEST, NAN = [9.0] * 8 + [1.2, 1.6, 1.3, 1.3], [9.0] * 8 + [0.8, 1.7, 1.3, 0.9], [9.0] * 8 + [math.nan] * 4


def test_a_trial_keeps_the_mean_difference_of_losses() -> None:
    row = selection(tried(RELU, BEST))[0]
    margin, error = mean_and_error([0.2, 0.3, 0.2, 0.3])
    assert (row.pick, row.runner_up, row.decided, row.dropped) == ("tanh", "relu", True, {"relu": 24})
    assert (row.lead.margin, row.lead.standard_error) == pytest.approx((margin, error), rel=1e-5)
    assert row.lead.steps == 4


def test_an_undecided_trial_keeps_the_original() -> None:
    model = tried(RELU, BETTER)
    row = selection(model)[0]
    margin, error = mean_and_error([-0.2, 0.4, 0.2, -0.1])
    assert 0 < margin < 2 * error
    assert (row.pick, row.runner_up, row.decided) == ("relu", "tanh", False)
    assert (row.lead.margin, row.lead.standard_error) == pytest.approx((-margin, error), rel=1e-5)


def test_the_lead_over_a_diverged_candidate_is_infinite_and_null_in_json() -> None:
    chosen = selection(tried(RELU, NAN))
    assert chosen[0].lead == Contest(math.inf, 0.0, 4)
    assert (chosen[0].pick, chosen[0].decided) == ("relu", True)
    assert "diverged" in str(chosen)
    text = json.dumps(chosen.to_dict(), allow_nan=False)
    assert json.loads(text)["rows"][0]["evidence"]["tanh"] == {"margin": None, "standard_error": 0.0, "steps": 4}


def with_evidence(dropped: dict[str, tuple[int, float, float]]) -> nn.Module:
    """A committed site: step, margin and standard error by dropped candidate."""
    site = FlexAct(("relu", "tanh", "gelu", "silu"))
    for name, (step, margin, error) in dropped.items():
        goes = torch.tensor([[candidate == name for candidate in site.candidates]])
        site.drop(goes, step, torch.tensor([margin, error, 50.0]).expand(1, 4, 3))
    return site


def test_the_runner_up_is_the_last_drop_with_the_smallest_margin_in_standard_errors() -> None:
    site = with_evidence({"silu": (1, 0.1, 1.0), "gelu": (9, 0.5, 0.1), "relu": (9, 0.8, 0.2)})
    row = selection(site)[0]
    assert (row.pick, row.runner_up, row.decided) == ("tanh", "relu", True)
    assert row.lead.z == pytest.approx(4.0)
    assert not row.evidence["silu"].is_significant


def test_a_lead_of_zero_is_not_significant() -> None:
    assert not Contest(0.0, 0.0, 5).is_significant
    assert Contest(0.1, 0.0, 5).is_significant
    assert not Contest(-0.1, 0.0, 5).is_significant


def test_before_training_every_row_is_undecided() -> None:
    chosen = selection(convert(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1), nn.Tanh()), "*"))
    lines = str(chosen).splitlines()
    assert [line.split()[1] for line in lines[2:4]] == ["undecided", "undecided"]
    assert lines[-1] == "undecided: no candidate leads yet"
    assert all(row.undecided for row in chosen)
    assert not any(row.decided for row in chosen)


def test_nan_probabilities_are_null_in_json() -> None:
    model = network()
    set_logits(model[1], [math.nan] * 5)
    data = selection(model).to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert (data["rows"][0]["probability"], data["rows"][0]["pick"]) == (None, None)  # nothing leads


@pytest.mark.parametrize("name", ["act", "encoder.layers.11.intermediate_block.intermediate_activation_function"])
def test_the_table_of_three_candidates_fits_120_columns(name: str) -> None:
    names = ("leaky_relu", "sigmoid", "softsign")
    model = nn.Module()
    for number in range(2):
        site = FlexAct(names)
        for step, candidate in enumerate(names[:-1], start=1):
            goes = torch.tensor([[one == candidate for one in names]])
            site.drop(goes, 1500 * step, torch.tensor([0.04321, 0.00321, 1500.0]).expand(1, 3, 3))
        inner = model
        for part in f"part{number}.{name}".split(".")[:-1]:
            inner.add_module(part, nn.Module())
            inner = inner.get_submodule(part)
        inner.add_module(name.rpartition(".")[2], site)
    lines = str(selection(model)).splitlines()
    assert max(map(len, lines)) <= 120
    assert "softsign" in lines[2]
    assert "0.0432 ± 0.0032  13.5  1500   sigmoid" in lines[2]
    assert lines[2].endswith("leaky_relu (1500), sigmoid (3000)")
    assert lines[2].split()[0] != lines[3].split()[0]


def test_a_dropped_leader_is_not_the_pick() -> None:
    """The largest logit may be that of a dropped candidate."""
    site = FlexAct(("relu", "tanh", "sigmoid"))
    site.drop(torch.tensor([[True, False, False]]), step=1)
    set_logits(site, [9.0, 0.0, 1.0])
    row = selection(site)[0]
    assert (row.pick, row.runner_up) == ("sigmoid", "tanh")


def test_picks_are_by_site_and_channels_are_numbered() -> None:
    config = FlexConfig(granularity="channel", candidates=("relu", "tanh"))
    model = convert(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), config=config, example_inputs=torch.randn(1, 3))
    set_logits(model[1], [0.0, 1.0, 1.0, 0.0])
    chosen = selection(model)
    assert chosen.picks == {"1:0": "tanh", "1:1": "relu"}
    assert [row.channel for row in chosen] == [0, 1]
    assert "1:1   relu ?" in str(chosen)


def test_it_is_a_sequence_of_rows() -> None:
    chosen = selection(network())
    assert len(chosen) == 2
    assert [row.site for row in chosen] == ["1", "3"]
    assert chosen[-1] is chosen.rows[1]


def test_the_dictionary_is_plain_json_with_a_version() -> None:
    model = network()
    model[1].keep(len(model[1].alive) - 1, step=3)
    data = selection(model).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["flexact_selection"] == 3
    assert [row["site"] for row in data["rows"]] == ["1", "3"]
    assert set(data["rows"][0]) == {
        "original",
        "site",
        "channel",
        "pick",
        "probability",
        "runner_up",
        "margin",
        "committed",
        "decided",
        "probabilities",
        "dropped",
        "evidence",
        "trying",
    }


def test_the_frame_has_a_row_per_site_and_a_column_per_candidate() -> None:
    model = nn.Sequential(FlexAct(("relu", "tanh")), FlexAct(("relu", "gelu", "silu")))
    set_logits(model[0], [1.0, 0.0])
    frame = selection(model).to_frame()
    assert list(frame["site"]) == ["0", "1"]
    assert frame["pick"][0] == "relu"
    assert frame["p(relu)"][0] == pytest.approx(torch.softmax(torch.tensor([1.0, 0.0]), 0)[0].item())
    assert frame["p(tanh)"].isna().tolist() == [False, True]
    assert set(frame.columns) >= {"site", "pick", "probability", "margin", "runner_up", "committed", "p(gelu)"}


def test_the_frame_has_the_evidence_against_the_runner_up() -> None:
    site = with_evidence({"silu": (1, 0.1, 1.0), "gelu": (9, 0.5, 0.125), "relu": (9, 0.75, 0.125)})
    frame = selection(nn.Sequential(site, FlexAct(("relu", "tanh")))).to_frame()
    columns = ["lead", "standard_error", "z", "steps", "decided"]
    assert frame[columns].iloc[0].tolist() == [0.5, 0.125, 4.0, 50.0, True]
    assert frame[columns].isna().iloc[1].tolist() == [True, True, True, True, False]
    assert not frame["decided"][1]


def test_without_pandas_the_frame_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_pandas(name: str, *args: object, **kwargs: object) -> object:
        if name.partition(".")[0] == "pandas":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pandas)
    with pytest.raises(FlexActError, match=r"flexact\[frame\]"):
        selection(network()).to_frame()


def test_it_prints_as_an_aligned_table() -> None:
    model = network()
    set_logits(model[1], [0.0, 0.0, 4.0, 0.0, 1.0])
    model[1].keep(len(model[1].alive) - 1, step=30)
    lines = str(selection(model)).splitlines()
    assert repr(selection(model)) == str(selection(model))
    assert lines[0].split("  ")[0] == "site"
    assert set(lines[1]) == {"-"}
    assert lines[2].startswith("1     tanh ?")
    assert lines[2].endswith("relu (30)")
    assert lines[-2:] == ["? not committed yet", "undecided: no candidate leads yet"]
    column = lines[0].index("probability")
    assert all(line[column].isdigit() for line in lines[2:4])
    assert lines[3].startswith("3     undecided")
    flexact.commit(model)
    assert "?" not in str(selection(model))


def test_names_match_the_plain_model_under_compilation() -> None:
    model = network()
    assert [row.key for row in selection(torch.compile(model))] == ["1", "3"]
    inner = nn.Sequential(torch.compile(network()), nn.Linear(1, 1))
    assert [row.key for row in selection(inner)] == ["0.1", "0.3"]


def test_a_model_without_sites_says_what_to_do(pick: Callable) -> None:
    with pytest.raises(FlexActError, match=r"flexact\.convert"):
        selection(nn.Linear(1, 1))
    with pytest.raises(FlexActError, match="extracted model"):
        selection(flexact.extract(pick(network(), "relu"), commit=True))


def test_a_lone_site_has_a_name() -> None:
    assert [row.key for row in selection(FlexAct())] == ["FlexAct"]


class HasAModule(nn.Module):
    """This is not a wrapper, although its child has the name of a wrapper's child."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def test_names_match_the_plain_model_under_averaging_and_data_parallelism(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for wrap in (nn.parallel.DistributedDataParallel, AveragedModel):
            assert [row.key for row in selection(wrap(network()))] == ["1", "3"]
            assert [row.key for row in selection(wrap(convert(HasAModule())))] == ["module.1"]
    finally:
        torch.distributed.destroy_process_group()


def test_buffers_that_were_copied_in_place_are_read(pick: Callable) -> None:
    """An average of weights copies into the tensors without load_state_dict."""
    source = flexact.commit(pick(network(), "tanh"))
    for read in (selection, flexact.commit, flexact.extract):
        copied = network()
        for mine, theirs in zip(copied.buffers(), source.buffers(), strict=True):
            mine.data.copy_(theirs)
        read(copied)
        assert [site.committed for site in (copied[1], copied[3])] == [True, True]
    assert [row.committed for row in selection(copied)] == [True, True]
    assert selection(copied).picks == {"1": "tanh", "3": "tanh"}


@pytest.mark.parametrize("value", [None, 3, nn.ReLU, "model"])
def test_only_modules_have_a_selection(value: object) -> None:
    with pytest.raises(FlexActError, match=r"torch\.nn\.Module"):
        selection(value)


def test_a_negative_lead_is_explained() -> None:
    model = lone_site(candidates=("relu", "tanh"))
    evidence = torch.tensor([[[math.nan] * 3, [-0.5, 0.5, 40.0]]])
    model[1].drop(torch.tensor([[False, True]]), 3, evidence)
    notes = str(selection(model)).splitlines()
    assert "lead: the pick's advantage over the runner-up when the runner-up was dropped" in notes[-3]
    assert notes[-2].startswith("(undecided): no significant lead (z >= 2) over the original, or over the runner-up if")
    assert notes[-1].startswith(
        "A negative lead means that the runner-up had the better evidence: the original was kept"
    )


def test_a_name_that_extraction_makes_misleading_is_reported() -> None:
    model = nn.Sequential()
    for name in ("gelu_1", "relu1", "act"):
        model.add_module(name, nn.GELU())
    model = convert(model, "*", config=FlexConfig(candidates=("relu", "gelu"), share="site"))
    assert "extract keeps" not in str(selection(model))  # nothing is picked yet
    for site in model:
        site.commit(candidate=site.candidates.index("relu"))
    assert str(selection(model)).splitlines()[-1] == "extract keeps module names: the module named gelu_1 is now a relu"
    assert "(gelu_1): ReLU()" in str(flexact.extract(model))


def test_wrappers_inside_a_model_do_not_change_the_names_of_its_sites() -> None:
    model = convert(nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Tanh()), "*", config=BY_SITE)
    model[0], model[1] = AveragedModel(model[0]), torch.compile(model[1], backend="eager")
    assert [row.site for row in selection(model)] == ["0.1", "1"]
