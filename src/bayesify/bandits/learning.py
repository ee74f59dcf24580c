"""Reward model: a network that predicts rewards and learns from a replay buffer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from bayesify.bandits.replay import ReplayBuffer
from bayesify.distributions.likelihoods import CategoricalLikelihood, GaussianLikelihood
from bayesify.distributions.likelihoods.likelihood import predictive_of
from bayesify.distributions.posteriors import Delta
from bayesify.estimators.module_attributes import kept_attributes
from bayesify.estimators.network_state import evaluation_mode
from bayesify.estimators.out_of_memory import is_out_of_memory
from bayesify.module.bayesian import BayesianModule
from bayesify.module.edited_inputs import Repeated
from bayesify.noise.arguments import positive_number, whole_number
from bayesify.noise.keys import Stream, kept_generators, seed_global_generators
from bayesify.training import NonFiniteLossError
from bayesify.training.backends import Backend, StepOptions, make_backend
from bayesify.training.checkpoint import as_json, check_same, load_trained, trained_parts
from bayesify.training.elbo import ELBO, ELBOTerms
from bayesify.training.loop import Minibatch, run_steps
from bayesify.training.optimizers import OptimizerFactory, make_optimizer

__all__ = ["Learning", "RewardModel"]


@dataclass(frozen=True)
class Learning:
    """Settings of how an agent learns from its replay buffer.

    Args:
        buffer_size: the number of interactions that the replay buffer holds.
        batch_size: the number of interactions in a minibatch.
        updates: the number of minibatches per call of ``learn``; or a function of the number of
            interactions so far that returns it, for instance to train more at the start.
        optimizer: creates an optimiser from parameter groups; None stands for Adam with learning
            rate 1e-3.
        rho_lr_scale: learning rate of rho as a multiple of the others'.
        num_samples: the number of weight samples per minibatch.
        temperature: factor on the KL (or on the penalty of a point estimate). None stands for 1, or
            0 for a plain network, which has no prior.
        reward_scale: rewards are divided by this number before the likelihood is computed.
        least_data: N in the objective is at least this number, even if the buffer holds fewer
            interactions. 1 gives the ELBO of the buffer. Blundell et al. 2015 train on 64
            minibatches of 64 with a 64th of the KL each, which is 4096.

    Raises:
        TypeError: a number that must be whole is not.
        ValueError: a number is out of its range.

    Example:
        >>> Learning(updates=2, batch_size=256).buffer_size
        4096
    """

    buffer_size: int = 4096
    batch_size: int = 64
    updates: int | Callable[[int], int] = 64
    optimizer: OptimizerFactory | None = None
    rho_lr_scale: float = 1.0
    num_samples: int = 1
    temperature: float | None = None
    reward_scale: float = 1.0
    least_data: int = 1

    def __post_init__(self) -> None:
        """Check the numbers that are not checked where they are used."""
        for name in ("buffer_size", "batch_size", "updates", "num_samples", "least_data"):
            value = getattr(self, name)
            if name == "updates" and callable(value):
                continue
            object.__setattr__(self, name, whole_number(name, value))
        object.__setattr__(self, "reward_scale", positive_number("reward_scale", self.reward_scale))
        if self.temperature is not None:
            object.__setattr__(self, "temperature", float(self.temperature))

    def to_json(self) -> dict[str, Any]:
        """Return all settings except functions and the optimiser, whose state is saved itself."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        return {n: v for n, v in settings.items() if n != "optimizer" and not callable(v)}


