"""Variational low-rank adapters over ``peft``; needs the extra ``adapters``."""

try:
    from bayesify.adapters.lora import bayesian_adapter
    from bayesify.adapters.storage import load_adapter, save_adapter
    from bayesify.adapters.widening import widen
except ModuleNotFoundError as error:
    if (error.name or "").startswith("bayesify"):
        raise
    raise ModuleNotFoundError(
        f"bayesify.adapters needs {error.name}; pip install 'bayesify[adapters]'", name=error.name
    ) from error

__all__ = ["bayesian_adapter", "load_adapter", "save_adapter", "widen"]
