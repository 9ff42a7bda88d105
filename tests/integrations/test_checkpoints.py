"""Tests of the checkpoints that a Trainer with FlexActCallback saves: plain where the picks agree, otherwise with a
picks file or a warning.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flexact
from flexact.config import PAPER_CANDIDATES
from flexact.routing.sites import sites_of

transformers = pytest.importorskip("transformers")
from flexact.integrations.transformers import FlexActCallback  # noqa: E402
from flexact.integrations.transformers_config import UNPICKED, record_picks  # noqa: E402

IDS = torch.arange(3, 33).view(6, 5)
Build = Callable[..., Any]
LAYER = "bert.encoder.layer.{}.intermediate.intermediate_act_fn"
POOLER = "bert.pooler.activation"


def set_picks(model: nn.Module, picks: dict[str, str]) -> nn.Module:
    """Commits sites to picks that the test chooses, and the others to their original function."""
    for site in sites_of(model):
        pick = picks.get(site.name, site.candidates[int(site.logits.argmax())])
        goes = torch.tensor([[name != pick for name in site.candidates]])
        site.drop(goes, step=0)
    return model


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.fixture(scope="module")
def runs() -> dict[str, tuple[nn.Module, Path]]:
    """Caches the models that `trained` has trained, and the folders they were saved to."""
    return {}


@pytest.fixture
def trained(
    routed: Build,
    trainer_of: Build,
    tmp_path: Path,
    runs: dict[str, tuple[nn.Module, Path]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Build:
    """Trains with fixed picks. Returns the model and the folder that the Trainer saved to."""

    def train(picks: dict[str, str], where: Any = "all") -> tuple[Any, Path]:
        how = repr((picks, where))
        if how not in runs:
            model = set_picks(routed(where, candidates=(*PAPER_CANDIDATES, "relu_squared", "gelu_tanh")), picks)
            trainer = FlexActCallback().wrap(trainer_of(model, max_steps=2))
            trainer.train()
            runs[how] = trainer.model, tmp_path_factory.mktemp("trained")
            trainer.save_model(str(runs[how][1]))
        model, kept = runs[how]
        shutil.copytree(kept, tmp_path / "saved")
        return copy.deepcopy(model), tmp_path / "saved"

    return train


@pytest.mark.parametrize(
    ("picks", "hidden_act"),
    [
        ({}, "gelu"),
        ({LAYER.format(0): "relu_squared", LAYER.format(1): "relu_squared"}, "relu2"),
        ({LAYER.format(0): "gelu_tanh", LAYER.format(1): "gelu_tanh"}, "gelu_pytorch_tanh"),
    ],
)
def test_the_checkpoint_is_plain_where_the_configuration_can_express_the_picks(
    picks: dict[str, str], hidden_act: str, trained: Build
) -> None:
    model, folder = trained(picks)
    config = json.loads((folder / "config.json").read_text())
    assert config["hidden_act"] == hidden_act
    assert "flexact" not in (folder / "config.json").read_text()
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert torch.equal(outputs(loaded), outputs(model))
    assert torch.equal(outputs(flexact.load_picks(loaded, folder)), outputs(model))


@pytest.mark.parametrize(
    "picks",
    [
        {LAYER.format(0): "relu"},
        {POOLER: "identity"},
        {LAYER.format(0): "relu", LAYER.format(1): "relu", POOLER: "relu"},
    ],
)
def test_load_picks_restores_picks_that_the_configuration_cannot_express(picks: dict[str, str], trained: Build) -> None:
    model, folder = trained(picks)
    content = json.loads((folder / "config.json").read_text())["flexact"]["picks"]
    assert {site: content[site] for site in picks} == picks
    assert json.loads((folder / "config.json").read_text())["hidden_act"] == UNPICKED
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    with pytest.raises(flexact.FlexActError, match=r"flexact\.load_picks"):
        outputs(loaded)
    assert torch.equal(outputs(flexact.load_picks(loaded, folder)), outputs(model))


def test_one_site_of_several_is_not_mistaken_for_all(trained: Build) -> None:
    """With "penultimate", the layers keep their function, which a single setting for all must not change."""
    model, folder = trained({POOLER: "relu"}, where="penultimate")
    assert "flexact" in json.loads((folder / "config.json").read_text())
    loaded = flexact.load_picks(transformers.AutoModelForSequenceClassification.from_pretrained(folder), folder)
    assert torch.equal(outputs(loaded), outputs(model))
    assert type(loaded.bert.encoder.layer[0].intermediate.intermediate_act_fn).__name__ == "GELUActivation"


def test_save_pretrained_alone_stores_the_picks_and_so_does_a_loaded_model(trained: Build, tmp_path: Path) -> None:
    model, _ = trained({LAYER.format(1): "tanh"})
    expected = outputs(model)
    for name in ("first", "second"):
        model.save_pretrained(tmp_path / name)
        model = transformers.BertForSequenceClassification.from_pretrained(tmp_path / name)
        assert torch.equal(outputs(flexact.load_picks(model, tmp_path / name)), expected)


def test_a_network_with_picks_can_be_fine_tuned_again(trained: Build, trainer_of: Build, tmp_path: Path) -> None:
    _, folder = trained({LAYER.format(1): "tanh"})
    model = flexact.load_picks(transformers.BertForSequenceClassification.from_pretrained(folder), folder)
    model = flexact.convert(model, config=flexact.FlexConfig(init="original"))
    assert [site.candidates[int(site.logits.argmax())] for site in sites_of(model)][:2] == ["gelu", "tanh"]
    trainer = FlexActCallback().wrap(trainer_of(set_picks(model, {LAYER.format(0): "relu"}), max_steps=2))
    trainer.train()
    trainer.save_model(str(tmp_path / "again"))
    kept = json.loads((tmp_path / "again" / "config.json").read_text())["flexact"]
    assert kept["original"] == {"hidden_act": "gelu"}
    loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "again")
    assert torch.equal(outputs(flexact.load_picks(loaded, tmp_path / "again")), outputs(trainer.model))


def test_the_encoder_alone_takes_the_picks_too(trained: Build) -> None:
    model, folder = trained({LAYER.format(0): "relu"})
    encoder = flexact.load_picks(transformers.AutoModel.from_pretrained(folder), folder).eval()
    with torch.no_grad():
        ours = encoder(input_ids=IDS).pooler_output
        theirs = model.eval().bert(input_ids=IDS).pooler_output
    assert torch.equal(ours, theirs)


def test_the_picks_of_an_encoder_load_into_it_under_a_head(tiny_bert: Build) -> None:
    """Names without the prefix, as in a BertModel that was trained alone."""
    names = {LAYER.format(0).removeprefix("bert."): "relu", POOLER.removeprefix("bert."): "sigmoid"}
    model = flexact.load_picks(tiny_bert(), names)
    assert isinstance(model.bert.encoder.layer[0].intermediate.intermediate_act_fn, nn.ReLU)
    assert isinstance(model.bert.pooler.activation, nn.Sigmoid)


def test_picks_for_a_part_that_another_head_lacks_are_skipped_with_a_warning(trained: Build) -> None:
    model, folder = trained({LAYER.format(0): "relu"})
    loaded = transformers.BertForMaskedLM.from_pretrained(folder)  # it has no pooler
    with pytest.warns(UserWarning, match=r"BertForMaskedLM .*bert\.pooler\.activation"):
        flexact.load_picks(loaded, folder)
    assert isinstance(loaded.bert.encoder.layer[0].intermediate.intermediate_act_fn, nn.ReLU)
    with torch.no_grad():
        ours = loaded.eval().bert(input_ids=IDS).last_hidden_state
        assert torch.equal(ours, model.eval().bert(input_ids=IDS).last_hidden_state)
        loaded(input_ids=IDS)  # the head keeps its own activation


def test_picks_of_another_network_are_refused_and_none_is_loaded(trained: Build, tmp_path: Path) -> None:
    _, folder = trained({LAYER.format(0): "relu"})
    loaded = transformers.BertForSequenceClassification.from_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())["flexact"]
    content["picks"][LAYER.format(2)] = "relu"
    (tmp_path / "other.json").write_text(json.dumps(content))
    with pytest.raises(flexact.FlexActError, match=r"bert\.encoder\.layer\.2\."):
        flexact.load_picks(loaded, tmp_path / "other.json")
    with pytest.raises(flexact.FlexActError, match=r"flexact\.load_picks"):
        outputs(loaded)


@pytest.mark.parametrize(
    ("projection", "picks"),
    [
        ("relu", {}),
        ("gated-gelu", {"encoder.block.0.layer.1.DenseReluDense.act": "tanh"}),
        ("gated-gelu", None),
    ],
)
def test_t5_is_trained_saved_and_loaded(
    picks: dict[str, str] | None, projection: str, trainer_of: Build, tmp_path: Path
) -> None:
    """Its setting also says whether the feed-forward is gated. None: every site picks relu."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "num_layers": 1, "vocab_size": 40}
    config = transformers.T5Config(**sizes, feed_forward_proj=projection, decoder_start_token_id=0)
    model = flexact.convert(transformers.T5ForConditionalGeneration(config), config=flexact.FlexConfig(init="original"))
    assert len(sites_of(model)) == 2
    set_picks(model, {site.name: "relu" for site in sites_of(model)} if picks is None else picks)
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    trainer = trainer_of(model, max_steps=2)
    trainer.train_dataset = rows
    FlexActCallback().wrap(trainer).train()
    trainer.save_model(str(tmp_path / "own"))
    loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "own")
    if picks:
        with pytest.raises(flexact.FlexActError, match=r"flexact\.load_picks"):
            loaded(input_ids=IDS, labels=IDS)
        loaded = flexact.load_picks(loaded, tmp_path / "own")
    with torch.no_grad():
        ours = loaded.eval()(input_ids=IDS, labels=IDS).logits
        assert torch.equal(ours, trainer.model.eval()(input_ids=IDS, labels=IDS).logits)


