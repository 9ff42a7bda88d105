"""Every layer of a network picks its activation function while it trains; then the plain network comes back out."""

from flexact.candidates import register_candidate
from flexact.config import FlexConfig, Policy
from flexact.errors import FlexActError
from flexact.observe.recorder import Recorder
from flexact.observe.selection import selection
from flexact.policy.logit_updates import penalty
from flexact.policy.optimizers import param_groups
from flexact.policy.schedule import Schedule
from flexact.routing.layer import FlexAct
from flexact.surgery.convert import commit, convert, extract
from flexact.surgery.picks_file import load_picks

__all__ = [
    "FlexAct",
    "FlexActError",
    "FlexConfig",
    "Policy",
    "Recorder",
    "Schedule",
    "commit",
    "convert",
    "extract",
    "load_picks",
    "param_groups",
    "penalty",
    "register_candidate",
    "selection",
]
