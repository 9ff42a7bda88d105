"""The paper's studies, one file a table, on a shared runner."""
