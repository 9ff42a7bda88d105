"""Checked input, atomic file writes, and tables as CSV, Markdown and text."""
