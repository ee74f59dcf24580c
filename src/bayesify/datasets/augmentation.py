"""Augmentation: minibatches of images with a random affine map of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.datasets.loader import EpochLoader

__all__ = ["AugmentedImages", "random_affine"]

#: Beyond it an image may be turned over, and a digit become another one.
_LARGEST = 0.5


class AugmentedImages:
    """Minibatches of images, each under a random affine map of its own, :func:`random_affine`.

    ``fit`` seeds torch's global generator before it fetches a minibatch, so that the maps are a
    function of its seed and the step, and a resumed run has those of an uninterrupted one.

    N does not grow: a step still counts each example once, with the log-likelihood of its mapped
    image. The expectation of that over maps is at most the log of the probability averaged over
    maps, so that the ELBO bounds the evidence of the network whose probability of a target is that
    average (Nabarro et al. 2022).

    Args:
        loader: minibatches (images, targets), such as a :class:`TensorLoader`.
        amount: as for :func:`random_affine`.
        image_shape: as for :func:`random_affine`.

    Raises:
        TypeError: ``loader`` has no ``set_epoch``, or ``amount`` is no number.
        ValueError: ``amount`` is out of its range, or ``image_shape`` has another length.

    Example:
        >>> from bayesify.datasets import TensorLoader
        >>> images = torch.zeros(5, 784)
        >>> once = TensorLoader(images, torch.zeros(5, dtype=torch.long), batch_size=2)
        >>> loader = AugmentedImages(once, 0.1, image_shape=(28, 28))
        >>> [tuple(x.shape) for x, _ in loader], loader.num_data
        ([(2, 784), (2, 784), (1, 784)], 5)
    """

    def __init__(
        self, loader: EpochLoader, amount: float, image_shape: Sequence[int] | None = None
    ) -> None:
        if not hasattr(loader, "set_epoch"):
            raise TypeError(
                f"loader must be a TensorLoader or the like, got {type(loader).__name__}; in the "
                "collate_fn of a DataLoader call random_affine"
            )
        _check(amount, image_shape)
        self._loader, self._amount, self._image_shape = loader, amount, image_shape

    @property
    def num_data(self) -> int:
        """N, the number of examples in an epoch."""
        return self._loader.num_data

    @property
    def passes(self) -> int:
        """The number of passes over the examples in an epoch."""
        return getattr(self._loader, "passes", 1)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self._loader.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, targets in self._loader:
            yield random_affine(images, self._amount, self._image_shape), targets


def random_affine(
    images: Tensor, amount: float, image_shape: Sequence[int] | None = None
) -> Tensor:
    """Shift, turn, scale and shear each image at random, by bilinear interpolation.

    A pixel is read at A (x, y, 1), its place from the middle of the image: A is the identity, each
    of its four numbers changed by a uniform number between ``-amount`` and ``amount``, and the two
    of the shift by as much of half the width and half the height. With .1 an image is shifted by at
    most a twentieth of its sides, turned by up to about 6 degrees, and scaled by up to about 10 %.
    Beyond its edge an image continues with the pixels there. All of this is computed in float32, or
    float64 for such images, under autocast too.

    Args:
        images: shape (N, C, H, W), floating-point; or (N, ...) with ``image_shape``.
        amount: from 0, which changes nothing, to .5.
        image_shape: (H, W) or (C, H, W) of an image, for flattened images.

    Returns:
        Images of the same shape and dtype, drawn with torch's global generator of the CPU, so that
        the maps are the same on every device.

    Raises:
        TypeError: ``images`` is no tensor of floating-point numbers, or ``amount`` no number.
        ValueError: ``images`` has another shape, or ``amount`` is out of its range.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> moved = random_affine(torch.eye(5).expand(2, 1, 5, 5), 0.1)
        >>> moved.shape, bool((moved[0] == moved[1]).all())
        (torch.Size([2, 1, 5, 5]), False)
    """
    _check(amount, image_shape)
    if not isinstance(images, Tensor) or not images.is_floating_point():
        found = images.dtype if isinstance(images, Tensor) else f"a {type(images).__name__}"
        raise TypeError(
            f"images must be a tensor of floating-point numbers, got {found}; convert pixels by "
            "images.float() / 255"
        )
    unflattened = _unflattened(images, image_shape)
    if amount == 0.0:
        return images
    height, width = unflattened.shape[-2:]
    changes = amount * (2.0 * torch.rand(len(images), 2, 3, dtype=torch.float32, device="cpu") - 1)
    # PyTorch's places go from -1 to 1 on both axes; an image that is not square must not be sheared
    # where it is turned.
    changes[:, 0, 1] *= height / width
    changes[:, 1, 0] *= width / height
    dtype = torch.promote_types(images.dtype, torch.float32)
    affine = (torch.eye(2, 3) + changes).to(images.device, dtype)
    # bfloat16 would round places to a tenth of a pixel and more.
    with torch.autocast(images.device.type, enabled=False):
        places = F.affine_grid(affine, list(unflattened.shape), align_corners=False)
        moved = F.grid_sample(
            unflattened.to(dtype), places, padding_mode="border", align_corners=False
        )
    return moved.to(images.dtype).reshape(images.shape)


def _unflattened(images: Tensor, image_shape: Sequence[int] | None) -> Tensor:
    """Return images of shape (N, C, H, W)."""
    if image_shape is None:
        if images.dim() != 4:
            raise ValueError(
                f"images must have shape (N, C, H, W), got {tuple(images.shape)}; flattened ones "
                "need image_shape"
            )
        return images
    *channels, height, width = image_shape
    count, rest = divmod(math.prod(images.shape[1:]), height * width)
    if rest or channels not in ([], [count]):
        raise ValueError(
            f"image_shape {tuple(image_shape)} does not fit images of shape {tuple(images.shape)}"
        )
    return images.reshape(len(images), count, height, width)


def _check(amount: float, image_shape: Sequence[int] | None) -> None:
    if isinstance(amount, bool) or not isinstance(amount, int | float):
        raise TypeError(f"amount must be a number, got {amount!r}")
    if not 0.0 <= amount <= _LARGEST:  # nor NaN
        raise ValueError(
            f"amount must be from 0, which changes nothing, to {_LARGEST:g}, got {amount}; .1 "
            "shifts an image by at most a twentieth of its sides"
        )
    if image_shape is not None and (len(image_shape) not in (2, 3) or min(image_shape) < 1):
        raise ValueError(
            "image_shape must be (height, width) or (channels, height, width), got "
            f"{tuple(image_shape)}"
        )
