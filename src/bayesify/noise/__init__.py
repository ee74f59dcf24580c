"""Reproducible noise: random numbers as a pure function of seed, stream, step and sample."""
