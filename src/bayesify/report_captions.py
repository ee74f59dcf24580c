"""What stands over and under each figure of a report."""

from __future__ import annotations

__all__ = ["CAPTIONS"]

#: Heading and reading aid of each known figure, by name.
CAPTIONS: dict[str, tuple[str, str]] = {
    "learning_curves": (
        "Learning curves",
        "After each epoch: the loss that is minimised, its likelihood part, and the error. Of "
        "a Bayesian network also how far the posterior has moved from the prior, and its median "
        "width. A width that still changes at the end has not converged.",
    ),
    "reliability": (
        "Calibration",
        "Points on the diagonal are calibrated: of the examples given 80 % confidence, 80 % are "
        "right. Above it the network is too modest, below it too sure. The lower panel counts the "
        "examples, on a logarithmic axis.",
    ),
    "risk_coverage": (
        "When should it not answer?",
        "The error of the test examples that are answered, if those above a threshold of "
        "uncertainty are not. The lower the curve the better the uncertainty tells right from "
        "wrong; the best possible order leaves every wrong answer to the end. The area is the "
        "mean of the curve. Choose a threshold on data that are not these.",
    ),
    "votes": (
        "Images on which the weight samples disagree",
        "Each network drawn from the posterior votes for the class that it finds most probable. "
        "Shown are the test images of which the winner has the fewest votes. The prediction "
        "averages probabilities, so that it need not be the majority's.",
    ),
    "out_of_distribution": (
        "Images of another kind",
        "The epistemic uncertainty of test images and of images of another data set, which the "
        "network was not trained for. The further apart, the better a threshold tells them apart: "
        "AUROC is the share of pairs that it puts in the right order, 0.5 by chance. The first bin "
        "holds all that lies below its left end.",
    ),
    "one_column": (
        "What is predicted",
        "The median and the intervals of the predictive distribution along the one input, noise "
        "included, over the training rows, and beyond them. Where there are no data the bands "
        "should widen.",
    ),
    "interval_coverage": (
        "Do the intervals hold what they promise?",
        "On the diagonal an interval of 80 % holds 80 % of the targets. Above it the network is "
        "too modest, below it too sure. The band is what chance allows for so many data.",
    ),
    "predicted_against_true": (
        "Predictions and what came true",
        "Each test row's prediction with its interval. On the diagonal the prediction is right; "
        "a good network has its widest intervals where it is furthest off.",
    ),
    "least_certain": (
        "The least certain test images",
        "The test images of the highest total uncertainty. Total is the entropy of the "
        "prediction, epistemic the part that knowing the weights would remove. A good network is "
        "unsure where a reader is, too.",
    ),
    "most_certain": (
        "The most certain test images",
        "The test images of the lowest total uncertainty: they should look unmistakable. A wrong "
        "prediction here would be a confident mistake.",
    ),
    "pruning": (
        "Pruning",
        "The error as the weights of the lowest signal-to-noise ratio are removed, without "
        "retraining; averaged over a few weight samples, so that its first row may differ "
        "a little from the numbers above. The further the curve stays at the dashed line, the "
        "fewer weights the network needs.",
    ),
    "snr": (
        "Signal-to-noise ratio of the weights",
        "The ratio |mean| / std in decibels: at 0 dB a weight is as large as its own uncertainty. "
        "Weights far to the left say little and can go; the dashed line marks the cut that "
        "removes three quarters.",
    ),
    "weight_densities": (
        "Trained weights",
        "How the values of the trained weights are spread, pruned ones left out. A prior with a "
        "narrow spike gathers means near zero; the sample adds the posterior's width.",
    ),
    "weight_posteriors": (
        "Single weights",
        "What the network knows of three of its weights. Where zero lies in the middle of the "
        "curve the weight can be removed; where it lies far out the data have fixed the weight.",
    ),
}
