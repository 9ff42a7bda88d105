"""The paper's studies, one package each, and what they share."""

REPORTS = {
    **dict.fromkeys(("synthetic", "alpha", "corrections"), "flexact.studies.synthetic.report"),
    **{name: f"flexact.studies.{name}.report" for name in ("cifar", "glue", "picks")},
}
"""The module with `sections(folder, config)` of each study, for the page of its folder."""
