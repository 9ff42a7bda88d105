"""Figures of a recorded history: what was picked, where and when."""

from flexact.observe.figures.history import curves, history_pictures, numbers, picks, probabilities
from flexact.observe.figures.network_map import margins, network

__all__ = ["curves", "history_pictures", "margins", "network", "numbers", "picks", "probabilities"]