def test_without_flexact_such_a_checkpoint_does_not_load(trained: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = trained({LAYER.format(0): "relu"})
    monkeypatch.delitem(transformers.activations.ACT2FN, UNPICKED)  # all that importing flexact changes in transformers
    with pytest.raises(KeyError, match=r"flexact\.load_picks\(model, folder\)"):
        transformers.BertForSequenceClassification.from_pretrained(folder)


def test_a_checkpoint_saved_during_the_run_is_marked_as_one(routed: Build, trainer_of: Build, tmp_path: Path) -> None:
    trainer = FlexActCallback().wrap(trainer_of(routed(), save_strategy="steps", save_steps=4))
    trainer.train()
    named = transformers.activations.ACT2FN[trainer.model.config.hidden_act]
    layers = [module for name, module in trainer.model.named_modules() if name.endswith("intermediate_act_fn")]
    assert {type(layer) for layer in layers} == {type(named)}  # one pick in all layers, which the config can express
    before, after = tmp_path / "out" / "checkpoint-4", tmp_path / "out" / "checkpoint-12"
    for folder in (before, after):
        assert json.loads((folder / "config.json").read_text())["hidden_act"] == UNPICKED
    loaded = transformers.BertForSequenceClassification.from_pretrained(before)
    with pytest.raises(flexact.FlexActError, match="not committed"):
        flexact.load_picks(loaded, before)
    last = flexact.load_picks(transformers.BertForSequenceClassification.from_pretrained(after), after)
    assert torch.equal(outputs(last), outputs(trainer.model))


class SaveAt(transformers.TrainerCallback):
    """Another callback that saves the model itself: at `step`, or at the end of the run."""

    def __init__(self, folder: Path, step: int | None = None) -> None:
        self.folder, self.step = folder, step

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == self.step:
            model.save_pretrained(self.folder)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self.step is None:
            model.save_pretrained(self.folder)


def test_what_another_callback_saves_at_the_end_is_not_loaded_with_other_activations(
    routed: Build, trainer_of: Build, tmp_path: Path
) -> None:
    saving = SaveAt(tmp_path / "early")
    model = set_picks(routed(), {LAYER.format(0): "relu"})
    trainer = trainer_of(model, callbacks=[saving])  # added before ours, so it runs before ours
    FlexActCallback().wrap(trainer).train()
    loaded = transformers.BertForSequenceClassification.from_pretrained(saving.folder)
    with pytest.raises(flexact.FlexActError, match=r"flexact\.load_picks"):
        outputs(loaded)
    assert torch.equal(outputs(flexact.load_picks(loaded, saving.folder)), outputs(trainer.model))


def test_what_another_callback_saves_before_the_commitment_is_refused(
    routed: Build, trainer_of: Build, tmp_path: Path
) -> None:
    saving = SaveAt(tmp_path / "early", step=3)
    FlexActCallback().wrap(trainer_of(routed(), callbacks=[saving])).train()
    loaded = transformers.BertForSequenceClassification.from_pretrained(saving.folder)
    with pytest.raises(flexact.FlexActError, match="not committed"):
        flexact.load_picks(loaded, saving.folder)
    with pytest.raises(flexact.FlexActError, match=r"flexact\.load_picks"):
        outputs(loaded)


def test_the_best_checkpoint_is_not_taken_for_what_was_committed_later(
    routed: Build, trainer_of: Build, tmp_path: Path
) -> None:
    saving = SaveAt(tmp_path / "early")
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    steps = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 4, "eval_steps": 4}
    trainer = trainer_of(routed(), callbacks=[saving], **best, **steps)
    trainer.evaluate = lambda *_, **__: {"eval_loss": -trainer.state.global_step}  # the first checkpoint is the best
    with pytest.warns(UserWarning, match="not committed"):
        FlexActCallback().wrap(trainer).train()
    assert not json.loads((saving.folder / "config.json").read_text())["flexact"]["committed"]
    assert trainer.state.best_global_step == 4
    assert sites_of(trainer.model) == []


