"""The paper's studies, one package each, and what they share."""

REPORTS = {
    **dict.fromkeys(("synthetic", "alpha", "corrections"), "flexact.studies.synthetic.report"),
    **{name: f"flexact.studies.{name}.report" for name in ("cifar", "glue", "picks")},
}
"""The module of each study whose `sections(folder, config)` makes the page of a folder."""
