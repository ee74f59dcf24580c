"""Load a pretrained network of ``transformers`` with what turns examples into its inputs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesify.io.files import one_line
from bayesify.tabular.files import TableError

__all__ = [
    "first_pass",
    "load_model",
    "load_reader",
    "mean_of_tokens",
    "quiet_transformers",
    "sha256_of_json",
    "sha256_of_weights",
]


def load_model(source: str, needs: str) -> tuple[Any, Sequence[str]]:
    """Load a model in float32, frozen and in evaluation mode.

    Args:
        source: a folder with ``config.json`` and weights as safetensors, or the name of such a
            model on Hugging Face's hub.
        needs: what it must have besides, for the error.

    Returns:
        The model, and the names of its weights that the file lacks and that are therefore random:
        those of a pooler, or of a decoder.

    Raises:
        TableError: transformers is not installed, ``source`` is no such model, or its file lacks
            weights that are used.

    Example:
        >>> load_model("/nowhere", "a tokenizer")
        Traceback (most recent call last):
        bayesify.tabular.files.errors.TableError: the encoder /nowhere must be the folder, or ...
    """

    def load(transformers: Any, **place: Any) -> tuple[Any, Sequence[str]]:
        # Weights of other formats are pickles.
        model, told = transformers.AutoModel.from_pretrained(
            source, use_safetensors=True, output_loading_info=True, dtype=torch.float32, **place
        )
        missing = sorted(told["missing_keys"])
        _check_complete(model, missing)
        return model.eval().requires_grad_(requires_grad=False), missing

    loaded: tuple[Any, Sequence[str]] = _loaded(source, needs, load)
    return loaded


def _check_complete(model: Any, missing: Sequence[str]) -> None:
    """Raise ValueError where weights that are used are not in the file, and so random."""
    is_pair = getattr(model.config, "is_encoder_decoder", False)
    used = {id(each) for each in (model.get_encoder() if is_pair else model).parameters()}
    own = dict(model.named_parameters())
    lacking = [n for n in missing if n in own and id(own[n]) in used and "pooler" not in n]
    if lacking:
        raise ValueError(
            f"its file lacks {len(lacking)} of the weights, such as {lacking[0]}, which would be "
            "random; are they there under other names?"
        )


def load_reader(source: str, kind: str, needs: str, **options: Any) -> Any:
    """Load the tokenizer or the image processor of a model.

    Args:
        source: as for :func:`load_model`.
        kind: ``"AutoTokenizer"`` or ``"AutoImageProcessor"``.
        needs: as for :func:`load_model`.
        options: for ``from_pretrained``.

    Raises:
        TableError: as :func:`load_model`.

    Example:
        >>> load_reader("/nowhere", "AutoTokenizer", "a tokenizer")
        Traceback (most recent call last):
        bayesify.tabular.files.errors.TableError: the encoder /nowhere must be the folder, or ...
    """

    def load(transformers: Any, **place: Any) -> Any:
        return getattr(transformers, kind).from_pretrained(source, **options, **place)

    return _loaded(source, needs, load)


def _loaded(source: str, needs: str, load: Callable[..., Any]) -> Any:
    if find_spec("transformers") is None:
        raise TableError("--encoder needs transformers; pip install 'bayesify[cli,transformers]'")
    import transformers

    try:
        if _is_path(source) and not Path(source).is_dir():
            raise FileNotFoundError("there is no such folder")
        with quiet_transformers():
            # A folder has all that is needed: nothing is asked of the hub.
            return load(transformers, local_files_only=Path(source).is_dir())
    except Exception as error:  # transformers raises errors of many kinds
        reason = one_line(error)
        raise TableError(
            f"the encoder {source} must be the folder, or the name on Hugging Face's hub, of a "
            f"transformers model with {needs} and weights as safetensors "
            f"({reason[:200] or type(error).__name__})"
        ) from error


def _is_path(source: str) -> bool:
    """Return whether this cannot be a name on the hub, which is ``NAME`` or ``OWNER/NAME``."""
    return Path(source).is_absolute() or source.startswith(".") or len(Path(source).parts) > 2


@contextmanager
def first_pass(source: str, model: Any, things: str) -> Iterator[None]:
    """Raise TableError, which names the encoder, for any error of a model's first pass.

    Args:
        source: as for :func:`load_model`.
        model: the model that was loaded.
        things: what it reads.

    Example:
        >>> with first_pass("net", torch.nn.Identity(), "texts"):
        ...     torch.zeros(2, 3) @ torch.zeros(2, 3)
        Traceback (most recent call last):
        bayesify.tabular.files.errors.TableError: --encoder net must be a model whose states ...
    """
    try:
        yield
    except Exception as error:  # models raise errors of many kinds
        reason = one_line(error)
        raise TableError(
            f"--encoder {source} must be a model whose states follow from {things} alone, got "
            f"{type(model).__name__} ({reason[:200] or type(error).__name__})"
        ) from error


def mean_of_tokens(states: Tensor, is_token: Tensor) -> Tensor:
    """Return the mean of a model's states over the tokens of each text, shape (N, F).

    Args:
        states: shape (N, T, F).
        is_token: which places hold tokens, shape (N, T); the mean over none is 0.

    Example:
        >>> mean_of_tokens(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[1, 1, 0]]))
        tensor([[2.]])
    """
    weights = is_token.unsqueeze(-1).to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1).clamp_min(1.0)


def sha256_of_weights(tensors: dict[str, Tensor], without: Sequence[str]) -> str:
    """Return the digest of weights; those that the file lacks, such as a pooler's, are random.

    Example:
        >>> some = {"a": torch.zeros(2)}
        >>> same = sha256_of_weights({**some, "b": torch.ones(1)}, without=["b"])
        >>> same == sha256_of_weights(some, without=[])
        True
    """
    digest = hashlib.sha256()
    for name in sorted(set(tensors) - set(without)):
        digest.update(name.encode())
        values: Any = tensors[name].detach().contiguous().flatten().numpy()
        digest.update(values)
    return digest.hexdigest()


def sha256_of_json(content: Any) -> str:
    """Return the digest of what JSON can hold, without regard to the order of keys.

    Example:
        >>> sha256_of_json({"a": 1, "b": [2]}) == sha256_of_json({"b": (2,), "a": 1})
        True
    """
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers from standard error, where a command shows its progress.

    Example:
        >>> with quiet_transformers():
        ...     pass
    """
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
