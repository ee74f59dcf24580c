"""One flat file for each experiment reproduced."""
