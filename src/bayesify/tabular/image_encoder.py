"""Turn images into numbers by a pretrained network, its pooled output or the mean of its states."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bayesify.tabular.pretrained_model import (
    first_pass,
    load_model,
    load_reader,
    sha256_of_json,
    sha256_of_weights,
)

__all__ = ["ImageEncoder", "image_encoder"]

_NEEDS = "an image processor"


class ImageEncoder:
    """A pretrained vision model of ``transformers`` and its image processor, not trained further.

    A feature is an entry of the model's pooled output, if the weights of that are in the file, and
    else of the mean of its last states over all positions. Of a model of images and texts, such as
    CLIP, the part for images is used.

    Args:
        source: a folder with ``config.json``, ``preprocessor_config.json`` and weights as
            safetensors, or the name of such a model on Hugging Face's hub; one of ``timm``, if that
            is installed too.

    Attributes:
        content: what ``sha256`` is of.
        reader: what ``reader_sha256`` is of.
        size: number F of features of an image.
        sha256: of the weights.
        reader_sha256: of the settings in the image processor's file.

    Raises:
        TableError: transformers is not installed, or ``source`` is no such model.
    """

    content, reader = "weights", "image processor"

    def __init__(self, source: str) -> None:
        from PIL import Image

        # Pillow's resizing, which needs no torchvision.
        self._processor = load_reader(source, "AutoImageProcessor", _NEEDS, backend="pil")
        # As the file has them: other versions of transformers may add defaults of their own.
        settings, _ = type(self._processor).get_image_processor_dict(
            source, local_files_only=Path(source).is_dir()
        )
        self.reader_sha256 = sha256_of_json(settings)
        loaded, missing = load_model(source, _NEEDS)
        self._network = getattr(loaded, "vision_model", loaded)
        self._has_pooler = not any("pooler" in name for name in missing)
        self.sha256 = sha256_of_weights(loaded.state_dict(), without=missing)
        with first_pass(source, loaded, "images"):
            self.size = self.features([Image.new("RGB", (8, 8))]).shape[1]

    @torch.no_grad()
    def features(self, images: Sequence[Any]) -> npt.NDArray[np.float64]:
        """Return the features of images of Pillow, shape (N, F)."""
        plain = [image.convert("RGB") for image in images]
        pixels = self._processor(images=plain, return_tensors="pt")["pixel_values"]
        outputs = self._network(pixel_values=pixels)
        pooled: Tensor | None = getattr(outputs, "pooler_output", None)
        if pooled is None or not self._has_pooler:
            states: Tensor = outputs.last_hidden_state
            # (N, F, height, width) of a convolutional network, (N, T, F) of others.
            pooled = states.mean((2, 3)) if states.dim() == 4 else states.mean(1)
        return np.asarray(pooled.flatten(1).double().numpy())


@lru_cache(maxsize=1)
def image_encoder(source: str) -> ImageEncoder:
    """Return the encoder of a folder or a name, loaded once in a process.

    Raises:
        TableError: as :class:`ImageEncoder`.
    """
    return ImageEncoder(source)
