"""Active learning on MNIST, as in Kirsch, van Amersfoort and Gal (2019)."""
