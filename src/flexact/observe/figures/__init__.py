"""Figures of a recorded history: what was picked, where and when."""

from flexact.observe.figures.history import final_picks, history_pictures, numbers, picks, probabilities

__all__ = ["final_picks", "history_pictures", "numbers", "picks", "probabilities"]
