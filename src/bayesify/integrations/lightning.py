"""Lightning's Trainer for the ELBO; needs the extra ``lightning``."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from bayesify.estimators.network_state import frozen_in_evaluation
from bayesify.module.inputs import Inputs, batch_size_of, without_targets
from bayesify.noise.arguments import whole_number
from bayesify.noise.keys import Stream, kept_generators, seed_global_generators
from bayesify.prediction import Predictive
from bayesify.training.accumulation import Accumulation
from bayesify.training.checks import check_counts
from bayesify.training.convergence import warn_of_convergence
from bayesify.training.elbo import ELBO, ELBOTerms
from bayesify.training.minibatches import num_batches_of, pair_of
from bayesify.training.optimizers import (
    OptimizerFactory,
    check_lr,
    check_rho_lr_scale,
    make_optimizer,
)
from bayesify.training.schedules import KLWarmup, ScheduleFactory, check_scaled_rate

try:
    from lightning.pytorch import LightningModule
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"ELBOModule needs {error.name}; pip install 'bayesify[lightning]'", name=error.name
    ) from error

__all__ = ["ELBOModule"]

#: In Lightning's checkpoints.
_FIRST_EPOCH = "bayesify_first_epoch"


class ELBOModule(LightningModule):  # type: ignore[misc]
    """A ``LightningModule`` that trains an :class:`~bayesify.ELBO`.

    With the same order of the data it gives the weights that ``fit`` gives, of the autograd backend
    under local reparametrisation and Flipout. The noise is a function of the network's seed and of
    the number of minibatches, which Lightning's checkpoints hold, and dropout one of seed, epoch
    and minibatch, so that a resumed run draws what an uninterrupted one would. It logs ``loss``,
    ``nll`` and ``kl`` in training, ``val_nll`` in validation and ``test_nll`` in a test, all in
    nats, and all but the KL per example. After training, ``bayesify.save(module.elbo.bnn, path)``
    writes the network.

    Args:
        elbo: the objective, whose ``num_data`` is the number of training examples of the whole run.
        lr: learning rate of the default optimiser; None is 1e-3. An ``optimizer`` has its own.
            Lightning's ``Tuner.lr_find`` sets it, and so is for the default optimiser alone.
        optimizer: a function of parameter groups; None is ``torch.optim.Adam``.
        scheduler: a function of optimiser and total number of steps, stepped after every update.
        rho_lr_scale: learning rate of rho as a multiple of the others'.
        kl_warmup_epochs: epochs over which the KL's weight rises from 0 to 1, see ``bayesify.fit``.
        kl_warmup_power: the power of a straight line in which it rises.
        val_samples: weight samples whose predictions a validation or a test averages; 0 uses the
            mean weights.

    Raises:
        TypeError: ``elbo`` is not an ELBO, or a rate no number.
        ValueError: an argument is out of its range, or, when training starts, ``num_data`` is not
            the number of training examples, ``num_batches`` not that of minibatches, or a schedule
            has no last step.

    Example:
        >>> import bayesify as bf
        >>> import torch
        >>> from lightning.pytorch import Trainer
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> data = TensorDataset(torch.randn(64, 3), torch.randint(2, (64,)))
        >>> elbo = bf.ELBO(bf.BayesianModule(torch.nn.Linear(3, 2)), num_data=64)
        >>> trainer = Trainer(max_epochs=2)  # doctest: +SKIP
        >>> trainer.fit(ELBOModule(elbo), DataLoader(data, 16, shuffle=True))  # doctest: +SKIP
    """

    def __init__(
        self,
        elbo: ELBO,
        *,
        lr: float | None = None,
        optimizer: OptimizerFactory | None = None,
        scheduler: ScheduleFactory | None = None,
        rho_lr_scale: float = 1.0,
        kl_warmup_epochs: float = 0.0,
        kl_warmup_power: float = 1.0,
        val_samples: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(elbo, ELBO):
            raise TypeError(
                f"elbo must be an ELBO, got {type(elbo).__name__}; pass ELBO(bnn, num_data=N)"
            )
        val_samples = whole_number("val_samples", val_samples, 0)
        check_lr(lr, optimizer)
        check_rho_lr_scale(rho_lr_scale)
        self.elbo = elbo
        self.lr = lr
        self._optimizer, self._scheduler = optimizer, scheduler
        self._rho_lr_scale, self._val_samples = rho_lr_scale, val_samples
        self._warmup = KLWarmup(kl_warmup_epochs, kl_warmup_power)
        # Of a run that trains on: its orders of the data and its masks are others than before.
        self._first_epoch = self._stored_first_epoch = 0

    def forward(self, inputs: Inputs) -> Predictive:
        """Predict with weight samples in evaluation mode; see ``BayesianModule.predict``."""
        return self.elbo.bnn.predict(inputs)

    def on_train_start(self) -> None:
        """Check the counts by which the KL is weighted, and set the modes in which ``fit`` trains.

        A network in evaluation mode, as it comes from a hub, is trained in training mode; parts
        without trained parameters stay in evaluation mode within a network in training mode.

        Warns with a ``ConvergenceWarning`` if the KL's warm-up takes all epochs.
        """
        check_counts(self.elbo, self.trainer.train_dataloader, self._num_batches())
        if self.trainer.is_global_zero and not self.trainer.fast_dev_run:
            epochs = self.trainer.max_epochs or 0  # -1 is without end
            warn_of_convergence([], epochs, self._warmup.epochs, stacklevel=2)
        is_resumed = self.trainer.ckpt_path is not None
        # A Trainer that trains on goes on with its own count.
        new_first = -(-self.elbo.step // self._num_batches()) - self.current_epoch
        self._first_epoch = self._stored_first_epoch if is_resumed else new_first
        bnn = self.elbo.bnn
        kept = frozen_in_evaluation(bnn.net, bnn.layout)
        self.elbo.train()
        for part in kept:
            part.eval()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the number of the run's first epoch among all of the objective."""
        checkpoint[_FIRST_EPOCH] = self._first_epoch

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read the number of the run's first epoch."""
        self._stored_first_epoch = int(checkpoint.get(_FIRST_EPOCH, 0))

    def on_train_epoch_start(self) -> None:
        """Tell the loader the epoch, by which one of bayesify's own orders its examples."""
        loader = self.trainer.train_dataloader
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self._first_epoch + self.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a minibatch, in nats per example."""
        inputs, targets = pair_of(batch)
        batches = self._num_batches()
        index = self.current_epoch * batches + batch_idx
        kl_scale = self._warmup.scale(index, batches) if self._warmup.epochs else 1.0
        with kept_generators():  # dropout is a function of seed and step, as in fit
            seed, place = self.elbo.bnn.seed, self._first_epoch * batches + index
            seed_global_generators(seed, Stream.DROPOUT, place, self.global_rank)
            terms: ELBOTerms = self.elbo(inputs, targets, batch_index=batch_idx, kl_scale=kl_scale)
        logged = {name: getattr(terms, name).detach() for name in ("loss", "nll", "kl")}
        self.log_dict(logged, batch_size=len(targets))
        # Lightning divides by the number of minibatches that share a step, also where an epoch ends
        # with fewer.
        accumulation = Accumulation(self.trainer.accumulate_grad_batches, batches)
        return terms.loss * (accumulation.every / accumulation.size(batch_idx))

    def validation_step(
        self,
        batch: Any,
        batch_idx: int,  # noqa: ARG002
        dataloader_idx: int = 0,  # noqa: ARG002
    ) -> None:
        """Log the nll of a minibatch as ``val_nll``.

        Of several loaders each has a value of its own, under the names that Lightning gives them.
        """
        self._log_nll("val_nll", batch)

    def test_step(
        self,
        batch: Any,
        batch_idx: int,  # noqa: ARG002
        dataloader_idx: int = 0,  # noqa: ARG002
    ) -> None:
        """Log the nll of a minibatch as ``test_nll``, as in validation."""
        self._log_nll("test_nll", batch)

    def _log_nll(self, name: str, batch: Any) -> None:
        """Log the nll of a minibatch, of the mean weights or averaged over weight samples."""
        inputs, targets = pair_of(batch)
        bnn, size = self.elbo.bnn, batch_size_of(inputs)
        if self._val_samples:
            nll = -bnn.log_prob(inputs, targets, self._val_samples, batch_size=size).mean()
        else:
            nll = self.elbo.nll(bnn.mean_outputs(inputs, batch_size=size).unsqueeze(0), targets)
        self.log(name, nll, batch_size=len(targets), sync_dist=True)

    def predict_step(
        self,
        batch: Any,
        batch_idx: int,  # noqa: ARG002
        dataloader_idx: int = 0,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Predict for a batch of inputs, or of pairs of inputs and targets.

        Returns:
            ``mean``, ``prediction``, ``total``, ``aleatoric`` and ``epistemic`` of the
            :class:`~bayesify.Predictive`, which Lightning itself cannot pass on.
        """
        inputs = without_targets(batch)
        p = self.elbo.bnn.predict(inputs, batch_size=batch_size_of(inputs))
        names = ("mean", "prediction", "total", "aleatoric", "epistemic")
        return {name: getattr(p, name) for name in names}

    def configure_optimizers(self) -> Any:
        """Return the optimiser, with rho in a group of its own, and its schedule."""
        # Lightning clips no gradients of a fused optimiser under mixed precision.
        made = make_optimizer(self.elbo, self._optimizer, self._rho_lr_scale, self.lr, fused=False)
        if self._scheduler is None:
            return made
        schedule = self._scheduler(made, self._num_steps())
        check_scaled_rate(schedule, made, self._rho_lr_scale)
        return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _num_batches(self) -> int:
        """Return the number of minibatches of an epoch, of a stream too."""
        batches = self.trainer.num_training_batches
        if math.isfinite(batches):
            return int(batches)
        per_process = -(-self.elbo.num_data // self.trainer.world_size)
        return num_batches_of(self.trainer.train_dataloader, per_process)

    def _num_steps(self) -> int:
        """Return the number of updates of the whole run."""
        steps = self.trainer.estimated_stepping_batches  # -1 for a stream
        if math.isfinite(steps) and steps > 0:
            return int(steps)
        epochs = self.trainer.max_epochs
        if epochs is None or epochs < 1:
            raise ValueError(
                "a schedule needs the number of steps, but the training has no end; give Trainer "
                "max_epochs or max_steps"
            )
        return int(epochs * math.ceil(self._num_batches() / self.trainer.accumulate_grad_batches))
