"""What was picked: noise-free probabilities, margins, and when a candidate was dropped."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import flexact
from flexact import FlexAct, FlexActError, FlexConfig, convert, selection
from flexact.selection import Selection


def network(config: FlexConfig | None = None) -> nn.Sequential:
    return convert(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh()), config=config)


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


def test_noise_and_temperature_do_not_show() -> None:
    model = network(FlexConfig(noise=5.0, temperature=0.01))
    set_logits(model[1], [0.1, 0.2, 0.3, 0.4, 0.5])
    before = selection(model).to_dict()
    for _ in range(5):
        model(torch.randn(2, 3))
        assert selection(model).to_dict() == before
    assert selection(model)[0].pick == "identity"


def test_what_was_dropped_has_no_probability_and_says_when() -> None:
    model = network()
    set_logits(model[1], [0.0, 3.0, 1.0, 2.0, -1.0])
    model[1].drop_weakest(step=7)
    model[1].drop_weakest(step=9)
    row = selection(model)[0]
    assert row.dropped == {"identity": 7, "relu": 9}
    assert row.probabilities["identity"] == row.probabilities["relu"] == 0
    left = torch.softmax(torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64), 0).tolist()
    assert [row.probabilities[name] for name in ("sigmoid", "tanh", "leaky_relu")] == pytest.approx(left, rel=1e-6)
    assert (row.pick, row.runner_up) == ("sigmoid", "leaky_relu")


def test_a_committed_site_has_probability_one_and_no_runner_up() -> None:
    model = network()
    set_logits(model[1], [0.0, 0.0, 0.1, 0.0, 0.0])
    model[1].commit(step=12)
    row = selection(model)[0]
    assert (row.pick, row.probability, row.margin, row.runner_up, row.committed) == ("tanh", 1.0, 1.0, None, True)
    assert set(row.dropped.values()) == {12}


def test_a_dropped_leader_is_not_the_pick() -> None:
    """The logit of what is out may still be the largest."""
    site = FlexAct(("relu", "tanh", "sigmoid"))
    site.drop(torch.tensor([[True, False, False]]), step=1)
    set_logits(site, [9.0, 0.0, 1.0])
    row = selection(site)[0]
    assert (row.pick, row.runner_up) == ("sigmoid", "tanh")


def test_picks_are_by_site_and_channels_have_numbers() -> None:
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
    model[1].drop_weakest(step=3)
    data = selection(model).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["flexact_selection"] == 1
    assert [row["site"] for row in data["rows"]] == ["1", "3"]
    assert set(data["rows"][0]) == {
        "site",
        "channel",
        "pick",
        "probability",
        "runner_up",
        "margin",
        "committed",
        "probabilities",
        "dropped",
    }


def test_the_frame_has_a_row_a_site_and_a_column_a_candidate() -> None:
    model = nn.Sequential(FlexAct(("relu", "tanh")), FlexAct(("relu", "gelu", "silu")))
    set_logits(model[0], [1.0, 0.0])
    frame = selection(model).to_frame()
    assert list(frame["site"]) == ["0", "1"]
    assert frame["pick"][0] == "relu"
    assert frame["p(relu)"][0] == pytest.approx(torch.softmax(torch.tensor([1.0, 0.0]), 0)[0].item())
    assert frame["p(tanh)"].isna().tolist() == [False, True]
    assert set(frame.columns) >= {"site", "pick", "probability", "margin", "runner_up", "committed", "p(gelu)"}


def test_without_pandas_the_frame_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_pandas(name: str, *args: object, **kwargs: object) -> object:
        if name.partition(".")[0] == "pandas":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pandas)
    with pytest.raises(FlexActError, match=r"pip install 'flexact\[frame\]'"):
        selection(network()).to_frame()


def test_it_prints_as_an_aligned_table() -> None:
    model = network()
    set_logits(model[1], [0.0, 0.0, 4.0, 0.0, 1.0])
    model[1].drop_weakest(step=30)
    lines = str(selection(model)).splitlines()
    assert repr(selection(model)) == str(selection(model))
    assert lines[0].split("  ")[0] == "site"
    assert set(lines[1]) == {"-"}
    assert lines[2].startswith("1     tanh ?")
    assert lines[2].endswith("relu (30)")
    assert lines[-1] == "? not committed yet"
    column = lines[0].index("probability")
    assert all(line[column].isdigit() for line in lines[2:4])
    flexact.commit(model)
    assert "?" not in str(selection(model))


def test_names_are_those_of_the_plain_model_under_compilation() -> None:
    model = network()
    assert list(selection(torch.compile(model)).picks) == ["1", "3"]
    inner = nn.Sequential(torch.compile(network()), nn.Linear(1, 1))
    assert list(selection(inner).picks) == ["0.1", "0.3"]


def test_a_model_without_sites_says_what_to_do(pick: Callable) -> None:
    with pytest.raises(FlexActError, match=r"call flexact.convert"):
        selection(nn.Linear(1, 1))
    with pytest.raises(FlexActError, match="extracted model has none left"):
        selection(flexact.extract(pick(network(), "relu"), commit=True))


def test_a_lone_site_has_a_name() -> None:
    assert list(selection(FlexAct()).picks) == ["FlexAct"]


class HasAModule(nn.Module):
    """Not a wrapper, though its child has a wrapper's name."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def test_names_are_those_of_the_plain_model_under_averaging_and_data_parallelism(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for wrap in (nn.parallel.DistributedDataParallel, AveragedModel):
            assert list(selection(wrap(network())).picks) == ["1", "3"]
            assert list(selection(wrap(convert(HasAModule()))).picks) == ["module.1"]
    finally:
        torch.distributed.destroy_process_group()


