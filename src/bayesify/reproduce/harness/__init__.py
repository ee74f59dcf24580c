"""Run jobs once, resume them, and turn their results into tables and figures."""
