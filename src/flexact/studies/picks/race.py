"""The race: successive halving of the fixed networks, with as many steps as Flex-Act uses for picking."""

from __future__ import annotations

import math

from flexact.studies.picks.picking import Picked, further_steps
from flexact.studies.picks.setting import Setting
from flexact.studies.picks.training import Diverged


def rungs_of(count: int, steps: int) -> list[tuple[int, int]]:
    """Return the number of networks per rung, and the steps of each network.

    Every rung has the same share of all steps, and half of its networks advance to the next.

    >>> rungs_of(7, 1200)
    [(7, 57), (4, 100), (2, 200)]
    """
    rungs = math.ceil(math.log2(count))
    found = []
    for _ in range(rungs):
        found.append((count, max(1, steps // rungs // count)))
        count = (count + 1) // 2
    return found


def picked_by_race(setting: Setting) -> Picked:
    """Return the winner as the pick of every site. Each network of a rung is a fresh run whose learning rate falls to
    0. The better half by held-out loss advances; diverged networks come last."""
    left = list(setting.task.candidates)
    spent, seconds = 0, 0.0
    for count, steps in rungs_of(len(left), further_steps(setting)):
        losses = {}
        for candidate in left[:count]:
            losses[candidate], took = _raced(setting, candidate, steps)
            spent += steps
            seconds += took
        left = sorted(losses, key=lambda candidate: losses[candidate])[: (count + 1) // 2]
    return Picked(setting.everywhere(left[0]), spent, seconds)


def _raced(setting: Setting, candidate: str, steps: int) -> tuple[float, float]:
    """Return the held-out loss of a short run (infinite if it diverged), and its seconds."""
    training = setting.plain(setting.everywhere(candidate), steps)
    training.run(steps, setting.stop)
    try:
        return training.evaluate(setting.problem.held_out_loss), training.seconds
    except Diverged:
        return math.inf, training.seconds
