"""FlexActCallback for `transformers.Trainer`.

The Trainer keeps its loop, optimizer and checkpoints. `FlexActCallback.wrap` changes the class of the given Trainer to
a subclass that extends the few methods for which there is no callback: optimizer groups, loss, logging and saving.
"""

from __future__ import annotations

import copy
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from flexact.errors import FlexActError, missing_extra
from flexact.integrations.transformers_config import (
    problem_with_recording,
    record_picks,
    require_load_picks,
    restore_settings,
)
from flexact.integrations.transformers_schedule import load_schedule, restart_learning_rate, save_schedule
from flexact.observe.selection import Selection, selection
from flexact.policy.logit_updates import penalty
from flexact.policy.optimizers import check_logit_lr, unwrapped
from flexact.policy.schedule import Schedule
from flexact.routing.layer import FlexAct
from flexact.routing.sites import blend, sites_of
from flexact.surgery.convert import commit, extract

if find_spec("transformers") is None:
    raise missing_extra("transformers", "transformers")
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback


class FlexActCallback(TrainerCallback):
    """Lets the activations of a model pick while `transformers.Trainer` trains it.

    logit_lr: learning rate of the logits if the optimizer updates them; by default that of the Trainer.
    log: whether to log the sites' probabilities together with the loss, until the commitment.
    extract: whether to replace the sites by plain activations at the end of `train`, so that `save_pretrained` writes a
        plain checkpoint.

    A Trainer does not pass the loss of a step to its callbacks. Therefore `pick_by="auto"` blends the candidates, even
    in a network without normalisation layers, and `pick_by="trial"` raises an error.

    `wrap` records in the model's configuration that it has sites, and the commitment records the picks there. Therefore
    `from_pretrained` never silently loads a saved model with the wrong activations.

    For any transformers model:

        model = flexact.convert(model, config=flexact.FlexConfig(init="original", warmup=0.3))
        trainer = FlexActCallback().wrap(Trainer(model=model, args=args, train_dataset=data))
        trainer.train()
    """

    def __init__(self, logit_lr: float | None = None, log: bool = True, extract: bool = True) -> None:
        self.logit_lr, self.logs, self.extracts = logit_lr, log, extract
        self.schedule: Schedule | None = None
        self.selection: Selection | None = None
        """The picks; None before the end of training."""
        self.checkpoint: Path | None = None
        """The checkpoint from which training resumes."""
        self._trainer: Any = None
        self._records_picks = False
        """Whether the model's configuration can record the picks."""

    def wrap(self, trainer: Any) -> Any:
        """Attach this callback to a Trainer and return the Trainer. Call it once, before `train`."""
        if not isinstance(trainer, Trainer):
            raise FlexActError(f"wrap got a {type(trainer).__name__}. Pass a transformers.Trainer.")
        if isinstance(trainer, _WrappedTrainer):
            raise FlexActError(
                "this Trainer is already wrapped. For another run, create a new Trainer with a newly converted model."
            )
        if self._trainer is not None:
            raise FlexActError("this FlexActCallback already has a Trainer. Create one callback per run.")
        sites = _checked_sites(trainer.model, self.extracts)
        _check_arguments(trainer)
        problem = problem_with_recording(trainer.model)
        if problem is not None and self.extracts:
            raise FlexActError(problem)
        blend(sites)
        check_logit_lr(self.logit_lr, sites)
        self._trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        restore_settings(trainer.model)
        self._records_picks = problem is None
        if problem is not None and hasattr(trainer.model, "save_pretrained"):
            warnings.warn(problem, stacklevel=2)
        self.update_config()
        vars(trainer)["flexact"] = self
        trainer.__class__ = type(trainer.__class__.__name__, (_WrappedTrainer, trainer.__class__), {})
        return trainer

    # Hooks of TrainerCallback.

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer is None:
            raise FlexActError(
                "a FlexActCallback among a Trainer's callbacks cannot change its loss. Wrap the Trainer instead: "
                "FlexActCallback().wrap(trainer)."
            )
        if self.schedule is not None:
            raise FlexActError(
                "this FlexActCallback has already been used. Create a new callback, Trainer and model for every run."
            )
        optimizer = unwrapped(kwargs["optimizer"])
        parts = (self._trainer.lr_scheduler, getattr(self._trainer.accelerator, "scaler", None))
        rewinds = [part for part in parts if part is not None]
        self.schedule = Schedule(self._trainer.model, state.max_steps, optimizer, rewinds)
        if self.checkpoint is not None:
            load_schedule(self.checkpoint, self.schedule)
        restart_learning_rate(self._trainer, optimizer, self.schedule)
        self.update_config()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        schedule = self.running
        if schedule is not None:
            was_committed = schedule.committed
            schedule.step()
            if schedule.rewound_at == schedule.steps_done:
                restart_learning_rate(self._trainer, unwrapped(kwargs["optimizer"]), schedule)
            if schedule.committed and not was_committed:
                self.update_config()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = self._trainer.model
        uncommitted = sum(not site.committed for site in sites_of(model))
        if uncommitted:
            warnings.warn(
                f"training ended after {state.global_step} of {state.max_steps} steps with {uncommitted} sites not "
                "committed, or the best checkpoint is from before the commitment. These sites pick their likeliest "
                "candidates, but the weights were not trained with these picks alone.",
                stacklevel=2,
            )
            commit(model)
        self.selection = selection(model)
        if self.extracts:
            extract(model, inplace=True)
        if self._records_picks:
            picks = self.selection.leading
            if any(row.channel is not None for row in self.selection):
                require_load_picks(model, picks, committed=True)
            else:
                record_picks(model, picks)

    # Used by the wrapped Trainer.

    @property
    def running(self) -> Schedule | None:
        """The schedule during training, otherwise None."""
        return self.schedule if self.selection is None else None

    def update_config(self) -> None:
        """Until training ends, record in the model's configuration that it has sites, and their current picks."""
        if self._records_picks and self.selection is None:
            current = selection(self._trainer.model)
            committed = all(row.committed for row in current)
            require_load_picks(self._trainer.model, current.leading, committed)

    def save(self, folder: Path) -> None:
        """Write the state of the schedule into a checkpoint folder during training."""
        if self.running is not None:
            save_schedule(folder, self.running)


