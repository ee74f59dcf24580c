"""Figures of single images with their predictions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from torch import Tensor
from torch.nn.functional import one_hot

from bayesify.plots.style import COLOURS, shortened, styled

__all__ = ["digit_gallery", "votes_gallery"]

_KEY = "bars: green = true class, red = wrong prediction"


@styled
def digit_gallery(
    images: Tensor,
    targets: Tensor,
    probs: Tensor,
    epistemic: Tensor,
    total: Tensor,
    class_names: Sequence[str],
    title: str,
) -> Figure:
    r"""Draw images, each with its predictive distribution as a bar chart.

    Args:
        images: shape (n, height, width), or (n, height, width, 3) from 0 to 1.
        targets: true classes, shape (n,).
        probs: predictive class probabilities, shape (n, K). Of more than 10 classes the 10 most
            probable are drawn, and the true class.
        epistemic: mutual information of class and weights, in nats, shape (n,).
        total: entropy of the prediction, in nats, shape (n,).
        class_names: K names.
        title: title of the figure.

    Raises:
        ValueError: there is no image, or the lengths differ.

    Example:
        >>> import torch
        >>> one = torch.ones(1)
        >>> figure = digit_gallery(torch.zeros(1, 2, 2), torch.tensor([1]),
        ...                        torch.tensor([[0.2, 0.8]]), 0 * one, 0.5 * one, "ab", "Digits")
        >>> figure.subfigs[0].get_suptitle()
        'true b\npredicted b\ntotal 0.50, epistemic 0.00 nats'
    """
    lengths = {len(tensor) for tensor in (images, targets, probs, epistemic, total)}
    if len(lengths) != 1 or 0 in lengths or probs.shape[1] != len(class_names):
        raise ValueError(
            "a gallery needs the same number n > 0 of images, targets, probs, epistemic and total, "
            f"and a name for each of the K classes, got lengths {sorted(lengths)}, "
            f"K={probs.shape[1]} and {len(class_names)} names"
        )
    figure, cards = _cards(images, title)
    for index, (card, bars) in enumerate(cards):
        true, predicted = int(targets[index]), int(probs[index].argmax())
        _set_heading(
            card,
            class_names,
            true,
            predicted,
            f"total {_nats(total[index])}, epistemic {_nats(epistemic[index])} nats",
        )
        _class_bars(bars, probs[index], true, class_names)
        bars.set_xticks((0.0, 0.5, 1.0), ("0", "½", "1"), fontsize=7)
        bars.set_xlabel("probability", fontsize=7, labelpad=1)
    return figure


@styled
def votes_gallery(
    images: Tensor,
    targets: Tensor,
    samples: Tensor,
    class_names: Sequence[str],
    title: str,
) -> Figure:
    r"""Draw images, each with the votes of the weight samples for their most probable class.

    Args:
        images: shape (n, height, width), or (n, height, width, 3) from 0 to 1.
        targets: true classes, shape (n,).
        samples: class probabilities of each of S weight samples, shape (S, n, K), as
            ``predict(x, keep_samples=True).samples``. Of more than 10 classes those with the most
            votes are drawn, the predicted class and the true class.
        class_names: K names.
        title: title of the figure.

    Raises:
        ValueError: there is no image or no sample, or the lengths differ.

    Example:
        >>> import torch
        >>> samples = torch.tensor([[[0.9, 0.1]], [[0.4, 0.6]], [[0.7, 0.3]]])
        >>> figure = votes_gallery(torch.zeros(1, 2, 2), torch.tensor([1]), samples, "ab", "Votes")
        >>> figure.subfigs[0].get_suptitle()
        'true b\npredicted a\nvotes: 2 for a, 1 for b'
    """
    if (
        samples.dim() != 3
        or 0 in samples.shape
        or not len(images) == len(targets) == samples.shape[1]
        or samples.shape[2] != len(class_names)
    ):
        raise ValueError(
            "a gallery of votes needs samples of shape (S, n, K), none of them 0, with n images, n "
            f"targets and K names, got {tuple(samples.shape)}, {len(images)}, {len(targets)} and "
            f"{len(class_names)}"
        )
    count = len(samples)
    votes = one_hot(samples.argmax(-1), len(class_names)).sum(0)
    figure, cards = _cards(images, title)
    for index, (card, bars) in enumerate(cards):
        # By the averaged probabilities, as every prediction; the majority can differ.
        true, predicted = int(targets[index]), int(samples[:, index].mean(0).argmax())
        ranked = votes[index].sort(descending=True, stable=True).indices[:2].tolist()
        counted = [
            f"{int(votes[index, k])} for {shortened(class_names[k], 8)}"
            for k in ranked
            if votes[index, k] > 0
        ]
        more = f"votes: {', '.join(counted)}"
        _set_heading(card, class_names, true, predicted, more)
        _class_bars(bars, votes[index] / count, true, class_names, predicted)
        ticks = (0, count // 2, count) if count % 2 == 0 else (0, count)
        bars.set_xticks([tick / count for tick in ticks], [str(t) for t in ticks], fontsize=7)
        bars.set_xlabel("votes", fontsize=7, labelpad=1)
    return figure


def _cards(images: Tensor, title: str) -> tuple[Figure, Iterator[tuple[SubFigure, Axes]]]:
    """Return a figure with its title, and per image a subfigure with empty axes for bars."""
    columns = min(4, len(images))
    rows = math.ceil(len(images) / columns)
    figure = Figure(figsize=(2.45 * columns, 0.4 + 2.1 * rows), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left")
    if columns > 2:
        figure.text(0.99, 0.98, _KEY, ha="right", va="top", fontsize=8)
    cards = figure.subfigures(rows, columns, squeeze=False).flat
    pictures = images.detach().cpu().double().numpy()
    low, high = float(pictures.min()), float(pictures.max())

    def drawn() -> Iterator[tuple[SubFigure, Axes]]:
        # Not strict: the last row may have more cards than images.
        for picture, card in zip(pictures, cards, strict=False):
            image, bars = card.subplots(1, 2)
            image.imshow(picture, cmap="gray_r", vmin=low, vmax=high, interpolation="nearest")
            image.set_axis_off()
            yield card, bars

    return figure, drawn()


def _set_heading(
    card: SubFigure, class_names: Sequence[str], true: int, predicted: int, more: str
) -> None:
    card.suptitle(
        f"true {shortened(class_names[true], 24)}\n"
        f"predicted {shortened(class_names[predicted], 24)}\n{more}",
        x=0.03,
        ha="left",
        fontsize=8,
        fontweight="normal",
        color=COLOURS["ink" if true == predicted else "vermillion"],
    )


def _class_bars(
    ax: Axes,
    probs: Tensor,
    true: int,
    class_names: Sequence[str],
    predicted: int | None = None,
) -> None:
    predicted = int(probs.argmax()) if predicted is None else predicted
    top = probs.topk(min(10, len(probs))).indices.tolist()
    if predicted not in top:
        top[-1] = predicted
    shown = sorted({true, *top})
    colours = {predicted: "vermillion", true: "green"}
    heights = [float(probs[k]) for k in shown]
    ax.barh(range(len(shown)), heights, 0.75, color=[COLOURS[colours.get(k, "sky")] for k in shown])
    ax.set_yticks(range(len(shown)), [shortened(class_names[k], 12) for k in shown], fontsize=7)
    ax.tick_params(axis="y", length=0, pad=2)
    ax.tick_params(axis="x", length=2, pad=2)
    ax.set(xlim=(0.0, 1.0), ylim=(len(shown) - 0.4, -0.6))
    ax.grid(axis="y", visible=False)


def _nats(value: Tensor) -> str:
    # Rounding can leave the mutual information slightly below 0.
    nats = max(float(value), 0.0)
    return f"{nats:.2f}" if nats >= 0.01 or nats == 0.0 else f"{nats:.0e}"
