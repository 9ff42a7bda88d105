"""The names of what a record of a history holds."""

DROPS, DECISIONS = "drops", "decisions"
RESERVED = ("sites", "picks", DROPS, DECISIONS)
"""What a record holds besides its step and the user's numbers."""
