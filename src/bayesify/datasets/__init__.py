"""Loaders of the data sets that the experiments use."""