def _checked_sites(model: Any, extracts: bool) -> list[FlexAct]:
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
    if extracts and any(site.config.granularity == "channel" for site in sites):
        raise FlexActError(
            "a transformers checkpoint cannot store picks per channel. Use granularity='layer', or "
            "FlexActCallback(extract=False) and save the result of flexact.extract(model) yourself."
        )
    return sites


def _check_arguments(trainer: Any) -> None:
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


class _WrappedTrainer(Trainer):
    """Extends the methods of the Trainer for which there is no callback."""

    flexact: FlexActCallback

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer, and move the logits to a parameter group of their own, without weight decay."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)
        logits = [site.logits for site in sites_of(self.model)]
        ids = {id(parameter) for parameter in logits}
        holding = [group for group in optimizer.param_groups if any(id(p) in ids for p in group["params"])]
        apart = all(group["weight_decay"] == 0 and {id(p) for p in group["params"]} <= ids for group in holding)
        if is_new and not apart:
            for group in holding:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in ids]
            rate = self.args.learning_rate if self.flexact.logit_lr is None else self.flexact.logit_lr
            optimizer.add_param_group({"params": logits, "weight_decay": 0.0, "lr": rate})
        return optimizer

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of a micro-batch plus the policy's penalty, which is averaged over the micro-batches."""
        result = super().compute_loss(model, inputs, *args, **kwargs)
        if not (model.training and self._adds_penalty(model)):
            return result
        extra = penalty(self.model)
        if self._loss_is_scaled(kwargs.get("num_items_in_batch", args[1] if len(args) > 1 else None)):
            accumulated = self.args.gradient_accumulation_steps
            extra = extra / (getattr(self, "current_gradient_accumulation_steps", None) or accumulated)
        loss, *others = result if isinstance(result, tuple) else (result,)
        loss = loss + extra.to(loss.device)
        return (loss, *others) if isinstance(result, tuple) else loss

    def _adds_penalty(self, model: nn.Module) -> bool:
        schedule = self.flexact.running
        if schedule is not None and (schedule.committed or schedule.router.at_rest):
            # DistributedDataParallel waits for the gradients of all parameters, unless it finds the unused ones.
            return isinstance(model, nn.parallel.DistributedDataParallel) and not model.find_unused_parameters
        return schedule is not None and schedule.config.policy.adds_to_loss

    def _loss_is_scaled(self, num_items_in_batch: Any) -> bool:
        """Return whether `compute_loss` divides by the number of micro-batches itself; otherwise the Trainer does."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is not None:
            return bool(scaled)
        by_model = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return bool(by_model or self.compute_loss_func is not None)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train with a higher recompile limit: every drop recompiles the network for training and for evaluation."""
        if not self.args.torch_compile:
            return super().train(*args, **kwargs)
        import torch._dynamo

        sizes = {site.k for site in sites_of(self.model)}  # equal ones drop together
        with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit + 2 * sum(sizes)):
            return super().train(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as before, then pass the probabilities to all callbacks but those that would print them."""
        super().log(logs, *args, **kwargs)
        schedule = self.flexact.running
        if schedule is None or "loss" not in logs or not self.flexact.logs:
            return
        self.flexact.logs = not schedule.committed  # the commitment is the last to be logged
        probabilities = selection(self.model).scalars
        self.state.log_history[-1].update(probabilities)
        handler = copy.copy(self.callback_handler)
        handler.callbacks = [
            one for one in handler.callbacks if not isinstance(one, PrinterCallback | ProgressCallback)
        ]
        handler.on_log(self.args, self.state, self.control, probabilities)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)
        self.flexact.checkpoint = Path(resume_from_checkpoint)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = output_dir if output_dir is not None else self.args.output_dir
        self.flexact.update_config()
        super()._save(folder, state_dict)
        self.flexact.save(Path(folder))

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.flexact.update_config()  # the best checkpoint may be from before the commitment
