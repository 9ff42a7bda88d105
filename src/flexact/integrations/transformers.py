"""Flex-Act inside `transformers.Trainer`.

The Trainer keeps its loop, its optimizer and its checkpoints. `FlexActCallback.wrap` makes the given Trainer one of a
subclass of its own class, in which the few methods that have no callback (the optimizer's groups, the loss, the log,
saving) do what they did and then what the policy needs.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flexact.errors import FlexActError, missing_extra
from flexact.integrations.transformers_checks import check_arguments, check_model, says_so_or_warns
from flexact.integrations.transformers_config import say_loudly, say_picks, unsay_picks
from flexact.integrations.transformers_rewinding import (
    START,
    begins_again,
    inner,
    read_start,
    restart_learning_rate,
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
"""In a checkpoint's folder: where the policy stands."""
_PRINTING = (PrinterCallback, ProgressCallback)
"""The callbacks that print a log as a whole."""


class FlexActCallback(TrainerCallback):
    """Lets the activations of a model pick while `transformers.Trainer` trains it.

    logit_lr: learning rate of the logits, where the policy leaves them to the optimizer; the Trainer's by default.
    log: whether the sites' probabilities go to the Trainer's loggers, with every log of the loss, until the commitment.
    extract: whether the model is a plain one when `train` returns, so that `save_pretrained` writes a plain checkpoint.

    A Trainer tells its callbacks no loss at the end of a step, so `pick_by="auto"` is a blend here, also in a network
    without normalisation layers, and `pick_by="trial"` is refused.

    From `wrap` on the model's configuration says that it has sites, and from the commitment on what they picked; so
    whoever saves the model, and when, `from_pretrained` never builds it with other activations without a word.

    In a user's program, where `model` is any model of transformers:

        model = flexact.convert(model, config=flexact.FlexConfig(init="original", warmup=0.3))
        trainer = FlexActCallback().wrap(Trainer(model=model, args=args, train_dataset=data))
        trainer.train()
    """

    def __init__(self, logit_lr: float | None = None, log: bool = True, extract: bool = True) -> None:
        self.logit_lr, self.logs, self.extracts = logit_lr, log, extract
        self.schedule: Schedule | None = None
        self.selection: Selection | None = None
        """What was picked; None before the end of the run."""
        self._trainer: Any = None
        self._checkpoint: Path | None = None
        self._adds_penalty = False
        self._says_so = False
        self._description: dict[str, Any] | None = None
        self._logged_commitment = False

    def wrap(self, trainer: Any) -> Any:
        """Take part in a Trainer's run; returns the Trainer. Do it once, before `train`."""
        if not isinstance(trainer, Trainer):
            raise FlexActError(f"wrap needs a transformers.Trainer; got {type(trainer).__name__}.")
        if isinstance(trainer, _Routed):
            raise FlexActError(
                "this Trainer is wrapped already: it has a FlexActCallback. Call wrap once; for another run make a "
                "fresh Trainer with a freshly converted model."
            )
        if self._trainer is not None:
            raise FlexActError("this FlexActCallback has a Trainer already; make one callback for each run.")
        sites = check_model(trainer.model, self.extracts)
        check_arguments(trainer)
        blend(sites)
        if self.logit_lr is not None and sites[0].config.logit_step == "paced":
            raise FlexActError(
                f"logit_lr={self.logit_lr} would have no effect: this policy moves the logits itself. Leave it out, or "
                "convert with FlexConfig(logit_step='optimizer')."
            )
        given = next((one for one in trainer.callback_handler.callbacks if isinstance(one, FlexActCallback)), None)
        if given not in (None, self):
            raise FlexActError(
                "this Trainer was given another FlexActCallback among its callbacks; leave it out there."
            )
        config = sites[0].config
        uses_kl = config.correction in ("grad_norm_kl", "clipped_norm_kl") and config.alpha > 0
        self._adds_penalty = uses_kl and config.alpha_kind == "absolute"
        self._trainer = trainer
        if given is None:
            trainer.add_callback(self)
        unsay_picks(trainer.model)
        self._says_so = self.extracts or says_so_or_warns(trainer.model)
        self.say_so_far()
        vars(trainer)["flexact"] = self
        trainer.__class__ = type(trainer.__class__.__name__, (_Routed, trainer.__class__), {})
        return trainer

    # What the Trainer calls.

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer is None:
            raise FlexActError(
                "FlexActCallback among a Trainer's callbacks has no way to the loss and the optimizer; give it the "
                "Trainer instead: FlexActCallback().wrap(trainer)."
            )
        if self.schedule is not None:
            raise FlexActError(
                "this FlexActCallback has run already; a callback, its Trainer and its converted model are for one "
                "run. Make them anew for the next."
            )
        optimizer = inner(kwargs["optimizer"])
        self._check_not_decayed(optimizer)
        self.schedule = Schedule(self._trainer.model, state.max_steps, optimizer, begins_again(self._trainer))
        if self._checkpoint is not None:
            _load_schedule(self._checkpoint, self.schedule)
        if self.schedule.steps_done != state.global_step:
            raise FlexActError(
                f"the Trainer goes on at step {state.global_step}, its policy at step {self.schedule.steps_done}; "
                "resume from a checkpoint that a Trainer with a FlexActCallback wrote."
            )
        restart_learning_rate(self._trainer, optimizer, self.schedule)
        self.say_so_far()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        if scaler is None or self._running is None or self._running.committed:
            return
        if not args.max_grad_norm:
            self._trainer.accelerator.unscale_gradients()  # as clipping does
        for site in self._sites:  # an overflow is no reason to move; a fused optimizer steps through it
            if site.logits.grad is not None:
                torch.nan_to_num_(site.logits.grad, nan=0.0, posinf=0.0, neginf=0.0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._running is not None:
            before = self._running.committed
            self._running.step()
            if self._running.rewound_at == self._running.steps_done:
                restart_learning_rate(self._trainer, inner(kwargs["optimizer"]), self._running)
            if self._running.committed and not before:
                self.say_so_far()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = self._trainer.model
        undecided = [site.name for site in self._sites if not site.committed]
        if undecided:
            warnings.warn(
                f"training ended after {state.global_step} of {state.max_steps} steps with {len(undecided)} sites not "
                "committed, or a checkpoint from before the commitment was loaded as the best one: their likeliest "
                "candidates are taken, with weights that were not trained with these alone.",
                stacklevel=2,
            )
            commit(model)
        self.selection = selection(model)
        if self.extracts:
            extract(model, inplace=True)
        if self._says_so:
            by_channel = any(row.channel is not None for row in self.selection)
            picks = self.selection.leading
            self._description = say_loudly(model, picks, committed=True) if by_channel else say_picks(model, picks)

    # What the wrapped Trainer's methods ask.

    @property
    def _running(self) -> Schedule | None:
        """The schedule, while the run goes on."""
        return self.schedule if self.selection is None else None

    @property
    def _sites(self) -> list[FlexAct]:
        return [] if self.schedule is None else self.schedule.router.sites

    def separate_logits(self, optimizer: Optimizer) -> None:
        """Give the logits a group of their own, without decay."""
        logits = [site.logits for site in sites_of(self._trainer.model)]
        known = {id(parameter) for parameter in logits}
        holding = [group for group in optimizer.param_groups if any(id(p) in known for p in group["params"])]
        if all(group["weight_decay"] == 0 and {id(p) for p in group["params"]} <= known for group in holding):
            return  # they have one, or the optimizer does not hold them, which the Schedule tells
        for group in holding:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in known]
        rate = self._trainer.args.learning_rate if self.logit_lr is None else self.logit_lr
        optimizer.add_param_group({"params": logits, "weight_decay": 0.0, "lr": rate})

    def with_penalty(self, loss: torch.Tensor, model: nn.Module, divided: int) -> torch.Tensor:
        """The loss of a micro-batch with the policy's penalty, over `divided` micro-batches of a step."""
        schedule = self._running
        if schedule is None or not model.training:
            return loss
        inner = self._trainer.model
        if schedule.committed or schedule.router.at_rest:
            # DistributedDataParallel waits for a gradient of every parameter, unless it looks for those without.
            if not isinstance(model, nn.parallel.DistributedDataParallel) or model.find_unused_parameters:
                return loss
        elif not self._adds_penalty:
            return loss
        return loss + penalty(inner).to(loss.device) / divided

    def probabilities(self) -> dict[str, float]:
        """What is logged: of each site, each candidate's probability."""
        schedule = self._running
        if schedule is None or not self.logs or self._logged_commitment:
            return {}
        self._logged_commitment = schedule.committed
        rows = selection(self._trainer.model)
        return {f"flexact/{row.key}/{name}": p for row in rows for name, p in row.probabilities.items()}

    @contextmanager
    def room_to_recompile(self) -> Iterator[None]:
        """Around the run: with torch_compile=True the network is compiled anew, for training and for evaluation, each
        time a candidate is dropped; torch's limit on that, which is meant for what goes on forever, counts the rest."""
        if not self._trainer.args.torch_compile:
            yield
            return
        rounds = sum({site.k for site in sites_of(self._trainer.model)})  # sites with as many candidates drop together
        import torch._dynamo

        with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit + 2 * rounds):
            yield

    def resume_from(self, checkpoint: str) -> None:
        """Where the run goes on from, once it begins."""
        self._checkpoint = Path(checkpoint)

    def say_so_far(self) -> None:
        """While there are sites: let the model's configuration say so, and what they would pick now."""
        if self._says_so and self.selection is None:
            now = selection(self._trainer.model)
            committed = all(row.committed for row in now)
            self._description = say_loudly(self._trainer.model, now.leading, committed)

    def write_beside(self, folder: Path) -> None:
        """What a checkpoint's folder holds besides the network."""
        if self._running is not None:
            whole = self._running.state_dict()
            if "start" in whole:
                whole["start"] = write_start(folder, whole["start"])
            state = {
                name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in whole.items()
            }
            write_whole(folder / SCHEDULE, json.dumps(state) + "\n")
        if self._description is not None:
            write_picks(folder, self._description)
        elif self._says_so:
            (folder / FILE).unlink(missing_ok=True)  # of an earlier save into this folder

    def _check_not_decayed(self, optimizer: Optimizer) -> None:
        known = {id(site.logits) for site in sites_of(self._trainer.model)}
        for group in optimizer.param_groups:
            if group.get("weight_decay", 0) != 0 and any(id(parameter) in known for parameter in group["params"]):
                raise FlexActError(
                    f"the optimizer decays the logits (weight_decay={group['weight_decay']}); give the Trainer one "
                    "that was made with flexact.param_groups(model, weight_decay=...), or let it make its own."
                )


