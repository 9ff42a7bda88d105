"""FlexActCallback for `transformers.Trainer`.

The Trainer keeps its loop, optimizer and checkpoints. `FlexActCallback.wrap` changes the class of the given Trainer to
a subclass that extends the few methods for which there is no callback: optimizer groups, loss, logging and saving.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flexact.errors import FlexActError, missing_extra
from flexact.integrations.transformers_checks import can_record_picks, check_arguments, check_model
from flexact.integrations.transformers_config import require_load_picks, restore_settings, say_picks
from flexact.integrations.transformers_rewinding import (
    START,
    read_start,
    restart_learning_rate,
    stateful_parts,
    unwrapped,
    write_start,
)
from flexact.io.atomic_files import write_whole
from flexact.io.json_input import parsed_json
from flexact.observe.selection import Selection, selection
from flexact.policy.logit_updates import penalty
from flexact.policy.schedule import Schedule
from flexact.routing.layer import FlexAct
from flexact.routing.sites import blend, sites_of
from flexact.surgery.convert import commit, extract
from flexact.surgery.picks_file import FILE, write_picks

if find_spec("transformers") is None:
    raise missing_extra("transformers", "transformers")
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

SCHEDULE = "flexact_schedule.json"
"""File with the state of the schedule, in every checkpoint."""


class FlexActCallback(TrainerCallback):
    """Lets the activations of a model pick while `transformers.Trainer` trains it.

    logit_lr: learning rate of the logits if the optimizer updates them; by default that of the Trainer.
    log: whether to log the sites' probabilities together with the loss, until the commitment.
    extract: whether to replace the sites by plain activations at the end of `train`, so that `save_pretrained` writes a
        plain checkpoint.

    A Trainer does not pass the loss of a step to its callbacks. Therefore `pick_by="auto"` blends the candidates, even
    in a network without normalisation layers, and `pick_by="trial"` raises an error.

    `wrap` marks the model's configuration as one with sites, and the commitment records the picks there. Whenever the
    model is saved, `from_pretrained` never loads it silently with the wrong activations.

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
        self._adds_penalty = False
        self._records_picks = False
        """Whether the model's configuration can record the picks."""
        self._description: dict[str, Any] | None = None
        """The content of flexact.json, if a checkpoint needs it."""
        self._logged_commitment = False

    def wrap(self, trainer: Any) -> Any:
        """Attach this callback to a Trainer and return the Trainer. Call it once, before `train`."""
        if not isinstance(trainer, Trainer):
            raise FlexActError(f"wrap got a {type(trainer).__name__}. Pass a transformers.Trainer.")
        if isinstance(trainer, _TrainerMixin):
            raise FlexActError(
                "this Trainer is already wrapped by a FlexActCallback. Call wrap once; for another run, create a new "
                "Trainer with a newly converted model."
            )
        if self._trainer is not None:
            raise FlexActError("this FlexActCallback already has a Trainer. Create one callback per run.")
        sites = check_model(trainer.model, self.extracts)
        check_arguments(trainer)
        blend(sites)
        config = sites[0].config
        if self.logit_lr is not None and config.policy.logit_step == "paced":
            raise FlexActError(
                f"logit_lr={self.logit_lr} has no effect because the policy updates the logits, not the optimizer. "
                "Remove it, or convert with FlexConfig(policy=Policy(logit_step='optimizer'))."
            )
        others = [one for one in trainer.callback_handler.callbacks if isinstance(one, FlexActCallback)]
        if others and others[0] is not self:
            raise FlexActError("the callbacks of this Trainer include another FlexActCallback. Remove it from them.")
        self._adds_penalty = config.policy.adds_to_loss
        self._trainer = trainer
        if not others:
            trainer.add_callback(self)
        restore_settings(trainer.model)
        self._records_picks = self.extracts or can_record_picks(trainer.model)
        self.update_config()
        vars(trainer)["flexact"] = self
        trainer.__class__ = type(trainer.__class__.__name__, (_TrainerMixin, trainer.__class__), {})
        return trainer

    # Hooks of TrainerCallback.

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer is None:
            raise FlexActError(
                "FlexActCallback was passed as a Trainer's callback, where it cannot change the loss or the optimizer. "
                "Wrap the Trainer instead: FlexActCallback().wrap(trainer)."
            )
        if self.schedule is not None:
            raise FlexActError(
                "this FlexActCallback has already been used for a run. Create a new callback, Trainer and converted "
                "model for every run."
            )
        optimizer = unwrapped(kwargs["optimizer"])
        self._check_not_decayed(optimizer)
        self.schedule = Schedule(self._trainer.model, state.max_steps, optimizer, stateful_parts(self._trainer))
        if self.checkpoint is not None:
            _load_schedule(self.checkpoint, self.schedule)
        if self.schedule.steps_done != state.global_step:
            raise FlexActError(
                f"the Trainer resumes at step {state.global_step}, but the policy at step {self.schedule.steps_done}. "
                "Resume from a checkpoint that was written by a Trainer with a FlexActCallback."
            )
        restart_learning_rate(self._trainer, optimizer, self.schedule)
        self.update_config()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        if scaler is None or self._running is None or self._running.committed:
            return
        if not args.max_grad_norm:
            self._trainer.accelerator.unscale_gradients()  # otherwise gradient clipping has done it
        for site in self._sites:  # on an overflow, keep the logits; a fused optimizer would step with the NaN
            if site.logits.grad is not None:
                torch.nan_to_num_(site.logits.grad, nan=0.0, posinf=0.0, neginf=0.0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        schedule = self._running
        if schedule is not None:
            was_committed = schedule.committed
            schedule.step()
            if schedule.rewound_at == schedule.steps_done:
                restart_learning_rate(self._trainer, unwrapped(kwargs["optimizer"]), schedule)
            if schedule.committed and not was_committed:
                self.update_config()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = self._trainer.model
        undecided = sum(not site.committed for site in self._sites)
        if undecided:
            warnings.warn(
                f"training ended after {state.global_step} of {state.max_steps} steps with {undecided} sites not "
                "committed, or the best checkpoint that was loaded is from before the commitment. Their most likely "
                "candidates are picked, but the weights were not trained with these picks alone.",
                stacklevel=2,
            )
            commit(model)
        self.selection = selection(model)
        if self.extracts:
            extract(model, inplace=True)
        if self._records_picks:
            picks = self.selection.leading
            if any(row.channel is not None for row in self.selection):
                self._description = require_load_picks(model, picks, committed=True)
            else:
                self._description = say_picks(model, picks)

    # Called by the methods of the wrapped Trainer.

    @property
    def _running(self) -> Schedule | None:
        """The schedule during training, otherwise None."""
        return self.schedule if self.selection is None else None

    @property
    def _sites(self) -> list[FlexAct]:
        return [] if self.schedule is None else self.schedule.router.sites

    def separate_logits(self, optimizer: Optimizer) -> None:
        """Move the logits to a parameter group of their own, without weight decay."""
        logits = [site.logits for site in sites_of(self._trainer.model)]
        ids = {id(parameter) for parameter in logits}
        groups = [group for group in optimizer.param_groups if any(id(p) in ids for p in group["params"])]
        if all(group["weight_decay"] == 0 and {id(p) for p in group["params"]} <= ids for group in groups):
            return  # they have one already, or are missing from the optimizer, for which the Schedule raises
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in ids]
        rate = self._trainer.args.learning_rate if self.logit_lr is None else self.logit_lr
        optimizer.add_param_group({"params": logits, "weight_decay": 0.0, "lr": rate})

    def with_penalty(self, loss: torch.Tensor, model: nn.Module, divisor: int) -> torch.Tensor:
        """Return the loss of a micro-batch plus the policy's penalty divided by `divisor`."""
        schedule = self._running
        if schedule is None or not model.training:
            return loss
        if schedule.committed or schedule.router.at_rest:
            # DistributedDataParallel waits for the gradients of all parameters, unless it finds the unused ones.
            if not isinstance(model, nn.parallel.DistributedDataParallel) or model.find_unused_parameters:
                return loss
        elif not self._adds_penalty:
            return loss
        return loss + penalty(self._trainer.model).to(loss.device) / divisor

    def probabilities(self) -> dict[str, float]:
        """Return the probabilities of all candidates per site for the log; empty after the commitment was logged."""
        schedule = self._running
        if schedule is None or not self.logs or self._logged_commitment:
            return {}
        self._logged_commitment = schedule.committed
        rows = selection(self._trainer.model)
        return {f"flexact/{row.key}/{name}": p for row in rows for name, p in row.probabilities.items()}

    @contextmanager
    def raised_recompile_limit(self) -> Iterator[None]:
        """Raise torch.compile's recompile limit during training.

        Every time candidates are dropped, the network is recompiled for training and for evaluation.
        """
        if not self._trainer.args.torch_compile:
            yield
            return
        rounds = sum({site.k for site in sites_of(self._trainer.model)})  # sites of equal size drop candidates together
        import torch._dynamo

        with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit + 2 * rounds):
            yield

    def update_config(self) -> None:
        """Until training ends, record in the model's configuration that it has sites, and their current picks."""
        if self._records_picks and self.selection is None:
            current = selection(self._trainer.model)
            committed = all(row.committed for row in current)
            self._description = require_load_picks(self._trainer.model, current.leading, committed)

    def save(self, folder: Path) -> None:
        """Write the state of the schedule and flexact.json into a checkpoint folder, as far as it needs them."""
        if self._running is not None:
            state = self._running.state_dict()
            if "start" in state:
                state["start"] = write_start(folder, state["start"])
            plain = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
            write_whole(folder / SCHEDULE, json.dumps(plain) + "\n")
        if self._description is not None:
            write_picks(folder, self._description)
        elif self._records_picks:
            (folder / FILE).unlink(missing_ok=True)  # from an earlier save into this folder

    def _check_not_decayed(self, optimizer: Optimizer) -> None:
        ids = {id(site.logits) for site in sites_of(self._trainer.model)}
        for group in optimizer.param_groups:
            if group.get("weight_decay", 0) != 0 and any(id(parameter) in ids for parameter in group["params"]):
                raise FlexActError(
                    f"the optimizer applies weight_decay={group['weight_decay']} to the logits. Create it with "
                    "flexact.param_groups(model, weight_decay=...), or let the Trainer create one."
                )


