"""Checked input and atomic output."""
