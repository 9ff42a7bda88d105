"""FlexActCallback for `lightning.Trainer`.

Lightning has no hook that changes the loss. During training, the callback therefore wraps the module's `training_step`
and adds the policy's penalty to the loss that it returns.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from flexact.errors import FlexActError, missing_extra
from flexact.observe.selection import Selection, selection
from flexact.policy.logit_updates import penalty
from flexact.policy.schedule import Schedule
from flexact.routing.sites import sites_of
from flexact.surgery.convert import extract


def _lightning() -> Any:
    """Return `lightning.pytorch`, or `pytorch_lightning` if the program imported only that one, or only that one is
    installed. Each package has a Callback class of its own."""
    names = ("lightning.pytorch", "pytorch_lightning")
    imported = [name for name in names if name in sys.modules]
    for name in imported or names:
        if find_spec(name.partition(".")[0]) is not None:
            return import_module(name)
    raise missing_extra("lightning", "lightning")


pl = _lightning()
_Callback: Any = pl.Callback


class FlexActCallback(_Callback):
    """Lets the activations of a LightningModule pick while `lightning.Trainer` fits it.

    log: whether to log the sites' probabilities every `log_every_n_steps`, until the commitment.

    If candidates are tried one after another (see `FlexConfig.pick_by`), they are compared by the loss that
    `training_step` returns, averaged over accumulated batches. The data loader is not restarted, so each candidate sees
    different batches.

    The module keeps its sites, so that checkpoints from during and after the run can be loaded. A committed site calls
    only its pick. `extracted` is a copy of the module with plain activations.

    For any LightningModule with one optimizer:

        model = flexact.convert(model)
        callback = FlexActCallback()
        lightning.Trainer(max_epochs=10, callbacks=[callback]).fit(model, loader)
        plain = callback.extracted
    """

    def __init__(self, log: bool = True) -> None:
        self.logs = log
        self.schedule: Schedule | None = None
        self.selection: Selection | None = None
        """The picks; None before the end of training."""
        self.extracted: Any = None
        """A copy of the module, of the same class, with plain activations; None before the end of `fit`, and in
        processes that do not train, which call `flexact.extract(model)` instead."""
        self._saved: dict[str, Any] | None = None
        self._losses: list[torch.Tensor] = []
        """Losses of the micro-batches of the current step, each divided by their number."""
        self._loss: torch.Tensor | None = None
        """Loss of the last step that had one; `training_step` may return None to skip a batch."""

    # Hooks of lightning's Callback.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if self.schedule is not None:
            raise FlexActError(
                "this FlexActCallback has already been used for a fit. Create a new one with a newly converted module, "
                "also to resume a stopped run with fit(..., ckpt_path=...)."
            )
        if not pl_module.automatic_optimization:
            raise FlexActError(
                f"{type(pl_module).__name__} has automatic_optimization=False. Use a flexact.Schedule instead of this "
                "callback: add flexact.penalty(self) to the loss, and call schedule.step() after each optimizer step."
            )
        if not isinstance(trainer.strategy, (pl.strategies.SingleDeviceStrategy, pl.strategies.DDPStrategy)):
            kind = type(trainer.strategy).__name__
            raise FlexActError(f"the strategy {kind} is not supported. Use one device, or strategy='ddp'.")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        (optimizer,) = trainer.optimizers  # automatic optimization has exactly one
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        rewinds = [config.scheduler for config in trainer.lr_scheduler_configs] + ([] if scaler is None else [scaler])
        self.schedule = Schedule(pl_module, _total_steps(trainer), optimizer, rewinds)
        if self._saved is not None:
            self.schedule.load_state_dict(self._saved)
        if self.schedule.steps_done != trainer.global_step:
            raise FlexActError(
                f"the Trainer resumes at step {trainer.global_step}, but the policy at step "
                f"{self.schedule.steps_done}. Resume from a checkpoint that was written with a FlexActCallback."
            )
        pl_module.training_step = _StepWithPenalty(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        if self.schedule is None:
            return
        if isinstance(outputs, dict) and outputs.get("loss") is not None and not self.schedule.committed:
            self._losses.append(outputs["loss"])
        if self.schedule.steps_done == trainer.global_step:
            return  # a micro-batch
        if self._losses:
            self._loss, self._losses = torch.stack(self._losses).sum(), []
        self.schedule.step(self._loss)
        if self.logs and trainer.global_step % trainer.log_every_n_steps == 0:
            self.logs = not self.schedule.committed  # the commitment is the last to be logged
            for logger in trainer.loggers:
                logger.log_metrics(selection(pl_module).scalars, step=trainer.global_step - 1)  # counted from 0

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        _remove_penalty(pl_module)
        uncommitted = sum(not site.committed for site in sites_of(pl_module))
        if uncommitted:
            total = "?" if self.schedule is None else self.schedule.total_steps
            warnings.warn(
                f"training ended after {trainer.global_step} of {total} steps with {uncommitted} sites not committed. "
                "The extracted network has their likeliest candidates, but was not trained with these picks alone; the "
                "module itself is unchanged, and its checkpoint can be resumed.",
                stacklevel=2,
            )

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.selection = selection(pl_module)
        forward = vars(pl_module).get("forward")
        if getattr(forward, "__self__", None) is pl_module:
            del vars(pl_module)["forward"]  # set by Lightning's DDP; it would hide the forward of the extracted class
        self.extracted = extract(pl_module, commit=True)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        _remove_penalty(pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule for Lightning's checkpoints; the sites' state is part of the module's."""
        return {} if self.schedule is None else self.schedule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts and the schedule is created."""
        self._saved = state_dict


def _total_steps(trainer: Any) -> int:
    """Return the number of optimizer steps of the whole run."""
    steps = trainer.estimated_stepping_batches
    if math.isinf(steps) or steps < 1:
        raise FlexActError(
            f"the number of steps is unknown from max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps} and "
            f"{trainer.num_training_batches} batches per epoch. Pass max_steps=... to the Trainer."
        )
    return int(steps)


class _StepWithPenalty:
    """Wraps a module's `training_step` and adds the policy's penalty to its loss."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.original = vars(module).get("training_step")  # a compiled module has one in its instance attributes
        functools.update_wrapper(self, module.training_step)  # Lightning inspects the signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]
        if isinstance(output, dict) and "loss" in output:
            return {**output, "loss": output["loss"] + penalty(self.module).to(output["loss"].device)}
        return output + penalty(self.module).to(output.device) if isinstance(output, torch.Tensor) else output


def _remove_penalty(module: Any) -> None:
    step = vars(module).get("training_step")
    if isinstance(step, _StepWithPenalty):
        del module.training_step
        if step.original is not None:
            module.training_step = step.original
