"""Variational continual learning on permuted and split MNIST, as in Nguyen et al. (2018)."""
