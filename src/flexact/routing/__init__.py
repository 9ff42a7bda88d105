"""The routed activation: FlexAct, its router, and what both keep."""
