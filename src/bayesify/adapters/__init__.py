"""Variational low-rank adapters over ``peft``; needs the extra ``adapters``."""

from bayesify.adapters.lora import bayesian_adapter
from bayesify.adapters.storage import load_adapter, save_adapter
from bayesify.adapters.widening import widen

__all__ = ["bayesian_adapter", "load_adapter", "save_adapter", "widen"]
