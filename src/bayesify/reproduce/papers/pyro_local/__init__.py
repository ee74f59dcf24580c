"""The notebook on local reparametrisation written with Pyro."""
