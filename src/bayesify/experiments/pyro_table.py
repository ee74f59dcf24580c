"""The table and the figures of the experiment ``pyro-local``, from its rows alone."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bayesify.experiments.cells import cell, standard_error
from bayesify.experiments.experiment import Row
from bayesify.training.convergence import STD_RESIDUAL_LIMIT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["REPORTED", "pyro_figures", "pyro_table", "unpacked"]

#: Accuracies on the held-out images, percent, and the first and the last loss that the document
#: prints, nats per training image.
REPORTED = {"bayes": 96.92, "dropout": 97.14, "first_loss": -105.283, "last_loss": -132.980}
#: Accuracy on the training images by epoch, percent, as the document prints it.
_REPORTED_CURVES = {
    "bayes": [
        *(29.950, 90.202, 94.398, 95.932, 96.704, 97.140, 97.558, 97.904, 98.186, 98.386),
        *(98.572, 98.816, 98.942, 99.054, 99.140, 99.276, 99.390, 99.354, 99.480, 99.612),
        *(99.610, 99.628, 99.706, 99.720, 99.750, 99.764, 99.828, 99.806, 99.818, 99.806),
    ],
    "dropout": [
        *(67.706, 91.616, 93.798, 94.838, 95.578, 95.986, 96.344, 96.440, 96.764, 97.038),
        *(97.046, 97.316, 97.392, 97.466, 97.642, 97.736, 97.836, 97.844, 97.940, 97.958),
        *(97.936, 98.086, 98.198, 98.118, 98.302, 98.166, 98.310, 98.438, 98.320, 98.350),
        *(98.452, 98.404, 98.488, 98.560, 98.528, 98.588, 98.634, 98.580, 98.672, 98.604),
        *(98.686, 98.742, 98.698, 98.740, 98.748, 98.788, 98.778, 98.856, 98.800, 98.830),
    ],
}
#: By unit and place in the row's accuracies: what the table calls it, and what is reported of it.
_LINES = {
    ("bayes", "one_sample"): ("Bayesian network, one weight sample", REPORTED["bayes"]),
    ("bayes", "averaged"): ("Bayesian network, {samples} samples averaged", None),
    ("bayes", "mean_weights"): ("Bayesian network, mean weights", None),
    ("dropout", "one_sample"): ("dropout network, dropout left on", REPORTED["dropout"]),
    ("dropout", "averaged"): ("dropout network, {samples} passes averaged", None),
    ("dropout", "off"): ("dropout network, dropout off", None),
}
_QUIRKS = (
    "The document leaves dropout on in the test, and its loss is a binary cross-entropy that takes "
    "the logarithms of the ten probabilities for logits; ours is -log p of the class. It draws "
    "noise of its own for each image in the test; our one sample is one set of weights for all "
    "images, and what the table shows is the mean over {samples} of them. The prior of its layers "
    "is N(0, 1) throughout, since the rates and scales of its model only add a constant to the "
    "loss; ours is as its text has it, N(0, 0.25^2) in the first layer."
)


def pyro_table(rows: Sequence[Row]) -> str:
    """Markdown: accuracies and nll beside those reported, then the posterior, then in words."""
    found = {name: [row for row in rows if row["unit"] == name] for name in ("bayes", "dropout")}
    samples = rows[0]["config"]["test_samples"]
    lines = [
        "| | reported, accuracy % | ours, accuracy % | ours, nll | seeds |",
        "|---|---|---|---|---|",
    ]
    for (name, place), (title, reported) in _LINES.items():
        some = [row["metrics"] for row in found[name]]
        if some:
            accuracy = cell([each["accuracy"][place] for each in some], 2)
            likelihood = cell([each["nll"][place] for each in some], 4)
            theirs = "-" if reported is None else f"{reported:.2f}"
            what = title.format(samples=samples)
            lines.append(f"| {what} | {theirs} | {accuracy} | {likelihood} | {len(some)} |")
    said = [
        f"Accuracy on {rows[0]['config']['held_out']:,} of the training images that were held out, "
        "after the last epoch; nll in nats per image; mean +- standard error over seeds.",
        "\n".join(lines),
    ]
    said += [
        _verdict(name, [row["metrics"] for row in some]) for name, some in found.items() if some
    ]
    if found["bayes"]:
        said += [_posterior(found["bayes"]), _loss(found["bayes"])]
    said.append(_QUIRKS.format(samples=samples))
    for name, some in found.items():
        if some:
            differences = "; ".join(some[0]["config"]["differences"])
            said.append(f"Settings that are not the document's, {_METHODS[name]}: {differences}.")
    return "\n\n".join(said) + "\n"


_METHODS = {"bayes": "Bayesian network", "dropout": "dropout network"}


def _verdict(name: str, metrics: Sequence[dict[str, Any]]) -> str:
    """Whether the reported accuracy is reached, and by how many standard errors."""
    values = [each["accuracy"]["one_sample"] for each in metrics]
    title, reported = _LINES[name, "one_sample"]
    assert reported is not None
    difference = mean(values) - reported
    place = f"{abs(difference):.2f} points {'above' if difference > 0 else 'below'}"
    if not round(difference, 2):
        place = "level with"
    said = f"{mean(values):.2f} %, {place} the {reported:.2f} % reported"
    text = f"{title[0].upper()}{title[1:]}: {said}"
    if len(values) > 1 and (error := standard_error(values)) > 0.0:
        text += f", {abs(difference) / error:.1f} of our standard errors"
    if name == "bayes":
        worst = min(min(each["one_sample_accuracies"]) for each in metrics)
        count = sum(len(each["one_sample_accuracies"]) for each in metrics)
        reached = sum(one >= reported for each in metrics for one in each["one_sample_accuracies"])
        text += f"; of {count} single samples {reached} reach it, and the lowest has {worst:.2f} %"
    return f"{text}."


def _posterior(rows: Sequence[Row]) -> str:
    """KL, rates and disagreement, by seed."""
    lines = [
        "| seed | KL, nats | KL, nats a training image | rates of the hidden layers | mean std by "
        "layer | digits on which the samples disagree |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        metrics = row["metrics"]
        learned = [rate for rate in row["config"]["init_rates"] if rate is not None]
        rates = ", ".join(f"{rate:.3f}" for rate in metrics["rates"][: len(learned)])
        stds = ", ".join(f"{std:.4f}" for std in metrics["std_mean"])
        lines.append(
            f"| {row['seed']} | {metrics['kl_nats']:,.0f} | {_each(row, 'kl_nats'):.2f} | {rates} "
            f"| {stds} | {metrics['disagree_percent']:.2f} % |"
        )
    return "\n".join(lines)


def _loss(rows: Sequence[Row]) -> str:
    """Why the document's losses are no -log p + KL, and how far ours has come."""
    first, last = REPORTED["first_loss"], REPORTED["last_loss"]
    initial = mean(_each(row, "kl_nats_initial") for row in rows)
    theirs = mean(_each(row, "kl_nats_initial_document") for row in rows)
    final = mean(_each(row, "kl_nats") for row in rows)
    text = (
        f"The document prints losses from {first:.2f} in the first epoch to {last:.2f} in the "
        "last. -log p + KL is never below 0, so these are something else and are not to be "
        "matched: Pyro's layer puts its KL into log_prob, in the model and in the guide alike, and "
        "in the difference of the two that of the guide has the opposite sign; training makes it "
        f"larger. Our KL is {initial:.2f} nats for each training image at the start ({theirs:.2f} "
        f"with the document's initial scales) and {final:.2f} at the end."
    )
    residuals = [row["metrics"]["std_residual"] for row in rows]
    if all(residual is not None for residual in residuals):
        residual = mean(residuals)
        text += f" The derivative of ours in log std is {residual:+.2f} nats a weight, 0 at the "
        text += "optimum"
        if residual < -STD_RESIDUAL_LIMIT:
            text += ": at this learning rate the stds are still near where they started"
        text += "."
    return text


