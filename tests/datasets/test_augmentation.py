"""Images moved at random: how far, each in its own way, and the same after a resumed training."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify as bf
from bayesify.datasets import AugmentedImages, TensorLoader, load_images, random_affine

AMOUNT = 0.1


def ramps(count: int, side: int = 41) -> Tensor:
    """Images of two channels whose pixels are their own places, from -1 to 1 between the edges."""
    places = (torch.arange(side) + 0.5) / side * 2.0 - 1.0
    return torch.stack(torch.meshgrid(places, places, indexing="xy")).expand(count, -1, -1, -1)


def test_an_amount_of_0_changes_nothing() -> None:
    images = torch.randn(3, 2, 5, 7)
    assert torch.equal(random_affine(images, 0.0), images)


def test_places_change_by_an_affine_map_whose_numbers_are_within_the_amount() -> None:
    # Bilinear interpolation is exact for ramps, except beyond the edge.
    torch.manual_seed(0)
    images = ramps(500)
    moved = random_affine(images, AMOUNT)
    inside = slice(8, -8)
    before, after = (each[:, :, inside, inside].flatten(2).double().mT for each in (images, moved))
    design = torch.cat([before[0], torch.ones(len(before[0]), 1, dtype=torch.double)], dim=1)
    maps = torch.linalg.lstsq(design.expand(len(after), -1, -1), after).solution.mT
    assert torch.allclose(design @ maps.mT, after, atol=1e-4)
    changes = maps - torch.eye(2, 3, dtype=torch.double)
    assert changes.abs().max() <= AMOUNT + 1e-4
    # Uniform: mean 0 and variance a^2 / 3, each within 5 standard errors of 500 images.
    assert (changes.mean(0).abs() < 5 * AMOUNT / math.sqrt(3 * 500)).all()
    error = 5 * AMOUNT**2 * math.sqrt((1 / 5 - 1 / 9) / 500)
    assert ((changes.var(0) - AMOUNT**2 / 3).abs() < error).all()


def test_beyond_its_edge_an_image_goes_on_with_the_pixels_there() -> None:
    torch.manual_seed(0)
    assert torch.allclose(random_affine(torch.full((50, 1, 6, 6), 3.0), 0.5), torch.tensor(3.0))


def test_each_image_moves_in_its_own_way_and_a_seed_gives_all_of_them() -> None:
    images = torch.eye(9).expand(4, 1, 9, 9)

    def moved(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return random_affine(images, AMOUNT)

    assert torch.equal(moved(0), moved(0))
    assert not torch.equal(moved(0), moved(1))
    assert len(moved(0).flatten(1).unique(dim=0)) == len(images)


@pytest.mark.parametrize("image_shape", [(4, 6), (2, 4, 6)])
def test_flattened_images_are_moved_as_images(image_shape: tuple[int, ...]) -> None:
    images, targets = torch.randn(5, 2, 4, 6), torch.arange(5)
    once = TensorLoader(images, targets, 5, shuffle=False)
    torch.manual_seed(0)
    ((whole, _),) = AugmentedImages(once, AMOUNT)
    flat = TensorLoader(images.flatten(1), targets, 5, shuffle=False)
    torch.manual_seed(0)
    ((rows, same),) = AugmentedImages(flat, AMOUNT, image_shape)
    assert torch.equal(rows, whole.flatten(1))
    assert torch.equal(same, targets)


@pytest.mark.parametrize("amount", [-0.1, 0.6, math.nan])
def test_an_amount_out_of_range_is_one_clear_error(amount: float) -> None:
    loader = TensorLoader(torch.zeros(2, 1, 4, 4), torch.zeros(2), 2)
    with pytest.raises(ValueError, match=r"amount must be from 0.* to 0\.5, got"):
        AugmentedImages(loader, amount)


def test_an_image_that_is_not_square_is_turned_and_not_sheared() -> None:
    # A line from top to bottom of a wide image tilts as much as one of a square image.
    torch.manual_seed(0)
    square, wide = torch.zeros(200, 1, 33, 33), torch.zeros(200, 1, 33, 129)
    square[..., 16], wide[..., 64] = 1.0, 1.0
    places = torch.arange(129.0) - 64.0

    def tilts(images: Tensor) -> Tensor:
        moved = random_affine(images, AMOUNT)[:, 0]
        side = images.shape[-1] // 2
        centre = (moved * places[64 - side : 65 + side]).sum(-1) / moved.sum(-1)
        return (centre[:, 26] - centre[:, 6]) / 20.0

    a, b = tilts(square), tilts(wide)
    assert a.abs().max() < 0.13
    assert b.abs().max() < 0.13
    assert b.abs().max() > 0.08


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_places_are_as_exact_in_any_dtype_and_under_autocast(dtype: torch.dtype) -> None:
    images = torch.rand(8, 1, 224, 224)

    def moved(images: Tensor) -> Tensor:
        torch.manual_seed(0)
        return random_affine(images, AMOUNT)

    exact, found = moved(images.to(dtype).double()), moved(images.to(dtype))
    assert found.dtype == dtype
    assert (found.double() - exact).abs().max() <= torch.finfo(dtype).eps + 1e-4
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(moved(images), moved(images))
        under = moved(images)
    assert torch.equal(under, moved(images))


def test_what_is_no_image_or_no_number_is_one_clear_error() -> None:
    with pytest.raises(TypeError, match=r"floating-point numbers, got torch.uint8.* / 255"):
        random_affine(torch.zeros(3, 1, 4, 4, dtype=torch.uint8), AMOUNT)
    with pytest.raises(TypeError, match="floating-point numbers, got a tuple"):
        random_affine((torch.zeros(3, 1, 4, 4),), AMOUNT)  # type: ignore[arg-type]
    for wrong in ("0.1", True, None):
        with pytest.raises(TypeError, match="amount must be a number"):
            random_affine(torch.zeros(3, 1, 4, 4), wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got DataLoader.* call random_affine"):
        AugmentedImages(DataLoader(TensorDataset(torch.zeros(3))), AMOUNT)  # type: ignore[arg-type]


def test_images_without_their_axes_are_one_clear_error() -> None:
    with pytest.raises(ValueError, match=r"shape \(N, C, H, W\), got \(3, 784\).*image_shape"):
        random_affine(torch.zeros(3, 784), AMOUNT)
    for wrong in ((27, 28), (3, 14, 14)):
        with pytest.raises(ValueError, match=r"does not fit images of shape \(3, 784\)"):
            random_affine(torch.zeros(3, 784), AMOUNT, wrong)
    with pytest.raises(ValueError, match=r"\(height, width\).*got \(784,\)"):
        AugmentedImages(TensorLoader(torch.zeros(3, 784), torch.zeros(3), 2), AMOUNT, (784,))


class StoppedError(Exception):
    """Ends a training."""


class StopAfter:
    """A callback that stops a training after some steps, as Ctrl-C would."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def on_start(self, **_: object) -> None:
        pass

    def on_step(self, **_: object) -> None:
        self._left -= 1
        if not self._left:
            raise StoppedError

    def on_epoch(self, row: object) -> None:
        pass


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_a_resumed_training_has_the_moves_of_an_uninterrupted_one(tmp_path: Path) -> None:
    data = load_images("mnist", limit=60)
    loader = AugmentedImages(
        TensorLoader(data.train_inputs, data.train_targets, 20), AMOUNT, data.image_shape
    )

    def trained(folder: Path, amount_of_steps: int | None = None) -> Tensor:
        net = nn.Sequential(nn.Linear(784, 10))
        torch.nn.init.zeros_(net[0].weight), torch.nn.init.zeros_(net[0].bias)
        bnn = bf.BayesianModule(net)
        callback = StopAfter(amount_of_steps) if amount_of_steps else None
        bf.fit(
            bf.ELBO(bnn, num_data=60),
            loader,
            epochs=3,
            checkpoint_dir=folder,
            resume=True,
            callback=callback,
        )
        return bnn.posterior.mean.detach().clone()

    whole = trained(tmp_path / "whole")
    with pytest.raises(StoppedError):
        trained(tmp_path / "stopped", 5)
    assert torch.equal(trained(tmp_path / "stopped"), whole)
