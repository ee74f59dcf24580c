"""The HTML report of a run: its figures and its page."""
