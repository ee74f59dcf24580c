"""Small networks on MNIST: pruned in training, compressed to a file, compared with literature."""
