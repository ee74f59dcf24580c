"""Training: the loop, schedules, checkpoints and progress."""
