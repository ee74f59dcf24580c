"""Blundell et al. 2015: Weight Uncertainty in Neural Networks."""
