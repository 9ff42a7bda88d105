"""Trial: candidates trained alone, one after another from the same start, and compared by their loss.

In a network without normalisation a blend of candidates does not train as any of them would: they differ in how signals
grow and vanish with depth, which the blend's gradient does not show. There each candidate has the whole network to
itself for some steps; the better half go on from where they stopped (successive halving).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexact.errors import FlexActError
from flexact.policy.evidence import SIGNIFICANT
from flexact.policy.held_out import HeldOut
from flexact.policy.rewinding import StartingPoint
from flexact.policy.rounds import Rung
from flexact.routing.call_statistics import mean_over_ranks
from flexact.routing.sites import SiteRouter

COMPARED = 1 / 3
"""The last part of each candidate's steps in a rung, over which its loss is averaged."""
HELD_OUT_LOSSES = 7
"""How often a held-out loss is taken over these steps, where there is one."""


class Compared(NamedTuple):
    """How a candidate did in a rung."""

    candidate: int
    loss: float
    margin: float
    """Its loss less the best one's."""
    error: float
    """The standard error of that."""
    steps: int
    """Over which it was averaged."""


class NothingTrains(Exception):
    """No candidate of a rung has a finite loss."""


class Trial:
    """Which candidate is trained now, and how those before it did.

    rungs: of `flexact.policy.rounds.rungs`.
    """

    def __init__(self, rungs: Sequence[Rung]) -> None:
        self.rungs = rungs
        self.rung = 0
        self.left = list(range(rungs[0].candidates))
        """The candidates of this rung."""
        self.place = 0
        """Which of these is trained."""
        self.steps = 0
        """Steps that it has been trained for."""
        self._losses: dict[int, list[Tensor]] = {}
        self._started = 0

    @property
    def candidate(self) -> int:
        return self.left[self.place]

    def add(self, loss: Tensor | float) -> None:
        """Compare the present candidate by this loss, among others."""
        # A copy: a captured graph writes the next loss to the same place.
        own = torch.as_tensor(loss).detach().float().reshape(()).clone()
        self._losses.setdefault(self.candidate, []).append(own)

    @property
    def is_compared(self) -> bool:
        """Whether candidates are compared by the loss of this step."""
        return self.steps > self.until - self._compared_steps

    @property
    def is_held_out(self) -> bool:
        """Whether a held-out loss is taken after this step."""
        part = max(self._compared_steps / HELD_OUT_LOSSES, 1.0)
        left = self.until - self.steps
        return left == 0 or (self.is_compared and int(left / part) != int((left - 1) / part))

    @property
    def until(self) -> int:
        """The number of steps at which a candidate's part of this rung ends."""
        return self.rungs[self.rung].until

    @property
    def _compared_steps(self) -> float:
        return max(3, COMPARED * (self.until - self._started))

    def next_candidate(self) -> bool:
        """Turn to the next candidate of the rung; False where there is none."""
        if self.place + 1 == len(self.left):
            return False
        self.place, self.steps = self.place + 1, self._started
        return True

    def ranked(self) -> list[Compared]:
        """The candidates of the rung that is over, best first; one whose loss is not finite is last."""
        losses = [mean_over_ranks(torch.stack(self._losses[candidate]).double()).cpu() for candidate in self.left]
        mean = [float(own.mean()) if bool(own.isfinite().all()) else math.inf for own in losses]
        order = sorted(range(len(mean)), key=lambda i: mean[i])
        best = losses[order[0]]
        differences = [_difference(losses[i], best) for i in order]
        return [
            Compared(self.left[i], mean[i], margin, error, len(best))
            for i, (margin, error) in zip(order, differences, strict=True)
        ]

    def next_rung(self, left: list[int]) -> None:
        """Begin the next rung with these candidates, from where each stopped."""
        self._started = self.until
        self.rung += 1
        self.left, self.place, self.steps, self._losses = left, 0, self._started, {}

    def state_dict(self) -> dict[str, Any]:
        losses = {candidate: torch.stack(own) for candidate, own in self._losses.items()}
        state = {name: getattr(self, name) for name in ("rung", "left", "place", "steps")}
        return state | {"started": self._started, "losses": losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rung, self.left, self.place = state["rung"], list(state["left"]), state["place"]
        self.steps, self._started = state["steps"], state["started"]
        self._losses = {candidate: list(own.unbind()) for candidate, own in state["losses"].items()}


def _difference(losses: Tensor, best: Tensor) -> tuple[float, float]:
    """The mean difference of two series of losses, paired by step, and its standard error as if steps were independent.
    The error is infinite with fewer than three."""
    difference = losses - best
    if not bool(difference.isfinite().all()):
        return math.inf, 0.0
    if len(difference) < 3:
        return float(difference.mean()), math.inf
    return float(difference.mean()), float(difference.std()) / math.sqrt(len(difference))


def tries_candidates(model: nn.Module, router: SiteRouter, held_out: bool) -> bool:
    """Whether a model's candidates are to be tried one after another; see `FlexConfig.pick_by`.

    held_out: whether there is a held-out loss to compare them by.
    """
    config, obstacle = router.config, _obstacle(router)
    if config.pick_by != "auto":
        if config.pick_by == "trial" and obstacle is not None:
            raise FlexActError(f"pick_by='trial' tries one candidate in the whole network, and {obstacle}.")
        return config.pick_by == "trial"
    policy = config.policy
    usual = policy.logit_step == "paced" and policy.noise == 0 and config.warmup == 0 and config.commit_at is not None
    rewinds = config.rewind is not False and config.eliminate in (None, "half")
    return obstacle is None and usual and rewinds and (held_out or not has_normalisation(model))


def _obstacle(router: SiteRouter) -> str | None:
    """Why the sites cannot be given one candidate after another together, and what to do; None where they can."""
    sites = router.sites
    if len({site.keys for site in sites}) > 1:
        return "the sites of this one have different candidates. Give all of them the same, or use pick_by='blend'"
    if not all(site.logits.requires_grad for site in sites):
        return "the logits of some sites are frozen. Unfreeze them, or use pick_by='blend'"
    if not router.shares_all:
        return "the sites of this one do not all pick together. Use share='model', or pick_by='blend'"
    return None


def has_normalisation(model: nn.Module) -> bool:
    """Whether any layer normalises: its class has "norm" in its name, as LayerNorm and BatchNorm2d do."""
    return any("norm" in type(module).__name__.lower() for module in model.modules())


class TrialRun:
    """A trial of a model's candidates: switches the sites and the weights from one to the next.

    start: where every candidate begins. Between its rungs a candidate's weights are kept in host memory.
    held_out: compared instead of the training loss, where it is given.
    """

    def __init__(
        self, router: SiteRouter, start: StartingPoint, rungs: Sequence[Rung], held_out: HeldOut | None = None
    ) -> None:
        self._router, self._start, self.trial, self.held_out = router, start, Trial(rungs), held_out
        self._saved: dict[int, dict[str, Any]] = {}
        router.trying = self.trial.candidate

    @property
    def steps(self) -> int:
        """The number of steps that trained the present weights."""
        return self.trial.steps

    def step(self, loss: Tensor | float | None, step: int, maximizes: bool = False) -> None:
        """Count a step of the run, and turn to the next candidate or rung where one ends. At the end of the last rung
        the sites commit to the best candidate, with its trained weights.

        maximizes: whether the loss is what the optimizer maximizes.
        """
        trial = self.trial
        trial.steps += 1
        if self.held_out is None:
            compared = loss if trial.is_compared else None
        else:
            name = self._router.sites[0].candidates[trial.candidate]
            compared = self.held_out.loss(name, loss) if trial.is_held_out else None
        if compared is not None:
            trial.add(-compared if maximizes else compared)
        if trial.steps < trial.until:  # the candidate has not had its part of the rung
            return
        self._start.check_model()
        self._saved[trial.candidate] = self._start.save()
        if not trial.next_candidate():
            self._end_rung(step)
            if self._router.committed:
                return
        self._start.put(self._saved.get(trial.candidate), step)
        self._router.trying = trial.candidate

    def _end_rung(self, step: int) -> None:
        trial, sites = self.trial, self._router.sites
        ranked = trial.ranked()
        if not math.isfinite(ranked[0].loss):
            raise NothingTrains
        is_last = trial.rung + 1 == len(trial.rungs)
        kept = [one.candidate for one in ranked[: 1 if is_last else trial.rungs[trial.rung + 1].candidates]]
        evidence_of = {one.candidate: (one.margin, one.error, float(one.steps)) for one in ranked}
        originals = {site.original_index for site in sites} - {-1}
        original = originals.pop() if len(originals) == 1 else -1  # with several, no candidate is the network as it was
        margin, error, steps = evidence_of.get(original, (math.inf, 0.0, 0.0))
        if original not in kept and margin <= SIGNIFICANT * error:  # nothing is significantly better
            evidence_of[kept[-1]] = (evidence_of[kept[-1]][0] - margin, error, steps)  # it was ahead of the original
            kept[-1] = original
        for site in sites:
            goes = torch.zeros(site.rows, site.k, dtype=torch.bool)
            evidence = torch.full((site.rows, site.k, 3), math.nan)
            for candidate, found in evidence_of.items():
                goes[:, candidate] = candidate not in kept
                evidence[:, candidate] = torch.tensor(found)
            site.drop(goes, step, evidence)
        if is_last:
            self._router.trying = None
            self._start.put(self._saved[kept[0]], step)
            trial.steps = trial.rungs[-1].until
        else:
            self._saved = {candidate: self._saved[candidate] for candidate in kept}
            trial.next_rung(kept)

    def state_dict(self) -> dict[str, Any]:
        """Where the trial stands, with the weights that its candidates have come to."""
        return {**self.trial.state_dict(), "saved": dict(self._saved)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trial.load_state_dict(state)
        self._saved = dict(state["saved"])
        self._router.trying = self.trial.candidate
