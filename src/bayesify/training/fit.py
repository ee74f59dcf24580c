"""fit(): train one Bayesian network on the ELBO."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bayesify.estimators import Estimator
from bayesify.module.bayesian import BayesianModule
from bayesify.module.inputs import check_names, check_not_copied
from bayesify.training.accumulation import Accumulation
from bayesify.training.agreement import begin_together, check_alike
from bayesify.training.backends import BackendName, StepOptions, check_backend, make_backend
from bayesify.training.checkpoint import Position
from bayesify.training.checks import check_arguments, check_can_divide
from bayesify.training.division import Division
from bayesify.training.elbo import ELBO, ELBOTerms
from bayesify.training.fit_warnings import (
    warn_of_row_count,
    warn_of_short_stream,
    warn_of_unread,
)
from bayesify.training.history import History
from bayesify.training.loop import Minibatch, Training
from bayesify.training.member import Member
from bayesify.training.minibatches import Loader, minibatches, num_batches_of, pair_of
from bayesify.training.optimizers import OptimizerFactory, make_optimizer
from bayesify.training.processes import Processes
from bayesify.training.progress import Callback, callback_of
from bayesify.training.pruning_schedule import PruningSchedule
from bayesify.training.schedules import KLWarmup, ScheduleFactory, constant

__all__ = ["fit"]


def fit(
    elbo: ELBO,
    train_loader: Loader,
    validation_loader: Loader | None = None,
    *,
    epochs: int = 10,
    lr: float | None = None,
    optimizer: Optimizer | OptimizerFactory | None = None,
    scheduler: LRScheduler | ScheduleFactory | None = None,
    rho_lr_scale: float = 1.0,
    kl_warmup_epochs: float = 0,
    kl_warmup_power: float = 1.0,
    accumulate_batches: int = 1,
    pruning: PruningSchedule | None = None,
    estimator: Estimator | None = None,
    backend: BackendName = "auto",
    shared_noise: bool = False,
    checkpoint_dir: str | Path | None = None,
    resume: bool = False,
    checkpoint_frozen: bool | Sequence[str] = True,
    callback: Callback | None = None,
    progress: bool = True,
) -> History:
    """Train a Bayesian network by stochastic gradient descent on the ELBO.

    All randomness is a function of the network's seed, the epoch and the step: the noise, the order
    of the data, dropout and random augmentation. The global generators of torch, Python and NumPy
    are seeded at each step and before each validation, and restored afterwards. A run that is
    stopped and resumed therefore ends with the same weights, bit for bit on one machine, as an
    uninterrupted one; docs/adr/0004 names an exception, and what is drawn in workers that persist
    (``persistent_workers=True``), or comes in any order (``in_order=False``), is another. With
    workers the order of torch's samplers is the same as without; what is drawn in a worker depends
    on their number. Ctrl-C ends the step, writes a checkpoint and raises KeyboardInterrupt. A
    further call continues with other orders of the data and other masks, as its epochs are counted
    on from the steps of the objective.

    Under ``torch.distributed`` all processes call ``fit`` alike and train one network together:
    each takes its rows of every minibatch and weights of its own, and the gradients are added up.
    The processes end with the same weights; the first prints and writes. See
    docs/several-processes.md.

    The network is set to training mode, but for parts without random or trained parameters that
    are in evaluation mode within a network in training mode, such as a frozen body.

    Args:
        elbo: the objective; its network is trained in place.
        train_loader: minibatches (inputs, targets), or mappings with the targets under "labels";
            tensors on the CPU are moved to the network's device. Its ``set_epoch``, if any, is
            called. Its length is the number of minibatches of an epoch, which ends there. One
            without a length, of a stream, brings ``num_data`` examples an epoch in minibatches of
            its ``batch_size``.
        validation_loader: data on which the mean weights are measured after each epoch.
        epochs: passes over the training data, including those before a resume.
        lr: learning rate of the default optimiser; None is 1e-3. An ``optimizer`` has its own.
        optimizer: an optimiser, or a function of parameter groups that builds one; None is
            ``torch.optim.Adam``.
        scheduler: a scheduler, or a function of optimiser and total number of steps, as in
            ``bayesify.training.schedules``. It is stepped after every step of the optimiser.
        rho_lr_scale: learning rate of rho as a multiple of the others'. A scheduler such as
            ``OneCycleLR``, which sets the rates, must be given one for each group instead.
        kl_warmup_epochs: epochs over which the KL's weight rises from 0 to 1; from then on the
            objective is the ELBO.
        kl_warmup_power: the power of a straight line in which it rises: above 1 late and steeply.
        accumulate_batches: minibatches for one step of the optimiser, with the mean of their
            gradients, whatever their sizes, where a large one does not fit into memory. Each has
            weight samples of its own. The last step of an epoch has those that are left, which the
            loader's length must tell. Above 1 the compiled and the closed-form backend are not
            used.
        pruning: prunes the network as it is trained; None prunes nothing.
        estimator: the gradient estimator, such as ``Flipout()``; the network keeps it. None is
            the network's own.
        backend: the implementation of a step, see docs/backends.md: ``"compiled"`` for one kernel
            over the weights, with noise of its own; ``"closed-form"`` for the same gradients
            without a compiler; ``"autograd"`` for the specification, which supports every
            objective and optimiser; ``"auto"`` for the fastest that supports the run: where only
            the optimiser has no kernel, the objective's own, see ``fused`` of the ELBO. The
            callback is told which it is.
        shared_noise: whether several processes draw the same weights: half as many bytes are
            exchanged, and the gradients vary more. Weight sampling by ``"compiled"`` or
            ``"closed-form"`` only.
        checkpoint_dir: where ``checkpoint.safetensors`` is written after every epoch.
        resume: resume from that checkpoint if it is there; what was frozen is frozen again, and no
            more. Without a ``checkpoint_dir`` there is none.
        checkpoint_frozen: whether checkpoints hold the frozen parameters, such as the body of a
            pretrained network, or which of them, as ``frozen`` of ``bayesify.save``. With False
            resuming and ``bayesify.load`` need the same pretrained network again.
        callback: called at every step and epoch, see ``bayesify.Callback``.
        progress: without a callback, whether a line per epoch is printed to standard error.

    Returns:
        The history, a row per epoch: epoch (from 1), loss and nll (nats per example, averaged over
        the epoch), kl and penalty (nats, at the last minibatch), free_energy (nll + kl / N, nats
        per example, whatever the temperature; None with an improper prior),
        free_energy_untrained and its standard error (in the last row, with all means at zero, see
        ``training.free_energy``), train_error (of the training outputs), validation_error and
        validation_nll (of the mean weights), fraction_pruned (of all random weights, at the end of
        the epoch), std_median,
        std_residual and its columns by group (nats per weight, see
        ``training.convergence.ResidualMeter.row``), learning_rate, data_per_second, seconds (of
        training so far). Where a backend does not compute the KL of every minibatch, the loss
        uses that of the last one.

    Raises:
        TypeError: an argument is of another type, such as a function as callback.
        ValueError: an argument is out of its range, all parameters are frozen, the objective's
            ``num_data`` is not the number of examples of a loader that knows it, ``backend`` does
            not support the run, or the scheduler is one of another optimiser, ends before the
            training or undoes ``rho_lr_scale``; or several processes differ in an argument, in the
            data or in the checkpoint.
        CompilerError: ``"compiled"`` needs a C++ compiler, and there is none.
        NonFiniteLossError: the loss or a parameter is NaN or infinite.
        RuntimeError: gradients are switched off, as within ``torch.no_grad()``.
        StorageError: the checkpoint is damaged or of another run.
        FileExistsError: ``checkpoint_dir`` holds a checkpoint and ``resume`` is False.

    Warns:
        ConvergenceWarning: the standard deviations have visibly not converged.
        RowCountWarning: the network returns more rows than ``num_data`` counts, as where it
            flattens pixels or the nodes of graphs, so that the KL weighs too much.
        ShortStreamWarning: a loader without a length ends before it has brought ``num_data``
            examples.
        SigmoidOutputWarning: a ``nn.Sequential`` under a ``BernoulliLikelihood`` ends in
            ``nn.Sigmoid``.
        SoftmaxOutputWarning: the outputs of the first minibatch under a ``CategoricalLikelihood``
            are probabilities, as after a softmax.
        TargetScaleWarning: the targets of a ``GaussianLikelihood`` are far from unit scale.
        UnreadParameterWarning: the outputs of twenty steps or more did not depend on some random
            parameters, by the compiled or closed-form backend in one process.

    Example:
        >>> import torch
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
    epochs = check_arguments(elbo, train_loader, validation_loader, epochs, pruning)
    batches = num_batches_of(train_loader, elbo.num_data)
    accumulation = Accumulation.checked(accumulate_batches, batches)
    warmup = KLWarmup(kl_warmup_epochs, kl_warmup_power)
    check_backend(backend)
    check_can_divide(elbo)
    run_callback = callback_of(callback, progress=progress)
    processes = Processes(shared_noise=shared_noise)
    if not processes.is_first:
        run_callback = callback_of(callback, progress=False)
    division = Division(train_loader, processes, batches)
    begin_together(elbo, processes)
    with _unchanged_if_refused(elbo.bnn):
        if pruning is not None:
            pruning.begin(elbo, epochs, batches)
        if estimator is not None:
            elbo.bnn.estimator = estimator
        made = make_optimizer(elbo, optimizer, rho_lr_scale, lr)
        member = Member.prepared(
            elbo,
            made,
            constant if scheduler is None else scheduler,
            epochs,
            batches,
            warmup,
            None if checkpoint_dir is None else Path(checkpoint_dir),
            resume=resume,
            rho_lr_scale=rho_lr_scale,
            pruning=pruning,
            frozen=checkpoint_frozen,
            processes=processes,
            accumulation=accumulation,
        )
        position = member.position
        chosen = make_backend(
            elbo,
            made,
            backend,
            noise=position.noise,
            processes=processes,
            accumulation=accumulation,
        )
    processes.check_equal(
        {"position": f"epoch {position.epoch}, minibatch {position.batch}"},
        "put checkpoint_dir where all processes see it",
    )
    arguments = {"epochs": epochs, "number of minibatches": batches, **member.settings}
    check_alike(elbo, made, chosen, processes, arguments)
    _check_noise_as_shared_before(position, processes)
    if processes.is_first and (note := _other_processes(position, processes)) is not None:
        getattr(run_callback, "on_note", lambda _: None)(note)

    device = elbo.bnn.posterior.mean.device
    told: set[str] = set()
    rows = 0  # of outputs

    def minibatches_of(epoch: int, first: int) -> Generator[Minibatch, None, None]:
        rank, index = processes.rank, first - 1
        with closing(
            minibatches(
                division.loader,
                seed=elbo.bnn.seed,
                epoch=position.first_epoch + epoch,
                skip=first,
                length=batches,
                rank=rank,
                fetch_rank=rank if division.is_loaded_in_parts else 0,
            )
        ) as pairs:
            for index, minibatch in pairs:
                # Of several processes each moves its own part only.
                inputs, targets = pair_of(minibatch, device if processes.is_alone else None)
                if index == first:
                    check_names(elbo.bnn.net, inputs)
                    check_not_copied(inputs, targets)
                if processes.is_alone:
                    yield Minibatch(index, inputs, targets)
                    continue
                if index == first:
                    division.check_order(inputs, targets)
                inputs, targets, share = division.share(index, inputs, targets)
                yield Minibatch(index, *pair_of((inputs, targets), device), share)
        accumulation.check_brought(index + 1)
        if epoch == 0 and processes.is_alone and index >= 0:
            warn_of_short_stream(train_loader, elbo.num_data, index + 1)
            warn_of_row_count(elbo, train_loader, rows=rows, brought=index + 1)
        unread = [name for name in chosen.unread if name not in told]
        warn_of_unread(unread)
        told.update(unread)

    def step(minibatch: Minibatch, options: StepOptions) -> list[ELBOTerms]:
        nonlocal rows
        terms = chosen.step(minibatch.inputs, minibatch.targets, options)
        rows += terms.outputs.shape[1]
        return [terms]

    [history] = Training(
        [member],
        step,
        minibatches_of,
        epochs=epochs,
        batches=batches,
        warmup=warmup,
        noise=lambda: chosen.noise,
        pruning=pruning,
        validation_loader=validation_loader,
        callback=run_callback,
        description=lambda: chosen.description,
    ).run()
    return history


@contextmanager
def _unchanged_if_refused(bnn: BayesianModule) -> Iterator[None]:
    """Give a network its mask and its estimator back where a run is refused before it begins."""
    mask, estimator = bnn.posterior.mask, bnn.estimator
    try:
        yield
    except BaseException:
        bnn.posterior.mask, bnn.estimator = mask, estimator
        raise


def _check_noise_as_shared_before(position: Position, processes: Processes) -> None:
    """Raise ValueError where processes resume with noise that is shared, or not, unlike before."""
    if processes.is_alone or position.processes == 1 or position == Position():
        return
    if position.shared_noise != processes.shared_noise:
        raise ValueError(
            f"this run began with shared_noise={position.shared_noise}; resume with that, got "
            f"{processes.shared_noise}"
        )


def _other_processes(position: Position, processes: Processes) -> str | None:
    """Describe a resumption by another number of processes; None where it is the same."""
    before, now = position.processes, processes.count
    if before == now or position == Position(processes=before):
        return None
    return (
        f"resumed by {now} process{'es' if now > 1 else ''} instead of {before}: the minibatches "
        "and the objective are the same, the noise of the weights and dropout is not, so that the "
        "results differ as those of two seeds do"
    )
