"""A run that diverged: nothing can be picked, so every site keeps the function that it had before."""

from __future__ import annotations

import warnings

from flexact.errors import FlexActError
from flexact.routing.sites import SiteRouter


def check_originals(router: SiteRouter, reason: str) -> None:
    """Raise where a site has nothing to keep. reason: why nothing can be picked."""
    without = [site.name or "FlexAct" for site in router.sites if site.original_index < 0]
    if without:
        raise FlexActError(
            f"{reason}, so nothing can be picked, and {without[0]} has no original among its candidates to keep. "
            "Lower the learning rate, or leave out the candidates that diverge."
        )


def keep_originals(router: SiteRouter, reason: str, step: int, rewinds: bool) -> None:
    """Commit every site to its original, with a warning. rewinds: whether the weights are put back next."""
    check_originals(router, reason)
    weights = "The weights are those that the run began with" if rewinds else "The weights stay as they are"
    warnings.warn(
        f"{reason}, so picking stops here, undecided: every site keeps its original function. {weights}. Lower the "
        "learning rate, or leave out the candidates that diverge.",
        stacklevel=3,
    )
    router.trying = None
    for site in router.sites:
        if not site.committed:
            site.restore_original(step)
