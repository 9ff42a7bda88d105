"""Tests of flexact.json: which files are refused, and how picks are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flexact
from flexact.surgery.picks_file import Unpicked

GOOD = {"flexact_picks": 1, "committed": True, "picks": {"1": "tanh"}, "original": {}}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.GELU())


def write(folder: Path, content: Any) -> Path:
    path = folder / "flexact.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_file_and_its_folder_are_equivalent(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    for given in (path, tmp_path, str(path)):
        model = flexact.load_picks(network(), given)
        assert isinstance(model[1], nn.Tanh)
        assert isinstance(model[3], nn.GELU)


def test_nothing_changes_if_the_picks_are_in_place(tmp_path: Path) -> None:
    model = network()
    before = list(model)
    write(tmp_path, {**GOOD, "picks": {"1": "relu", "3": "original"}})
    assert list(flexact.load_picks(model, tmp_path)) == before


def test_hooks_of_an_activation_stay_and_a_model_that_is_one_is_replaced() -> None:
    inputs: list[torch.Tensor] = []
    model = network()
    model[1].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    flexact.load_picks(model, {"1": "tanh"})(torch.ones(1, 2))
    assert len(inputs) == 1
    assert isinstance(flexact.load_picks(nn.ReLU(), {"": "tanh"}), nn.Tanh)


def test_one_layer_of_a_transformer_encoder_gets_its_pick() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    loaded = flexact.load_picks(encoder, {"layers.1.activation": "silu"})
    assert not loaded.use_nested_tensor  # only torch's fused path supports it
    padding = torch.tensor([[False, False, True]])
    assert loaded(torch.randn(1, 3, 8), src_key_padding_mask=padding).shape == (1, 3, 8)
    assert not any("flexact" in name for name in vars(loaded))


class Calls(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return torch.relu(h) + 1


def test_a_functional_call_gets_its_pick(tmp_path: Path) -> None:
    routed = flexact.convert(nn.Sequential(Calls()))
    (name,) = flexact.selection(routed).picks
    write(tmp_path, {**GOOD, "picks": {name: "sigmoid"}})
    model = flexact.load_picks(nn.Sequential(Calls()), tmp_path)
    h = torch.linspace(-2, 2, 9)
    assert torch.equal(model(h), torch.sigmoid(h) + 1)


def test_a_saved_selection_is_accepted_too(tmp_path: Path) -> None:
    trained = flexact.commit(flexact.convert(network(), config=flexact.FlexConfig(candidates=("tanh", "silu"))))
    path = tmp_path / "picks.json"
    path.write_text(json.dumps(flexact.selection(trained).to_dict()))
    plain = flexact.extract(trained)
    loaded = flexact.load_picks(network(), path)
    loaded.load_state_dict(plain.state_dict())
    h = torch.randn(5, 2)
    assert torch.equal(loaded(h), plain(h))


@pytest.mark.parametrize("form", ["selection", "dictionary"])
def test_a_selection_itself_is_accepted_too(form: str) -> None:
    trained = flexact.commit(flexact.convert(network(), config=flexact.FlexConfig(candidates=("tanh", "silu"))))
    picks = flexact.selection(trained)
    loaded = flexact.load_picks(network(), picks if form == "selection" else picks.to_dict())
    loaded.load_state_dict(flexact.extract(trained).state_dict())
    h = torch.randn(5, 2)
    assert torch.equal(loaded(h), trained(h))


def test_a_selection_that_does_not_fit_is_reported() -> None:
    deeper = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2), nn.ReLU())
    undecided = flexact.convert(deeper)
    with pytest.raises(flexact.FlexActError, match="before any pick"):
        flexact.load_picks(network(), flexact.selection(undecided))
    picks = flexact.selection(flexact.commit(undecided))
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    with pytest.raises(flexact.FlexActError, match=r"another network.*'3'"):
        flexact.load_picks(model[:2], flexact.selection(flexact.commit(flexact.convert(network(), where=["3"]))))
    with pytest.raises(flexact.FlexActError, match="another network"):
        flexact.load_picks(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU())), picks)
    with pytest.raises(flexact.FlexActError, match="no picks"):
        flexact.load_picks(model, {"1": 3})
    with pytest.raises(flexact.FlexActError, match="'rows' must be a list of sites with their picks"):
        flexact.load_picks(model, {"flexact_selection": 3, "rows": [3]})
    assert isinstance(model[1], nn.ReLU)


def test_a_selection_by_channel_is_reported(tmp_path: Path) -> None:
    config = flexact.FlexConfig(granularity="channel")
    trained = flexact.commit(flexact.convert(network(), config=config, example_inputs=torch.randn(3, 2)))
    content = flexact.selection(trained).to_dict()
    for given in (write(tmp_path, content), content):
        with pytest.raises(flexact.FlexActError, match="picks per channel"):
            flexact.load_picks(network(), given)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"flexact_picks": 1,', "truncated or damaged: invalid JSON"),
        ({"flexact_selection": 4, "rows": []}, r"has version 4, and this flexact reads selections of version 3"),
        ({"flexact_selection": 3, "rows": 3}, r"flexact\.json is not a selection: 'rows' must be a list"),
        ([1], "has no picks of flexact"),
        ({**GOOD, "flexact_picks": 99}, "has version 99, but this flexact reads up to 1; update"),
        ({**GOOD, "picks": {"1": 3}}, "'picks' must map each site or setting to a name"),
        ({**GOOD, "picks": {"1": "tahn"}}, "site '1': unknown candidate 'tahn'; did you mean 'tanh'"),
        ({**GOOD, "picks": {"7": "tanh"}}, "belongs to another network: this Sequential has no activation '7'"),
        ({**GOOD, "committed": False}, "had not committed to its picks yet"),
        ({**GOOD, "committed": None}, "'committed' must be true or false"),
    ],
)
def test_an_invalid_file_is_reported(content: Any, message: str, tmp_path: Path) -> None:
    model = network()
    with pytest.raises(flexact.FlexActError, match=message):
        flexact.load_picks(model, write(tmp_path, content))
    assert isinstance(model[1], nn.ReLU)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(flexact.FlexActError, match=r"there is no file"):
        flexact.load_picks(network(), tmp_path / "nowhere")
    with pytest.raises(flexact.FlexActError, match=r"no flexact\.json"):
        flexact.load_picks(network(), tmp_path)


def test_a_plain_checkpoint_does_not_change_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_act": "relu", "model_type": "bert"}')
    model = network()
    before = list(model)
    assert flexact.load_picks(model, tmp_path) is model
    assert list(model) == before
    model[1] = Unpicked()
    with pytest.raises(flexact.FlexActError, match=r"config\.json names no picks, but .* not in place yet. Pass the f"):
        flexact.load_picks(model, tmp_path)
    (tmp_path / "config.json").write_text('{"grids": []}')
    with pytest.raises(
        flexact.FlexActError, match=r"no flexact\.json in .*config\.json is not a configuration of transf"
    ):
        flexact.load_picks(network(), tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(flexact.FlexActError, match=r"config\.json .*damaged"):
        flexact.load_picks(network(), tmp_path)


def test_a_model_that_is_no_plain_network_is_reported(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    with pytest.raises(flexact.FlexActError, match="still picking"):
        flexact.load_picks(flexact.convert(network()), tmp_path)
    with pytest.raises(flexact.FlexActError, match=r"torch\.nn\.Module"):
        flexact.load_picks(tmp_path, network())  # type: ignore[arg-type]


def test_the_picks_of_a_selection_are_enough() -> None:
    model = flexact.commit(flexact.convert(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))))
    assert isinstance(
        flexact.load_picks(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)), {"1": "gelu"})[1], nn.GELU
    )
    picks = flexact.selection(model).picks
    assert isinstance(flexact.load_picks(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)), picks)[1], nn.ReLU)


def test_another_name_of_a_candidate_is_accepted() -> None:
    model = flexact.load_picks(network(), {"1": "swish", "3": "gelu_python"})
    assert isinstance(model[1], nn.SiLU)
    assert isinstance(model[3], nn.GELU)


def test_a_selection_from_before_any_pick_is_refused() -> None:
    chosen = flexact.selection(flexact.convert(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))))
    with pytest.raises(flexact.FlexActError, match="before any pick"):
        flexact.load_picks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)), chosen)


def test_json_text_instead_of_a_path_is_refused() -> None:
    text = json.dumps({f"layer{number}.act": "relu" for number in range(300)})
    with pytest.raises(flexact.FlexActError, match=r"is not a path.*json\.loads\(text\)"):
        flexact.load_picks(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), text)
