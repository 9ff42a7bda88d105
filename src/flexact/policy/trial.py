"""Trial: train each candidate alone from the same initial weights, and compare their losses.

In a network without normalisation, a blend does not show how a candidate trains alone: candidates differ in how
signals grow or vanish with depth, which the gradient of the blend does not reveal. In a trial, the whole network is
trained with one candidate after another. The better half of the candidates resume from their own weights in the next
rung (successive halving).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexact.errors import FlexActError
from flexact.policy.evidence import SIGNIFICANT
from flexact.policy.initialisation import has_init, initialise
from flexact.policy.rewinding import StartingPoint
from flexact.policy.rounds import Rung
from flexact.routing.call_statistics import mean_over_ranks
from flexact.routing.random_state import same_random_state
from flexact.routing.router import Router
from flexact.routing.site import Site

COMPARED_PART = 1 / 3
"""The last fraction of a candidate's steps in a rung, over which its loss is averaged."""
HELD_OUT_LOSSES = 7
"""Maximum number of held-out losses that are measured in these steps."""


class HeldOut:
    """Calls the user's function, with the model in eval mode and without gradients."""

    def __init__(self, function: Callable[[], Any], model: nn.Module) -> None:
        if not callable(function):
            raise FlexActError(f"held_out must be a function that returns a held-out loss; got {function!r:.80}.")
        self._function, self._model = function, model

    def loss(self) -> float:
        """Return the current held-out loss. It may be NaN or infinite if the network has diverged."""
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        try:
            with torch.no_grad():
                value = self._function()
        finally:
            for module, training in modes.items():
                module.training = training
        try:
            if isinstance(value, bool | str | bytes):
                raise TypeError
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            raise FlexActError(f"held_out must return one number, a mean loss; got {value!r:.80}.") from None

    def check(self) -> None:
        """Measure the loss once before the run. Raise if it is not finite."""
        with same_random_state():
            value = self.loss()
        if not math.isfinite(value):
            raise FlexActError(
                f"held_out returned {value} for the initial weights. Check its data and the weights. When resuming a "
                "run, load the state of the model after creating the Schedule."
            )


