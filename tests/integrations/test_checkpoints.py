"""What a Trainer with FlexActCallback saves: plain where the picks agree, never silently wrong where they do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flexact
from flexact.layer import sites_of
from flexact.picks_file import write_picks

transformers = pytest.importorskip("transformers")
from flexact.integrations.transformers import FlexActCallback  # noqa: E402
from flexact.integrations.transformers_config import LOUD, say_picks  # noqa: E402

IDS = torch.arange(3, 33).view(6, 5)
Build = Callable[..., Any]
LAYER = "bert.encoder.layer.{}.intermediate.intermediate_act_fn"
POOLER = "bert.pooler.activation"


def set_picks(model: nn.Module, picks: dict[str, str]) -> nn.Module:
    """Commit sites to picks of the test's choice, the others to their original function."""
    for site in sites_of(model):
        pick = picks.get(site.name, site.candidates[int(site.logits.argmax())])
        goes = torch.tensor([[name != pick for name in site.candidates]])
        site.drop(goes, step=0)
    return model


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.fixture
def trained(routed: Build, trainer_of: Build, tmp_path: Path) -> Build:
    """Trains with picks that are set from the start; the Trainer, and the folder that it saved to."""

    def train(picks: dict[str, str], where: Any = "all") -> tuple[Any, Path]:
        trainer = FlexActCallback().wrap(trainer_of(set_picks(routed(where), picks), num_train_epochs=1))
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
        return trainer, tmp_path / "saved"

    return train


@pytest.mark.parametrize(
    ("picks", "hidden_act"),
    [
        ({}, "gelu"),
        ({LAYER.format(0): "relu", LAYER.format(1): "relu"}, "relu"),
        ({LAYER.format(0): "identity", LAYER.format(1): "identity"}, "linear"),
    ],
)
def test_where_the_configuration_can_say_the_picks_the_checkpoint_is_plain(
    picks: dict[str, str], hidden_act: str, trained: Build
) -> None:
    trainer, folder = trained(picks)
    config = json.loads((folder / "config.json").read_text())
    assert config["hidden_act"] == hidden_act
    assert "flexact" not in (folder / "config.json").read_text()
    assert not (folder / "flexact.json").exists()
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert torch.equal(outputs(loaded), outputs(trainer.model))


@pytest.mark.parametrize(
    "picks",
    [
        {LAYER.format(0): "relu"},
        {POOLER: "identity"},
        {LAYER.format(0): "relu", LAYER.format(1): "tanh", POOLER: "sigmoid"},
        {LAYER.format(0): "relu", LAYER.format(1): "relu", POOLER: "relu"},
    ],
)
def test_where_it_cannot_load_picks_puts_them_in(picks: dict[str, str], trained: Build) -> None:
    trainer, folder = trained(picks)
    told = json.loads((folder / "flexact.json").read_text())["picks"]
    assert {site: told[site] for site in picks} == picks
    assert json.loads((folder / "config.json").read_text())["hidden_act"] == LOUD
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    with pytest.raises(flexact.FlexActError, match=r"put them in with flexact\.load_picks"):
        outputs(loaded)
    assert torch.equal(outputs(flexact.load_picks(loaded, folder)), outputs(trainer.model))


def test_one_site_of_several_is_not_mistaken_for_all(trained: Build) -> None:
    """Penultimate: the layers keep their function, which one setting for all must not change."""
    trainer, folder = trained({POOLER: "relu"}, where="penultimate")
    assert (folder / "flexact.json").is_file()
    loaded = flexact.load_picks(transformers.AutoModelForSequenceClassification.from_pretrained(folder), folder)
    assert torch.equal(outputs(loaded), outputs(trainer.model))
    assert type(loaded.bert.encoder.layer[0].intermediate.intermediate_act_fn).__name__ == "GELUActivation"


def test_save_pretrained_alone_carries_the_picks_and_so_does_a_loaded_model(trained: Build, tmp_path: Path) -> None:
    trainer, _ = trained({LAYER.format(1): "tanh"})
    model, expected = trainer.model, outputs(trainer.model)
    for name in ("first", "second"):
        model.save_pretrained(tmp_path / name)
        model = transformers.BertForSequenceClassification.from_pretrained(tmp_path / name)
        assert torch.equal(outputs(flexact.load_picks(model, tmp_path / name)), expected)


