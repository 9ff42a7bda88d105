"""The paper's table of overheads."""

from __future__ import annotations

OVERHEAD: dict[tuple[str, str], tuple[float, float, float, int]] = {
    ("resnet18", "relu"): (22.599, 5.61, 713, 0),
    ("resnet34", "relu"): (41.529, 10.284, 1195, 0),
    ("resnet18", "penultimate"): (28.966, 5.783, 713, 5),
    ("resnet34", "penultimate"): (44.691, 10.438, 1196, 5),
    ("resnet18", "all"): (40.688, 5.788, 1057, 40),
    ("resnet34", "all"): (66.384, 10.512, 1839, 80),
}
"""The overhead (tab:performance_benchmarking): training and inference in ms a batch of 128, memory in MB, extra
parameters; by network and placement."""
