"""The paper's table of GLUE results."""

from __future__ import annotations

_GLUE_COLUMNS = (
    ("cola", "matthews"),
    ("mrpc", "f1"),
    ("mrpc", "accuracy"),
    ("stsb", "pearson"),
    ("stsb", "spearman"),
    ("qnli", "accuracy"),
    ("rte", "accuracy"),
    ("wnli", "accuracy"),
)
_GLUE_ROWS = {
    "fixed": (56.53, 88.85, 84.07, 88.64, 88.48, 90.66, 65.70, 56.34),
    "flexact-penultimate": (60.08, 90.07, 85.78, 89.20, 88.82, 91.14, 66.43, 56.34),
    "flexact-all": (59.40, 90.78, 85.85, 89.70, 88.92, 91.22, 66.06, 61.97),
}
GLUE: dict[str, dict[tuple[str, str], float]] = {
    method: dict(zip(_GLUE_COLUMNS, row, strict=True)) for method, row in _GLUE_ROWS.items()
}
"""The paper's tab:glue_results, for BERT: by method, then by task and metric. Its average is over all eight."""