def test_a_network_with_picks_can_be_fine_tuned_again(trained: Build, trainer_of: Build, tmp_path: Path) -> None:
    _, folder = trained({LAYER.format(1): "tanh"})
    model = flexact.load_picks(transformers.BertForSequenceClassification.from_pretrained(folder), folder)
    model = flexact.convert(model, config=flexact.FlexConfig(init="original"))
    assert [site.candidates[int(site.logits.argmax())] for site in sites_of(model)][:2] == ["gelu", "tanh"]
    trainer = FlexActCallback().wrap(trainer_of(set_picks(model, {LAYER.format(0): "relu"}), num_train_epochs=1))
    trainer.train()
    trainer.save_model(str(tmp_path / "again"))
    kept = json.loads((tmp_path / "again" / "flexact.json").read_text())
    assert kept["original"] == {"hidden_act": "gelu"}
    loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "again")
    assert torch.equal(outputs(flexact.load_picks(loaded, tmp_path / "again")), outputs(trainer.model))


def test_the_encoder_alone_takes_the_picks_too(trained: Build) -> None:
    trainer, folder = trained({LAYER.format(0): "relu"})
    encoder = flexact.load_picks(transformers.AutoModel.from_pretrained(folder), folder).eval()
    with torch.no_grad():
        ours = encoder(input_ids=IDS).pooler_output
        theirs = trainer.model.eval().bert(input_ids=IDS).pooler_output
    assert torch.equal(ours, theirs)


def test_without_flexact_such_a_checkpoint_does_not_load(trained: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = trained({LAYER.format(0): "relu"})
    monkeypatch.delitem(transformers.activations.ACT2FN, LOUD)  # all that importing flexact changes in transformers
    with pytest.raises(KeyError, match=r"flexact\.load_picks\(model, folder\)"):
        transformers.BertForSequenceClassification.from_pretrained(folder)


def test_a_checkpoint_of_the_run_says_that_it_is_one(routed: Build, trainer_of: Build, tmp_path: Path) -> None:
    trainer = FlexActCallback().wrap(trainer_of(routed(), save_strategy="steps", save_steps=4))
    trainer.train()
    assert trainer.model.config.hidden_act == "gelu"  # this run kept it
    before, after = tmp_path / "out" / "checkpoint-4", tmp_path / "out" / "checkpoint-12"
    for folder in (before, after):
        assert json.loads((folder / "config.json").read_text())["hidden_act"] == LOUD
    loaded = transformers.BertForSequenceClassification.from_pretrained(before)
    with pytest.raises(flexact.FlexActError, match="had not committed to its picks yet"):
        flexact.load_picks(loaded, before)
    last = flexact.load_picks(transformers.BertForSequenceClassification.from_pretrained(after), after)
    assert torch.equal(outputs(last), outputs(trainer.model))


def test_the_best_checkpoint_is_extracted_where_it_is_loaded_at_the_end(routed: Build, trainer_of: Build) -> None:
    trainer = FlexActCallback().wrap(
        trainer_of(
            routed(),
            save_strategy="epoch",
            eval_strategy="epoch",
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            greater_is_better=True,  # the first one is the best
        )
    )
    with pytest.warns(UserWarning, match="not committed"):
        trainer.train()
    assert trainer.state.best_global_step in (6, 12)
    assert sites_of(trainer.model) == []


def test_functional_activations_take_their_picks(tmp_path: Path) -> None:
    """RoBERTa's head calls torch.tanh in its forward."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.RobertaConfig(**sizes, vocab_size=40, max_position_embeddings=12)
    model = flexact.convert(
        transformers.RobertaForSequenceClassification(config), config=flexact.FlexConfig(init="original")
    )
    (head,) = [site.name for site in sites_of(model) if site.name.startswith("classifier")]
    picks = flexact.selection(set_picks(model, {head: "relu"})).picks
    plain = flexact.extract(model)
    description = say_picks(plain, picks)
    assert description is not None
    plain.save_pretrained(tmp_path)
    write_picks(tmp_path, description)
    loaded = transformers.RobertaForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(outputs(flexact.load_picks(loaded, tmp_path)), outputs(plain))
