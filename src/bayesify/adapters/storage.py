"""A folder that is an ordinary ``peft`` adapter of the means, with the posterior next to it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft import PeftModel
from peft.tuners.lora.layer import MultiheadAttention
from torch import nn

from bayesify.adapters.lora import active_adapter
from bayesify.estimators import stateless
from bayesify.estimators.network_state import copy_network
from bayesify.io import StorageError, load
from bayesify.io.files import write_tensors
from bayesify.io.models import model_document
from bayesify.module.bayesian import BayesianModule

__all__ = ["load_adapter", "save_adapter"]

_POSTERIOR = "posterior.safetensors"
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: Beginnings of the initial values of peft that take a part of W into the adapter.
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def save_adapter(bnn: BayesianModule, folder: str | os.PathLike[str]) -> None:
    """Save a Bayesian adapter to a folder, without the network that it adapts.

    ``PeftModel.from_pretrained(base, folder)`` alone loads the adapter of the means;
    :func:`load_adapter` the posterior too. Each file is replaced as a whole.

    Args:
        bnn: a network of :func:`bayesian_adapter` or :func:`widen`.
        folder: the folder; it is made if there is none.

    Raises:
        TypeError: the network is no adapter.
        ValueError: peft could not load it alone: it has several adapters, one that is not called
            "default", or one whose initial values changed the network that it adapts; or it adapts
            an ``nn.MultiheadAttention``, whose weights peft changes in each forward pass.
        OSError: a file cannot be written.

    Example:
        >>> import bayesify.adapters
        >>> from peft import LoraConfig, get_peft_model
        >>> base = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> net = get_peft_model(base, LoraConfig(r=2, target_modules=["0"]))
        >>> bnn = bayesify.adapters.bayesian_adapter(net, output=None)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_adapter(bnn, folder)
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['README.md', 'adapter_config.json', 'adapter_model.safetensors', 'posterior.safetensors']
    """
    if not isinstance(bnn, BayesianModule):
        raise TypeError(
            f"save_adapter needs a BayesianModule, got {type(bnn).__name__}; an adapter of peft "
            "alone is saved by net.save_pretrained(folder)"
        )
    _check_can_be_loaded(bnn.net, active_adapter(bnn.net))
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    net: Any = copy_network(bnn.net)
    means = bnn.posterior.masked_mean.detach().to(bnn.layout.dtype)
    stateless.restore_parameters(net, bnn.layout, bnn.layout.unflatten(means))
    for left in target.glob(".part-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    # Within the folder, which may be of another file system than its parent.
    with tempfile.TemporaryDirectory(dir=target, prefix=".part-") as part:
        # "auto" would ask a hub for the size of the vocabulary.
        net.save_pretrained(part, save_embedding_layers=False)
        # The head that a new one replaces is drawn anew where the network is loaded.
        document = model_document(bnn, ("*.original_module.*",))
        write_tensors(Path(part) / _POSTERIOR, *document)
        for written in sorted(path for path in Path(part).rglob("*") if path.is_file()):
            place = target / written.relative_to(part)
            place.parent.mkdir(parents=True, exist_ok=True)
            written.replace(place)


def _check_can_be_loaded(net: Any, name: str) -> None:
    names = list(net.peft_config)
    if names != ["default"]:
        raise ValueError(
            'save_adapter needs one adapter, called "default", as peft writes only such a one to '
            f"the folder itself, got {', '.join(map(repr, names))}; make the network by "
            "get_peft_model(base, config) without adapter_name, or remove the others by "
            "delete_adapter"
        )
    kind = getattr(net.peft_config[name], "init_lora_weights", True)
    if isinstance(kind, str) and kind.lower().startswith(_CHANGE_BASE):
        raise ValueError(
            f"save_adapter writes no adapter of init_lora_weights={kind!r}, which changes the "
            "network that it adapts; save the whole by bayesify.save(bnn, path)"
        )
    for path, layer in net.named_modules():
        if isinstance(layer, MultiheadAttention):
            raise ValueError(
                f"save_adapter writes no adapter of an nn.MultiheadAttention, got {path}: in each "
                "forward pass peft adds the adapter to the frozen weights and takes it away, which "
                "changes them by rounding; save the whole by bayesify.save(bnn, path)"
            )


def load_adapter(folder: str | os.PathLike[str], base: nn.Module, **options: Any) -> BayesianModule:
    """Load a Bayesian adapter from a folder of :func:`save_adapter`.

    Args:
        folder: the folder.
        base: the network that was adapted, with its values; peft puts the adapter into it. After
            an error it is as it was.
        options: the arguments of ``bayesify.load``, for components that are not bayesify's.

    Raises:
        StorageError: the folder holds no Bayesian adapter, a file is missing or damaged, or
            ``base`` is another network.
        TypeError: ``base`` has an adapter already.

    Example:
        >>> load_adapter("nowhere", nn.Linear(8, 8))
        Traceback (most recent call last):
        bayesify.io.files.StorageError: nowhere must be a folder of save_adapter, but has no ...
    """
    path = Path(folder) / _POSTERIOR
    if not path.is_file():
        raise StorageError(
            f"{folder} must be a folder of save_adapter, but has no {_POSTERIOR}; an adapter of "
            "peft alone is loaded by PeftModel.from_pretrained, and made Bayesian anew"
        )
    if isinstance(base, PeftModel):
        raise TypeError(
            "base must be the network without an adapter, got a PeftModel; pass "
            "base.unload(), or the network as it was before"
        )
    for name in (_CONFIG, _WEIGHTS):
        if not (Path(folder) / name).is_file():  # peft would look for it on the hub
            raise StorageError(f"{folder} must be a folder of save_adapter, but has no {name}")
    with _unchanged_on_error(base):
        try:
            net: Any = PeftModel.from_pretrained(base, str(folder), is_trainable=True)
        except Exception as error:  # of peft, safetensors and torch, each with classes of its own
            raise StorageError(
                f"{folder} cannot be loaded into {type(base).__name__}: "
                f"{next(iter(str(error).splitlines()), type(error).__name__)}; the files are "
                "damaged, or base is another network"
            ) from error
        return load(path, net, **options)


@contextmanager
def _unchanged_on_error(net: nn.Module) -> Iterator[None]:
    """Take an adapter out of a network again where the block fails, whatever peft had done."""
    trained = [(parameter, parameter.requires_grad) for parameter in net.parameters()]
    before = [(module, type(module), dict(vars(module))) for module in net.modules()]
    # Parts, parameters, buffers and hooks, whose handles know these very dictionaries.
    held = [
        (value, dict(value))
        for _, _, attributes in before
        for value in attributes.values()
        if isinstance(value, dict)
    ]
    try:
        yield
    except BaseException:
        for module, kind, attributes in before:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
        for value, content in held:
            value.clear()
            value.update(content)
        for parameter, is_trained in trained:
            parameter.requires_grad_(is_trained)
        raise
