"""Table and figures of the experiment ``pyro-local``, made from its results alone."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bayesify.reproduce.harness.experiment import (
    Result,
    of_job,
)
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.seed_statistics import mean_and_error, standard_error
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
        29.950, 90.202, 94.398, 95.932, 96.704, 97.140, 97.558, 97.904, 98.186, 98.386,
        98.572, 98.816, 98.942, 99.054, 99.140, 99.276, 99.390, 99.354, 99.480, 99.612,
        99.610, 99.628, 99.706, 99.720, 99.750, 99.764, 99.828, 99.806, 99.818, 99.806,
    ],
    "dropout": [
        67.706, 91.616, 93.798, 94.838, 95.578, 95.986, 96.344, 96.440, 96.764, 97.038,
        97.046, 97.316, 97.392, 97.466, 97.642, 97.736, 97.836, 97.844, 97.940, 97.958,
        97.936, 98.086, 98.198, 98.118, 98.302, 98.166, 98.310, 98.438, 98.320, 98.350,
        98.452, 98.404, 98.488, 98.560, 98.528, 98.588, 98.634, 98.580, 98.672, 98.604,
        98.686, 98.742, 98.698, 98.740, 98.748, 98.788, 98.778, 98.856, 98.800, 98.830,
    ],
}  # fmt: skip
#: By job and kind of accuracy: the name in the table, and the reported value.
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


def pyro_table(results: Sequence[Result]) -> str:
    """Return Markdown: accuracies and nll next to those reported, the posterior, then remarks."""
    found = {name: of_job(results, name) for name in ("bayes", "dropout")}
    samples = results[0]["config"]["test_samples"]
    lines = table_head("| | reported, accuracy % | ours, accuracy % | ours, nll | seeds |")
    for (name, place), (title, reported) in _LINES.items():
        some = [result["metrics"] for result in found[name]]
        if some:
            accuracy = mean_and_error([each["accuracy"][place] for each in some], 2)
            likelihood = mean_and_error([each["nll"][place] for each in some], 4)
            theirs = "-" if reported is None else f"{reported:.2f}"
            what = title.format(samples=samples)
            lines.append(f"| {what} | {theirs} | {accuracy} | {likelihood} | {len(some)} |")
    said = [
        f"Accuracy on {results[0]['config']['held_out']:,} of the training images that were held "
        "out, after the last epoch; nll in nats per image; mean +- standard error over seeds.",
        "\n".join(lines),
    ]
    said += [
        _verdict(name, [result["metrics"] for result in some])
        for name, some in found.items()
        if some
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
    """Compare our accuracy with the reported one, in points and standard errors."""
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


def _posterior(results: Sequence[Result]) -> str:
    """Return the table of KL, rates and disagreement by seed."""
    lines = table_head(
        "| seed | KL, nats | KL, nats a training image | rates of the hidden layers | mean std by "
        "layer | digits on which the samples disagree |"
    )
    for result in results:
        metrics = result["metrics"]
        learned = [rate for rate in result["config"]["init_rates"] if rate is not None]
        rates = ", ".join(f"{rate:.3f}" for rate in metrics["rates"][: len(learned)])
        stds = ", ".join(f"{std:.4f}" for std in metrics["std_mean"])
        lines.append(
            f"| {result['seed']} | {metrics['kl_nats']:,.0f} | {_each(result, 'kl_nats'):.2f} | "
            f"{rates} | {stds} | {metrics['disagree_percent']:.2f} % |"
        )
    return "\n".join(lines)


def _loss(results: Sequence[Result]) -> str:
    """Explain why the document's losses are not -log p + KL, and report ours."""
    first, last = REPORTED["first_loss"], REPORTED["last_loss"]
    initial = mean(_each(result, "kl_nats_initial") for result in results)
    theirs = mean(_each(result, "kl_nats_initial_document") for result in results)
    final = mean(_each(result, "kl_nats") for result in results)
    text = (
        f"The document prints losses from {first:.2f} in the first epoch to {last:.2f} in the "
        "last. -log p + KL is never below 0, so these are something else and are not to be "
        "matched: Pyro's layer puts its KL into log_prob, in the model and in the guide alike, and "
        "in the difference of the two that of the guide has the opposite sign; training makes it "
        f"larger. Our KL is {initial:.2f} nats for each training image at the start ({theirs:.2f} "
        f"with the document's initial scales) and {final:.2f} at the end."
    )
    residuals = [result["metrics"]["std_residual"] for result in results]
    if all(residual is not None for residual in residuals):
        residual = mean(residuals)
        text += f" The derivative of ours in log std is {residual:+.2f} nats a weight, 0 at the "
        text += "optimum"
        if residual < -STD_RESIDUAL_LIMIT:
            text += ": at this learning rate the stds are still near where they started"
        text += "."
    return text