@pytest.mark.parametrize("extracted", [False, True])
def test_a_model_that_keeps_its_sites_is_marked_as_such(
    extracted: bool, routed: Build, trainer_of: Build, tmp_path: Path
) -> None:
    model = set_picks(routed(), {LAYER.format(0): "relu"})
    trainer = FlexActCallback(extract=False).wrap(trainer_of(model, save_strategy="steps", save_steps=4))
    trainer.train()
    plain = flexact.extract(model)
    if extracted:
        plain.save_pretrained(tmp_path / "own")
    else:
        trainer.save_model(str(tmp_path / "own"))
    for folder in (tmp_path / "own", tmp_path / "out" / "checkpoint-12"):
        loaded = transformers.BertForSequenceClassification.from_pretrained(folder)
        with pytest.raises(flexact.FlexActError, match=r"flexact\.load_picks"):
            outputs(loaded)
        assert torch.equal(outputs(flexact.load_picks(loaded, folder)), outputs(plain))


def test_a_model_that_keeps_sites_that_agree_makes_a_checkpoint_that_needs_no_flexact(
    routed: Build, trainer_of: Build, tmp_path: Path
) -> None:
    model = set_picks(routed(), {LAYER.format(0): "relu", LAYER.format(1): "relu"})
    FlexActCallback(extract=False).wrap(trainer_of(model)).train()
    plain = flexact.extract(model)
    plain.save_pretrained(tmp_path / "own")
    loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "own")
    assert torch.equal(outputs(loaded), outputs(plain))


