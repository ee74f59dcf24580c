"""Bayesian modules: networks whose parameters are random variables, and their predictions."""
