"""The arithmetic of a training step on the flat vectors of means and rhos."""
