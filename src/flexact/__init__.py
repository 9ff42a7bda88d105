"""Every layer of a network picks its activation function while it trains; then the plain network comes back out."""

from typing import TYPE_CHECKING, Any

from flexact.candidates.registry import register_candidate
from flexact.config import FlexConfig, Policy
from flexact.errors import FlexActError
from flexact.observe.recorder import Recorder
from flexact.observe.selection import selection
from flexact.policy.logit_updates import penalty
from flexact.policy.optimizers import param_groups
from flexact.policy.schedule import Schedule
from flexact.routing.layer import FlexAct
from flexact.surgery.convert import commit, convert, extract
from flexact.surgery.inspection import inspect
from flexact.surgery.picks_file import load_picks

if TYPE_CHECKING:
    from flexact.studies.compare.comparison import compare

__all__ = [
    "FlexAct",
    "FlexActError",
    "FlexConfig",
    "Policy",
    "Recorder",
    "Schedule",
    "commit",
    "compare",
    "convert",
    "extract",
    "inspect",
    "load_picks",
    "param_groups",
    "penalty",
    "register_candidate",
    "selection",
]


def __getattr__(name: str) -> Any:
    """Import `compare` when it is first used, because it needs much that training does not."""
    if name == "compare":
        from flexact.studies.compare.comparison import compare

        return compare
    raise AttributeError(f"module 'flexact' has no attribute {name!r}")
