"""Train a run from its settings, and estimate beforehand how long that takes."""

from __future__ import annotations

import copy
import time
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from bayesify.app.runs.declarations import ConfigError
from bayesify.app.runs.folder import Run
from bayesify.app.runs.run_config import RunConfig
from bayesify.app.runs.run_data import RunData, num_train
from bayesify.datasets import AugmentedImages, Passes, TensorLoader, random_affine
from bayesify.distributions.likelihoods import CensoredGaussianLikelihood
from bayesify.module.bayesian import BayesianModule
from bayesify.tabular.relevance import sparse_relevance
from bayesify.tabular.table_data import TableData
from bayesify.training import ConvergenceWarning, fit
from bayesify.training.backends import (
    NonFiniteLossError,
    StepOptions,
    check_shared_noise,
    make_backend,
)
from bayesify.training.elbo import ELBO
from bayesify.training.free_energy import free_energy_note, is_above_untrained
from bayesify.training.history import EpochRow, History
from bayesify.training.ivon import IVON
from bayesify.training.learned_prior import learn_prior_mean, split_for_prior
from bayesify.training.optimizers import OptimizerFactory, make_optimizer
from bayesify.training.pac_bayes import MIN_BOUND_EXAMPLES, PACBayesObjective
from bayesify.training.progress import Callback
from bayesify.training.schedules import constant, cosine

if TYPE_CHECKING:  # pandas takes its time to load
    from bayesify.tabular.streaming.encoded import EncodedRowsLoader

__all__ = [
    "PRIOR_NAME",
    "Trained",
    "check_prior_part",
    "check_pruning",
    "fit_network",
    "make_elbo",
    "optimizer_factory",
    "precision_of",
    "prior_indices",
    "seconds_per_epoch",
    "train",
    "use_threads",
    "with_option_names",
]

#: Part of a GPU's free memory that all examples of one kind may take.
_GPU_SHARE = 0.25
#: Steps that are timed for the estimate, the first two of which pay for memory and threads.
_TIMED_STEPS = 8
#: Learning rate of Adam for the network at the centre of a PAC-Bayes run's prior.
_PRIOR_LR = 1e-3
#: Folder, in that of the run, with the checkpoint of that network.
PRIOR_NAME = "prior"


class Trained(NamedTuple):
    """A trained network, its history, and notes for readers of its results."""

    bnn: BayesianModule
    history: History
    notes: list[str]


