"""The picks and their evidence: selection, Recorder, live table, TensorBoard and figures."""
