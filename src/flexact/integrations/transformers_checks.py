"""What FlexActCallback refuses, or warns about, before it takes part in a Trainer's run."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from flexact.errors import FlexActError
from flexact.integrations.transformers_config import check_says_so, reason_not_to_say
from flexact.routing.layer import FlexAct
from flexact.routing.sites import sites_of


def check_model(model: Any, extracts: bool) -> list[FlexAct]:
    """The sites of a Trainer's model; an error where it is compiled or has none, or where its checkpoints could not say
    its picks."""
    if hasattr(model, "_orig_mod"):
        raise FlexActError(
            "the Trainer's model went through torch.compile already; give the Trainer the model that is not compiled, "
            "and its TrainingArguments torch_compile=True."
        )
    sites = sites_of(model) if isinstance(model, nn.Module) else []
    if not sites:
        raise FlexActError(
            f"the Trainer's {type(model).__name__} has no FlexAct sites; convert it before you build the Trainer: "
            "model = flexact.convert(model, config=flexact.FlexConfig(init='original'))."
        )
    if extracts:
        if any(site.config.granularity == "channel" for site in sites):
            raise FlexActError(
                "picks by channel cannot be written into a checkpoint of transformers; use granularity='layer', or "
                "give FlexActCallback extract=False and save what flexact.extract(model) returns yourself."
            )
        check_says_so(model)
    return sites


def says_so_or_warns(model: Any) -> bool:
    """Whether a model that is left with its sites can still keep `from_pretrained` from the wrong activations."""
    reason = reason_not_to_say(model)
    if reason is None:
        return True
    if hasattr(model, "save_pretrained"):
        warnings.warn(
            f"the configuration of {type(model).__name__} {reason}, so it cannot say which activations were picked: "
            "from_pretrained will load what save_pretrained writes with the original ones, without a word. Keep "
            "flexact.selection(model).to_dict() as a JSON file beside it, and give that to flexact.load_picks.",
            stacklevel=3,
        )
    return False


def check_arguments(trainer: Any) -> None:
    """Refuse what the Trainer was asked for and the policy cannot go along with."""
    args = trainer.args
    for wrong, told in (
        (trainer.is_deepspeed_enabled, "DeepSpeed is not supported; use DistributedDataParallel, through torchrun."),
        (trainer.is_fsdp_enabled, "FSDP is not supported; use DistributedDataParallel, through torchrun."),
        (args.n_gpu > 1, "nn.DataParallel is not supported; start one process a GPU, through torchrun."),
        (args.auto_find_batch_size, "auto_find_batch_size=True begins a run again in its middle; set a batch size."),
        (trainer.model_init is not None, "model_init=... builds an unconverted model; give the Trainer a model."),
    ):
        if wrong:
            raise FlexActError(f"FlexActCallback: {told}")
