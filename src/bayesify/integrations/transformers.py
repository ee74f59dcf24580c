"""Hugging Face's Trainer for the ELBO; needs the extra ``transformers``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesify.distributions.likelihoods import CategoricalLikelihood
from bayesify.estimators.network_state import frozen_in_evaluation
from bayesify.module.inputs import Inputs
from bayesify.noise.arguments import whole_number
from bayesify.prediction import CategoricalPredictive
from bayesify.training.convergence import warn_of_convergence
from bayesify.training.elbo import ELBO, ELBOTerms
from bayesify.training.minibatches import pair_of
from bayesify.training.optimizers import (
    check_decay,
    check_holds,
    check_rho_lr_scale,
    separate_rho,
)
from bayesify.training.schedules import KLWarmup

try:
    from transformers import Trainer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"ELBOTrainer needs {error.name}; pip install 'bayesify[transformers]'", name=error.name
    ) from error

__all__ = ["ELBOTrainer"]


class ELBOTrainer(Trainer):  # type: ignore[misc]
    """A ``transformers.Trainer`` whose model is an :class:`~bayesify.ELBO`.

    Batches are mappings with the targets under "labels", which the network itself does not see. The
    loss is that of the ELBO in nats per example, and N counts examples: not tokens, nor those that
    gradient accumulation adds up. A causal language model is trained on the next token, as
    Hugging Face's own; ``compute_metrics`` gets labels that are already shifted. Next to ``loss``
    it logs ``nll``, in nats per example, and ``kl``, in nats, as means over the same minibatches;
    ``eval_loss`` is the nll, without the KL.

    The noise is a function of the network's seed and of the number of minibatches, which
    checkpoints hold, so that a resumed run draws what an uninterrupted one would. After training,
    ``bayesify.save(trainer.model.bnn, path)`` writes the network.

    Args:
        model: the objective, whose ``num_data`` is the length of ``train_dataset``. With
            ``model_init=make``, a function of no argument or of a trial, it is left out: each run
            of ``train``, and each trial of ``hyperparameter_search``, makes an objective anew.
        args: ``transformers.TrainingArguments``; its weight decay does not apply to rho.
        kl_warmup_epochs: epochs over which the KL's weight rises from 0 to 1, see ``bayesify.fit``.
        kl_warmup_power: the power of a straight line in which it rises.
        rho_lr_scale: learning rate of rho as a multiple of the others'.
        eval_samples: weight samples whose predictions an evaluation averages; 0 evaluates the mean
            weights.
        others: the arguments of ``Trainer``.

    Raises:
        TypeError: the model is not an ELBO.
        ValueError: an argument is out of its range, or one of a loss or a network of Hugging Face's
            own; ``rho_lr_scale`` is given where the optimiser exists, or the posterior has no rho;
            ``num_data`` is not the length of ``train_dataset``; an optimiser decays rho, or
            holds other parameters; or a language model's likelihood ignores no target, where the
            last token has none.

    Example:
        >>> import bayesify as bf
        >>> ELBOTrainer(bf.BayesianModule(nn.Linear(3, 2)))
        Traceback (most recent call last):
        TypeError: the model must be an ELBO, got BayesianModule; pass ELBO(bnn, num_data=N), ...
    """

    # The mean over a minibatch: the Trainer divides it by the number of accumulated minibatches.
    loss_is_scaled_for_ga = False

    def __init__(
        self,
        model: ELBO | None = None,
        args: Any = None,
        *,
        kl_warmup_epochs: float = 0.0,
        kl_warmup_power: float = 1.0,
        rho_lr_scale: float = 1.0,
        eval_samples: int = 0,
        **others: Any,
    ) -> None:
        eval_samples = whole_number("eval_samples", eval_samples, 0)
        check_rho_lr_scale(rho_lr_scale)
        self._warmup = KLWarmup(kl_warmup_epochs, kl_warmup_power)
        self._rho_lr_scale, self._eval_samples = rho_lr_scale, eval_samples
        self._updates, self._since_update = -1, 0
        self._sums: Tensor | None = None  # since the last log: of nll, KL and minibatches
        self._trained_on = others.get("train_dataset")
        if model is not None or others.get("model_init") is None:
            self._use(model)
        _check_arguments(args, others)
        super().__init__(model, args, **others)
        if self.optimizer is not None:
            if rho_lr_scale != 1.0:
                raise ValueError(
                    "rho_lr_scale needs the Trainer to make the optimiser; leave it out, and give "
                    "rho a rate of its own in the group that bayesify.parameter_groups(elbo) has "
                    "for it"
                )
            check_holds(self._elbo, self.optimizer)
            check_decay(self._elbo, self.optimizer)
        # The network's arguments, of which Trainer keeps the columns of the data.
        names = list(inspect.signature(_base_of(self._elbo.bnn.net).forward).parameters)
        self._signature_columns = [*names, *self.label_names, "labels", "label", "label_ids"]
        self.can_return_loss = True

    def call_model_init(self, trial: Any = None) -> ELBO:
        """Return a new objective of ``model_init``."""
        return self._use(super().call_model_init(trial))

    def _use(self, model: object) -> ELBO:
        if not isinstance(model, ELBO):
            raise TypeError(
                f"the model must be an ELBO, got {type(model).__name__}; pass "
                "ELBO(bnn, num_data=N), since a loss of the network's own lacks the KL"
            )
        if model.kl_weighting == "geometric":
            raise ValueError(
                "geometric weights need the place of a minibatch in its epoch, which the Trainer "
                'does not know; use ELBO(..., kl_weighting="uniform"), bayesify.fit or Lightning'
            )
        if self._rho_lr_scale != 1.0 and getattr(model.bnn.posterior, "rho", None) is None:
            raise ValueError(
                "rho_lr_scale needs a posterior with a rho, got "
                f"{type(model.bnn.posterior).__name__}"
            )
        self._elbo = model
        self._keep_modes()
        self._shifted_by = _ignored_target(model)
        _check_num_data(model, self._trained_on)
        return model

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as ``Trainer.train``; frozen parts in evaluation mode stay in it, as in ``fit``.

        Warns with a ``ConvergenceWarning`` if training ended within the KL's warm-up.
        """
        if self._elbo.bnn.net.training:
            self._keep_modes()
        self._sums = None
        found = super().train(*args, **kwargs)
        if self.is_world_process_zero():
            epochs = self.state.epoch or 0.0
            warn_of_convergence([], epochs, self._warmup.epochs, stacklevel=2)
        return found

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as ``Trainer.log``, and next to the loss of training the ``nll`` and the ``kl``."""
        if "loss" in logs and self._sums is not None:
            nll, kl, count = self.accelerator.gather(self._sums.unsqueeze(0)).sum(0).tolist()
            logs |= {"nll": nll / count, "kl": kl / count}
            self._sums = None
        super().log(logs, *args, **kwargs)

    def _keep_modes(self) -> None:
        bnn = self._elbo.bnn
        self._in_evaluation = frozen_in_evaluation(bnn.net, bnn.layout)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Create the Trainer's optimiser, with rho in a group of its own and without decay."""
        if self.optimizer is None:
            made: Optimizer = super().create_optimizer(model)
            separate_rho(made, self._elbo, self._rho_lr_scale)
        optimizer: Optimizer = self.optimizer
        return optimizer

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,  # noqa: ARG002
    ) -> Any:
        """Return the loss in nats per example, and the outputs of the first weight sample."""
        if model.training:  # the Trainer sets all parts to training mode
            for part in self._in_evaluation:
                part.eval()
        network_inputs, targets = self._pair_of(inputs)
        terms: ELBOTerms = model(network_inputs, targets, kl_scale=self._kl_scale())
        if model.training:
            new = torch.stack([terms.nll, terms.kl, torch.ones_like(terms.kl)]).detach()
            self._sums = new if self._sums is None else self._sums + new
        return (terms.loss, {"logits": terms.outputs[0]}) if return_outputs else terms.loss

    def prediction_step(
        self,
        model: nn.Module,  # noqa: ARG002
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,  # noqa: ARG002
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return nll in nats per example, outputs and targets, of the mean weights or averaged.

        Averaged outputs of classes are log probabilities; of numbers, means.
        """
        inputs = self._prepare_inputs(inputs)
        has_targets = inputs.get("labels") is not None
        targets = None
        if has_targets:
            network_inputs, targets = self._pair_of(inputs)
        else:
            network_inputs = {name: each for name, each in inputs.items() if name != "labels"}
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs, loss = self._evaluated(network_inputs, targets)
        return (loss, None, None) if prediction_loss_only else (loss, outputs, targets)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        # A file of safetensors holds no memory twice, as tied frozen parameters have it.
        state = self.model.state_dict() if state_dict is None else state_dict
        first = {each.data_ptr(): name for name, each in reversed(list(state.items()))}
        own = {
            n: each if first[each.data_ptr()] == n else each.clone() for n, each in state.items()
        }
        super()._save(output_dir, own)

    def _evaluated(self, inputs: Inputs, targets: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return outputs, and their nll in nats per example where there are targets."""
        bnn, is_averaged = self._elbo.bnn, self._eval_samples > 0
        p = bnn.predict(inputs, self._eval_samples) if is_averaged else None
        if p is None:
            outputs = bnn.mean_outputs(inputs)
        else:
            outputs = p.log_mean if isinstance(p, CategoricalPredictive) else p.mean
        if targets is None:
            return outputs, None
        if p is None or (isinstance(p, CategoricalPredictive) and targets.dim() == 1):
            # Averaged log probabilities are logits too.
            return outputs, self._elbo.nll(outputs.unsqueeze(0), targets)
        return outputs, -bnn.log_prob(inputs, targets, self._eval_samples).mean()

    def _pair_of(self, inputs: Mapping[str, Any]) -> tuple[Inputs, Tensor]:
        network_inputs, targets = pair_of(inputs)
        if not network_inputs:
            raise ValueError(
                "a batch must have inputs next to its labels, got none; add "
                "remove_unused_columns=False to the TrainingArguments"
            )
        if self._shifted_by is not None:  # each position predicts the next
            _check_not_shifted(network_inputs, targets)
            last = targets.new_full((len(targets), 1), self._shifted_by)
            targets = torch.cat([targets[:, 1:], last], 1)
        return network_inputs, targets

    def _kl_scale(self) -> float:
        """Return the KL's factor in the next minibatch; the Trainer counts updates only."""
        if not self._warmup.epochs:
            return 1.0
        updates, every = self.state.global_step, self.args.gradient_accumulation_steps
        if updates == self._updates:
            self._since_update = (self._since_update + 1) % every
        else:
            self._updates, self._since_update = updates, 0
        # auto_find_batch_size may have made minibatches smaller than the arguments say.
        share = self._elbo.num_data / (self._train_batch_size * self.args.world_size)
        is_cut = self.args.dataloader_drop_last
        batches = max(1, math.floor(share)) if is_cut else math.ceil(share)
        epoch, in_epoch = divmod(updates, math.ceil(batches / every))
        minibatch = epoch * batches + in_epoch * every + self._since_update
        return self._warmup.scale(minibatch, batches)


def _ignored_target(elbo: ELBO) -> int | None:
    """Return the target of a language model's last token, or None for other networks."""
    names = {kind.__name__ for kind in type(_base_of(elbo.bnn.net)).__mro__}
    if names.isdisjoint(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        return None
    likelihood = elbo.bnn.likelihood
    ignored = likelihood.ignore_index if isinstance(likelihood, CategoricalLikelihood) else None
    if ignored is None:
        raise ValueError(
            "the likelihood of a causal language model must ignore the last token, which has no "
            "next one; pass likelihood=CategoricalLikelihood(ignore_index=-100)"
        )
    return ignored


def _check_not_shifted(inputs: Inputs, targets: Tensor) -> None:
    """Check that the labels of a language model are the tokens of their own positions.

    Raises:
        ValueError: they are the tokens that follow, so that each would be predicted two ahead.
    """
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    if not isinstance(ids, Tensor) or ids.shape != targets.shape:
        return
    own, following = targets == ids, targets[:, :-1] == ids[:, 1:]
    counts = targets >= 0  # others are ignored
    known = counts[:, :-1]  # of the last token none tells what follows
    if bool(known.any()) and not bool(own[counts].all()) and bool(following[known].all()):
        raise ValueError(
            "labels must be those of Hugging Face's collators, the tokens themselves, which "
            "ELBOTrainer shifts, got the tokens that follow; do not shift them in the loader"
        )


def _base_of(net: nn.Module) -> nn.Module:
    """Return the network that an adapter of peft is in, or the network itself."""
    of_adapter: Any = getattr(net, "get_base_model", None)
    base: nn.Module = net if of_adapter is None else of_adapter()
    return base


_CHECKPOINTING = "call net.gradient_checkpointing_enable() before the network is made Bayesian"
#: Settings of ``TrainingArguments`` for a model of Hugging Face's own, and what to do instead.
_FOR_OWN_MODELS = {
    "label_smoothing_factor": "the ELBO's likelihood has none",
    "gradient_checkpointing": _CHECKPOINTING,
    "activation_checkpointing": _CHECKPOINTING,
    "neftune_noise_alpha": "the weights' noise takes its place",
}


def _check_arguments(args: Any, others: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments that an objective cannot follow."""
    for name, mend in _FOR_OWN_MODELS.items():
        if getattr(args, name, None):
            raise ValueError(
                f"{name} is for a loss or a network of Hugging Face's own, got "
                f"{getattr(args, name)}; leave it out: {mend}"
            )
    if others.get("compute_loss_func") is not None:
        raise ValueError(
            "compute_loss_func would not be called, as the loss is the ELBO's; leave it out, and "
            "choose a likelihood of the network instead"
        )


def _check_num_data(elbo: ELBO, dataset: object) -> None:
    length = len(dataset) if hasattr(dataset, "__len__") else None
    if length is not None and length != elbo.num_data:
        raise ValueError(
            f"the objective's num_data must be the number of training examples, {length}, got "
            f"{elbo.num_data}; the KL would be weighted wrongly"
        )
