"""Declare each setting of a run once: its type, default, help, range, and where it applies.

``RunConfig``, its checks and the options of ``bayesify train`` all follow from these declarations.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal, get_type_hints

from bayesify.app.runs.declarations import Declaration, Rule, Setting
from bayesify.app.runs.rules import (
    ADAPTER,
    AT_MOST_HALF,
    AUGMENTED,
    BASELINE,
    BAYES,
    BAYESIAN_DIGITS,
    BAYESIAN_TABLE,
    BYTES,
    CENSORED,
    CERTIFIED,
    CLASSES,
    COUNT,
    DIGITS,
    DROPOUT,
    FINITE,
    GROUPED,
    HELD_OUT,
    HIDDEN_LAYERS,
    MIXTURE,
    NOT_NEGATIVE,
    ONE_STD,
    OWN_IMAGES,
    OWN_NOISE,
    OWN_RHO,
    PART,
    POSITIVE,
    PRUNABLE,
    PRUNED,
    RANDOM_PART,
    REGRESSION,
    SGD,
    TABLE,
    TABLE_COLUMNS,
    TABLE_FILE,
    TABLE_TEXTS,
    WARMUP,
)
from bayesify.distributions.families import PosteriorName
from bayesify.distributions.sparsity import UnitOrWeight
from bayesify.tabular.likelihoods import NumberLikelihood

__all__ = ["RunSettings", "declarations"]

PriorName = Literal[
    "gaussian", "scale-mixture", "laplace", "grouped-gaussian", "spike-and-slab", "log-uniform"
]

_TABLES, _BASELINES = "Tables", "Baselines"
_POSTERIOR, _TRAINING = "Prior and posterior", "Training"


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run, which ``RunConfig`` checks and uses.

    Each field declares one setting: its type (with its choices), its default and a
    :class:`Setting`. The defaults were chosen by measurement; see docs/adr.
    """

    dataset: Annotated[
        str,
        Setting(
            "mnist, fashion-mnist, a table's FILE with --target NAME (of images with --image NAME "
            "too), or a FOLDER with one subfolder of images for each class."
        ),
    ]
    target: Annotated[str | None, Setting("Column of the table to predict.", _TABLES)] = None
    task: Annotated[
        Literal["classification", "regression"] | None,
        Setting("{choices}; if absent, the values of the target decide.", _TABLES, None, TABLE),
    ] = None
    likelihood: Annotated[
        NumberLikelihood,
        Setting(
            "Distribution of a number given the row: {choices}; poisson and negative-binomial are "
            "for counts, student-t for outliers.",
            _TABLES,
            None,
            REGRESSION,
        ),
    ] = "gaussian"
    censored_below: Annotated[
        float | None,
        Setting("Lower limit at which a censored number is recorded.", _TABLES, FINITE, CENSORED),
    ] = None
    censored_above: Annotated[
        float | None,
        Setting("Upper limit at which a censored number is recorded.", _TABLES, FINITE, CENSORED),
    ] = None
    ordered: Annotated[
        tuple[str, ...],
        Setting(
            "All classes in their order, such as low,middle,high, if they have one; in quotation "
            "marks those that hold a comma.",
            _TABLES,
            None,
            CLASSES,
        ),
    ] = ()
    noise: Annotated[
        Literal["learned", "input-dependent"],
        Setting(
            "Noise of a regression: {choices}; learned is one std for all rows.",
            _TABLES,
            None,
            OWN_NOISE,
        ),
    ] = "learned"
    relevance: Annotated[
        Literal["equal", "learned"],
        Setting(
            "Width of the prior by input: {choices}; learned is automatic relevance determination.",
            _TABLES,
            None,
            BAYESIAN_TABLE,
        ),
    ] = "equal"
    test_fraction: Annotated[
        float,
        Setting(
            "Fraction of the rows or images to hold out for testing; for a table 0 trains on all "
            "rows.",
            _TABLES,
            PART,
            HELD_OUT,
        ),
    ] = 0.2
    drop: Annotated[
        tuple[str, ...],
        Setting("A column to leave out; may be repeated.", _TABLES, None, TABLE_COLUMNS),
    ] = ()
    keep: Annotated[
        tuple[str, ...],
        Setting(
            "A column to use although it looks like an id; may be repeated.",
            _TABLES,
            None,
            TABLE_COLUMNS,
        ),
    ] = ()
    text: Annotated[
        tuple[str, ...],
        Setting(
            "A column of texts, which --encoder reads; may be repeated.",
            _TABLES,
            None,
            TABLE_COLUMNS,
        ),
    ] = ()
    image: Annotated[
        str | None,
        Setting(
            "Column with the paths of images, relative to the folder of FILE. Without --encoder a "
            "small network learns the classes in --target from the images alone.",
            _TABLES,
            None,
            TABLE_FILE,
        ),
    ] = None
    encoder: Annotated[
        str | None,
        Setting(
            "Pretrained network that reads texts or images and stays as it is: a folder, or a name "
            "on Hugging Face's hub.",
            _TABLES,
            None,
            TABLE,
        ),
    ] = None
    max_memory: Annotated[
        str | None,
        Setting(
            "Memory that each process may use, such as 2GB: the table is streamed from its files. "
            "If absent, this is done only for a table that does not fit into the free memory.",
            _TABLES,
            BYTES,
            TABLE,
        ),
    ] = None
    adapter: Annotated[
        bool,
        Setting(
            "Train a variational low-rank adapter (LoRA) within --encoder for --text, instead of a "
            "network on its features alone.",
            _TABLES,
            None,
            TABLE_TEXTS,
        ),
    ] = False
    adapter_rank: Annotated[int, Setting("Rank of the adapter.", _TABLES, COUNT, ADAPTER)] = 8
    baseline: Annotated[
        Literal["sgd", "dropout"] | None,
        Setting("Train a plain network instead: {choices}.", _BASELINES),
    ] = None
    net: Annotated[
        Literal["mlp", "lenet5", "table", "resnet8"],
        Setting("Architecture: {choices}; table is for tables only, resnet8 for your own images."),
    ] = "mlp"
    size: Annotated[
        int | None,
        Setting(
            "Height and width to which images of your own are scaled; if absent, their own if "
            "all are equal squares of at most 32 pixels, else 32.",
            None,
            Rule("be from 8 to 1,024", lambda x: 8 <= x <= 1024),
            OWN_IMAGES,
        ),
    ] = None
    hidden: Annotated[
        tuple[int, ...],
        Setting("Units of each hidden layer, such as 400,400.", None, None, HIDDEN_LAYERS),
    ] = (400, 400)
    random: Annotated[
        Literal["all", "last-layer"],
        Setting(
            "Which weights of an image network are random: {choices}; the others are trained as in "
            "a plain network.",
            _POSTERIOR,
            None,
            RANDOM_PART,
        ),
    ] = "all"
    prior: Annotated[
        PriorName,
        Setting(
            "Prior of the weights: {choices}. --prior-std alone means gaussian. The last three "
            "remove weights that the data do not need; log-uniform is improper.",
            _POSTERIOR,
            None,
            BAYES,
        ),
    ] = "scale-mixture"
    prior_std: Annotated[
        float,
        Setting(
            "Standard deviation of a Gaussian or Laplace prior. In a regression on a table, and "
            "with --relevance learned, the std of a weight, also of a mixture, is divided by the "
            "square root of its layer's inputs.",
            _POSTERIOR,
            POSITIVE,
            ONE_STD,
        ),
    ] = 0.3
    pi: Annotated[
        float,
        Setting("Mixture prior: weight of the component with --std1.", _POSTERIOR, None, MIXTURE),
    ] = 0.1
    std1: Annotated[
        float, Setting("Mixture prior: the larger std.", _POSTERIOR, POSITIVE, MIXTURE)
    ] = 0.5
    std2: Annotated[
        float, Setting("Mixture prior: the smaller std.", _POSTERIOR, POSITIVE, MIXTURE)
    ] = 0.01
    group_by: Annotated[
        UnitOrWeight,
        Setting(
            "Weights that share a width, or the choice of spike or slab: those of one {choices}; "
            "spike-and-slab has input or output.",
            _POSTERIOR,
            None,
            GROUPED,
        ),
    ] = "input"
    posterior: Annotated[
        PosteriorName,
        Setting(
            "Family of the posterior: {choices}. Under all but mean-field weights depend on each "
            "other; a step costs several times as much.",
            _POSTERIOR,
            None,
            BAYES,
        ),
    ] = "mean-field"
    init_std: Annotated[
        float,
        Setting(
            "Std of the posterior at the start; ivon begins with a curvature instead.",
            _POSTERIOR,
            POSITIVE,
            OWN_RHO,
        ),
    ] = 0.02
    mean_init_std: Annotated[
        float | None,
        Setting(
            "Draw initial means from N(0, X^2) instead of PyTorch's distribution.",
            _POSTERIOR,
            POSITIVE,
            DIGITS,
        ),
    ] = None
    dropout_input: Annotated[
        float,
        Setting("Probability of dropping a pixel in training.", _TRAINING, PART, DROPOUT),
    ] = 0.0
    dropout_hidden: Annotated[
        float,
        Setting("Probability of dropping a hidden unit in training.", _TRAINING, PART, DROPOUT),
    ] = 0.0
    augment: Annotated[
        float,
        Setting(
            "Shift, turn, scale and shear each training image at random, anew in each epoch: .1 "
            "shifts it by at most a twentieth of its sides, 0 changes nothing.",
            _TRAINING,
            AT_MOST_HALF,
            AUGMENTED,
        ),
    ] = 0.0
    estimator: Annotated[
        Literal["sampling", "antithetic", "local", "local-per-position", "flipout"],
        Setting(
            "Gradient estimator: {choices}. sampling draws the weights once per minibatch, "
            "antithetic in pairs; local is local reparametrisation.",
            _TRAINING,
            None,
            BAYES,
        ),
    ] = "sampling"
    objective: Annotated[
        Literal["elbo", "f-quad", "f-classic", "f-lambda"],
        Setting(
            "What is minimised: {choices}. All but elbo are PAC-Bayes bounds, for bayesify "
            "certify; dropout then is that of the prior's network.",
            _TRAINING,
            None,
            BAYESIAN_DIGITS,
        ),
    ] = "elbo"
    prior_part: Annotated[
        float,
        Setting(
            "Fraction of the training images on which the prior of a PAC-Bayes bound is learned.",
            _TRAINING,
            Rule("be above 0 and below 1", lambda x: 0.0 < x < 1.0),
            CERTIFIED,
        ),
    ] = 0.5
    prior_epochs: Annotated[
        int, Setting("Epochs of the training of that prior.", _TRAINING, COUNT, CERTIFIED)
    ] = 15
    kl: Annotated[
        Literal["auto", "closed", "monte-carlo"],
        Setting("KL divergence: {choices}.", _TRAINING, None, BAYES),
    ] = "auto"
    kl_weighting: Annotated[
        Literal["uniform", "geometric"],
        Setting(
            "Weight of the KL in each minibatch: {choices} (Blundell et al. 2015, eq. 9).",
            _TRAINING,
            None,
            BAYES,
        ),
    ] = "uniform"
    kl_warmup: Annotated[
        float,
        Setting(
            "Fraction of the epochs over which the weight of the KL rises from 0 to 1.",
            _TRAINING,
            PART,
            BAYES,
        ),
    ] = 0.95
    kl_warmup_power: Annotated[
        float,
        Setting("The weight rises as this power of a straight line.", _TRAINING, POSITIVE, WARMUP),
    ] = 2.0
    prune_fraction: Annotated[
        float,
        Setting(
            "Fraction of the random weights to remove in training: those with the lowest |mean| / "
            "std, more and more of them; the others are trained on.",
            _TRAINING,
            PART,
            PRUNABLE,
        ),
    ] = 0.0
    prune_from: Annotated[
        float | None,
        Setting(
            "Epochs before the first weights are removed; if absent, a tenth of all.",
            _TRAINING,
            NOT_NEGATIVE,
            PRUNED,
        ),
    ] = None
    prune_until: Annotated[
        float | None,
        Setting(
            "Epochs after which no more are removed; if absent, half of all.",
            _TRAINING,
            POSITIVE,
            PRUNED,
        ),
    ] = None
    temperature: Annotated[
        float, Setting("Factor on the KL; 1 is the ELBO.", _TRAINING, NOT_NEGATIVE, BAYES)
    ] = 1.0
    train_samples: Annotated[
        int, Setting("Weight samples per training step.", _TRAINING, COUNT, BAYES)
    ] = 1
    test_samples: Annotated[
        int, Setting("Weight samples of the test predictions.", None, COUNT, BAYES)
    ] = 100
    optimizer: Annotated[
        Literal["sgd", "adam", "ivon"],
        Setting(
            "{choices}; ivon learns the standard deviations from the curvature, for mnist and "
            "fashion-mnist with --prior gaussian.",
            _TRAINING,
        ),
    ] = "adam"
    lr: Annotated[
        float,
        Setting(
            "Learning rate on the mean loss of a minibatch. A rate eta on the summed loss, as in "
            "Blundell et al. 2015, is eta x batch size here.",
            _TRAINING,
            POSITIVE,
        ),
    ] = 1.82e-3
    momentum: Annotated[float, Setting("Momentum of SGD.", _TRAINING, PART, SGD)] = 0.0
    weight_decay: Annotated[
        float,
        Setting(
            "Weight decay of a baseline: this times each weight is added to its gradient. A "
            "Bayesian network has its prior instead.",
            _TRAINING,
            NOT_NEGATIVE,
            BASELINE,
        ),
    ] = 0.0
    rho_lr_scale: Annotated[
        float,
        Setting("Learning rate of rho as a multiple of --lr.", _TRAINING, POSITIVE, OWN_RHO),
    ] = 1.5
    schedule: Annotated[
        Literal["cosine", "constant"],
        Setting("Learning rate: {choices}; cosine falls to 0.", _TRAINING),
    ] = "cosine"
    epochs: Annotated[
        int, Setting("Epochs, each of --passes passes over the training data.", _TRAINING, COUNT)
    ] = 30
    passes: Annotated[
        int, Setting("Passes over the training data per epoch.", _TRAINING, COUNT)
    ] = 1
    batch_size: Annotated[int, Setting("Images or rows per minibatch.", _TRAINING, COUNT)] = 256
    limit: Annotated[
        int | None,
        Setting(
            "Use only N training images, the first ones of mnist and fashion-mnist, or the first N "
            "rows of a table, of which a part is held out.",
            None,
            COUNT,
        ),
    ] = None
    precision: Annotated[
        Literal["float32", "bfloat16"],
        Setting(
            "Forward and backward pass in training: {choices} (by autocast); means, rho, KL and "
            "the optimizer's state are float32 in both.",
            _TRAINING,
        ),
    ] = "float32"
    backend: Annotated[
        Literal["auto", "compiled", "closed-form", "autograd"],
        Setting(
            "Implementation of a training step: {choices}; auto is compiled where possible.",
            _TRAINING,
            None,
            BAYES,
        ),
    ] = "auto"
    seed: Annotated[
        int,
        Setting(
            "Seed of all randomness.",
            None,
            Rule("have at most 128 bits", lambda x: -(2**127) <= x < 2**127),
        ),
    ] = 0
    threads: Annotated[
        int,
        Setting(
            "CPU threads.",
            None,
            Rule("be at least 1 and at most 1,024", lambda x: 1 <= x <= 1024),
        ),
    ] = 1


@cache
def declarations() -> dict[str, Declaration]:
    """Return every setting's declaration by name, in the order of the fields.

    Example:
        >>> declarations()["kl"].choices
        ('auto', 'closed', 'monte-carlo')
    """
    hints = get_type_hints(RunSettings, include_extras=True)
    return {
        field.name: Declaration(hints[field.name].__metadata__[0], hints[field.name].__origin__)
        for field in dataclasses.fields(RunSettings)
    }
