"""What happens between steps: logit updates, elimination, trials, the schedule and the rewind."""
