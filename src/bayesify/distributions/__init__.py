"""Posteriors and priors over the flat weight vector, their KL divergence, and likelihoods."""
