"""What a network believes of rewards, and how it learns from those that were got."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from bayesify import stateless
from bayesify.bandits.replay import ReplayBuffer
from bayesify.elbo import ELBO
from bayesify.fused import TrainingStep
from bayesify.likelihoods import CategoricalLikelihood, GaussianLikelihood
from bayesify.module import BayesianModule
from bayesify.noise import Stream, derived_seed
from bayesify.posteriors import Delta
from bayesify.random_network import as_tensor
from bayesify.training import NonFiniteLossError
from bayesify.training.checkpoint import check_same, load_trained, trained_parts
from bayesify.training.minibatches import generators_seed, kept_generators
from bayesify.training.optimizers import OptimizerFactory, make_optimizer
from bayesify.training.steps import make_step

__all__ = ["Learning", "RewardModel"]


@dataclass(frozen=True)
class Learning:
    """How an agent learns from its replay buffer.

    Args:
        buffer_size: how many of the last interactions are remembered.
        batch_size: interactions a minibatch.
        updates: minibatches each time that the agent learns; or a function that says how many,
            of the number of interactions so far, as for more of them while there are few data.
        optimizer: makes an optimiser of parameter groups; None is Adam with rate 1e-3.
        rho_lr_scale: learning rate of rho as a multiple of the others'.
        num_samples: weight samples a minibatch.
        temperature: factor on the KL (or on a point's penalty); None is 1, and 0 for a plain
            network, which has no prior.
        reward_scale: rewards are divided by it before the likelihood sees them.
        least_data: the KL is weighed as if at least so many interactions were remembered. 1 is the
            ELBO of those that are. Blundell et al. 2015 take 64 minibatches of 64 however few
            there are, each with a 64th of the KL: 4096.

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
        """Check the numbers that no other part does."""
        for name in ("buffer_size", "batch_size", "updates", "num_samples", "least_data"):
            value = getattr(self, name)
            if name == "updates" and callable(value):
                continue
            if not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not (self.reward_scale > 0.0 and math.isfinite(self.reward_scale)):
            raise ValueError(f"reward_scale must be positive and finite, got {self.reward_scale}")

    def to_json(self) -> dict[str, Any]:
        """All but the optimiser, which has a state of its own, and what is a function."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        return {n: v for n, v in settings.items() if n != "optimizer" and not callable(v)}


class RewardModel:
    """A network of a context and a one-hot action, whose answer is the expected reward.

    The objective is the ELBO of the interactions in the buffer: N is their number, or
    ``learning.least_data`` if that is more.

    Args:
        model: a Bayesian network, or a plain one, which is trained by maximum likelihood with
            Gaussian noise. It is copied. Its inputs have the d numbers of a context and then one
            for each action; it answers with one number, (N, 1) or (N,).
        num_actions: how many there are.
        learning: how it learns.

    Raises:
        TypeError: ``model`` is no network.
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
        if num_actions < 1:
            raise ValueError(f"num_actions must be at least 1, got {num_actions}")
        self.bnn = (
            copy.deepcopy(model)
            if isinstance(model, BayesianModule)
            else BayesianModule(model, likelihood=GaussianLikelihood(), posterior=Delta)
        )
        if isinstance(self.bnn.likelihood, CategoricalLikelihood):
            raise ValueError(
                "rewards are numbers and no classes: the network's likelihood must be such as "
                "GaussianLikelihood(), got CategoricalLikelihood, which is BayesianModule's default"
            )
        self.num_actions, self.learning = num_actions, learning
        mean = self.bnn.posterior.mean
        self._dtype, self._device = mean.dtype, mean.device
        self.buffer = ReplayBuffer(learning.buffer_size, dtype=self._dtype)
        temperature = learning.temperature
        if temperature is None:
            temperature = 1.0 if isinstance(model, BayesianModule) else 0.0
        # That num_data is the capacity is made good by each step's factor on the KL.
        self.elbo = ELBO(
            self.bnn,
            num_data=learning.buffer_size,
            temperature=temperature,
            num_samples=learning.num_samples,
        )
        self.optimizer = make_optimizer(self.elbo, learning.optimizer, learning.rho_lr_scale)
        # As they are before any step: some optimisers keep numbers of their own beside them.
        self._hyperparameters = _hyperparameters(self.optimizer)
        self._step: TrainingStep = make_step(self.elbo, self.optimizer, "auto")
        self._actions = torch.eye(num_actions, dtype=self._dtype)

    def mean_weights(self) -> Tensor:
        """The mean of the weights, shape (1, D)."""
        return self.bnn.posterior.masked_mean.detach().clone().unsqueeze(0)

    @torch.no_grad()
    def expected(self, context: Tensor, weights: Tensor) -> Tensor:
        """Expected reward of each action, averaged over weights of shape (S, D): shape (A,).

        On the scale that the likelihood sees.

        Raises:
            ValueError: the context is no vector of finite numbers or not as long as those before,
                or the network does not take it or answer with one number for each action.
            NonFiniteLossError: it answers with NaN or infinity.
        """
        contexts = self._checked(context).expand(self.num_actions, -1)
        inputs = torch.cat([contexts, self._actions], 1).to(self._device)
        with stateless.evaluating(self.bnn.net):
            try:
                outputs = [as_tensor(self.bnn.run_with(each, inputs)) for each in weights]
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise ValueError(
                    f"the network failed on rows of {inputs.shape[1]} numbers, {len(context)} of a "
                    f"context and one for each of {self.num_actions} actions: {error}"
                ) from error
        values = self.bnn.likelihood.predictive(outputs, keep_samples=False).mean
        if values.shape not in ((self.num_actions,), (self.num_actions, 1)):
            raise ValueError(
                "the network must answer with one number for each context and action, shape "
                f"(N, 1) or (N,), but of {self.num_actions} came {tuple(values.shape)}"
            )
        if not bool(values.isfinite().all()):
            raise NonFiniteLossError(
                "the network answers with NaN or infinity: most likely its learning rate is too "
                "high"
            )
        self._target_shape = values.shape[1:]
        return values.flatten()

    def observe(self, context: Tensor, action: int, reward: float) -> None:
        """Remember what an action got.

        Raises:
            ValueError: context or reward is not finite, or there is no such action.
        """
        if action not in range(self.num_actions):
            raise ValueError(f"action must be from 0 to {self.num_actions - 1}, got {action!r}")
        if not math.isfinite(reward):
            raise ValueError(f"a reward must be finite, got {reward}")
        self.buffer.add(self._checked(context), int(action), float(reward))

    def learn(self) -> None:
        """Take the steps of training that follow an interaction.

        Raises:
            ValueError: nothing was observed yet.
            NonFiniteLossError: the loss became NaN or infinite.
        """
        bnn, elbo, learning = self.bnn, self.elbo, self.learning
        kept = self.buffer.interactions
        kl_scale = elbo.num_data / max(len(self.buffer), learning.least_data)
        if not hasattr(self, "_target_shape"):
            self.expected(kept.contexts[0], self.mean_weights())
        if not bnn.net.training:
            elbo.train()
        set_seed = generators_seed()
        with kept_generators():  # dropout's are functions of the step, too
            updates = learning.updates
            for _ in range(updates(self.buffer.added) if callable(updates) else updates):
                draw = elbo.step
                set_seed(derived_seed(bnn.seed, Stream.DROPOUT, draw))
                contexts, actions, rewards = self.buffer.minibatch(
                    learning.batch_size, seed=bnn.seed, draw=draw
                )
                one_hot = F.one_hot(actions, self.num_actions).to(contexts)
                inputs = torch.cat([contexts, one_hot], 1).to(self._device)
                targets = (rewards / learning.reward_scale).to(self._device)
                values = self._step.evaluate(
                    inputs,
                    targets.view(-1, *self._target_shape),
                    batch_index=0,
                    kl_scale=kl_scale,
                    values=False,
                )
                if not bool(values.nll.isfinite()):
                    raise NonFiniteLossError(
                        f"the nll at step {draw} is NaN or infinite: most likely the learning "
                        "rate is too high, or reward_scale too small for rewards of this size"
                    )
                self._step.update(residual=False)

    def parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that acting and learning change, as tensors and JSON."""
        tensors, trained = trained_parts(self.elbo, self.optimizer)
        tensors |= {f"buffer.{name}": part for name, part in self.buffer.tensors().items()}
        return tensors, {
            **trained,
            "learning": self.learning.to_json(),
            "hyperparameters": self._hyperparameters,
            "num_actions": self.num_actions,
            "added": self.buffer.added,
            "noise": self._step.noise,
        }

    def load_parts(self, path: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Go back to what :meth:`parts` gave, read from ``path``.

        Raises:
            StorageError: it is of another agent; nothing has then been changed.
        """
        check_same(path, "number of actions", self.num_actions, meta["num_actions"])
        check_same(path, "way of learning", self.learning.to_json(), meta["learning"])
        # Loading would bring the stored settings in the place of these.
        ours, stored = self._hyperparameters, meta["hyperparameters"]
        # Another version of the optimiser may have others.
        both = [name for name in ours if name in stored]
        check_same(path, "optimizer", {n: ours[n] for n in both}, {n: stored[n] for n in both})
        load_trained(path, self.elbo, self.optimizer, tensors, meta)
        prefix = "buffer."
        kept = {n.removeprefix(prefix): tensors[n] for n in tensors if n.startswith(prefix)}
        self.buffer.load(kept, meta["added"])
        self._step = make_step(self.elbo, self.optimizer, "auto", noise=meta["noise"])

    def _checked(self, context: Any) -> Tensor:
        vector = torch.as_tensor(context, dtype=self._dtype, device="cpu")
        if vector.dim() != 1 or not bool(vector.isfinite().all()):
            what = "NaN or infinity" if vector.dim() == 1 else f"shape {tuple(vector.shape)}"
            raise ValueError(
                f"a context must be a vector of finite numbers, shape (d,), got {what}"
            )
        self.buffer.check(vector)
        return vector


#: How an optimiser is computed, not what it computes.
_IMPLEMENTATION = {"params", "foreach", "fused", "capturable", "differentiable"}


def _hyperparameters(optimizer: Optimizer) -> dict[str, Any]:
    """Its type, and of each setting the value in every group of parameters."""
    groups = optimizer.param_groups
    names = [name for name in groups[0] if name not in _IMPLEMENTATION]
    settings = {name: [group.get(name) for group in groups] for name in names}
    return {"type": type(optimizer).__name__, **settings}
