"""The rows of `benchmarks/cost.py`, one file per group."""