class _Routed:
    """Over a Trainer's own class: the methods that do something for the policy, too."""

    flexact: FlexActCallback

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        own = self.optimizer is None  # type: ignore[attr-defined]
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if own:
            self.flexact.separate_logits(optimizer)
        return optimizer

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        items = kwargs.get("num_items_in_batch", args[1] if len(args) > 1 else None)
        divided = self._micro_batches() if self._is_whole(items) else 1
        if isinstance(found, tuple):
            return (self.flexact.with_penalty(found[0], model, divided), *found[1:])
        return self.flexact.with_penalty(found, model, divided)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with self.flexact.room_to_recompile():
            return super().train(*args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log(logs, *args, **kwargs)  # type: ignore[misc]
        if "loss" in logs:
            self._log_unprinted(self.flexact.probabilities())

    def _log_unprinted(self, logs: dict[str, float]) -> None:
        """Give the loggers what would flood a console, with the last entry of the log, and not what prints it."""
        if not logs:
            return
        if self.state.log_history:  # type: ignore[attr-defined]
            self.state.log_history[-1].update(logs)  # type: ignore[attr-defined]
        handler = self.callback_handler  # type: ignore[attr-defined]
        everyone = handler.callbacks
        handler.callbacks = [one for one in everyone if not isinstance(one, _PRINTING)]
        try:
            self.control = handler.on_log(self.args, self.state, self.control, logs)  # type: ignore[attr-defined,has-type]
        finally:
            handler.callbacks = everyone

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        self.flexact.resume_from(resume_from_checkpoint)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = output_dir if output_dir is not None else self.args.output_dir  # type: ignore[attr-defined]
        self.flexact.say_so_far()
        super()._save(folder, state_dict)  # type: ignore[misc]
        self.flexact.write_beside(Path(folder))

    def _load_best_model(self) -> None:
        super()._load_best_model()  # type: ignore[misc]
        self.flexact.say_so_far()  # it may be from before the commitment

    def _is_whole(self, num_items_in_batch: Any) -> bool:
        """Whether the loss of a micro-batch is its part of the step's already, which the Trainer divides otherwise."""
        told = getattr(self, "loss_is_scaled_for_ga", None)
        if told is not None:
            return bool(told)
        by_model = self.model_accepts_loss_kwargs and num_items_in_batch is not None  # type: ignore[attr-defined]
        return bool(by_model or self.compute_loss_func is not None)  # type: ignore[attr-defined]

    def _micro_batches(self) -> int:
        given: int = self.args.gradient_accumulation_steps  # type: ignore[attr-defined]
        return getattr(self, "current_gradient_accumulation_steps", None) or given


def _load_schedule(checkpoint: Path, schedule: Schedule) -> None:
    """Let a schedule go on from the state that `write_beside` wrote."""
    path = checkpoint / SCHEDULE
    try:
        saved = parsed_json(path.read_bytes())
    except FileNotFoundError:
        raise FlexActError(
            f"{path} is not there: this checkpoint was not written by a Trainer with a FlexActCallback. Start the run "
            "anew, or resume from another checkpoint."
        ) from None
    except ValueError as error:
        raise FlexActError(f"{path} is cut off or damaged: no valid JSON ({error}). Resume from another one.") from None
    own: Mapping[str, Any] = schedule.state_dict()
    state: dict[str, Any] = dict(saved) if isinstance(saved, dict) else {}
    if state.get("start") == START:
        state["start"] = read_start(checkpoint)
    try:
        for name, value in own.items():
            if isinstance(value, torch.Tensor) and isinstance(state.get(name), list | int | float):
                state[name] = torch.tensor(state[name], dtype=value.dtype, device=value.device)
        schedule.load_state_dict(state)
    except (FlexActError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise FlexActError(
            f"{path}: {error} Resume with the epochs or max_steps, batch size and accumulation of the run that wrote "
            "it, or from another checkpoint."
        ) from None
