"""Fused code for candidates that are written in torch: recording, printing and checking."""
