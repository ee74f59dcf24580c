"""Declare each setting of a run once: its type, default, help, range, and where it applies.

``RunConfig``, its checks and the options of ``bayesify train`` all follow from these declarations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from bayesify.app.runs.defaults import closed_forms_hold, defaults_for, is_image_folder
from bayesify.distributions.priors import Gaussian, Laplace, Prior, ScaleMixture
from bayesify.estimators import Estimator, Flipout, LocalReparameterization, WeightSampling

__all__ = [
    "ESTIMATORS",
    "FORMAT",
    "ConfigError",
    "Declaration",
    "Rule",
    "RunConfig",
    "Setting",
    "declarations",
    "is_table_file",
    "option",
    "renamed_settings",
]

#: Of ``config.json``. 2: dropout also without the dropout baseline. 3: ``backend``, not ``step``.
FORMAT = 3
ESTIMATORS: dict[str, Estimator] = {
    "sampling": WeightSampling(),
    "antithetic": WeightSampling(antithetic=True),
    "local": LocalReparameterization(),
    "local-per-position": LocalReparameterization(per_position=True),
    "flipout": Flipout(),
}


class ConfigError(ValueError):
    """A setting is out of its range or contradicts another."""


class Rule(NamedTuple):
    """A condition, and the words for it in error messages.

    Args:
        words: complete "NAME must ..." (a range) or "it applies only to ..." (a kind of run).
        holds: the condition, on the value or on the run's settings.
    """

    words: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Setting:
    """The declaration of one setting, next to its type and default in ``RunConfig``.

    Args:
        help: for ``bayesify train --help``, which fills in ``{choices}`` and adds the defaults.
        panel: heading of its group in that help.
        range: what its value must satisfy.
        applies: to which runs; None where to all.
    """

    help: str
    panel: str | None = None
    range: Rule | None = None
    applies: Rule | None = None


COUNT = Rule("be at least 1 and at most 2,147,483,647", lambda x: 1 <= x < 2**31)
POSITIVE = Rule("be positive and finite", lambda x: 0.0 < x < math.inf)
NOT_NEGATIVE = Rule("be at least 0 and finite", lambda x: 0.0 <= x < math.inf)
PART = Rule("be at least 0 and below 1", lambda x: 0.0 <= x < 1.0)

TABLE = Rule("tables", lambda run: run.target is not None)
FOLDER = Rule("folders of images", lambda run: run.net == "resnet8")
HELD_OUT = Rule("tables and folders of images", lambda run: run.net in ("table", "resnet8"))
REGRESSION = Rule(
    "regression on a table", lambda run: run.target is not None and run.task != "classification"
)
DIGITS = Rule("mnist and fashion-mnist", lambda run: run.net in ("mlp", "lenet5"))
HIDDEN_LAYERS = Rule("--net mlp and tables", lambda run: run.net in ("mlp", "table"))
BAYESIAN_DIGITS = Rule(
    "mnist and fashion-mnist without --baseline",
    lambda run: run.net in ("mlp", "lenet5") and run.baseline is None,
)
DROPOUT = Rule(
    "mnist and fashion-mnist without --baseline sgd",
    lambda run: run.net in ("mlp", "lenet5") and run.baseline != "sgd",
)
BAYES = Rule("runs without --baseline", lambda run: run.baseline is None)
RANDOM_PART = Rule(
    "folders of images without --baseline",
    lambda run: run.net == "resnet8" and run.baseline is None,
)
BAYESIAN_TABLE = Rule(
    "tables without --baseline", lambda run: run.target is not None and run.baseline is None
)
CERTIFIED = Rule("--objective f-quad, f-classic or f-lambda", lambda run: run.objective != "elbo")
BASELINE = Rule("--baseline", lambda run: run.baseline is not None)
MIXTURE = Rule(
    "--prior scale-mixture", lambda run: run.baseline is None and run.prior == "scale-mixture"
)
ONE_STD = Rule(
    "--prior gaussian or laplace", lambda run: run.baseline is None and run.prior != "scale-mixture"
)
WARMUP = Rule("--kl-warmup above 0", lambda run: run.baseline is None and run.kl_warmup > 0.0)
SGD = Rule("--optimizer sgd", lambda run: run.optimizer == "sgd")

_TABLES, _BASELINES = "Tables", "Baselines"
_POSTERIOR, _TRAINING = "Prior and posterior", "Training"


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run, apart from the bytes of its data and the versions.

    Each field declares one setting: its type (with its choices), its default and a
    :class:`Setting`. The defaults were chosen by measurement; see docs/adr.

    Raises:
        ConfigError: a setting is of a wrong type or out of range, or contradicts another.

    Example:
        >>> RunConfig.of("mnist", hidden=(100,)).hidden
        (100,)
        >>> RunConfig.of("mnist", epochs=-1)
        Traceback (most recent call last):
        bayesify.app.runs.settings.ConfigError: epochs must be at least 1 and at most
        2,147,483,647, got -1
    """

    dataset: Annotated[
        str,
        Setting(
            "mnist, fashion-mnist, a table's FILE with --target NAME, or a FOLDER with one "
            "subfolder of images for each class."
        ),
    ]
    target: Annotated[str | None, Setting("Column of the table to predict.", _TABLES)] = None
    task: Annotated[
        Literal["classification", "regression"] | None,
        Setting("{choices}; if absent, the values of the target decide.", _TABLES, None, TABLE),
    ] = None
    noise: Annotated[
        Literal["learned", "input-dependent"],
        Setting(
            "Noise of a regression: {choices}; learned is one std for all rows.",
            _TABLES,
            None,
            REGRESSION,
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
        tuple[str, ...], Setting("A column to leave out; may be repeated.", _TABLES, None, TABLE)
    ] = ()
    keep: Annotated[
        tuple[str, ...],
        Setting(
            "A column to use although it looks like an id; may be repeated.", _TABLES, None, TABLE
        ),
    ] = ()
    text: Annotated[
        tuple[str, ...],
        Setting("A column of texts, which --encoder reads; may be repeated.", _TABLES, None, TABLE),
    ] = ()
    encoder: Annotated[
        str | None,
        Setting(
            "Pretrained network that reads texts, which is not trained: a folder, or a name on "
            "Hugging Face's hub.",
            _TABLES,
            None,
            TABLE,
        ),
    ] = None
    baseline: Annotated[
        Literal["sgd", "dropout"] | None,
        Setting("Train a plain network instead: {choices}.", _BASELINES),
    ] = None
    net: Annotated[
        Literal["mlp", "lenet5", "table", "resnet8"],
        Setting("Architecture: {choices}; table is for tables only, resnet8 for folders."),
    ] = "mlp"
    size: Annotated[
        int | None,
        Setting(
            "Height and width to which the images of a folder are scaled; if absent, their own if "
            "all are equal squares of at most 32 pixels, else 32.",
            None,
            Rule("be from 8 to 1,024", lambda x: 8 <= x <= 1024),
            FOLDER,
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
        Literal["gaussian", "scale-mixture", "laplace"],
        Setting(
            "Prior of the weights: {choices}. --prior-std alone means gaussian.",
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
    init_std: Annotated[
        float, Setting("Std of the posterior at the start.", _POSTERIOR, POSITIVE, BAYES)
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
    temperature: Annotated[
        float, Setting("Factor on the KL; 1 is the ELBO.", _TRAINING, NOT_NEGATIVE, BAYES)
    ] = 1.0
    train_samples: Annotated[
        int, Setting("Weight samples per training step.", _TRAINING, COUNT, BAYES)
    ] = 1
    test_samples: Annotated[
        int, Setting("Weight samples of the test predictions.", None, COUNT, BAYES)
    ] = 100
    optimizer: Annotated[Literal["sgd", "adam"], Setting("{choices}.", _TRAINING)] = "adam"
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
        Setting("Learning rate of rho as a multiple of --lr.", _TRAINING, POSITIVE, BAYES),
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
        int | None, Setting("Use only the first N training images or rows.", None, COUNT)
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

    def __post_init__(self) -> None:
        for name, declared in declarations().items():
            declared.check(name, getattr(self, name))
        _check_combination(self)

    @classmethod
    def of(cls, dataset: str, *, num_rows: int | None = None, **given: Any) -> RunConfig:
        """Build a configuration from given settings and defaults that suit data and baseline.

        Args:
            dataset: as the field.
            num_rows: rows of a table for training, on which its defaults depend.
            given: any of the fields.

        Raises:
            ConfigError: a setting is out of range, or is given where it would do nothing.
        """
        defaults = defaults_for({"dataset": dataset, **given}, num_rows)
        config = cls(dataset=dataset, **{**defaults, **given})
        for name in config.idle():
            if name in given:
                applies = declarations()[name].setting.applies
                assert applies is not None
                raise ConfigError(
                    f"{option(name)} would do nothing here: it applies only to {applies.words}; "
                    "leave it out"
                )
        usual = defaults.get("optimizer", cls.optimizer)
        if config.optimizer != usual and "lr" not in given:
            raise ConfigError(
                f"optimizer {config.optimizer} needs lr: the default {config.lr:g} was chosen for "
                f"{usual}"
            )
        return config

    @classmethod
    def from_json(cls, stored: Mapping[str, Any], version: int = FORMAT) -> RunConfig:
        """Read the settings in a run's ``config.json``, of this or an earlier format.

        Raises:
            ConfigError: a setting is missing, unknown, of a wrong type or out of range.
        """
        try:
            settings = renamed_settings(stored)
            if version < 2 and settings["baseline"] != "dropout":
                # Only that baseline dropped units then: in other runs the numbers did nothing.
                settings |= {"dropout_input": 0.0, "dropout_hidden": 0.0}
            lists = {name: tuple(settings[name]) for name in _tuples() if name in settings}
            return cls(**{**settings, **lists, "hidden": tuple(settings["hidden"])})
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"config.json does not hold the settings of a run: {error}"
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON."""
        settings = dataclasses.asdict(self)
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in settings.items()
        }

    def unusual(self) -> dict[str, Any]:
        """Return the settings from which ``of`` makes this configuration, as JSON.

        Example:
            >>> RunConfig.of("mnist", kl_warmup=0.5, kl_warmup_power=2.0).unusual()
            {'kl_warmup': 0.5, 'kl_warmup_power': 2.0}
        """
        settings = self.to_json()
        kind = ("dataset", "baseline", "target", "task")
        given = {name: settings[name] for name in kind if settings[name] is not None}
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        idle = set(self.idle())
        while True:
            usual = {**fields, **defaults_for(given)}
            differing = (
                name
                for name in settings
                if name not in given and name not in idle and getattr(self, name) != usual[name]
            )
            name = next(differing, None)
            if name is None:
                del given["dataset"]
                return {name: value for name, value in settings.items() if name in given}
            # One at a time, since it can change the defaults of others.
            given[name] = settings[name]
            if name == "optimizer":  # which must be given with its rate
                given["lr"] = settings["lr"]

    def idle(self) -> list[str]:
        """Return the settings that do nothing in this combination."""
        return [
            name
            for name, declared in declarations().items()
            if declared.setting.applies is not None and not declared.setting.applies.holds(self)
        ]

    def make_prior(self, width: float = 1.0) -> Prior:
        """Return the prior that the settings name, ``width`` times as wide."""
        if self.prior == "gaussian":
            return Gaussian(width * self.prior_std)
        if self.prior == "laplace":
            return Laplace(width * self.prior_std / math.sqrt(2.0))
        return ScaleMixture(self.pi, width * self.std1, width * self.std2)

    def make_estimator(self) -> Estimator:
        """Return the estimator that the settings name."""
        return ESTIMATORS[self.estimator]


class Declaration(NamedTuple):
    """The declaration of a setting, with its type."""

    setting: Setting
    kind: Any

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that its type allows, if it is a ``Literal``."""
        kinds = (self.kind, *get_args(self.kind))
        return next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigError where a value is of a wrong type, no choice, or out of range."""
        if value is None and NoneType in get_args(self.kind):
            return
        if self.choices and value not in self.choices:
            raise ConfigError(
                f"{option(name)} must be one of {', '.join(self.choices)}, got {value}"
            )
        if not (self.choices or _is_of(self.kind, value)):
            kind = getattr(self.kind, "__name__", str(self.kind))
            raise ConfigError(f"{option(name)} must be of type {kind}, got {value!r}")
        wanted = self.setting.range
        if wanted is not None and not wanted.holds(value):
            raise ConfigError(f"{option(name)} must {wanted.words}, got {value}")


@cache
def declarations() -> dict[str, Declaration]:
    """Return every setting's declaration by name, in the order of the fields.

    Example:
        >>> declarations()["kl"].choices
        ('auto', 'closed', 'monte-carlo')
    """
    hints = get_type_hints(RunConfig, include_extras=True)
    return {
        field.name: Declaration(hints[field.name].__metadata__[0], hints[field.name].__origin__)
        for field in dataclasses.fields(RunConfig)
    }


def option(name: str) -> str:
    """Return a setting's name on the command line."""
    return name.replace("_", "-")


def renamed_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored settings, some or all of a run's, under their names of today.

    Example:
        >>> renamed_settings({"epochs": 3, "step": "fused"})
        {'epochs': 3, 'backend': 'compiled'}
    """
    renamed = dict(settings)
    if "step" in renamed:
        plain = "closed-form" if closed_forms_hold(settings) else "autograd"
        backends = {"auto": "auto", "fused": "compiled", "plain": plain}
        step = renamed.pop("step")
        renamed["backend"] = backends.get(step, step)
    return renamed


def _tuples() -> list[str]:
    return [name for name, found in declarations().items() if get_origin(found.kind) is tuple]


def _is_of(kind: Any, value: Any) -> bool:
    """Whether a value is of a field's type; a whole number is a number too, a truth value is not.

    Example:
        >>> _is_of(float | None, 3), _is_of(int, True), _is_of(tuple[int, ...], (1, "2"))
        (True, False, False)
    """
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_of(get_args(kind)[0], each) for each in value)
    if get_args(kind):
        return any(_is_of(part, value) for part in get_args(kind))
    if isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def _check_combination(run: RunConfig) -> None:
    """Raise ConfigError where settings contradict each other."""
    if run.target is None and is_table_file(run.dataset):
        raise ConfigError(f"a table needs --target NAME, the column of {run.dataset} to predict")
    if run.target is not None:
        nets: tuple[str, ...] = ("table",)
    else:
        nets = ("resnet8",) if is_image_folder(run.dataset) else ("mlp", "lenet5")
    if run.net not in nets:
        raise ConfigError(f"net must be one of {', '.join(nets)}, got {run.net}")
    if bool(run.text) != (run.encoder is not None):
        raise ConfigError(
            "columns of texts need --encoder with the folder or the name of a pretrained network"
            if run.text
            else "encoder reads texts; name their column by --text"
        )
    if run.net in ("table", "resnet8") and run.baseline == "dropout":
        kind = "table" if run.net == "table" else "folder of images"
        raise ConfigError(f"a {kind} has no dropout baseline; use --baseline sgd")
    if not (run.hidden and all(COUNT.holds(units) for units in run.hidden)):
        raise ConfigError(
            f"hidden must be positive numbers of units such as 400,400, got "
            f"{','.join(map(str, run.hidden)) or 'none'}"
        )
    if run.estimator == "local-per-position" and run.net not in ("lenet5", "resnet8"):
        raise ConfigError(
            f"estimator local-per-position needs --net lenet5 or a folder of images: net {run.net} "
            "uses each weight once per example; use --estimator local"
        )
    try:
        run.make_prior()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if run.make_estimator().antithetic and run.train_samples % 2:
        raise ConfigError(
            f"estimator {run.estimator} takes weight samples in pairs, so train-samples must "
            f"be even, got {run.train_samples}; use --train-samples 2"
        )
    if run.kl == "closed" and run.prior == "scale-mixture":
        raise ConfigError(
            "the scale mixture has no closed-form KL; use --kl auto, or --prior gaussian"
        )
    if run.objective != "elbo" and BAYESIAN_DIGITS.holds(run):
        usual = {"prior": "gaussian", "kl_weighting": "uniform", "temperature": 1.0}
        for name, value in {**usual, "kl_warmup": 0.0}.items():
            if getattr(run, name) != value:
                raise ConfigError(
                    f"objective {run.objective} needs {option(name)} {value}, got "
                    f"{getattr(run, name)}"
                )
        if run.kl == "monte-carlo":
            raise ConfigError(f"objective {run.objective} needs the exact KL; leave out --kl")
    if run.kl_weighting == "geometric" and run.passes > 1:
        raise ConfigError(
            f"geometric weights divide the KL over one pass, got passes {run.passes}; add "
            "--passes 1"
        )


def is_table_file(dataset: str) -> bool:
    """Return whether the name of a data set is that of a file with a table.

    Example:
        >>> is_table_file("sales.csv"), is_table_file("mnist")
        (True, False)
    """
    return PurePath(dataset).suffix.lower() in (".csv", ".tsv", ".txt", ".gz", ".parquet")
