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
from flexact.evidence import SIGNIFICANT
from flexact.gathering import mean_over_ranks
from flexact.rewinding import StartingPoint
from flexact.rounds import Rung
from flexact.routing import Router

COMPARED = 1 / 3
"""The last part of each candidate's steps in a rung, over which its loss is averaged."""


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

    rungs: of `flexact.rounds.rungs`.
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

    def add(self, loss: Tensor | float) -> bool:
        """Count one step of the present candidate; whether its part of the rung is over."""
        self.steps += 1
        until = self.rungs[self.rung].until
        if self.steps > until - max(3, COMPARED * (until - self._started)):
            # A copy: a captured graph writes the next loss to the same place.
            own = torch.as_tensor(loss).detach().float().reshape(()).clone()
            self._losses.setdefault(self.candidate, []).append(own)
        return self.steps >= until

    @property
    def rung_is_over(self) -> bool:
        """Whether the present candidate is the last of its rung."""
        return self.place + 1 == len(self.left)

    def next_candidate(self) -> None:
        """Go on to the next candidate of the rung."""
        self.place += 1
        self.steps = self._started

    def ranked(self) -> list[Compared]:
        """The candidates of the rung that is over, best first; one whose loss is not finite is last."""
        losses = [mean_over_ranks(torch.stack(self._losses[candidate]).double()).cpu() for candidate in self.left]
        mean = [float(own.mean()) if bool(own.isfinite().all()) else math.inf for own in losses]
        order = sorted(range(len(mean)), key=lambda i: mean[i])
        best = losses[order[0]]
        return [Compared(self.left[i], mean[i], *_difference(losses[i], best), len(best)) for i in order]

    def next_rung(self, left: list[int]) -> None:
        """Go on with these candidates, from where each stopped."""
        self._started = self.rungs[self.rung].until
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
    """The mean difference of two series of losses, and its standard error; paired by step. The error is infinite
    before the third step."""
    difference = losses - best
    if not bool(difference.isfinite().all()):
        return math.inf, 0.0
    if len(difference) < 3:
        return float(difference.mean()), math.inf
    return float(difference.mean()), float(difference.std()) / math.sqrt(len(difference))


def tries_candidates(model: nn.Module, router: Router) -> bool:
    """Whether a model's candidates are to be tried one after another; see `FlexConfig.pick_by`."""
    config = router.config
    same = len({site.keys for site in router.sites}) == 1 and all(site.logits.requires_grad for site in router.sites)
    if config.pick_by != "auto":
        if config.pick_by == "trial" and not same:
            raise FlexActError(
                "pick_by='trial' tries one candidate in the whole network, and the sites of this one have different "
                "candidates or frozen logits. Give all sites the same candidates, or use pick_by='blend'."
            )
        return config.pick_by == "trial"
    together = same and router.shares_all
    usual = config.logit_step == "paced" and config.noise == 0 and config.warmup == 0 and config.commit_at is not None
    rewinds = config.rewind is not False and config.eliminate in (None, "half")
    return together and usual and rewinds and not has_normalisation(model)


def has_normalisation(model: nn.Module) -> bool:
    """Whether any layer normalises: its class has "norm" in its name, as LayerNorm and BatchNorm2d do."""
    return any("norm" in type(module).__name__.lower() for module in model.modules())


class TrialRun:
    """A trial of a model's candidates: switches the sites and the weights from one to the next.

    start: where every candidate begins. Between its rungs a candidate's weights are kept in host memory.
    """

    def __init__(self, router: Router, start: StartingPoint, rungs: Sequence[Rung]) -> None:
        self._router, self._start, self.trial = router, start, Trial(rungs)
        self._saved: dict[int, dict[str, Any]] = {}
        router.trying = self.trial.candidate

    @property
    def steps(self) -> int:
        """Steps that the present weights have been trained for."""
        return self.trial.steps

    def step(self, loss: Tensor | float, step: int) -> None:
        """Count a step of the run, and go on to the next candidate or rung where it is the last of one. At the end of
        the last rung the sites commit to the best candidate, with the weights that it has come to."""
        trial = self.trial
        if not trial.add(loss):
            return
        self._saved[trial.candidate] = self._start.save()
        if not trial.rung_is_over:
            trial.next_candidate()
        else:
            self._end_rung(step)
            if self._router.committed:
                return
        self._start.put(self._saved.get(trial.candidate), step)
        self._router.trying = trial.candidate

    def _end_rung(self, step: int) -> None:
        trial, sites = self.trial, self._router.sites
        ranked = trial.ranked()
        is_last = trial.rung + 1 == len(trial.rungs)
        kept = [one.candidate for one in ranked[: 1 if is_last else trial.rungs[trial.rung + 1].candidates]]
        original = sites[0].original_index
        if not math.isfinite(ranked[0].loss):
            raise NothingTrains
        if is_last and any(one.candidate == original and one.margin <= SIGNIFICANT * one.error for one in ranked):
            kept = [original]  # nothing is significantly better
        for site in sites:
            goes = torch.zeros(site.rows, site.k, dtype=torch.bool)
            evidence = torch.full((site.rows, site.k, 3), math.nan)
            for one in ranked:
                goes[:, one.candidate] = one.candidate not in kept
                evidence[:, one.candidate] = torch.tensor([one.margin, one.error, one.steps])
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
        return {**self.trial.state_dict(), "saved": self._saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trial.load_state_dict(state)
        self._saved = dict(state["saved"])
        self._router.trying = self.trial.candidate
