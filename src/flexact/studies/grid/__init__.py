"""A study as a grid of cells: which ones run, where, what is kept of them, and how a grid is gone on with."""