class Trial:
    """Switches the sites and the weights of a model from one candidate to the next, and compares the candidates.

    start: the initial state of every candidate. Between rungs, a candidate's weights are kept in host memory.
    rungs: see `flexact.policy.rounds.rungs`.
    held_out: if given, its loss is compared instead of the training loss.
    """

    def __init__(
        self, router: Router, start: StartingPoint, rungs: Sequence[Rung], held_out: HeldOut | None = None
    ) -> None:
        self._router, self._start, self._rungs, self._held_out = router, start, rungs, held_out
        self._rung = self._index = 0
        self._left = _trial_order(router.sites[0])
        """The candidates of this rung; the one at `_index` is being trained."""
        self.steps = 0
        """The number of steps that trained the current weights."""
        self._losses: dict[int, list[Tensor]] = {}
        self._saved: dict[int, dict[str, Any]] = {}
        router.trying = self._candidate

    def step(self, loss: Tensor | float | None, step: int, maximizes: bool = False) -> str | None:
        """Count a step. At the end of a candidate's steps, switch to the next candidate or rung; at the end of the last
        rung, commit the sites to the best candidate and restore its trained weights. If nothing can be picked, return
        the reason, otherwise None.

        loss: needed without a held-out loss. maximizes: whether the optimizer maximizes the loss.
        """
        if loss is None and self._held_out is None:
            raise FlexActError(
                "schedule.step() was called without a loss in a trial, which compares candidates by their loss. "
                "Call schedule.step(loss) after every optimizer step, or use FlexConfig(pick_by='blend')."
            )
        self.steps += 1
        rung = self._rungs[self._rung]
        value = self._compared_loss(loss, rung)
        if value is not None:
            # A copy, since a captured CUDA graph writes the next loss to the same memory.
            own = torch.as_tensor(-value if maximizes else value).detach().float().reshape(()).clone()
            self._losses.setdefault(self._candidate, []).append(own)
        return None if self.steps < rung.until else self._switch(step, rung)

    @property
    def _candidate(self) -> int:
        return self._left[self._index]

    def _compared_loss(self, loss: Tensor | float | None, rung: Rung) -> Tensor | float | None:
        """Return the training or held-out loss of this step if the candidates are compared by it; otherwise None."""
        left, compared = rung.until - self.steps, max(3, COMPARED_PART * (rung.until - rung.start))
        if left >= compared:
            return None
        if self._held_out is None:
            return loss
        return self._held_out.loss() if left % math.ceil(compared / HELD_OUT_LOSSES) == 0 else None

    def _switch(self, step: int, rung: Rung) -> str | None:
        """Save the weights of this candidate, and restore those of the next one. See `step`."""
        self._saved[self._candidate] = self._start.save()
        self._index, self.steps = self._index + 1, rung.start
        if self._index == len(self._left):
            ranked = self._ranked()
            if not ranked:
                return "the loss of every candidate is NaN or infinite"
            self._end_rung(step, ranked)
            self.steps = rung.until
        self._start.restore(step, self._saved.get(self._candidate), stacklevel=6)
        if self._candidate not in self._saved:
            initialise(self._router.sites, self._candidate)
        self._router.trying = None if self._router.committed else self._candidate
        return None

    def _end_rung(self, step: int, evidence_of: dict[int, tuple[float, float, float]]) -> None:
        """Drop the weaker candidates, and start the next rung with the others. evidence_of: see `_ranked`."""
        sites = self._router.sites
        self._rung += 1
        kept = list(evidence_of)[: self._rungs[self._rung].candidates if self._rung < len(self._rungs) else 1]
        originals = {site.original_index for site in sites} - {-1}
        original = originals.pop() if len(originals) == 1 else -1  # else none is the original network
        margin, error, steps = evidence_of.get(original, (math.inf, 0.0, 0.0))
        if original not in kept and margin <= SIGNIFICANT * error:  # no candidate is significantly better
            displaced, kept[-1] = kept[-1], original
            evidence_of[displaced] = (*_difference(self._series(displaced), self._series(original)), steps)
        dropped = torch.zeros(1, self._router.k, dtype=torch.bool)
        evidence = torch.full((1, self._router.k, 3), math.nan)
        for candidate, found in evidence_of.items():
            dropped[:, candidate] = candidate not in kept
            evidence[:, candidate] = torch.tensor(found)
        for site in sites:
            site.drop(dropped, step, evidence)
        self._left, self._index, self._losses = kept, 0, {}
        self._saved = {candidate: self._saved[candidate] for candidate in kept}

    def _ranked(self) -> dict[int, tuple[float, float, float]]:
        """Return the candidates of the finished rung, best first, each with its difference in loss from the best, the
        standard error of the difference, and the number of losses. Empty if every candidate diverged."""
        losses = {candidate: self._series(candidate) for candidate in self._left}
        means = {candidate: float(own.mean()) if _is_finite(own) else math.inf for candidate, own in losses.items()}
        order = sorted(means, key=means.__getitem__)
        best = losses[order[0]]
        if not _is_finite(best):
            return {}
        names = self._router.sites[0].candidates
        if diverged := [names[candidate] for candidate in order if not _is_finite(losses[candidate])]:
            warnings.warn(
                f"these candidates had a NaN or infinite loss in the trial and are dropped: {', '.join(diverged)}. "
                "Lower the learning rate, or leave out the candidates that diverge.",
                stacklevel=6,
            )
        return {candidate: (*_difference(losses[candidate], best), float(len(best))) for candidate in order}

    def _series(self, candidate: int) -> Tensor:
        """Return the compared losses of a candidate in this rung, as means over all ranks."""
        return mean_over_ranks(torch.stack(self._losses[candidate]).double()).cpu()

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the trial and the current weights of its candidates."""
        losses = {candidate: torch.stack(own) for candidate, own in self._losses.items()}
        progress = {"rung": self._rung, "left": self._left, "place": self._index, "steps": self.steps}
        return progress | {"losses": losses, "saved": dict(self._saved)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rung, self._left, self._index = state["rung"], list(state["left"]), state["place"]
        self.steps, self._saved = state["steps"], dict(state["saved"])
        self._losses = {candidate: list(own.unbind()) for candidate, own in state["losses"].items()}
        self._router.trying = self._candidate


def _trial_order(site: Site) -> list[int]:
    """Return the candidates in trial order: those without an initialisation of their own first."""
    order = sorted(range(site.k), key=lambda k: has_init(site, k))
    if has_init(site, order[0]):
        raise FlexActError(
            f"all candidates ({', '.join(site.candidates)}) have an initialisation of their own, but the first "
            "one in a trial starts from the current weights. Add 'original', or use pick_by='blend'."
        )
    return order


def _is_finite(losses: Tensor) -> bool:
    return bool(losses.isfinite().all())


def _difference(losses: Tensor, best: Tensor) -> tuple[float, float]:
    """Return the mean difference of two series of losses, paired by step, and its standard error.

    The standard error assumes independent steps, and is infinite for fewer than three.
    """
    difference = losses - best
    if not _is_finite(difference):
        return math.inf, 0.0
    if len(difference) < 3:
        return float(difference.mean()), math.inf
    return float(difference.mean()), float(difference.std()) / math.sqrt(len(difference))


def tries_candidates(model: nn.Module, router: Router, held_out: bool) -> bool:
    """Return whether a model picks by a trial; see `FlexConfig.pick_by`.

    held_out: whether there is a held-out loss to compare them by.
    """
    config, obstacle = router.config, _obstacle(router)
    if config.pick_by != "auto":
        if config.pick_by == "trial" and obstacle is not None:
            raise FlexActError(f"pick_by='trial' runs one candidate in the whole network, but {obstacle}.")
        return config.pick_by == "trial"
    policy = config.policy
    usual = policy.moves_logits and policy.noise == 0 and config.warmup == 0 and config.commit_at is not None
    rewinds = config.rewind is not False and config.eliminate in (None, "half")
    normalises = any(map(_is_normalisation, model.modules()))
    # With several originals, no candidate is the original network, so a trial could not keep it.
    one_original = len({site.original_index for site in router.sites} - {-1}) <= 1
    return obstacle is None and usual and rewinds and (held_out or (one_original and not normalises))


def _is_normalisation(module: nn.Module) -> bool:
    """Return whether a module is a normalisation layer, by the name of its class. torch's weight and spectral
    normalisation act on weights, and do not count."""
    kind = type(module)
    return "norm" in kind.__name__.lower() and kind.__module__ != "torch.nn.utils.parametrizations"


def _obstacle(router: Router) -> str | None:
    """Return why the sites cannot run one candidate together, and what to do about it; None if they can."""
    sites = router.sites
    if len({site.keys for site in sites}) > 1:
        return "its sites have different candidates. Give all of them the same, or use pick_by='blend'"
    if not all(site.logits.requires_grad for site in sites):
        return "the logits of some sites are frozen. Unfreeze them, or use pick_by='blend'"
    if len({site.group for site in sites}) > 1 or sites[0].group is None:
        return "its sites do not all pick together. Use share='model', or pick_by='blend'"
    return None