def _each(row: Row, key: str) -> float:
    """A KL in nats for each training image."""
    return float(row["metrics"][key] / row["metrics"]["num_train"])


def unpacked(text: str) -> Tensor:
    """The image, (28, 28) from 0 to 1, that ``pyro_local.packed`` made text of."""
    raw = bytearray(zlib.decompress(base64.b64decode(text)))
    return torch.frombuffer(raw, dtype=torch.uint8).view(28, 28).float() / 255.0


def pyro_figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Of the first seed of each: accuracy by epoch, and the digits with their votes."""
    made = {"pyro-accuracy": _curves(rows)}
    bayes = [row for row in rows if row["unit"] == "bayes"]
    if bayes:
        row = min(bayes, key=lambda each: each["seed"])
        made["pyro-rates"] = _rates(row)
        if row["metrics"]["digits"]:
            made["pyro-votes"] = _gallery(row)
    return made


def _gallery(row: Row) -> Figure:
    from bayesify.plots.gallery import votes_gallery

    digits = row["metrics"]["digits"]
    votes = torch.tensor([each["votes"] for each in digits])
    # A sample that is sure of its vote, for each of them.
    samples = torch.stack([torch.arange(10).repeat_interleave(some) for some in votes], 1)
    return votes_gallery(
        torch.stack([unpacked(each["pixels"]) for each in digits]),
        torch.tensor([each["label"] for each in digits]),
        one_hot(samples, 10).double(),
        [str(digit) for digit in range(10)],
        f"Held-out digits on which {len(samples)} weight samples disagree: the first {len(digits)}",
    )


def _curves(rows: Sequence[Row]) -> Figure:
    """A panel a network: ours on both parts, and the document's on the training images."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from bayesify.plots.style import COLOURS, styled

    @styled
    def drawn() -> Figure:
        names = [name for name in _METHODS if any(row["unit"] == name for row in rows)]
        figure = Figure(figsize=(4.6 * len(names), 3.4), layout="constrained")
        for ax, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            row = min((r for r in rows if r["unit"] == name), key=lambda each: each["seed"])
            curves = row["metrics"]["curve"]
            quiet = "mean weights" if name == "bayes" else "dropout off"
            noisy = "sampled weights" if name == "bayes" else "dropout on"
            for label, colour, dashes, values in (
                (f"training images, {noisy}", "vermillion", "-", curves["train"]),
                (f"held out, {quiet}", "blue", "-", curves["held_out"]),
                ("training images, reported", "grey", "--", _REPORTED_CURVES[name]),
            ):
                epochs = range(1, len(values) + 1)
                errors = [max(100.0 - value, 0.01) for value in values]
                marker = "o" if len(values) <= 5 else ""
                ax.plot(epochs, errors, dashes, color=COLOURS[colour], label=label, marker=marker)
            held_out = 100.0 - REPORTED[name]
            how = "one sample" if name == "bayes" else "dropout on"
            label = f"held out, reported ({how})"
            ax.axhline(held_out, ls=":", lw=1.2, color=COLOURS["ink"], label=label)
            ax.set_yscale("log")
            ticks = [0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0]
            ax.set_yticks(ticks, [f"{100.0 - tick:g}" for tick in ticks])
            ax.minorticks_off()
            ax.invert_yaxis()
            ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
            title = f"{_METHODS[name][0].upper()}{_METHODS[name][1:]}, seed {row['seed']}"
            ax.set(title=title, xlabel="epoch", ylabel="accuracy (%)")
            ax.legend(loc="best")
        return figure

    return drawn()


def _rates(row: Row) -> Figure:
    """The rate of each hidden layer at the end of each epoch."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from bayesify.plots.style import COLOURS, styled

    @styled
    def drawn() -> Figure:
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        ax = figure.subplots()
        looks = (("blue", "-"), ("vermillion", "--"), ("green", ":"), ("orange", "-."))
        series = list(zip(*row["metrics"]["rates_by_epoch"], strict=True))
        for number, (values, initial) in enumerate(
            zip(series, row["config"]["init_rates"], strict=True)
        ):
            if initial is not None:
                colour, dashes = looks[number % len(looks)]
                label = f"hidden layer {number + 1}"
                ax.plot(range(len(values)), values, dashes, color=COLOURS[colour], label=label)
        ax.set(ylim=(0.0, 1.05), xlabel="epoch", ylabel="rate", title="Learned rates, one a layer")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        ax.legend(loc="best")
        return figure

    return drawn()
