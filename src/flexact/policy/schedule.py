"""Schedule: annealing, elimination or trial, and commitment over a run."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from flexact.errors import FlexActError
from flexact.policy import checks
from flexact.policy.elimination import Elimination, keep_originals
from flexact.policy.initialisation import check_inits, initialise
from flexact.policy.logit_updates import before_step, skip
from flexact.policy.optimizers import Step, Steps, check_optimizer, has_stepped
from flexact.policy.rewinding import StartingPoint
from flexact.policy.rounds import Plan, planned, planned_for
from flexact.policy.step_hooks import listen
from flexact.policy.trial import HeldOut, Trial, tries_candidates
from flexact.routing.site import Site, versions_of
from flexact.routing.sites import one_router, sites_of

VERSION = 3


class Schedule:
    """Runs a model's policy over training: temperature, correction weight, elimination rounds, commitment.

    model: a converted model, or any model with `FlexAct` sites (whose noise is then drawn together).
    total_steps: the number of optimizer steps of the whole run, picking included.
    network_steps: alternatively, the number of steps that train the network with its picks; `total_steps` is then this
    number plus the extra steps that picking takes.
    optimizer: if given, the Schedule checks that the optimizer holds the logits and, if the optimizer moves them (see
    `Policy.logit_step`), that it applies no weight decay to them. A network may have several optimizers: before the
    step of each one, the policy acts on the logits that this optimizer holds.
    rewinds: if the run rewinds, the objects to rewind together with the weights: learning-rate schedulers (and with
    them the learning rates), averaged models, gradient scalers, or anything else with `state_dict()` and
    `load_state_dict()`. The optimizers of torch need not be listed.

    held_out: a function without arguments that returns a held-out loss of the model in its current state. A trial then
    compares the candidates by this loss rather than by their training loss, also in networks with normalisation layers.
    The function is called once when the Schedule is created, and at most seven times for each candidate of a rung, with
    the model in eval mode and without gradients.

    Call `step(loss)` once after each optimizer step, and after stepping the objects in `rewinds`. The logits are moved,
    or their gradients corrected, just before the optimizer's step, once gradients are accumulated, averaged over ranks
    and unscaled. If the optimizer has `maximize=True`, both this loss and that of `held_out` are maximized.

    >>> import torch, flexact
    >>> model = flexact.convert(torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)))
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    >>> schedule = flexact.Schedule(model, 10, optimizer)
    >>> for _ in range(10):
    ...     loss = model(torch.randn(4, 2)).square().mean()
    ...     loss.backward(); optimizer.step(); optimizer.zero_grad(); schedule.step(loss)
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
        steps = checks.checked_steps(total_steps, network_steps)
        sites = sites_of(model)
        if not sites:
            raise FlexActError(f"this {type(model).__name__} has no FlexAct sites; call flexact.convert(model) first.")
        if optimizer is not None:
            check_optimizer(optimizer, sites)
        logits = {id(site.logits) for site in sites}
        self._trains_weights = any(one.requires_grad and id(one) not in logits for one in model.parameters())
        self.steps_done = self._steps_lost = 0
        self.router = one_router(model, sites)
        self.router.scheduled = True
        self.router.resumes |= any(site.has_dropped for site in sites)
        self.config = self.router.config
        policy = self.config.policy
        self._acts, self._moves_logits = policy.acts_before_steps, policy.moves_logits
        self._adds_to_loss = policy.adds_to_loss
        self._step_size = torch.zeros((), dtype=torch.float32, device=self.router.device)
        self._written: tuple[tuple[float, ...], list[int]] | None = None
        self._constant = policy.temperature == policy.final_temperature and policy.alpha_schedule == "constant"
        tries = self._trains_weights and tries_candidates(model, self.router, held_out is not None)
        self._follow((planned if network_steps is None else planned_for)(self.router.k, self.config, tries, steps))
        self._adds_steps = network_steps is not None
        """Whether the steps for picking are added to those that the user asked for."""
        self._held_out = None if held_out is None else HeldOut(held_out, model)
        if held_out is not None and not (self._plan.rungs or self.committed):
            raise FlexActError(
                "held_out compares candidates in a trial, but this run picks by a blend. A trial needs share='model', "
                "the same candidates at every site, no warm-up, a rewind, and enough steps."
            )
        self._start = StartingPoint(model, rewinds, self._plan.rewinds)
        self.router.trying = None  # a model that was copied during a trial still has it set
        self._trial: Trial | None = None
        """The trial of this run while it lasts; None if the run picks by a blend."""
        if not self.committed:
            self._start.keep(steps_after=self.total_steps - self.commit_step)
            check_inits(sites, self._start.kept)
            if self._plan.rungs:
                self._trial = self._new_trial()
                if self._held_out is not None:
                    self._held_out.check()
            if self._acts:
                checks.warn_if_short(self._plan, network_steps)
            checks.warn_if_rates_end(rewinds, self._plan)
        self._steps = Steps(self.router, self._start.note)
        self._stepped: dict[Site, bool] = {}
        """The sites whose logits an optimizer has stepped, and whether it maximizes."""
        self._picking = True
        """Whether the run still picks, or has yet to rewind after the commitment."""
        self._warned: set[str] = set()
        self._start_step()
        self.router.acting = id(self)  # if a model has several schedules, only the newest one acts
        listen(self._action)

    @property
    def committed(self) -> bool:
        """Whether every site is committed."""
        return self.router.committed

    @property
    def rewound_at(self) -> int | None:
        """The step after which the weights were last rewound; None if they were not."""
        return self._start.rewound_at

    @property
    def trained_steps(self) -> int:
        """The number of steps that trained the current weights, which is less than `steps_done` after a rewind. A loop
        that sets its own learning rate or data order should use this step number."""
        return self.steps_done - self._steps_lost if self._trial is None else self._trial.steps

    def step(self, loss: Tensor | float | None = None) -> None:
        """Advance by one step. Call this after the optimizer's step.

        loss: the loss of this step, by which a trial compares candidates; see `FlexConfig.pick_by`.
        """
        if self.steps_done >= self.total_steps:
            self._warn_once(
                f"the schedule was created for {self.total_steps} steps, which are done; further ones have no effect. "
                "Create it with the number of optimizer steps of the whole run, including a last partial batch."
            )
            self.router.go_to(self.router.step + 1)
            return
        if loss is not None:
            checks.check_loss(loss)
            loss = loss.detach() if isinstance(loss, Tensor) else loss
        self.router.loss = loss
        self.router.tried = self.router.trying
        committed = self.router.committed
        if committed and not self._picking:  # only the step count advances
            self.steps_done += 1
            self.router.go_to(self.steps_done)
            return
        first_rewind = self._plan.rungs[0].until if self._plan.rungs else self.commit_step
        rewinds_untrained = (committed or self.steps_done + 1 >= first_rewind) and self._start.lacks_optimizer
        if self.steps_done == 0 or self._adds_to_loss or rewinds_untrained:  # the others have nothing to warn about
            for message in checks.omissions(
                self.router, self.steps_done, bool(self._stepped), self._adds_steps, rewinds_untrained
            ):
                self._warn_once(message)
        if not committed:
            self._pick(loss)
        self.steps_done += 1
        if self.router.committed:
            self._end_picking()
        elif self.steps_done > self.commit_step:
            self._warn_once(
                "some sites are not committed, although commit_step has passed: an earlier state was loaded into the "
                "model but not into the schedule. Load the schedule's state from the same checkpoint."
            )
        self._start_step()

    def _pick(self, loss: Tensor | float | None) -> None:
        """Do this step's part of picking, which may commit the sites."""
        step = self.steps_done + 1
        if self._trial is None:
            diverged = self._step_blend(loss, step)
        elif step == 1 and loss is None and self._held_out is None and not self._adds_steps:
            self._blend_instead()
            return
        else:
            diverged = self._trial.step(loss, step, maximizes=bool(self._stepped) and all(self._stepped.values()))
        if diverged is not None:
            keep_originals(self.router, diverged, step, self._start.kept)
            self._trial = None  # none of its weights are kept

    def _step_blend(self, loss: Tensor | float | None, step: int) -> str | None:
        """Advance a blend by one step. At the end of a round, drop candidates; at the end of the last, commit. If
        nothing can be picked, return the reason, otherwise None."""
        drops = step in self._elimination.steps
        if drops or loss is not None:
            diverged = checks.divergence(loss, self.router.sites if drops else [])
            if diverged is not None:
                return diverged
        if drops:
            if step == min(self._elimination.steps):
                checks.warn_of_arbitrary_picks(
                    self.router, self._elimination.statistics, bool(self._stepped), self._acts
                )
            self._elimination.drop(step)
        if step in self._elimination.settled_after.values():
            # Before the weights settle, gradients favour candidates like the dropped one.
            self._elimination.statistics.reset()
        return None

    def _follow(self, plan: Plan) -> None:
        self._plan = plan
        self.total_steps = plan.total_steps
        """The number of optimizer steps of the whole run."""
        self.commit_step = plan.commit_step
        """The step at which every site commits to its pick; past the end if the policy never commits."""
        self.network_steps = plan.network_steps
        """The number of steps that train the final network; all steps if nothing is rewound."""
        self._elimination = Elimination(self.router, plan)
        self._same_values = 0.0, 0.0
        """The first step with the current temperature, step size and correction weight, and the next with others."""

    def _blend_plan(self) -> Plan:
        """Return the plan of this run without a trial."""
        return planned(self.router.k, self.config, tries=False, total_steps=self.total_steps)

    def _blend_instead(self) -> None:
        """After the first step of a trial: continue from the initial weights with a blend, which needs no loss."""
        warnings.warn(
            "this network has no normalisation layers, so a trial would pick better than a blend, but needs the loss: "
            "call schedule.step(loss). Falling back to a blend; FlexConfig(pick_by='blend') avoids this warning.",
            stacklevel=4,
        )
        self._start.restore(1, stacklevel=5)
        self._steps_lost = 1
        self._trial = self.router.trying = None
        self._follow(self._blend_plan())
        if not self._plan.rewinds:
            self._start.forget()

    def _end_picking(self) -> None:
        """After the commitment: continue from the weights of the trial's winner, or rewind to the initial weights."""
        if self._trial is not None:
            self._steps_lost = self.steps_done - self._trial.steps
            self._trial = self.router.trying = None
        elif self._start.kept and self.steps_done < self.total_steps:
            self._start.restore(self.steps_done)
            initialise(self.router.sites)
            self._steps_lost = self.steps_done
        self._start.forget()
        self._picking = False

    def _new_trial(self) -> Trial:
        return Trial(self.router, self._start, self._plan.rungs, self._held_out)

    def _action(self, stepping: Optimizer) -> Callable[[bool], None] | None:
        """What the policy does before this optimizer's step, if anything; called by a hook."""
        step = self._steps.of(stepping) if self._picking else None
        if step is None or self.router.committed:
            return None
        if not self._stepped and self.steps_done == 0 and has_stepped(stepping):
            self.router.resumes = True
        if len(self._stepped) < len(self.router.sites):
            self._stepped |= step.sites
        self.router.current = False  # the logits are about to move, and a site may be called directly next
        acts = self._acts and self.router.acting == id(self)
        return functools.partial(self._before_optimizer_step, stepping, step) if acts else None

    def _before_optimizer_step(self, stepping: Optimizer, step: Step, again: bool) -> None:
        """Correct or move the logits that an optimizer holds.

        again: whether this was done before in the same step; the Schedule moves logits only once.
        """
        if self._moves_logits and (again or self._ignores_gradients):
            skip(self.router, step)
        elif not again:
            self._step_size = self._step_size.to(self.router.device)
            before_step(self.router, self._elimination.statistics, self._step_size, step, step.factors(stepping))

    @property
    def _ignores_gradients(self) -> bool:
        """Whether this step's logit gradients have no effect: the logits do not move, and the running averages are
        reset before they move again.

        False on a GPU, where a CUDA graph may capture this step and replay it when the logits move.
        """
        return self._settles and self.router.device.type == "cpu"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run. The state of the sites is part of the model's. Before a rewind, the initial
        weights are included."""
        progress = {"version": VERSION, "step": self.steps_done, "steps_lost": self._steps_lost}
        trial = {"blends": not self._plan.rungs, "trial": None if self._trial is None else self._trial.state_dict()}
        tensors = {name: own.clone() for name, own in self._elimination.state_dict().items()}
        return progress | self._identity(self._plan) | tensors | self._start.state_dict() | trial

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume a saved run. Load the model's state as well, before or after."""
        fell_back = isinstance(state, dict) and state.get("blends") and self._plan.rungs  # the saved run got no loss
        plan = self._blend_plan() if fell_back else self._plan
        shapes = {name: tuple(own.shape) for name, own in self._elimination.state_dict().items()}
        checks.check_run(state, VERSION, self._identity(plan) | shapes)
        self._start.load_state_dict(state)
        if fell_back:
            self._follow(plan)
        for name, own in self._elimination.state_dict().items():
            own.copy_(state[name])  # in place, since a captured CUDA graph uses them
        self.steps_done, self._steps_lost = state["step"], state["steps_lost"]
        self._steps = Steps(self.router, self._start.note)
        self._trial = self.router.trying = None
        if (trial := state.get("trial")) is not None:
            self._trial = self._new_trial()
            self._trial.load_state_dict(trial)
        self._picking = True
        self._start_step()

    def _identity(self, plan: Plan) -> dict[str, Any]:
        """Return what a resumed run must have in common with the saved one: its length, the steps at which it drops
        candidates (in a trial, counted per candidate), which sites pick together, and what is rewound."""
        groups = [object() if site.group is None else site.group for site in self.router.sites]
        return {
            "network_steps": plan.network_steps,
            "total_steps": plan.total_steps,
            "drops": [rung.until for rung in plan.rungs] or sorted(Elimination(self.router, plan).steps),
            "groups": [groups.index(group) for group in groups],
            "rewinds": plan.rewinds and self._start.others,
        }

    def _start_step(self) -> None:
        """Draw the noise of the next step, and set its temperature, step size and correction weight."""
        first, end = self._same_values
        if not first <= self.steps_done < end:
            self._set_values(self.steps_done)
        self.router.warming_up = self._warms_up
        self.router.go_to(self.steps_done)
        self._write()

    def _set_values(self, step: int) -> None:
        policy, start, settled_after = self.config.policy, self._plan.warmup_steps, self._elimination.settled_after
        end = max(min(self.commit_step, self.total_steps), start + 1)
        progress = min(max((step - start) / (end - start), 0.0), 1.0)
        fall = math.log(policy.final_temperature / policy.temperature)
        temperature = policy.temperature * math.exp(progress * fall)
        alpha = policy.alpha * (1 - progress) if policy.alpha_schedule == "falling" else policy.alpha
        self._settles = any(drop <= step < settled for drop, settled in settled_after.items())
        moves = step >= start and not self._settles
        step_size = policy.logit_step_size / ((1 - policy.settle) * self._plan.round_steps) if moves else 0.0
        starts_at_original = self.config.init == "original" and policy.moves_logits
        self._warms_up = starts_at_original and self._trains_weights and step < start
        self._values = temperature, step_size, alpha
        changes = (start, *settled_after, *settled_after.values()) if self._constant else (step + 1,)
        self._same_values = step, min([change for change in changes if change > step], default=math.inf)

    def _write(self) -> None:
        """Write the values in place, since a captured CUDA graph reads this memory. Skip unchanged values, since each
        write is a kernel launch."""
        temperatures = self.router.temperatures()
        held = [*temperatures, self._step_size, self.router.alpha]
        if self._written == (self._values, versions_of(held)):
            return
        temperature, step_size, alpha = self._values
        first = temperatures[0].fill_(temperature)
        torch._foreach_copy_(temperatures, [first] * len(temperatures))  # on a CPU faster than arithmetic
        self._step_size.fill_(step_size)
        self.router.alpha.fill_(alpha)
        self._written = (self._values, versions_of(held))

    def _warn_once(self, message: str, stacklevel: int = 3) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=stacklevel)
