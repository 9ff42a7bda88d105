"""The overhead study: what routing costs in time and memory."""