def test_buffers_that_were_copied_without_notice_are_read(pick: Callable) -> None:
    """As an average of weights does it: into the tensors, past load_state_dict."""
    source = flexact.commit(pick(network(), "tanh"))
    for read in (selection, flexact.commit, flexact.extract):
        copied = network()
        for mine, theirs in zip(copied.buffers(), source.buffers(), strict=True):
            mine.data.copy_(theirs)
        read(copied)
        assert [site.committed for site in (copied[1], copied[3])] == [True, True]
    assert [row.committed for row in selection(copied)] == [True, True]
    assert selection(copied).picks == {"1": "tanh", "3": "tanh"}


def test_a_selection_comes_back_from_its_dictionary() -> None:
    model = network()
    model[1].drop_weakest(step=3)
    chosen = selection(model)
    assert Selection.from_dict(json.loads(json.dumps(chosen.to_dict()))) == chosen


def _with(**fields: object) -> dict[str, object]:
    data = selection(network()).to_dict()
    data["rows"][1].update(fields)
    return data


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (3, "not a Selection"),
        ({"rows": []}, "not a Selection"),
        ({"flexact_selection": "1", "rows": []}, "not a Selection"),
        ({"flexact_selection": 2, "rows": []}, "has version 2"),
        ({"flexact_selection": 1}, "needs 'rows'"),
        ({"flexact_selection": 1, "rows": [{"site": "1"}]}, "row 0 of a selection needs the fields"),
        (_with(more=1), "row 1 of a selection needs the fields"),
        (_with(pick=3), "row 1 of a selection: pick cannot be 3"),
        (_with(probability=True), "probability cannot be True"),
        (_with(dropped={"relu": "soon"}), "dropped cannot be"),
    ],
)
def test_what_is_no_selection_is_refused(data: object, told: str) -> None:
    with pytest.raises(FlexActError, match=told):
        Selection.from_dict(data)


@pytest.mark.parametrize("value", [None, 3, nn.ReLU, "model"])
def test_only_modules_have_a_selection(value: object) -> None:
    with pytest.raises(FlexActError, match=r"selection needs a torch.nn.Module; got"):
        selection(value)
