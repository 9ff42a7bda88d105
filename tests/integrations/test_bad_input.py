"""Tests that every misuse of FlexActCallback raises an error before the first step and says what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flexact
from flexact.routing.sites import sites_of

transformers = pytest.importorskip("transformers")
from flexact.integrations.transformers import FlexActCallback  # noqa: E402
from flexact.integrations.transformers_schedule import SCHEDULE  # noqa: E402

Build = Callable[..., Any]


def test_a_trainer_that_is_wrapped_already(routed: Build, trainer_of: Build) -> None:
    trainer = FlexActCallback().wrap(trainer_of(routed()))
    with pytest.raises(flexact.FlexActError, match="already"):
        FlexActCallback().wrap(trainer)


def test_a_callback_used_for_two_runs(routed: Build, trainer_of: Build) -> None:
    callback = FlexActCallback()
    trainer = callback.wrap(trainer_of(routed(), max_steps=2))
    with pytest.raises(flexact.FlexActError, match="one callback"):
        callback.wrap(trainer_of(routed()))
    trainer.train()
    with pytest.raises(flexact.FlexActError, match="already been used"):
        trainer.train()


def test_a_callback_that_was_not_given_its_trainer(routed: Build, trainer_of: Build) -> None:
    with pytest.raises(flexact.FlexActError, match=r"FlexActCallback\(\).wrap\(trainer\)"):
        trainer_of(routed(), callbacks=[FlexActCallback()]).train()
    callback = FlexActCallback()
    callback.wrap(trainer_of(routed(), callbacks=[callback], max_steps=2)).train()  # the same one counts as one


def test_what_is_no_trainer() -> None:
    with pytest.raises(flexact.FlexActError, match=r"Linear.*transformers\.Trainer"):
        FlexActCallback().wrap(nn.Linear(1, 1))


def test_a_model_that_was_not_converted(tiny_bert: Build, trainer_of: Build) -> None:
    with pytest.raises(flexact.FlexActError, match="convert"):
        FlexActCallback().wrap(trainer_of(tiny_bert()))


def test_a_model_that_is_compiled_already(routed: Build, trainer_of: Build) -> None:
    compiled = torch.compile(routed())
    for extract in (True, False):
        with pytest.raises(flexact.FlexActError, match="torch_compile=True"):
            FlexActCallback(extract=extract).wrap(trainer_of(compiled))


def test_a_model_with_no_convertible_activation() -> None:
    class Plain(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.head = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x)

    with pytest.raises(flexact.FlexActError, match="No activation"):
        flexact.convert(Plain(transformers.PretrainedConfig()), config=flexact.FlexConfig(init="original"))


def test_a_configuration_that_cannot_warn_users_without_flexact(trainer_of: Build) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.act = nn.Embedding(40, 2), nn.ReLU()

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
            scores = self.act(self.embedding(input_ids)).mean(1)
            return {"loss": nn.functional.cross_entropy(scores, labels)}

    model = flexact.convert(Own())
    with pytest.raises(flexact.FlexActError, match=r"Own .*extract=False"):
        FlexActCallback().wrap(trainer_of(model))
    trainer = FlexActCallback(extract=False).wrap(trainer_of(model, max_steps=4))
    trainer.train()
    assert sites_of(flexact.extract(trainer.model)) == []


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 40, "intermediate_size": 48}
WITH_HEADS = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 4}
READS_ITS_SETTING_ELSEWHERE = {
    "Mamba": SMALL,
    "Mamba2": {**SMALL, "num_heads": 8, "head_dim": 8, "n_groups": 2},
    "Jamba": {**WITH_HEADS, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
}


@pytest.mark.parametrize("name", READS_ITS_SETTING_ELSEWHERE)
def test_a_configuration_whose_setting_something_else_reads_is_not_rewritten(name: str, trainer_of: Build) -> None:
    config = getattr(transformers, f"{name}Config")(**READS_ITS_SETTING_ELSEWHERE[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the forwards that are not rewritten
        model = flexact.convert(getattr(transformers, f"{name}ForCausalLM")(config), "*.act")
    with pytest.raises(flexact.FlexActError, match=r"hidden_act\b.*\.activation"):
        FlexActCallback().wrap(trainer_of(model))
    with pytest.warns(UserWarning, match=r"\.activation"):
        FlexActCallback(extract=False).wrap(trainer_of(model))
    assert model.config.hidden_act == "silu"


def test_a_configuration_whose_setting_a_method_reads_each_time_is_not_rewritten(trainer_of: Build) -> None:
    class Own(transformers.PreTrainedModel):
        config_class = transformers.BertConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.act = transformers.activations.ACT2FN[config.hidden_act]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(x) if self.config.hidden_act == "gelu" else x

    model = flexact.convert(Own(transformers.BertConfig()), "act")
    with pytest.raises(flexact.FlexActError, match=r"hidden_act\b.*Own\.forward"):
        FlexActCallback().wrap(trainer_of(model))


def test_a_model_left_with_sites_whose_configuration_cannot_say_so_is_warned_about(trainer_of: Build) -> None:
    class Own(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.embedding, self.act = nn.Embedding(40, 2), nn.ReLU()

    model = flexact.convert(Own(transformers.PretrainedConfig()))
    with pytest.warns(UserWarning, match=r"Own .*flexact\.load_picks"):
        FlexActCallback(extract=False).wrap(trainer_of(model))


@pytest.mark.parametrize(
    ("choices", "settings", "message"),
    [
        ({"logit_lr": 0.1}, {}, "logit_lr=0.1 has no effect"),
        ({}, {"auto_find_batch_size": True}, "auto_find_batch_size=True restarts"),
    ],
)
def test_settings_that_cannot_be(
    choices: dict[str, Any], settings: dict[str, Any], message: str, routed: Build, trainer_of: Build
) -> None:
    with pytest.raises(flexact.FlexActError, match=message):
        FlexActCallback(**choices).wrap(trainer_of(routed(), **settings))


def test_picks_by_channel(tiny_bert: Build, trainer_of: Build) -> None:
    config = flexact.FlexConfig(init="original", granularity="channel", channel_dim=-1)
    model = flexact.convert(tiny_bert(), config=config, example_inputs={"input_ids": torch.ones(1, 5).long()})
    with pytest.raises(flexact.FlexActError, match="per channel"):
        FlexActCallback().wrap(trainer_of(model))


def test_an_optimizer_that_decays_the_logits_it_moves_or_has_none(routed: Build, trainer_of: Build) -> None:
    model = routed(logit_step="optimizer")
    decaying = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    with pytest.raises(flexact.FlexActError, match=r"weight_decay=0.1.*flexact\.param_groups"):
        FlexActCallback().wrap(trainer_of(model, optimizers=(decaying, None))).train()
    weights = [p for name, p in model.named_parameters() if not name.endswith("logits")]
    without = torch.optim.AdamW(weights, lr=1e-3)
    with pytest.raises(flexact.FlexActError, match="3 of 3 sites"):
        FlexActCallback().wrap(trainer_of(model, optimizers=(without, None))).train()
    right = torch.optim.AdamW(flexact.param_groups(model, weight_decay=0.1), lr=1e-3)
    FlexActCallback().wrap(trainer_of(model, optimizers=(right, None))).train()


def test_a_checkpoint_without_flexact_state(routed: Build, trainer_of: Build, tmp_path: Path) -> None:
    FlexActCallback().wrap(trainer_of(routed(), save_strategy="steps", save_steps=4)).train()
    schedule = tmp_path / "out" / "checkpoint-4" / SCHEDULE

    def resume(**settings: Any) -> None:
        trainer = FlexActCallback().wrap(trainer_of(routed(), **settings))
        trainer.train(resume_from_checkpoint=str(schedule.parent))

    with pytest.raises(flexact.FlexActError, match=r"network_steps=12, .*18"):
        resume(num_train_epochs=3)
    whole = schedule.read_bytes()
    schedule.write_bytes(whole[:20])
    with pytest.raises(flexact.FlexActError, match=SCHEDULE):
        resume()
    schedule.unlink()
    with pytest.raises(flexact.FlexActError, match="FlexActCallback"):
        resume()
