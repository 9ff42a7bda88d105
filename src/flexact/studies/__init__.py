"""The paper's studies and the comparison of a user's own training, one package each, and what they share."""

REPORTS = {
    **dict.fromkeys(("synthetic", "alpha", "corrections"), "flexact.studies.synthetic.studies"),
    **{name: f"flexact.studies.{name}.study" for name in ("cifar", "glue", "picks", "compare")},
}
"""The module of each study whose `sections(folder, config)` makes the page of a folder."""
