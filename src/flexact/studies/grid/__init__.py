"""A study as a grid of cells: running them, storing their results, and resuming the grid."""