def train(
    run: Run,
    data: RunData,
    callback: Callback,
    device: torch.device | None = None,
    *,
    shared_noise: bool = False,
) -> Trained:
    """Train a run from its last checkpoint, or from the start if it has none.

    The network is on ``device`` while it is trained, and on the CPU afterwards; None is the CPU.
    Under ``torch.distributed`` all processes train it together, as ``fit`` does.

    Raises:
        NonFiniteLossError, StorageError, OSError: as ``fit`` does.
    """
    config = run.config
    device = torch.device("cpu") if device is None else device
    elbo = make_elbo(_at_start(run, data, callback).to(device), config, data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        history = fit_network(
            elbo,
            config,
            data,
            checkpoint_dir=run.folder,
            callback=callback,
            shared_noise=shared_noise,
        )
    elbo.bnn.to("cpu")
    notes = [
        with_option_names(str(warning.message), config)
        for warning in caught
        if issubclass(warning.category, ConvergenceWarning)
    ]
    if config.baseline is None and config.temperature != 1.0:
        notes.insert(
            0,
            f"tempered objective: the KL is multiplied by {config.temperature:g}, so that this is "
            "not the ELBO",
        )
    if not elbo.bnn.weight_prior.is_proper:
        notes.append(
            f"improper prior: the KL from {config.prior} is known up to a constant only, so that "
            "there is no free energy"
        )
    note = free_energy_note(history[-1])
    if note is not None and is_above_untrained(history[-1]):
        notes.append(note)
    return Trained(elbo.bnn, history, notes)


def fit_network(
    elbo: ELBO,
    config: RunConfig,
    data: RunData,
    *,
    checkpoint_dir: Path | None = None,
    callback: Callback,
    shared_noise: bool = False,
) -> History:
    """Train a network in place as the settings name it, with the errors and warnings of ``fit``.

    Args:
        elbo: from :func:`make_elbo`.
        config: the settings.
        data: its training data; the test data, if there are any, are measured after each epoch.
        checkpoint_dir: resume from the checkpoint in this folder and write one after each epoch;
            None for neither.
        callback: as for ``fit``.
        shared_noise: as for ``fit``.
    """
    bounds = {"has_bounds": isinstance(elbo.bnn.likelihood, CensoredGaussianLikelihood)}
    device = elbo.bnn.posterior.mean.device
    once: TensorLoader | EncodedRowsLoader | AugmentedImages
    if isinstance(data, TableData) and data.stream is not None:
        once = data.stream.loader(config.batch_size, seed=config.seed)
    else:
        inputs, targets = _near((data.train_inputs, data.train_targets), device)
        once = TensorLoader(inputs, targets, config.batch_size, seed=config.seed, **bounds)
        if config.augment:
            once = AugmentedImages(once, config.augment, data.image_shape)
    # Of the inputs that a pretrained network gives, all may matter.
    sparse = sparse_relevance(elbo) if config.encoder is None else nullcontext()
    test_inputs, test_targets = _near((data.test_inputs, data.test_targets), device)
    with precision_of(config, device), sparse:
        return fit(
            elbo,
            Passes(once, config.passes),
            TensorLoader(test_inputs, test_targets, 2048, shuffle=False, **bounds)
            if len(test_inputs)
            else None,
            epochs=config.epochs,
            optimizer=optimizer_factory(config, elbo),
            scheduler=cosine if config.schedule == "cosine" else constant,
            rho_lr_scale=1.0 if "rho_lr_scale" in config.idle() else config.rho_lr_scale,
            kl_warmup_epochs=0 if config.baseline else config.kl_warmup * config.epochs,
            kl_warmup_power=config.kl_warmup_power,
            pruning=config.make_pruning(),
            backend=config.backend,
            shared_noise=shared_noise,
            checkpoint_dir=checkpoint_dir,
            resume=checkpoint_dir is not None,
            checkpoint_frozen=["*.original_module.*"] if config.adapter else True,
            callback=callback,
        )


def _near(examples: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return examples on a GPU where they fit, so that no minibatch is copied to it."""
    size = sum(each.numel() * each.element_size() for each in examples)
    if device.type != "cuda" or size > _GPU_SHARE * torch.cuda.mem_get_info(device)[0]:
        return examples
    inputs, targets = examples
    return inputs.to(device), targets.to(device)


def _at_start(run: Run, data: RunData, callback: Callback) -> BayesianModule:
    """Return the network before its training; that of a PAC-Bayes run at its learned prior."""
    config = run.config
    if config.objective == "elbo" or run.checkpoint.exists():  # which holds the prior's centre
        return run.make_module()
    seen = prior_indices(config, data)
    images = TensorLoader(
        data.train_inputs[seen], data.train_targets[seen], config.batch_size, seed=config.seed
    )
    learned = learn_prior_mean(
        run.make_net(),
        AugmentedImages(images, config.augment, data.image_shape),
        num_data=len(seen),
        epochs=config.prior_epochs,
        optimizer=partial(torch.optim.Adam, lr=_PRIOR_LR, fused=True),
        scheduler=cosine,
        seed=config.seed,
        checkpoint_dir=run.folder / PRIOR_NAME,
        resume=True,
        callback=_PriorNotes(callback, config.prior_epochs),
    )
    return run.make_module(learned)


def check_pruning(config: RunConfig, data: RunData) -> None:
    """Raise ConfigError where weights would be removed up to the last step of training."""
    pruning = config.make_pruning()
    batches = config.passes * -(-num_train(data) // config.batch_size)
    steps = config.epochs * batches
    if pruning is not None and pruning.last_step(batches) >= steps:
        raise ConfigError(
            "pruning must end before the last step of training, so that the weights that are left "
            f"are trained on, but prune-from {pruning.from_epoch:g} and prune-until "
            f"{pruning.until_epoch:g} end after step {pruning.last_step(batches)} of {steps}, with "
            f"{batches} minibatches in each of {config.epochs} epochs; lower prune-until, or "
            "prune-from too"
        )


def check_prior_part(config: RunConfig, data: RunData) -> None:
    """Raise ConfigError where the prior or the bound of a PAC-Bayes run has too few examples."""
    if config.objective == "elbo":
        return
    count = num_train(data)
    of_prior = round(config.prior_part * count)
    if of_prior < 1 or count - of_prior < MIN_BOUND_EXAMPLES:
        mend = "raise" if of_prior < 1 else "lower"
        raise ConfigError(
            f"prior-part must leave at least 1 training image to the prior and "
            f"{MIN_BOUND_EXAMPLES} to the bound, got {of_prior} and {count - of_prior} with "
            f"prior-part {config.prior_part:g} of {count}; {mend} it, or raise limit"
        )


class _PriorNotes(Callback):
    """Report the epochs of the prior's training as notes of a callback."""

    def __init__(self, callback: Callback, epochs: int) -> None:
        self._tell = getattr(callback, "on_note", None)
        self._epochs = epochs

    def on_epoch(self, row: EpochRow) -> None:
        """Report the error of the epoch's training outputs."""
        if self._tell is not None:
            error, epoch = row["train_error"], int(row["epoch"] or 0)
            self._tell(f"prior: epoch {epoch} of {self._epochs}, training error {error:.2f} %")


def prior_indices(config: RunConfig, data: RunData) -> Tensor:
    """Return the training images that the prior of a PAC-Bayes run has seen."""
    return split_for_prior(len(data.train_targets), config.prior_part, seed=config.seed)


def with_option_names(text: str, config: RunConfig) -> str:
    """Return a message of the library with the names of the command line's options.

    Advice for another optimizer, or on a setting that it has not, is left out.
    """
    text = text.replace(" (with IVON, lower beta2)", "")
    if config.optimizer == "ivon":
        text = text.replace(", then raise rho_lr_scale", "")
        text = text.replace(" or start from a smaller init_std", "")
    for name in ("rho_lr_scale", "init_std"):
        text = text.replace(name, f"--{name.replace('_', '-')}")
    return text


def make_elbo(bnn: BayesianModule, config: RunConfig, data: RunData) -> ELBO:
    """Return the objective that the settings name; for a baseline the plain likelihood."""
    num_data = num_train(data)
    if config.objective != "elbo":
        return PACBayesObjective(
            bnn,
            num_data=num_data,
            form=config.objective,
            num_bound=num_data - len(prior_indices(config, data)),
            num_samples=config.train_samples,
        )
    return ELBO(
        bnn,
        num_data=num_data,
        kl=config.kl,
        kl_weighting=config.kl_weighting,
        temperature=0.0 if config.baseline else config.temperature,
        num_samples=config.train_samples,
        num_batches=config.passes * -(-num_data // config.batch_size),
    )


def precision_of(config: RunConfig, device: torch.device) -> torch.autocast:
    """Return the autocast context of the training steps."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bfloat16")


def optimizer_factory(config: RunConfig, elbo: ELBO) -> OptimizerFactory:
    """Return a function that makes the optimizer that the settings name.

    Args:
        config: the settings.
        elbo: the objective, from which IVON makes its own parameter groups.
    """
    lr, decay = config.lr, config.weight_decay
    if config.optimizer == "ivon":
        return lambda _: IVON(elbo, lr=lr)
    if config.optimizer == "adam":
        return partial(torch.optim.Adam, lr=lr, weight_decay=decay, fused=True)
    return partial(torch.optim.SGD, lr=lr, momentum=config.momentum, weight_decay=decay, fused=True)


def use_threads(run: Run) -> None:
    """Compute with the run's number of threads, which may change the last bits of results."""
    torch.set_num_threads(run.config.threads)


def seconds_per_epoch(
    bnn: BayesianModule,
    config: RunConfig,
    data: RunData,
    processes: int = 1,
    device: torch.device | None = None,
    *,
    shared_noise: bool = False,
) -> float:
    """Return the seconds of an epoch, from the median of a few steps on a copy of the network.

    Of several processes it is the time that each computes, without their exchange of gradients.

    Raises:
        ValueError: the noise of several processes cannot be shared.
    """
    device = torch.device("cpu") if device is None else device
    elbo = make_elbo(copy.deepcopy(bnn).to(device), config, data)
    optimizer = make_optimizer(elbo, optimizer_factory(config, elbo), 1.0)
    if shared_noise:
        check_shared_noise(elbo, config.backend)
    backend = make_backend(elbo, optimizer, config.backend)
    rows = -(-config.batch_size // processes)
    inputs, targets = (each[:rows].to(device) for each in (data.train_inputs, data.train_targets))
    times = []
    for _ in range(_TIMED_STEPS):
        started = time.perf_counter()
        try:
            with precision_of(config, device):
                images = inputs
                if config.augment:
                    images = random_affine(inputs, config.augment, data.image_shape)
                terms = backend.step(images, targets, StepOptions(batch_index=0))
                float(terms.nll)  # waits for a GPU
        except NonFiniteLossError:
            break  # the run itself names the step and the mend
        times.append(time.perf_counter() - started)
    batches = config.passes * -(-num_train(data) // config.batch_size)
    return median(times[2:] or times or [0.0]) * batches
