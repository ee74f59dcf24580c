"""Tables larger than memory: statistics in one pass, rows in random order from a file on disk."""