class RewardModel:
    """A network that predicts the expected reward of a context and a one-hot action.

    The objective is the ELBO of the interactions in the buffer, with N the larger of their number
    and ``learning.least_data``.

    Args:
        model: a Bayesian network, or a plain one, which is trained by maximum likelihood with
            Gaussian noise. It is copied. Its inputs are the d numbers of a context followed by the
            one-hot action; its output is one number per row, shape (N, 1) or (N,).
        num_actions: the number of actions.
        learning: the settings of learning.

    Raises:
        TypeError: ``model`` is not a network, or ``num_actions`` is no whole number.
        ValueError: ``num_actions`` is below 1, or the likelihood is of classes.

    Example:
        >>> rewards = RewardModel(nn.Linear(3 + 2, 1), 2, Learning(updates=1))
        >>> rewards.observe(torch.ones(3), 1, 5.0)
        >>> rewards.learn()
        >>> rewards.expected(torch.ones(3), rewards.mean_weights()).shape
        torch.Size([2])
    """

    def __init__(self, model: nn.Module, num_actions: int, learning: Learning) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"an agent needs a BayesianModule or another network, got {type(model).__name__}"
            )
        num_actions = whole_number("num_actions", num_actions)
        self.bnn = (
            copy.deepcopy(model)
            if isinstance(model, BayesianModule)
            else BayesianModule(model, likelihood=GaussianLikelihood(), posterior=Delta)
        )
        if isinstance(self.bnn.likelihood, CategoricalLikelihood):
            raise ValueError(
                "rewards are numbers, not classes: the network's likelihood must be one such as "
                "GaussianLikelihood(), got CategoricalLikelihood, which is BayesianModule's default"
            )
        self.num_actions, self.learning = num_actions, learning
        self._dtype, self._device = self.bnn.layout.dtype, self.bnn.posterior.mean.device
        # In float32 at least, because rewards are divided by their scale only later.
        stored = torch.promote_types(self._dtype, torch.float32)
        self.buffer = ReplayBuffer(learning.buffer_size, dtype=stored)
        temperature = learning.temperature
        if temperature is None:
            temperature = 1.0 if isinstance(model, BayesianModule) else 0.0
        # num_data is the capacity; the factor on the KL of each step corrects it to the present N.
        self.elbo = ELBO(
            self.bnn,
            num_data=learning.buffer_size,
            temperature=temperature,
            num_samples=learning.num_samples,
        )
        self.optimizer = make_optimizer(self.elbo, learning.optimizer, learning.rho_lr_scale)
        # Recorded before any step, since some optimisers add state to their settings.
        self._hyperparameters = _hyperparameters(self.optimizer)
        self._backend: Backend = make_backend(self.elbo, self.optimizer)
        self._actions = torch.eye(num_actions, dtype=stored)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of; it makes a backend of its own."""
        state = dict(vars(self))
        state["_backend"] = self._backend.noise
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`__getstate__` returned."""
        vars(self).update(state)
        self._backend = make_backend(self.elbo, self.optimizer, noise=state["_backend"])

    def mean_weights(self) -> Tensor:
        """Return the mean weights, shape (1, D)."""
        return self.bnn.posterior.masked_mean.detach().clone().unsqueeze(0)

    @torch.no_grad()
    def expected(self, context: Tensor, weights: Tensor) -> Tensor:
        """Return the expected reward of each action, averaged over S weight vectors, shape (A,).

        The rewards are divided by ``reward_scale``.

        Args:
            context: the context, shape (d,).
            weights: the weight vectors, shape (S, D).

        Raises:
            ValueError: the context is not a vector of finite numbers or has another length than
                earlier ones, or the network fails on it or does not return one number per action.
            NonFiniteLossError: the network predicts NaN or infinity.
        """
        contexts = self._checked(context).expand(self.num_actions, -1)
        inputs = torch.cat([contexts, self._actions], 1).to(self._device, self._dtype)
        passes = Repeated()

        def outputs_of(each: Tensor) -> Tensor:
            with kept_attributes(self.bnn.net):  # a cache would be of these weights
                return self.bnn.tensor_of(self.bnn.run_with(each, passes.take(inputs)))

        with evaluation_mode(self.bnn.net):
            try:
                outputs = [outputs_of(each) for each in weights]
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                raise ValueError(
                    f"the network failed on rows of {inputs.shape[1]} numbers, {len(context)} of a "
                    f"context and one for each of {self.num_actions} actions: {error}"
                ) from error
        values = predictive_of(self.bnn.likelihood, outputs, keep_samples=False).mean
        if values.shape not in ((self.num_actions,), (self.num_actions, 1)):
            raise ValueError(
                "the network must return one number for each context and action, shape (N, 1) or "
                f"(N,), got shape {tuple(values.shape)} for {self.num_actions} rows"
            )
        if not bool(values.isfinite().all()):
            raise NonFiniteLossError(
                "the network predicts NaN or infinity: most likely its learning rate is too high"
            )
        self._target_shape = values.shape[1:]
        return values.flatten()

    def observe(self, context: Tensor, action: int, reward: float) -> None:
        """Store the reward of an action in the replay buffer.

        Raises:
            ValueError: context or reward is not finite, or the action is out of range.
        """
        if action not in range(self.num_actions):
            raise ValueError(f"action must be from 0 to {self.num_actions - 1}, got {action!r}")
        if not bool(torch.tensor(float(reward), dtype=self.buffer.dtype).isfinite()):
            kind = str(self.buffer.dtype).removeprefix("torch.")
            raise ValueError(f"a reward must be finite in {kind}, got {reward}")
        self.buffer.add(self._checked(context), int(action), float(reward))

    def learn(self) -> None:
        """Run the training steps that follow an interaction.

        Raises:
            TypeError: the function ``updates`` returns no whole number.
            ValueError: nothing was observed yet, or ``updates`` returns a negative number.
            NonFiniteLossError: the loss became NaN or infinite.
        """
        elbo, updates = self.elbo, self.learning.updates
        options = StepOptions(0, elbo.num_data / max(len(self.buffer), self.learning.least_data))
        if not hasattr(self, "_target_shape"):
            self.expected(self.buffer.interactions.contexts[0], self.mean_weights())
        if not self.bnn.net.training:
            elbo.train()
        if callable(updates):
            count = whole_number("the result of updates", updates(self.buffer.added), 0)
        else:
            count = updates
        steps = run_steps(
            self._step,
            self._minibatches(count),
            lambda _: options,
            self.bnn,
        )
        with kept_generators():
            try:
                for _ in steps:
                    pass
            except NonFiniteLossError as error:
                raise NonFiniteLossError(
                    f"{error}: most likely the learning rate is too high, or reward_scale too "
                    "small for rewards of this size"
                ) from None

    def _step(self, minibatch: Minibatch, options: StepOptions) -> list[ELBOTerms]:
        return [self._backend.step(minibatch.inputs, minibatch.targets, options)]

    def _minibatches(self, count: int) -> Iterator[Minibatch]:
        """Yield minibatches of the buffer; they and dropout masks are functions of the step."""
        learning, seed = self.learning, self.bnn.seed
        for _ in range(count):
            step = self.elbo.step
            seed_global_generators(seed, Stream.DROPOUT, step)
            contexts, actions, rewards = self.buffer.minibatch(
                learning.batch_size, seed=seed, draw=step
            )
            one_hot = F.one_hot(actions, self.num_actions).to(contexts)
            inputs = torch.cat([contexts, one_hot], 1).to(self._device, self._dtype)
            targets = (rewards / learning.reward_scale).to(self._device, self._dtype)
            yield Minibatch(0, inputs, targets.view(-1, *self._target_shape))

    def parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all state that acting and learning change, as tensors and JSON."""
        tensors, trained = trained_parts(self.elbo, self.optimizer)
        tensors |= {f"buffer.{name}": part for name, part in self.buffer.tensors().items()}
        return tensors, {
            **trained,
            "learning": self.learning.to_json(),
            "hyperparameters": self._hyperparameters,
            "num_actions": self.num_actions,
            "added": self.buffer.added,
            "noise": self._backend.noise,
        }

    def load_parts(self, path: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Restore the state from the result of :meth:`parts`, read from ``path``.

        Raises:
            StorageError: the state is that of another agent; nothing is then changed.
        """
        check_same(path, "number of actions", self.num_actions, meta["num_actions"])
        check_same(path, "way of learning", self.learning.to_json(), meta["learning"])
        # Loading would replace these settings by the stored ones.
        ours, stored = self._hyperparameters, meta["hyperparameters"]
        # Another version of the optimiser may have other settings.
        both = [name for name in ours if name in stored]
        check_same(path, "optimizer", {n: ours[n] for n in both}, {n: stored[n] for n in both})
        load_trained(path, self.elbo, self.optimizer, tensors, meta)
        prefix = "buffer."
        stored_tensors = {
            n.removeprefix(prefix): tensors[n] for n in tensors if n.startswith(prefix)
        }
        self.buffer.load(stored_tensors, meta["added"])
        self._backend = make_backend(self.elbo, self.optimizer, noise=meta["noise"])

    def _checked(self, context: Any) -> Tensor:
        vector = torch.as_tensor(context, dtype=self.buffer.dtype, device="cpu")
        if vector.dim() != 1 or not bool(vector.to(self._dtype).isfinite().all()):
            got = "NaN or infinity" if vector.dim() == 1 else f"shape {tuple(vector.shape)}"
            raise ValueError(f"a context must be a vector of finite numbers, shape (d,), got {got}")
        self.buffer.check(vector)
        return vector


#: Settings of an optimiser's implementation, which do not change its results.
_IMPLEMENTATION = {"params", "foreach", "fused", "capturable", "differentiable"}


def _hyperparameters(optimizer: Optimizer) -> dict[str, Any]:
    """Return the type of an optimiser, and its settings for each group of parameters."""
    groups = optimizer.param_groups
    names = [name for name in groups[0] if name not in _IMPLEMENTATION]
    settings = {name: as_json([group.get(name) for group in groups]) for name in names}
    return {"type": type(optimizer).__name__, **settings}
