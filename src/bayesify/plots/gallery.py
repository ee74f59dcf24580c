"""Single data and what the network says of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from bayesify.plots.style import COLOURS, styled

__all__ = ["digit_gallery"]


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
    r"""Images, each with its predictive distribution as a bar chart.

    Args:
        images: shape (n, height, width), or (n, height, width, 3) from 0 to 1.
        targets: true classes, shape (n,).
        probs: predictive class probabilities, shape (n, K). Of more than 10 classes the 10 most
            probable are drawn, and the true one.
        epistemic: mutual information of class and weights, in nats, shape (n,).
        total: entropy of the prediction, in nats, shape (n,).
        class_names: K names.
        title: the figure's title.

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
    columns = min(4, len(images))
    rows = math.ceil(len(images) / columns)
    figure = Figure(figsize=(2.45 * columns, 0.4 + 2.1 * rows), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left")
    if columns > 2:
        key = "bars: green the true class, red-orange a wrong prediction"
        figure.text(0.99, 0.98, key, ha="right", va="top", fontsize=8)
    cards = figure.subfigures(rows, columns, squeeze=False).flat
    pictures = images.detach().cpu().double().numpy()
    low, high = float(pictures.min()), float(pictures.max())
    # Not strict: the last row may have more cards than images.
    for index, (picture, card) in enumerate(zip(pictures, cards, strict=False)):
        true, predicted = int(targets[index]), int(probs[index].argmax())
        card.suptitle(
            f"true {_shortened(class_names[true], 24)}\n"
            f"predicted {_shortened(class_names[predicted], 24)}\n"
            f"total {_nats(total[index])}, epistemic {_nats(epistemic[index])} nats",
            x=0.03,
            ha="left",
            fontsize=8,
            fontweight="normal",
            color=COLOURS["ink" if true == predicted else "vermillion"],
        )
        image, bars = card.subplots(1, 2)
        image.imshow(picture, cmap="gray_r", vmin=low, vmax=high, interpolation="nearest")
        image.set_axis_off()
        _class_bars(bars, probs[index], true, class_names)
    return figure


def _class_bars(ax: Axes, probs: Tensor, true: int, class_names: Sequence[str]) -> None:
    shown = sorted({true, *probs.topk(min(10, len(probs))).indices.tolist()})
    predicted = int(probs.argmax())
    colours = {predicted: "vermillion", true: "green"}
    heights = [float(probs[k]) for k in shown]
    ax.barh(range(len(shown)), heights, 0.75, color=[COLOURS[colours.get(k, "sky")] for k in shown])
    ax.set_yticks(range(len(shown)), [_shortened(class_names[k], 12) for k in shown], fontsize=7)
    ax.tick_params(axis="y", length=0, pad=2)
    ax.set_xticks((0.0, 0.5, 1.0), ("0", "½", "1"), fontsize=7)
    ax.tick_params(axis="x", length=2, pad=2)
    ax.set_xlabel("probability", fontsize=7, labelpad=1)
    ax.set(xlim=(0.0, 1.0), ylim=(len(shown) - 0.4, -0.6))
    ax.grid(axis="y", visible=False)


def _nats(value: Tensor) -> str:
    # Rounding can leave the mutual information of a certain datum just below 0.
    nats = max(float(value), 0.0)
    return f"{nats:.2f}" if nats >= 0.01 or nats == 0.0 else f"{nats:.0e}"


def _shortened(name: str, limit: int) -> str:
    return name if len(name) <= limit else f"{name[: limit - 1]}…"
