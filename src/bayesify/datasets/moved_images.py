"""Augmentation: minibatches whose images are moved a little, each in a way of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.datasets.loader import EpochLoader

__all__ = ["MovedImages", "move_images"]

#: Beyond it an image may be turned over, and a digit become another one.
_LARGEST = 0.5


class MovedImages:
    """Minibatches of images, each image moved at random by :func:`move_images`.

    ``fit`` seeds torch's global generator before it fetches a minibatch, so that the moves are a
    function of its seed and the step, and a resumed run has those of an uninterrupted one.

    N does not grow: a step still counts each example once, with the log-likelihood of its image
    as moved. The expectation of that over moves is at most the log of the probability averaged over
    moves, so that the ELBO bounds the evidence of the network whose probability of a target is that
    average (Nabarro et al. 2022).

    Args:
        loader: minibatches (images, targets), such as a :class:`TensorLoader`.
        amount: as for :func:`move_images`.
        image_shape: (H, W) or (C, H, W) of an image, for images that the loader brings flattened;
            None for images of shape (N, C, H, W).

    Raises:
        ValueError: ``amount`` is out of its range, or ``image_shape`` has another length.

    Example:
        >>> from bayesify.datasets import TensorLoader
        >>> images = torch.zeros(5, 784)
        >>> once = TensorLoader(images, torch.zeros(5, dtype=torch.long), batch_size=2)
        >>> loader = MovedImages(once, 0.1, image_shape=(28, 28))
        >>> [tuple(x.shape) for x, _ in loader], loader.num_data
        ([(2, 784), (2, 784), (1, 784)], 5)
    """

    def __init__(
        self, loader: EpochLoader, amount: float, image_shape: Sequence[int] | None = None
    ) -> None:
        _check_amount(amount)
        if image_shape is not None and len(image_shape) not in (2, 3):
            raise ValueError(
                "image_shape must be (height, width) or (channels, height, width), got "
                f"{tuple(image_shape)}"
            )
        self._loader, self._amount = loader, amount
        self._size = None if image_shape is None else tuple(image_shape[-2:])

    @property
    def num_data(self) -> int:
        """N, the number of examples in an epoch."""
        return self._loader.num_data

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self._loader.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, targets in self._loader:
            images = inputs
            if self._size is not None:
                images = inputs.reshape(len(inputs), -1, *self._size)
            yield move_images(images, self._amount).reshape(inputs.shape), targets


def move_images(images: Tensor, amount: float) -> Tensor:
    """Shift, turn, scale and shear each image at random, by bilinear interpolation.

    An image is read at the places A (x, y, 1), its coordinates from -1 to 1 from edge to edge: A
    is the identity, each of its six numbers changed by a uniform number between ``-amount`` and
    ``amount``. With .1 an image is shifted by at most a twentieth of its side, scaled by at most
    10 %, and turned by at most 6 degrees. Beyond its edge an image goes on with the pixels there.

    Args:
        images: shape (N, C, H, W).
        amount: from 0, which changes nothing, to .5.

    Returns:
        Images of the same shape and dtype, drawn with torch's global generator of the CPU, so that
        they are the same on every device.

    Raises:
        ValueError: ``images`` has another number of axes, or ``amount`` is out of its range.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> moved = move_images(torch.eye(5).expand(2, 1, 5, 5), 0.1)
        >>> moved.shape, bool((moved[0] == moved[1]).all())
        (torch.Size([2, 1, 5, 5]), False)
    """
    _check_amount(amount)
    if images.dim() != 4:
        raise ValueError(
            f"images must have shape (N, C, H, W), got {tuple(images.shape)}; flattened ones need "
            "image_shape"
        )
    if amount == 0.0:
        return images
    changes = (2.0 * torch.rand(len(images), 2, 3) - 1.0) * amount
    affine = (torch.eye(2, 3) + changes).to(images.device, images.dtype)
    places = F.affine_grid(affine, list(images.shape), align_corners=False)
    return F.grid_sample(images, places, padding_mode="border", align_corners=False)


def _check_amount(amount: float) -> None:
    if not (math.isfinite(amount) and 0.0 <= amount <= _LARGEST):
        raise ValueError(
            f"amount must be from 0, which moves nothing, to {_LARGEST:g}, got {amount}; .1 shifts "
            "an image by at most a twentieth of its side"
        )
