"""Features of images from two layers of convolutions with fixed wavelets; nothing is learned.

The network is that of Bruna and Mallat (2013), Invariant Scattering Convolution Networks, with one
bank of small filters that is applied to images of halved size in place of larger filters. Before
it, digits are straightened by their moments, as in LeCun et al. (1998).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["principal_components", "scattering", "straightened", "wavelets"]

#: The width of the Gaussian window and the frequency of the wave, of a pixel and in radians.
_STD, _FREQUENCY = 0.8, 0.75 * math.pi
_RADIUS = 3
#: Images in one pass.
_BATCH = 250


def straightened(images: Tensor) -> Tensor:
    """Centre images and remove their slant, so that x and y are uncorrelated under the ink.

    Args:
        images: not negative, shape (N, H, W).

    Returns:
        Images of the same shape, interpolated; an image without ink stays as it is.

    Example:
        >>> image = torch.eye(9).unsqueeze(0)  # a slanted line
        >>> straightened(image)[0].sum(0).argmax().item()
        4
    """
    count, height, width = images.shape
    y, x = torch.meshgrid(
        torch.linspace(-1.0, 1.0, height), torch.linspace(-1.0, 1.0, width), indexing="ij"
    )
    ink = images / images.sum((1, 2), keepdim=True).clamp_min(1e-12)

    def average(values: Tensor) -> Tensor:
        return (ink * values).sum((1, 2), keepdim=True)

    centre_x, centre_y = average(x), average(y)
    slant = average((x - centre_x) * (y - centre_y)) / average((y - centre_y).square()).clamp_min(
        1e-12
    )
    one, zero = torch.ones_like(slant), torch.zeros_like(slant)
    rows = [torch.cat([one, slant, centre_x], 2), torch.cat([zero, one, centre_y], 2)]
    places = F.affine_grid(torch.cat(rows, 1), [count, 1, height, width], align_corners=True)
    moved = F.grid_sample(images.unsqueeze(1), places, align_corners=True)
    return moved.squeeze(1)


def wavelets(angles: int) -> Tensor:
    """Return Morlet wavelets at equal angles from 0 to 180 degrees.

    Args:
        angles: the number of angles, L, at least 1.

    Returns:
        Filters of mean zero, shape (2 L, 1, 7, 7): the real parts, then the imaginary parts.

    Raises:
        ValueError: ``angles`` is below 1.

    Example:
        >>> filters = wavelets(4)
        >>> filters.shape, filters.sum((1, 2, 3)).abs().max().item() < 1e-6
        (torch.Size([8, 1, 7, 7]), True)
    """
    if angles < 1:
        raise ValueError(f"angles must be at least 1, got {angles}")
    axis = torch.arange(-_RADIUS, _RADIUS + 1, dtype=torch.float64)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    theta = (torch.arange(angles, dtype=torch.float64) * math.pi / angles).reshape(-1, 1, 1)
    along, across = x * theta.cos() + y * theta.sin(), y * theta.cos() - x * theta.sin()
    # With few angles each wavelet is round, with many it is long and selective.
    window = (-(along.square() + (across * min(1.0, 4.0 / angles)).square()) / (2 * _STD**2)).exp()
    window /= window.sum((1, 2), keepdim=True)
    wave = (_FREQUENCY * along).cos()
    real = window * (wave - (window * wave).sum((1, 2), keepdim=True))
    imaginary = window * (_FREQUENCY * along).sin()
    return torch.cat([real, imaginary]).unsqueeze(1).float()


def scattering(images: Tensor, *, angles: int, levels: int, grid: int) -> Tensor:
    """Compute the features of images: averages of the moduli of one and of two convolutions.

    Args:
        images: shape (N, H, W).
        angles: the number of angles of the wavelets, L.
        levels: the number of sizes of the images, J, each half of the one before.
        grid: the features are averaged over the cells of a grid of ``grid`` x ``grid``.

    Returns:
        Features, shape (N, (1 + J L + J (J - 1) / 2 L^2) grid^2).

    Raises:
        ValueError: ``angles``, ``levels`` or ``grid`` is below 1.

    Example:
        >>> scattering(torch.zeros(5, 28, 28), angles=4, levels=2, grid=7).shape
        torch.Size([5, 1225])
    """
    if min(levels, grid) < 1:
        raise ValueError(f"levels and grid must be at least 1, got {levels} and {grid}")
    filters = wavelets(angles)
    parts = (_of_batch(part.unsqueeze(1), filters, levels, grid) for part in images.split(_BATCH))
    return torch.cat(list(parts))


def _of_batch(images: Tensor, filters: Tensor, levels: int, grid: int) -> Tensor:
    maps = [images]
    low = images
    for level in range(levels):
        first = _moduli(low, filters)
        maps.append(first)
        for _ in range(level + 1, levels):
            first = F.avg_pool2d(first, 2)
            maps.append(_moduli(first, filters))
        low = F.avg_pool2d(low, 2)
    pooled = [F.adaptive_avg_pool2d(each, grid).flatten(1) for each in maps]
    return torch.cat(pooled, 1)


def _moduli(maps: Tensor, filters: Tensor) -> Tensor:
    """Return the moduli of the convolutions of all maps (N, C, H, W), shape (N, C * L, H, W)."""
    count, channels = maps.shape[:2]
    convolved = F.conv2d(maps.flatten(0, 1).unsqueeze(1), filters, padding=_RADIUS)
    real, imaginary = convolved.chunk(2, 1)
    moduli: Tensor = torch.hypot(real, imaginary).unflatten(0, (count, channels))
    return moduli.flatten(1, 2)


def principal_components(
    features: Tensor, num_components: int, *, whitening: float
) -> tuple[Tensor, Tensor]:
    """Find the directions of the largest variance.

    Args:
        features: shape (N, D).
        num_components: K, at most D.
        whitening: the power with which each component is divided by its standard deviation: 0
            leaves the variances as they are, 1 makes all of them equal.

    Returns:
        The mean of the features, shape (D,), and a projection, shape (D, K). The components
        ``(features - mean) @ projection`` have an average variance of 1.

    Raises:
        ValueError: ``num_components`` is not from 1 to D.

    Example:
        >>> x = torch.tensor([[3.0, 0.1], [-3.0, 0.1], [3.0, -0.1], [-3.0, -0.1]])
        >>> mean, projection = principal_components(x, 1, whitening=0.0)
        >>> ((x - mean) @ projection).abs().flatten().tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    if not 1 <= num_components <= features.shape[1]:
        raise ValueError(
            f"num_components must lie from 1 to {features.shape[1]}, the number of features, got "
            f"{num_components}"
        )
    mean = features.mean(0)
    centred = features - mean
    variances, directions = torch.linalg.eigh(centred.T @ centred / len(features))
    variances = variances[-num_components:].flip(0).clamp_min(1e-12)
    directions = directions[:, -num_components:].flip(1)
    scaled = directions * variances.pow(-0.5 * whitening)
    return mean, scaled / variances.pow(1.0 - whitening).mean().sqrt()