def _each(result: Result, key: str) -> float:
    """Return a KL in nats per training image."""
    return float(result["metrics"][key] / result["metrics"]["num_train"])


def unpacked(text: str) -> Tensor:
    """Decode an image, (28, 28) from 0 to 1, from the text of ``notebook.packed``."""
    raw = bytearray(zlib.decompress(base64.b64decode(text)))
    return torch.frombuffer(raw, dtype=torch.uint8).view(28, 28).float() / 255.0


def pyro_figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw accuracy by epoch, rates, and digits with their votes, for the first seed."""
    made = {"pyro-accuracy": _curves(results)}
    bayes = of_job(results, "bayes")
    if bayes:
        result = min(bayes, key=lambda each: each["seed"])
        made["pyro-rates"] = _rates(result)
        if result["metrics"]["digits"]:
            made["pyro-votes"] = _gallery(result)
    return made


def _gallery(result: Result) -> Figure:
    from bayesify.plots.gallery import votes_gallery

    digits = result["metrics"]["digits"]
    votes = torch.tensor([each["votes"] for each in digits])
    # The gallery takes probabilities: each vote becomes a sample with probability 1.
    samples = torch.stack([torch.arange(10).repeat_interleave(some) for some in votes], 1)
    return votes_gallery(
        torch.stack([unpacked(each["pixels"]) for each in digits]),
        torch.tensor([each["label"] for each in digits]),
        one_hot(samples, 10).double(),
        [str(digit) for digit in range(10)],
        f"Held-out digits on which {len(samples)} weight samples disagree: the first {len(digits)}",
    )


def _curves(results: Sequence[Result]) -> Figure:
    """Draw a panel for each network: our accuracies, and the document's on the training images."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from bayesify.plots.style import COLOURS, styled

    @styled
    def drawn() -> Figure:
        names = [name for name in _METHODS if any(result["job"] == name for result in results)]
        figure = Figure(figsize=(4.6 * len(names), 3.4), layout="constrained")
        for ax, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            result = min((r for r in results if r["job"] == name), key=lambda each: each["seed"])
            curves = result["metrics"]["curve"]
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
            ticks = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0]
            low, high = ax.get_ylim()
            ticks = [tick for tick in ticks if low <= tick <= high]
            ax.set_yticks(ticks, [f"{100.0 - tick:g}" for tick in ticks])
            ax.minorticks_off()
            ax.invert_yaxis()
            ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
            title = f"{_METHODS[name][0].upper()}{_METHODS[name][1:]}, seed {result['seed']}"
            ax.set(title=title, xlabel="epoch", ylabel="accuracy (%)")
            ax.legend(loc="best")
        return figure

    return drawn()


def _rates(result: Result) -> Figure:
    """Draw the rate of each hidden layer after each epoch."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from bayesify.plots.style import COLOURS, styled

    @styled
    def drawn() -> Figure:
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        ax = figure.subplots()
        looks = (("blue", "-"), ("vermillion", "--"), ("green", ":"), ("orange", "-."))
        series = list(zip(*result["metrics"]["rates_by_epoch"], strict=True))
        for number, (values, initial) in enumerate(
            zip(series, result["config"]["init_rates"], strict=True)
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
