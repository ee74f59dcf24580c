"""fit(): one readable loop."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bayesify.elbo import ELBO
from bayesify.perturbations import Perturbation
from bayesify.training.callbacks import Callback, LineProgress
from bayesify.training.checkpoint import (
    CHECKPOINT_NAME,
    Position,
    read_checkpoint,
    write_checkpoint,
)
from bayesify.training.checks import check_arguments, check_finite, check_parameters
from bayesify.training.convergence import warn_of_convergence
from bayesify.training.history import EpochMeter, History, validation_row
from bayesify.training.interrupt import deferred_interrupt
from bayesify.training.minibatches import Loader, kept_generators, minibatches
from bayesify.training.optimizers import OptimizerFactory, make_optimizer
from bayesify.training.schedules import KLWarmup, ScheduleFactory, constant
from bayesify.training.steps import StepKind, check_step, make_step

__all__ = ["fit"]


def fit(
    elbo: ELBO,
    train_loader: Loader,
    validation_loader: Loader | None = None,
    *,
    epochs: int = 10,
    optimizer: Optimizer | OptimizerFactory | None = None,
    scheduler: LRScheduler | ScheduleFactory | None = None,
    rho_lr_scale: float = 1.0,
    kl_warmup_epochs: float = 0,
    kl_warmup_power: float = 1.0,
    perturbation: Perturbation | None = None,
    step: StepKind = "auto",
    checkpoint_dir: str | Path | None = None,
    resume: bool = False,
    callback: Callback | None = None,
) -> History:
    """Train a Bayesian network by stochastic gradient descent on the ELBO.

    Everything random is a function of the network's seed, the epoch and the step: the noise, the
    order of the data and dropout (torch's global generators are seeded anew each step, and put
    back as they were afterwards). So a run that was stopped and resumed gives the same weights,
    bit for bit on one machine, as one that was not (save where the network chooses its way by the
    data under an estimator that traces it, see docs/adr/0004). Ctrl-C ends the step, writes a
    checkpoint and raises KeyboardInterrupt.

    Args:
        elbo: the objective; its network is trained in place.
        train_loader: minibatches (inputs, targets); its ``set_epoch``, if any, is called.
        validation_loader: data to measure the error of the mean weights on, each epoch.
        epochs: passes over the training data in all, those before a resume included.
        optimizer: an optimiser, or a function that makes one from parameter groups; None is
            ``torch.optim.Adam`` with rate 1e-3.
        scheduler: a scheduler, or a function of optimiser and total number of steps, as in
            ``bayesify.training.schedules``. It is stepped after every minibatch.
        rho_lr_scale: learning rate of rho as a multiple of the others'.
        kl_warmup_epochs: the KL's weight rises from 0 to 1 over so many epochs; from then on the
            objective is the ELBO.
        kl_warmup_power: it rises as this power of a straight line: above 1 late and steeply.
        perturbation: how noise enters, such as ``Flipout()``; the network keeps it. None leaves
            the network's own.
        step: ``"fused"`` for the network's passes and one compiled kernel for all else, on noise
            of its own; ``"plain"`` for a step without a compiler; ``"auto"`` for the fused one
            where it can be taken (see docs/fused-step.md). The callback is told which it is.
        checkpoint_dir: where ``checkpoint.safetensors`` is written after every epoch.
        resume: go on from that checkpoint if it is there.
        callback: told of every step and epoch; None prints a line an epoch on standard error.

    Returns:
        The history, a row an epoch: epoch (from 1), loss and nll (nats per datum, averaged over
        the epoch's data; the loss with the KL of the last minibatch, where the others' is not
        computed because its gradient does not need it), kl and penalty (nats, at the last
        minibatch), train_error (of the
        training outputs), validation_error and validation_nll (of the mean weights), std_median,
        std_residual (nats a weight, see ``training.convergence``), learning_rate,
        data_per_second, seconds (of training so far).

    Raises:
        ValueError: an argument is out of its range, the objective's ``num_data`` is not what
            the loader brings, or ``step="fused"`` cannot be taken.
        CompilerError: it needs a C++ compiler, and there is none.
        NonFiniteLossError: the loss or a parameter is NaN or infinite.
        StorageError: the checkpoint is damaged or of another run.
        FileExistsError: ``checkpoint_dir`` holds a checkpoint and ``resume`` is False.

    Warns:
        ConvergenceWarning: the standard deviations have visibly not converged.

    Example:
        >>> import bayesify as bf
        >>> x, y = torch.randn(64, 3), torch.randint(2, (64,))
        >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 32)
        >>> elbo = bf.ELBO(bf.BayesianModule(torch.nn.Linear(3, 2)), num_data=64)
        >>> import warnings
        >>> with warnings.catch_warnings(action="ignore"):
        ...     history = fit(elbo, loader, epochs=2)
        >>> [row["epoch"] for row in history]
        [1, 2]
    """
    batches = len(train_loader)
    check_arguments(elbo, train_loader, validation_loader, epochs)
    warmup = KLWarmup(kl_warmup_epochs, kl_warmup_power)
    check_step(step)
    if perturbation is not None:
        elbo.bnn.perturbation = perturbation
    made = make_optimizer(elbo, optimizer, rho_lr_scale)
    schedule = constant if scheduler is None else scheduler
    if not isinstance(schedule, LRScheduler):
        schedule = schedule(made, max(1, epochs * batches))
    settings = {
        **warmup.settings,
        "lr": [float(group.get("initial_lr", group["lr"])) for group in made.param_groups],
    }
    path = None if checkpoint_dir is None else Path(checkpoint_dir) / CHECKPOINT_NAME
    position = Position()
    if path is not None and path.exists():
        if not resume:
            raise FileExistsError(
                f"{path} exists already; pass resume=True to go on from it, or another folder"
            )
        position = read_checkpoint(path, elbo, made, schedule, settings)
    taken = make_step(elbo, made, step, noise=position.noise)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)

    def checkpoint() -> None:
        position.noise = taken.noise
        if path is not None:
            write_checkpoint(path, elbo, made, schedule, settings, position)

    watcher = LineProgress() if callback is None else callback
    if (tell := getattr(watcher, "on_note", None)) is not None:
        tell(f"step: {taken.description}")
    watcher.on_start(epochs=epochs, batches=batches, history=list(position.history))
    elbo.train()
    with deferred_interrupt() as interrupt:
        for epoch in range(position.epoch, epochs):
            started = time.perf_counter() - position.epoch_seconds
            meter = EpochMeter(elbo, batches, position.sums)
            learning_rate = position.sums.setdefault("learning_rate", made.param_groups[0]["lr"])
            epoch_of_data = minibatches(
                train_loader, seed=elbo.bnn.seed, epoch=epoch, skip=position.batch
            )
            with closing(epoch_of_data):
                for batch, (inputs, targets) in epoch_of_data:
                    kl_scale = warmup.scale(epoch * batches + batch, batches)
                    # Under autocast, the casts of parameters as they were before the last step.
                    torch.clear_autocast_cache()
                    last = batch + 1 == batches
                    values = taken.evaluate(
                        inputs, targets, batch_index=batch, kl_scale=kl_scale, values=last
                    )
                    check_finite(elbo, values, epoch, batch, path)
                    meter.add(values, targets)
                    residual = taken.update(residual=meter.wants_residual(batch))
                    meter.add_residual(values, residual, batch=batch)
                    schedule.step()
                    watcher.on_step(epoch=epoch, batch=batch)
                    if interrupt.requested and not last:
                        check_parameters(elbo, epoch, path)
                        position.batch = batch + 1
                        position.epoch_seconds = time.perf_counter() - started
                        checkpoint()
                        raise KeyboardInterrupt
            seconds = time.perf_counter() - started
            position.seconds += seconds
            row = meter.row(
                epoch=epoch,
                learning_rate=learning_rate,
                seconds=seconds,
                total_seconds=position.seconds,
            )
            check_parameters(elbo, epoch, path)
            with kept_generators():
                position.history.append(row | validation_row(elbo, validation_loader))
            position.begin_epoch(epoch + 1)
            checkpoint()
            watcher.on_epoch(position.history[-1])
            if interrupt.requested:
                raise KeyboardInterrupt
    warn_of_convergence(position.history, epochs, kl_warmup_epochs, stacklevel=3)
    return position.history
