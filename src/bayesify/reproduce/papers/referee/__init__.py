"""Approximate posteriors judged by Hamiltonian Monte Carlo on the same model."""
