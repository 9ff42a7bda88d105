"""The routed activation: FlexAct, its router, and their state."""