class _TrainerMixin:
    """Extends the methods of a wrapped Trainer."""

    flexact: FlexActCallback

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        is_new = self.optimizer is None  # type: ignore[attr-defined]
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if is_new:
            self.flexact.separate_logits(optimizer)
        return optimizer

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        divisor = 1
        if self._loss_is_scaled(kwargs.get("num_items_in_batch", args[1] if len(args) > 1 else None)):
            accumulated = self.args.gradient_accumulation_steps  # type: ignore[attr-defined]
            divisor = getattr(self, "current_gradient_accumulation_steps", None) or accumulated
        if isinstance(result, tuple):
            return (self.flexact.with_penalty(result[0], model, divisor), *result[1:])
        return self.flexact.with_penalty(result, model, divisor)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with self.flexact.raised_recompile_limit():
            return super().train(*args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as before, then pass the probabilities to all callbacks but those that would print them."""
        super().log(logs, *args, **kwargs)  # type: ignore[misc]
        probabilities = self.flexact.probabilities() if "loss" in logs else {}
        if not probabilities:
            return
        if self.state.log_history:  # type: ignore[attr-defined]
            self.state.log_history[-1].update(probabilities)  # type: ignore[attr-defined]
        handler = self.callback_handler  # type: ignore[attr-defined]
        callbacks = handler.callbacks
        handler.callbacks = [one for one in callbacks if not isinstance(one, PrinterCallback | ProgressCallback)]
        try:
            self.control = handler.on_log(self.args, self.state, self.control, probabilities)  # type: ignore[attr-defined,has-type]
        finally:
            handler.callbacks = callbacks

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        self.flexact.checkpoint = Path(resume_from_checkpoint)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = output_dir if output_dir is not None else self.args.output_dir  # type: ignore[attr-defined]
        self.flexact.update_config()
        super()._save(folder, state_dict)  # type: ignore[misc]
        self.flexact.save(Path(folder))

    def _load_best_model(self) -> None:
        super()._load_best_model()  # type: ignore[misc]
        self.flexact.update_config()  # it may be from before the commitment

    def _loss_is_scaled(self, num_items_in_batch: Any) -> bool:
        """Return whether `compute_loss` divides by the number of micro-batches itself; otherwise the Trainer does."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is not None:
            return bool(scaled)
        by_model = self.model_accepts_loss_kwargs and num_items_in_batch is not None  # type: ignore[attr-defined]
        return bool(by_model or self.compute_loss_func is not None)  # type: ignore[attr-defined]


def _load_schedule(checkpoint: Path, schedule: Schedule) -> None:
    """Load the state that `FlexActCallback.save` wrote into a schedule."""
    path = checkpoint / SCHEDULE
    try:
        saved = parsed_json(path.read_bytes())
    except FileNotFoundError:
        raise FlexActError(
            f"{path} does not exist: the checkpoint was not written by a Trainer with a FlexActCallback. Resume from "
            "another checkpoint, or start a new run."
        ) from None
    except ValueError as error:
        raise FlexActError(f"{path} is not valid JSON ({error}). Resume from another checkpoint.") from None
    state: dict[str, Any] = dict(saved) if isinstance(saved, dict) else {}
    if state.get("start") == START:
        state["start"] = read_start(checkpoint)
    try:
        for name, value in schedule.state_dict().items():
            if isinstance(value, torch.Tensor) and isinstance(state.get(name), list | int | float):
                state[name] = torch.tensor(state[name], dtype=value.dtype, device=value.device)
        schedule.load_state_dict(state)
    except (FlexActError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise FlexActError(
            f"{path}: {error} Resume with the epochs or max_steps, batch size and gradient accumulation of the run "
            "that wrote it, or from another checkpoint."
        ) from None