def test_loading_picks_by_channel_is_an_error(tiny_bert: Build, trainer_of: Build, tmp_path: Path) -> None:
    config = flexact.FlexConfig(init="original", granularity="channel", channel_dim=-1)
    model = flexact.convert(tiny_bert(), config=config, example_inputs={"input_ids": IDS})
    FlexActCallback(extract=False).wrap(trainer_of(model, max_steps=2)).train()
    flexact.extract(model).save_pretrained(tmp_path / "own")
    loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "own")
    with pytest.raises(flexact.FlexActError, match="per channel"):
        flexact.load_picks(loaded, tmp_path / "own")


def test_an_interrupted_run_can_be_committed_by_hand(routed: Build, trainer_of: Build, tmp_path: Path) -> None:
    class BreakOff(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            raise KeyboardInterrupt

    model = routed()
    with pytest.raises(KeyboardInterrupt):
        FlexActCallback().wrap(trainer_of(model, callbacks=[BreakOff()])).train()
    set_picks(model, {LAYER.format(1): "tanh"})
    (tmp_path / "picks.json").write_text(json.dumps(flexact.selection(model).to_dict()))
    plain = flexact.extract(model)
    plain.save_pretrained(tmp_path / "own")
    loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "own")
    with pytest.raises(flexact.FlexActError, match=r"flexact\.selection\(model\)\.to_dict\(\)"):
        flexact.load_picks(loaded, tmp_path / "own")
    assert torch.equal(outputs(flexact.load_picks(loaded, tmp_path / "picks.json")), outputs(plain))


def test_a_used_folder_has_the_picks_of_the_network_that_was_saved_last(trained: Build) -> None:
    model, folder = trained({LAYER.format(0): "relu"})
    record_picks(model, {LAYER.format(1): "relu"})
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["flexact"]["picks"] == {LAYER.format(1): "relu"}


def test_picks_are_loaded_into_functional_activations(tmp_path: Path) -> None:
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
    record_picks(plain, picks)
    plain.save_pretrained(tmp_path)
    loaded = transformers.RobertaForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(outputs(flexact.load_picks(loaded, tmp_path)), outputs(plain))
