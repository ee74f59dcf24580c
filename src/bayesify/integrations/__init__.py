"""Other libraries' training loops, each in a module of the library's name, for the ELBO."""
