"""Tables in text files: what their columns hold, inputs for a network, and checks of new rows.

Its modules but ``data`` need pandas; nothing is imported here, so that the rest does without.
"""
