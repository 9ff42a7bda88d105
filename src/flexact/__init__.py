"""Every layer of a network picks its activation function while it trains; then the plain network comes back out."""

from flexact.candidates import register_candidate
from flexact.config import FlexConfig
from flexact.convert import commit, convert, extract
from flexact.errors import FlexActError
from flexact.layer import FlexAct
from flexact.optimizers import param_groups
from flexact.picks_file import load_picks
from flexact.policy import penalty
from flexact.recorder import Recorder
from flexact.schedule import Schedule
from flexact.selection import selection

__all__ = [
    "FlexAct",
    "FlexActError",
    "FlexConfig",
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
