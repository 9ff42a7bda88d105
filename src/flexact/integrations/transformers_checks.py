"""Checks of the Trainer and its model that FlexActCallback makes before training."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from flexact.errors import FlexActError
from flexact.integrations.transformers_config import check_can_record_picks
from flexact.routing.layer import FlexAct
from flexact.routing.sites import sites_of


def check_model(model: Any, extracts: bool) -> list[FlexAct]:
    """Return the sites of a Trainer's model. Raise if it is compiled, has none, or cannot be saved once extracted."""
    if hasattr(model, "_orig_mod"):
        raise FlexActError(
            "the Trainer's model is already compiled. Pass it the original model, and torch_compile=True to its "
            "TrainingArguments."
        )
    sites = sites_of(model) if isinstance(model, nn.Module) else []
    if not sites:
        raise FlexActError(
            f"the Trainer's {type(model).__name__} has no FlexAct sites. Convert it before you create the Trainer: "
            "model = flexact.convert(model, config=flexact.FlexConfig(init='original'))."
        )
    if extracts:
        if any(site.config.granularity == "channel" for site in sites):
            raise FlexActError(
                "a transformers checkpoint cannot store picks per channel. Use granularity='layer', or "
                "FlexActCallback(extract=False) and save the result of flexact.extract(model) yourself."
            )
        check_can_record_picks(model)
    return sites


def can_record_picks(model: Any) -> bool:
    """Return whether the configuration of a model that keeps its sites can record the picks; warn if it cannot."""
    try:
        check_can_record_picks(model)
    except FlexActError as error:
        if hasattr(model, "save_pretrained"):
            warnings.warn(str(error), stacklevel=3)
        return False
    return True


def check_arguments(trainer: Any) -> None:
    """Raise if a setting of the Trainer is not supported."""
    args = trainer.args
    for unsupported, message in (
        (trainer.is_deepspeed_enabled, "DeepSpeed is not supported. Use DistributedDataParallel through torchrun."),
        (trainer.is_fsdp_enabled, "FSDP is not supported. Use DistributedDataParallel through torchrun."),
        (args.n_gpu > 1, "nn.DataParallel is not supported. Launch one process per GPU with torchrun."),
        (args.auto_find_batch_size, "auto_find_batch_size=True restarts training midway. Set a batch size instead."),
        (trainer.model_init is not None, "model_init=... creates an unconverted model. Pass a model instead."),
    ):
        if unsupported:
            raise FlexActError(f"FlexActCallback: {message}")
