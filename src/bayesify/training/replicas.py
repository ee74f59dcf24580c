"""fit_replicas(): train several networks of one architecture at once."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map

from bayesify.noise.keys import kept_generators
from bayesify.training.backends import BackendName, ReplicaBackend, StepOptions, check_backend
from bayesify.training.checks import check_arguments, check_objective, check_one_process
from bayesify.training.elbo import ELBO, ELBOTerms
from bayesify.training.history import History
from bayesify.training.loop import Minibatch, Training
from bayesify.training.member import Member
from bayesify.training.minibatches import Loader, minibatches, num_batches_of, pair_of
from bayesify.training.optimizers import OptimizerFactory, make_optimizer
from bayesify.training.progress import Callback, callback_of
from bayesify.training.schedules import KLWarmup, ScheduleFactory, constant

__all__ = ["fit_replicas"]


def fit_replicas(
    elbos: Iterable[ELBO],
    train_loader: Loader | Sequence[Loader],
    validation_loader: Loader | None = None,
    *,
    epochs: int = 10,
    lr: float | None = None,
    optimizer: OptimizerFactory | Sequence[OptimizerFactory] | None = None,
    scheduler: ScheduleFactory | None = None,
    rho_lr_scale: float = 1.0,
    kl_warmup_epochs: float = 0,
    kl_warmup_power: float = 1.0,
    backend: BackendName = "auto",
    checkpoint_dir: str | Path | None = None,
    resume: bool = False,
    callback: Callback | None = None,
    progress: bool = True,
) -> list[History]:
    """Train K networks of one architecture at once, as error bars, ensembles and grids need.

    Each becomes what ``fit`` would make of it alone with the same minibatches, to rounding: they
    share nothing but the work. Dropout has other masks than there, and an optimiser other than
    Adam, SGD and IVON other noise, that of ``fit(backend="autograd")``. Seeds, the numbers of their
    priors, initial values, temperatures and learning rates may differ. Where one network is too
    small for the machine, as on a GPU, K of them take little more time than one.

    One forward pass computes the outputs of all, by ``torch.vmap``. Networks that differ in an
    attribute or a hook of a module, whose pass sets an attribute that is no buffer, or that have
    recurrent layers or branches on numbers raise ``ValueError``; train each by ``fit``.

    Args:
        elbos: one objective for each network, with one weight sample a step.
        train_loader: minibatches for all, or a sequence of K loaders with minibatches of equal
            shapes, one for each.
        validation_loader: data to measure the error of the mean weights on, each epoch.
        epochs: passes over the training data in all, those before a resume included.
        lr: learning rate of the default optimiser; None is 1e-3. An ``optimizer`` has its own.
        optimizer: a function that makes one from parameter groups, or one for each network; None
            is Adam.
        scheduler: a function of optimiser and total number of steps.
        rho_lr_scale: learning rate of rho as a multiple of the others'.
        kl_warmup_epochs: the KL's weight rises from 0 to 1 over so many epochs.
        kl_warmup_power: as this power of a straight line.
        backend: ``"compiled"``, ``"autograd"`` (any prior and optimiser), or ``"auto"`` for the
            first where it supports all networks.
        checkpoint_dir: where ``replica-K/checkpoint.safetensors`` are written after every epoch. If
            a process is killed between two of these writes, the checkpoints are of different
            epochs, and resuming raises ``ValueError``.
        resume: resume from these if they are there.
        callback: called at every step and epoch, with the first network's rows.
        progress: without a callback, whether a line per epoch is printed to standard error.

    Returns:
        A history for each network, as ``fit`` returns.

    Raises:
        TypeError: ``optimizer`` or ``scheduler`` is an object that is made already; see also
            ``fit``.
        ValueError: the networks or the loaders do not go together, or the networks cannot be run at
            once; see also ``fit``.
        CompilerError: ``"compiled"`` needs a C++ compiler, and there is none.
        NonFiniteLossError: a loss or a parameter is NaN or infinite.
        RuntimeError: gradients are switched off, as within ``torch.no_grad()``.
        StorageError, FileExistsError: as of ``fit``.

    Warns:
        ConvergenceWarning: as ``fit``, for each network.

    Example:
        >>> import bayesify as bf
        >>> x, y = torch.randn(64, 3), torch.randint(2, (64,))
        >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 32)
        >>> elbos = [bf.ELBO(bf.BayesianModule(torch.nn.Linear(3, 2), seed=k), num_data=64)
        ...          for k in range(3)]
        >>> import warnings
        >>> with warnings.catch_warnings(action="ignore"):
        ...     histories = fit_replicas(elbos, loader, epochs=2)
        >>> [len(history) for history in histories]
        [2, 2, 2]
    """
    if isinstance(elbos, nn.Module) and not isinstance(elbos, nn.ModuleList):
        raise TypeError(
            f"elbos must be a list of objectives, got one {type(elbos).__name__}; train it by fit"
        )
    elbos = list(elbos)
    for elbo in elbos:
        check_objective(elbo, "fit_replicas")
    loaders = list(train_loader) if isinstance(train_loader, Sequence) else [train_loader]
    separate = isinstance(train_loader, Sequence)
    _check(elbos, loaders, optimizer, separate=separate)
    check_backend(backend)
    run_callback = callback_of(callback, progress=progress)
    if isinstance(scheduler, LRScheduler):
        raise TypeError(
            "scheduler must be a function of optimiser and total number of steps, because each "
            "network needs its own, got a scheduler"
        )
    warmup = KLWarmup(kl_warmup_epochs, kl_warmup_power)
    check_one_process()
    for elbo, loader in zip(elbos, loaders if separate else loaders * len(elbos), strict=True):
        epochs = check_arguments(elbo, loader, validation_loader, epochs)
    batches = num_batches_of(loaders[0], elbos[0].num_data)
    factories = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer] * len(elbos)
    members = [
        Member.prepared(
            elbo,
            make_optimizer(elbo, factory, rho_lr_scale, lr),
            constant if scheduler is None else scheduler,
            epochs,
            batches,
            warmup,
            None if checkpoint_dir is None else Path(checkpoint_dir) / f"replica-{number}",
            resume=resume,
            rho_lr_scale=rho_lr_scale,
        )
        for number, (elbo, factory) in enumerate(zip(elbos, factories, strict=True))
    ]
    first = members[0].position
    places = {(m.position.epoch, m.position.batch, m.position.noise) for m in members}
    if len(places) > 1:
        new = [n for n, m in enumerate(members) if (m.position.epoch, m.position.batch) == (0, 0)]
        raise ValueError(
            f"networks {new} have no checkpoint, as where there were fewer of them, or a process "
            "was killed while it wrote the first ones; resume with as many as before, or remove "
            "the folders of all to begin anew"
            if new
            else "the checkpoints of the networks must be of one step, but they differ, as where a "
            "process was killed while it wrote them; remove the folders of all to begin anew"
        )
    optimizers = [member.optimizer for member in members]
    replicas = ReplicaBackend(elbos, optimizers, backend, noise=first.noise)

    def step(minibatch: Minibatch, options: StepOptions) -> list[ELBOTerms]:
        return replicas.step(minibatch.inputs, minibatch.targets, options, separate=separate)

    def minibatches_of(epoch: int, skip: int) -> Generator[Minibatch, None, None]:
        replicas.check_modules()
        own = [member.position.first_epoch + epoch for member in members]
        return _joint_minibatches(loaders, elbos, own, skip, batches, separate=separate)

    try:
        return Training(
            members,
            step,
            minibatches_of,
            epochs=epochs,
            batches=batches,
            warmup=warmup,
            noise=lambda: replicas.noise,
            separate=separate,
            validation_loader=validation_loader,
            callback=run_callback,
            description=lambda: replicas.description,
        ).run()
    finally:
        replicas.release()


def _joint_minibatches(
    loaders: Sequence[Loader],
    elbos: Sequence[ELBO],
    epochs: Sequence[int],
    skip: int,
    length: int,
    *,
    separate: bool,
) -> Generator[Minibatch, None, None]:
    """The minibatches of one loader for all, or those of K loaders with a leading axis."""
    device = elbos[0].bnn.posterior.mean.device
    # The iterations are interleaved, so that each restores what another has seeded.
    with kept_generators(), ExitStack() as stack:
        iterations = [
            stack.enter_context(
                closing(
                    minibatches(loader, seed=elbo.bnn.seed, epoch=epoch, skip=skip, length=length)
                )
            )
            for loader, elbo, epoch in zip(loaders, elbos, epochs, strict=False)
        ]
        for several in zip(*iterations, strict=True):
            batch, minibatch = several[0]
            inputs, targets = pair_of(minibatch, device)
            if separate:
                pairs = [pair_of(minibatch, device) for _, minibatch in several]
                inputs, targets = tree_map(lambda *parts: torch.stack(parts), pairs[0], *pairs[1:])
            yield Minibatch(batch, inputs, targets)


def _check(
    elbos: Sequence[ELBO], loaders: Sequence[Loader], optimizer: object, *, separate: bool
) -> None:
    if not elbos:
        raise ValueError("there must be at least one objective, got none")
    if separate and len(loaders) != len(elbos):
        raise ValueError(
            f"there must be one loader for all networks or one for each of {len(elbos)}, got a "
            f"sequence of {len(loaders)}; if these are minibatches for all, use a TensorLoader or "
            "a DataLoader"
        )
    counts = {num_batches_of(loader, elbos[0].num_data) for loader in loaders}
    if len(counts) > 1:
        raise ValueError(
            "the loaders must bring equal numbers of minibatches, got from "
            f"{min(counts)} to {max(counts)}"
        )
    if isinstance(optimizer, Optimizer):
        raise TypeError(
            "optimizer must be a function of parameter groups, such as "
            "functools.partial(torch.optim.Adam, lr=1e-3), since each network needs its own"
        )
    if isinstance(optimizer, Sequence) and len(optimizer) != len(elbos):
        raise ValueError(
            f"there must be one optimizer for each of {len(elbos)} networks, got {len(optimizer)}"
        )
