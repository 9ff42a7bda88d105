"""Schedule: annealing, elimination or trial, and commitment over a run."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from flexact.errors import FlexActError
from flexact.policy.divergence import check_originals, keep_originals
from flexact.policy.elimination import Elimination
from flexact.policy.held_out import HeldOut
from flexact.policy.logit_updates import before_step
from flexact.policy.optimizer_steps import Scaling, Steps
from flexact.policy.optimizers import check_holds_logits, unwrapped
from flexact.policy.pick_warnings import warn_if_frozen, warn_if_short, warn_of_arbitrary_picks
from flexact.policy.rewinding import StartingPoint
from flexact.policy.rounds import Plan, left_after_rounds, planned, planned_for
from flexact.policy.running_gradient import RunningGradient
from flexact.policy.schedule_checks import check_drops, check_loss, check_run, checked_steps, is_lost
from flexact.policy.step_hooks import Listener
from flexact.policy.trial import NothingTrains, TrialRun, tries_candidates
from flexact.routing.layer import FlexAct
from flexact.routing.router import version_of
from flexact.routing.saved_state import check_tensors
from flexact.routing.sites import one_router, sites_of

VERSION = 2
_in_force: weakref.WeakValueDictionary[int, Schedule] = weakref.WeakValueDictionary()
"""The schedule of each router, by its id."""


class Schedule:
    """Runs a model's policy over training: temperature, correction weight, elimination rounds, commitment.

    model: a converted model, or any model with `FlexAct` sites (which then draw together).
    total_steps: the number of optimizer steps of the whole run, picking included.
    network_steps: instead of it, for how many steps the network with its picks is to be trained; `total_steps` is then
    that and the steps that picking takes.
    optimizer: if given, it is checked to hold the logits. The policy acts before the steps of any optimizer that holds
    logits, on those that it holds: a network may have several.
    rewinds: with `FlexConfig(rewind=True)`, what begins again together with the weights: learning-rate schedulers (and
    with them the learning rates), averaged models, gradient scalers, or anything else with `state_dict()` and
    `load_state_dict()`. Optimizers of torch need not be named.

    held_out: a function without arguments that returns a held-out loss of the model as it is. A trial then compares the
    candidates by it rather than by their training loss, also in networks with normalisation layers. It is called seven
    times for each candidate of a rung, with the model in eval mode and without gradients.

    Call `step(loss)` once after each optimizer step, and after the steps of what is in `rewinds`. The logits are moved,
    or their gradients corrected, just before the optimizer's step, when gradients are accumulated, averaged over ranks
    and unscaled. Where the optimizer has `maximize=True`, the loss and that of `held_out` are what it maximizes.

    >>> import torch, flexact
    >>> model = flexact.convert(torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)))
    >>> optimizer = torch.optim.Adam(flexact.param_groups(model, lr=0.01))
    >>> schedule = flexact.Schedule(model, total_steps=10)
    >>> for _ in range(10):
    ...     loss = model(torch.randn(4, 2)).square().mean() + flexact.penalty(model)
    ...     loss.backward(); optimizer.step(); optimizer.zero_grad(); schedule.step()
    >>> schedule.committed
    True
    """

    def __init__(
        self,
        model: nn.Module,
        total_steps: int | None = None,
        optimizer: Optimizer | None = None,
        rewinds: Sequence[Any] = (),
        *,
        network_steps: int | None = None,
        held_out: Callable[[], Any] | None = None,
    ) -> None:
        steps = checked_steps(total_steps, network_steps)
        sites = sites_of(model)
        if not sites:
            raise FlexActError(
                f"this {type(model).__name__} has no FlexAct sites to schedule; call flexact.convert(model) first."
            )
        if optimizer is not None:
            optimizer = unwrapped(optimizer)
            check_holds_logits(optimizer, sites)
        warn_if_frozen(sites)
        logits = {id(site.logits) for site in sites}
        self._trains_weights = any(one.requires_grad and id(one) not in logits for one in model.parameters())
        self.steps_done = self._steps_lost = 0
        self.router = one_router(model, sites)
        self.router.scheduled = True
        self.config = self.router.config
        self._acts = self.config.policy.acts_before_steps
        self._step_size = torch.zeros((), device=self.router.device)
        self._running = RunningGradient(self.router.rows, self.router.k, self.router.device)
        self._written: tuple[tuple[float, ...], list[int]] | None = None
        tries = self._trains_weights and tries_candidates(model, self.router, held_out is not None)
        self._plan = (planned if network_steps is None else planned_for)(self.router.k, self.config, tries, steps)
        self._first_plan, self._has_fixed_end = self._plan, network_steps is not None
        self._held_out = None if held_out is None else HeldOut(held_out, model)
        if held_out is not None and not (self._plan.rungs or self.committed):
            raise FlexActError(
                "held_out compares candidates in a trial, and this run picks by a blend. A trial needs one pick for "
                "all sites (share='model'), the same candidates at each, no warm-up, rewinding, and enough steps. "
                "Leave held_out out otherwise."
            )
        self._elimination = Elimination(self.router, self.config, self.total_steps, self.commit_step)
        self._start = StartingPoint(model, optimizer, rewinds, self._plan.rewinds)
        if not self.committed:
            self._start.keep(steps_after=self.total_steps - self.commit_step)
        self._trial = self._new_trial() if self._plan.rungs and not self.committed else None
        if self._acts and not self.committed:
            warn_if_short(self._plan, self.router.k, self.config, self._round_steps, self._rounds)
        self._apply()
        self._steps = Steps(self.router)
        self._stepped: dict[FlexAct, bool] = {}
        """The sites whose logits an optimizer holds that has made a step; whether it maximizes."""
        self._scaled = False
        self._warned: set[str] = set()
        self._listen()

    @property
    def total_steps(self) -> int:
        """The number of optimizer steps of the whole run."""
        return self._plan.total_steps

    @property
    def commit_step(self) -> int:
        """The step from which on every site runs its pick alone; past the end if the policy never commits."""
        return self._plan.commit_step

    @property
    def committed(self) -> bool:
        """Whether every site is."""
        return self.router.committed

    @property
    def rewound_at(self) -> int | None:
        """The last step after which the weights were rewound; None before that."""
        return self._start.rewound_at

    @property
    def network_steps(self) -> int:
        """The number of steps that train the final network: all of them where nothing is rewound."""
        return self._plan.network_steps

    @property
    def trained_steps(self) -> int:
        """The number of steps that trained the present weights, which is less than `steps_done` after a rewind. A loop
        that rewinds its data and learning rate as well uses those of this step."""
        return self.steps_done - self._steps_lost if self._trial is None else self._trial.steps

    def step(self, loss: Tensor | float | None = None) -> None:
        """Advance by one step. Call this after the optimizer's step.

        loss: that of this step, by which a trial compares the candidates; see `FlexConfig.pick_by`.
        """
        if self.steps_done >= self.total_steps:
            self._warn_once(
                f"the schedule was made for {self.total_steps} steps, and all of them are done: further steps change "
                "nothing. Make it with the number of optimizer steps of the whole run (epochs times batches, divided "
                "by accumulation; a last partial batch is a step)."
            )
            self.router.advance()
            return
        check_loss(loss)
        drops = self._trial is None and self.steps_done + 1 in self._elimination.steps
        diverged = self._diverged(loss, drops)
        if diverged is not None:
            check_originals(self.router, diverged)
        elif drops and not self.committed:
            self._start.check_model()
        self.steps_done += 1
        if self._trial is not None and self.committed:  # by hand, to the candidate that was tried
            self._end_trial()
        if self._trial is not None:
            self._try(loss)
        elif diverged is not None:
            keep_originals(self.router, diverged, self.steps_done, self._start.kept)
        elif drops:
            if self.steps_done == min(self._elimination.steps) and not self.committed:
                # What a fused optimizer does with a gradient scaler may be to skip every step.
                stepped = [site for site in self._stepped if not (self._scaled and site.at_start())]
                warn_of_arbitrary_picks(self.router, self._running, stepped, self._acts)
            self._running.reset()  # what is left is another contest, with gradients of another size
            self._elimination.drop(self.steps_done)
        if self._start.kept and self.committed and self.steps_done < self.total_steps:
            self._start.put(None, self.steps_done)
            self._start.forget()
            self._steps_lost = self.steps_done
        if self.steps_done in self._elimination.settled_after.values():
            self._running.reset()  # gradients of unsettled weights ask for whatever resembles the one dropped
            self._elimination.evidence.reset()
        first_drop = min(self._elimination.steps, default=0)  # it would be arbitrary without a step of an optimizer
        awaits_optimizer = not self._stepped and self.steps_done < first_drop
        if not (self._acts or awaits_optimizer) or self.committed:
            self._hook.remove()
        if self.steps_done > self.commit_step and not self.committed:
            self._warn_once(
                f"sites are undecided after step {self.commit_step}, at which the schedule has them commit: an earlier "
                "state was loaded into the model, and not into the schedule. Load the schedule's of that time as well."
            )
        self._apply()

    def _diverged(self, loss: Tensor | float | None, drops: bool) -> str | None:
        """Why a blend cannot pick any more; None where it can.

        drops: whether candidates are dropped at this step. Only then are the logits read, which waits for the device.
        """
        if self._trial is not None or self.committed:
            return None
        if is_lost(loss):
            return "the loss is NaN or infinite"
        lost = self._elimination.lost() if drops else []
        return f"the logits of {', '.join(lost[:5])} are NaN or infinite" if lost else None

    def _try(self, loss: Tensor | float | None) -> None:
        """One step of a trial."""
        assert self._trial is not None
        if loss is None and self._trial.held_out is None:
            if self.steps_done > 1:
                raise FlexActError(
                    "schedule.step() was called without a loss in the middle of a trial, which compares candidates by "
                    "it. Call schedule.step(loss) after every optimizer step, or use FlexConfig(pick_by='blend')."
                )
            self._blend_instead()
            return
        try:
            self._trial.step(loss, self.steps_done, bool(self._stepped) and all(self._stepped.values()))
        except NothingTrains:
            keep_originals(self.router, "the loss of every candidate is NaN or infinite", self.steps_done, True)
            self._trial = None  # the weights go back to where they began, as at any other commitment
            return
        if self.committed:
            self._end_trial()

    def _end_trial(self) -> None:
        """Continue with the weights of the candidate that the sites have committed to."""
        assert self._trial is not None
        self._steps_lost = self.steps_done - self._trial.steps
        self._trial = self.router.trying = None
        self._start.forget()

    def _blend_instead(self) -> None:
        """Blend the candidates where no loss was given to compare them by."""
        if self._has_fixed_end:  # a blend takes another number of steps, and a loop may have fixed its own
            raise FlexActError(
                "this network has no normalisation layers, so its candidates are compared in a trial, which needs the "
                "loss: call schedule.step(loss), or use FlexConfig(pick_by='blend')."
            )
        warnings.warn(
            "this network has no normalisation layers, and there a trial picks better than a blend, but needs the "
            "loss: call schedule.step(loss). Blending now; FlexConfig(pick_by='blend') leaves this warning out.",
            stacklevel=4,
        )
        self._start.put(None, self.steps_done)
        self._steps_lost = self.steps_done
        self._trial = self.router.trying = None
        self._set_plan(self._blend_plan())

    def _blend_plan(self) -> Plan:
        """The plan of this run without a trial."""
        return planned(self.router.k, self.config, tries=False, total_steps=self.total_steps)

    def _set_plan(self, plan: Plan) -> None:
        if plan != self._plan:
            self._plan = plan
            self._elimination = Elimination(self.router, self.config, self.total_steps, self.commit_step)
        if not plan.rewinds:
            self._start.forget()

    def _new_trial(self) -> TrialRun:
        return TrialRun(self.router, self._start, self._plan.rungs, self._held_out)

    def _listen(self) -> None:
        """Let the policy act before the steps of optimizers, and no older schedule of the same model."""
        if self._acts:
            older = _in_force.get(id(self.router))
            if older is not None:
                older._hook.remove()
            _in_force[id(self.router)] = self
        self._hook: Listener = Listener(self)

    def acts_before(self, stepping: Optimizer) -> bool:
        """Whether the policy acts before this optimizer's step; called by a hook."""
        if self.committed:
            return False
        step = self._steps.of(stepping)
        if not step.sites:
            return False
        if len(self._stepped) < len(self.router.sites):
            self._stepped |= step.sites
            self._scaled = self._scaled or Scaling.of(stepping) is not None
        self.router.current = False  # the logits are about to move, and the next call may not be the model's own
        return self._acts

    def before_optimizer_step(self, stepping: Optimizer) -> None:
        """Correct or move the logits that an optimizer holds; called by a hook."""
        self._step_size = self._step_size.to(self.router.device)
        evidence, step = self._elimination.evidence, self._steps.of(stepping)
        before_step(self.router, self._running, evidence, self._step_size, step, Scaling.of(stepping))

    @property
    def _moves(self) -> bool:
        """Whether paced logits move at this step."""
        settling = any(drop <= self.steps_done < end for drop, end in self._elimination.settled_after.items())
        return self.steps_done >= self._warmup_steps and not settling

    @property
    def _waits(self) -> bool:
        """Whether the network runs as it was before the conversion: in a warm-up that starts there, with paced logits,
        unless nothing else is trained."""
        starts_there = self.config.init == "original" and self.config.policy.logit_step == "paced"
        return starts_there and self._trains_weights and self.steps_done < self._warmup_steps

    @property
    def _warmup_steps(self) -> float:
        return self.config.warmup * self.total_steps

    @property
    def _round_steps(self) -> float:
        """The length of an elimination round, also where nothing is eliminated."""
        return max((min(self.commit_step, self.total_steps) - self._warmup_steps) / self._rounds, 1.0)

    @property
    def _rounds(self) -> int:
        """The number of elimination rounds; where nothing is eliminated, as many as dropping one by one would take."""
        return len(left_after_rounds(self.router.k, self.config)) or self.router.k - 1

    def state_dict(self) -> dict[str, Any]:
        """The state of the run, without that of the sites, which is the model's. Before a rewind it contains the
        initial weights."""
        place: dict[str, Any] = {"version": VERSION, "step": self.steps_done, "total_steps": self.total_steps}
        place |= {"steps_lost": self._steps_lost, "drops": self._drops(self._plan)}
        running = {name: tensor.clone() for name, tensor in self._running.state_dict().items()}
        trial = {"blends": not self._plan.rungs, "trial": None if self._trial is None else self._trial.state_dict()}
        return place | running | self._elimination.state_dict() | self._start.state_dict() | trial

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume a saved run. Load the model's state as well, before or after."""
        check_run(state, VERSION, self.total_steps)
        plan = self._blend_plan() if state.get("blends") else self._first_plan
        check_drops(state.get("drops"), self._drops(plan))
        check_tensors(state, self._running.state_dict() | self._elimination.state_dict())
        self._start.load_state_dict(state, is_over=state["step"] >= plan.commit_step)
        self._set_plan(plan)
        self._running.load_state_dict(state)
        self._elimination.load_state_dict(state)
        self.steps_done, self._steps_lost = state["step"], state["steps_lost"]
        self._trial = self.router.trying = None
        if (trial := state.get("trial")) is not None:
            self._trial = self._new_trial()
            self._trial.load_state_dict(trial)
        self._hook.remove()
        self._listen()  # again, if this run had committed
        self._apply()

    def _drops(self, plan: Plan) -> list[int]:
        """When a plan drops candidates: steps of the run for a blend, steps of each candidate for a trial."""
        elimination = Elimination(self.router, self.config, plan.total_steps, plan.commit_step)
        return [rung.until for rung in plan.rungs] or sorted(elimination.steps)

    def _apply(self) -> None:
        """Set the temperature, the correction's weight and the draw of this step."""
        start = self._warmup_steps
        end = max(min(self.commit_step, self.total_steps), start + 1)
        progress = min(max((self.steps_done - start) / (end - start), 0.0), 1.0)
        policy = self.config.policy
        fall = math.log(policy.final_temperature / policy.temperature)
        temperature = policy.temperature * math.exp(progress * fall)
        step_size = policy.pace / ((1 - policy.settle) * self._round_steps) if self._moves else 0.0
        alpha = policy.alpha * (1 - progress) if policy.alpha_schedule == "falling" else policy.alpha
        self.router.waiting = self._waits
        self._write(temperature, step_size, alpha)
        self.router.go_to(self.steps_done)

    def _write(self, temperature: float, step_size: float, alpha: float) -> None:
        """Write in place, since a captured CUDA graph reads this memory; skip what is unchanged, since each write is a
        kernel launch."""
        self.router.place()
        temperatures = [site.temperature for site in self.router.sites]
        held = [*temperatures, self._step_size, self.router.alpha]
        if self._written == ((temperature, step_size, alpha), [version_of(one) for one in held]):
            return
        torch._foreach_zero_(temperatures)
        torch._foreach_add_(temperatures, temperature)
        self._step_size.fill_(step_size)
        self.router.alpha.fill_(alpha)
        self._written = ((temperature, step_size, alpha), [version_of(one) for one in held])

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=3)
