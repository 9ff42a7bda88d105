"""Figures of a recorded history."""
