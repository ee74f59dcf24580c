"""One folder or file for each paper or document that is reproduced."""
