"""Flex-Act inside `lightning.Trainer`, as a callback.

Lightning has no hook that changes the loss, so while a run goes on the module's `training_step` is wrapped: it does
what it did, and the policy's penalty is added to what it returns.
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
from torch import nn
from torch.optim import Optimizer

from flexact.errors import FlexActError, missing_extra
from flexact.observe.selection import Selection, selection
from flexact.policy.logit_updates import penalty
from flexact.policy.schedule import Schedule
from flexact.routing.sites import sites_of
from flexact.surgery.convert import extract

_STEP = "training_step"


def _lightning() -> Any:
    """`lightning.pytorch`, or `pytorch_lightning` in a program that imported that one: a callback of the one is not a
    callback of the other."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in names:
        if name in sys.modules:
            return sys.modules[name]
    for name in names:
        if find_spec(name.partition(".")[0]) is not None:
            return import_module(name)
    raise missing_extra("lightning", "lightning")


pl = _lightning()
_Callback: Any = pl.Callback


class FlexActCallback(_Callback):  # type: ignore[misc]
    """Lets the activations of a LightningModule pick while `lightning.Trainer` fits it.

    log: whether the sites' probabilities go to the Trainer's loggers, every `log_every_n_steps`, until the commitment.

    Where candidates are tried one after another (see `FlexConfig.pick_by`), they are compared by the loss that
    `training_step` returns, averaged over accumulated batches. The data goes on: each candidate sees other batches.

    The module keeps its sites, so that all checkpoints of a run and after it fit; once committed they call what they
    picked and nothing else. The plain network is `extracted`, a copy.

    In a user's program, where `model` is any LightningModule whose `configure_optimizers` gives its optimizer
    `flexact.param_groups(self, weight_decay=...)`:

        model = flexact.convert(model)
        callback = FlexActCallback()
        lightning.Trainer(max_epochs=10, callbacks=[callback]).fit(model, loader)
        plain = callback.extracted
    """

    def __init__(self, log: bool = True) -> None:
        self.logs = log
        self.schedule: Schedule | None = None
        self.selection: Selection | None = None
        """What was picked; None before the end of the run."""
        self._saved: dict[str, Any] | None = None
        self._extracted: nn.Module | None = None
        self._logged_commitment = False
        self._losses: list[torch.Tensor] = []
        """Of the batches of the present step, each divided by their number."""
        self._loss: torch.Tensor | None = None
        """Of the last step that had one: a `training_step` may return None to skip a batch."""

    @property
    def extracted(self) -> Any:
        """A copy of the module, of its own class, with plain activations; there once `fit` has returned."""
        if self._extracted is None:
            raise FlexActError(
                "there is no plain network yet: it is made when fit ends. Where fit trained in processes of its own "
                "(ddp_spawn, ddp_fork) or was interrupted, take it from the module: flexact.extract(model)."
            )
        return self._extracted

    # What the Trainer calls.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if self.schedule is not None:
            raise FlexActError(
                "this FlexActCallback has run already; a callback and its converted module are for one fit. Make them "
                "anew for the next, and go on with a stopped run by fit(..., ckpt_path=...)."
            )
        _check_module(pl_module)
        kinds = (pl.strategies.SingleDeviceStrategy, pl.strategies.DDPStrategy)
        if not isinstance(trainer.strategy, kinds):
            raise FlexActError(
                f"FlexActCallback works on one device and with strategy='ddp'; got {type(trainer.strategy).__name__}."
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        (optimizer,) = trainer.optimizers  # automatic optimization has one
        _check_not_decayed(optimizer, pl_module)
        self.schedule = Schedule(pl_module, _steps(trainer), optimizer, _begins_again(trainer))
        if self._saved is not None:
            self.schedule.load_state_dict(self._saved)
        if self.schedule.steps_done != trainer.global_step:
            raise FlexActError(
                f"the Trainer goes on at step {trainer.global_step}, its policy at step {self.schedule.steps_done}; "
                "resume from a checkpoint that a Trainer with a FlexActCallback wrote."
            )
        vars(pl_module)[_STEP] = _StepWithPenalty(pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is None or self.schedule is None or self.schedule.committed:
            return
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            scaler.unscale_(optimizer)  # which Lightning leaves to a fused optimizer, and that comes after the policy
        for site in self.schedule.router.sites:  # an overflow is no reason to move; a fused optimizer steps through it
            if site.logits.grad is not None:
                torch.nan_to_num_(site.logits.grad, nan=0.0, posinf=0.0, neginf=0.0)

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
        if self.logs and not self._logged_commitment and trainer.global_step % trainer.log_every_n_steps == 0:
            self._log(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        _remove_penalty(pl_module)
        undecided = [site.name for site in sites_of(pl_module) if not site.committed]
        if undecided:
            total = "?" if self.schedule is None else self.schedule.total_steps
            warnings.warn(
                f"training ended after {trainer.global_step} of {total} steps with {len(undecided)} sites not "
                "committed: the extracted network has their likeliest candidates, with weights that were not trained "
                "with these alone. The module itself is as it was, and a checkpoint of it can be gone on with.",
                stacklevel=2,
            )

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.selection = selection(pl_module)
        forward = vars(pl_module).get("forward")
        if getattr(forward, "__self__", None) is pl_module:
            del vars(pl_module)["forward"]  # Lightning's DDP leaves it there: it hides that of the extracted class
        self._extracted = extract(pl_module, commit=True)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        _remove_penalty(pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Where the policy stands, for Lightning's checkpoints; the sites' own state travels with the module's."""
        return {} if self.schedule is None else self.schedule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until the run begins."""
        self._saved = state_dict

    def _log(self, trainer: Any, module: nn.Module) -> None:
        assert self.schedule is not None
        self._logged_commitment = self.schedule.committed
        rows = selection(module)
        values = {f"flexact/{row.key}/{name}": p for row in rows for name, p in row.probabilities.items()}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step - 1)  # as Lightning counts: this batch's own values


def _check_module(module: Any) -> None:
    if not sites_of(module):
        raise FlexActError(
            f"this {type(module).__name__} has no FlexAct sites; convert it before fit, or the network inside it where "
            "it is made: self.net = flexact.convert(net)."
        )
    if not module.automatic_optimization:
        raise FlexActError(
            f"{type(module).__name__} optimizes by hand (automatic_optimization=False), so only it knows what a step "
            "is. Leave the FlexActCallback out; make a flexact.Schedule in on_train_start, add flexact.penalty(self) "
            "to the loss, and call schedule.step() after each optimizer step."
        )


def _check_not_decayed(optimizer: Optimizer, module: nn.Module) -> None:
    called = dict.fromkeys(row.site for row in selection(module))
    names = {id(site.logits): name for site, name in zip(sites_of(module), called, strict=True)}
    for group in optimizer.param_groups:
        held = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        if held and group.get("weight_decay", 0) != 0:
            raise FlexActError(
                f"the optimizer decays the logits of {len(held)} sites ({', '.join(held[:5])}) with weight_decay="
                f"{group['weight_decay']}. In {type(module).__name__}.configure_optimizers give it "
                "flexact.param_groups(self, weight_decay=...) instead of self.parameters()."
            )


def _begins_again(trainer: Any) -> list[Any]:
    """What a Trainer has that begins again with the weights: its learning-rate schedules, and its gradient scaler."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    return schedulers if scaler is None else [*schedulers, scaler]


def _steps(trainer: Any) -> int:
    """The number of optimizer steps of the whole run."""
    steps = trainer.estimated_stepping_batches
    if math.isinf(steps) or steps < 1:
        raise FlexActError(
            "how many steps this run has is not known, and the commitment must come inside it: give the Trainer "
            f"max_steps=..., or max_epochs=... with data that has a length; got max_epochs={trainer.max_epochs}, "
            f"max_steps={trainer.max_steps}, {trainer.num_training_batches} batches an epoch."
        )
    return int(steps)


class _StepWithPenalty:
    """In front of a module's own `training_step`: its loss with the policy's penalty."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.before = vars(module).get(_STEP)  # a compiled module has one there, too
        functools.update_wrapper(self, getattr(module, _STEP))  # Lightning looks at its arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]
        if isinstance(found, dict) and "loss" in found:
            return {**found, "loss": self._added(found["loss"])}
        return self._added(found) if isinstance(found, torch.Tensor) else found

    def _added(self, loss: torch.Tensor) -> torch.Tensor:
        return loss + penalty(self.module).to(loss.device)

    def remove(self) -> None:
        if self.before is None:
            del vars(self.module)[_STEP]
        else:
            vars(self.module)[_STEP] = self.before


def _remove_penalty(module: Any) -> None:
    step = vars(module).get(_STEP)
    if isinstance(step, _StepWithPenalty):
        step.remove()
