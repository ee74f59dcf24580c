"""Rahmanto's reproduction in PyTorch."""
