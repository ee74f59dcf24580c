"""Several networks of one architecture in one step, over a leading axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesify import stateless
from bayesify.elbo import ELBO
from bayesify.fused.samples import judge
from bayesify.fused.support import leaf_kind, why_not_fused
from bayesify.fused.trainee import Trainee
from bayesify.fused.values import StepValues
from bayesify.inputs import Inputs, arguments_of
from bayesify.module import BayesianModule
from bayesify.random_network import as_tensor

__all__ = ["ReplicaStep"]


class ReplicaStep:
    """One step of K independent networks: their passes as one, over a leading axis.

    Their parameters and buffers become views of tensors with that axis; they stay the networks'
    own, and each network is what it would have become alone, to rounding.

    Args:
        elbos: K objectives over networks of one architecture; seeds, priors of one kind, initial
            values, temperatures and numbers of data may differ.
        optimizers: one for each, of one class; rates may differ.

    Raises:
        ValueError: they do not go together, or cannot take a fused step.
        CompilerError: the kernel cannot be compiled here.
    """

    def __init__(self, elbos: Sequence[ELBO], optimizers: Sequence[Optimizer]) -> None:
        _check(elbos, optimizers)
        self._elbos = list(elbos)
        first = elbos[0].bnn
        count, mean = len(elbos), first.posterior.mean
        leaf = torch.empty(count, mean.numel(), dtype=mean.dtype, device=mean.device)
        pairs = zip(elbos, optimizers, leaf, strict=True)
        self._trainees = [Trainee(elbo, optimizer, row) for elbo, optimizer, row in pairs]
        parts = first.layout.unflatten(leaf)
        self._leaves = {name: part.detach().requires_grad_() for name, part in parts.items()}
        self._net = first.net
        self._places = stateless.places_of(first.net, first.layout)
        nets = [elbo.bnn.net for elbo in elbos]
        self._own = [dict(net.named_parameters(remove_duplicate=False)) for net in nets]
        self._rest = _stacked(self._own)
        self._buffers = _stacked([dict(net.named_buffers(remove_duplicate=False)) for net in nets])
        for name, tensor in self._rest.items():
            tensor.requires_grad_(self._own[0][name].requires_grad)
        self.description = f"fused, {count} networks at once ({self._trainees[0].description})"

    def evaluate(
        self,
        inputs: Inputs,
        targets: Tensor,
        *,
        separate: bool,
        batch_index: int,
        kl_scale: float,
        values: bool,
    ) -> list[StepValues]:
        """The forward passes.

        Args:
            inputs: of a minibatch, shape (B_i, ...), or (K, B_i, ...) where they are separate.
            targets: likewise.
            separate: whether each network has data of its own.
            batch_index: the minibatch's place in the epoch.
            kl_scale: a further factor on the KL, for its warm-up.
            values: whether the value of the KL is asked for.
        """
        for trainee in self._trainees:
            trainee.begin()
        outputs = self._outputs(inputs, separate=separate)
        judged = [
            judge(
                elbo,
                outputs[k].unsqueeze(0),
                targets[k] if separate else targets,
                batch_index=batch_index,
                kl_scale=kl_scale,
                draw=partial(trainee.draw, 0) if values else None,
            )
            for k, (elbo, trainee) in enumerate(zip(self._elbos, self._trainees, strict=True))
        ]
        for elbo in self._elbos:
            elbo.count_step()
        self._factors = [said.factor for _, said in judged]
        self._nll = torch.stack([nll for nll, _ in judged]).sum()
        return [said for _, said in judged]

    def update(self) -> list[float | None]:
        """The backward pass and the optimisers; see ``TrainingStep.update`` for the results."""
        for trainee in self._trainees:
            trainee.forget_gradients()
        for tensor in (*self._leaves.values(), *self._rest.values()):
            tensor.grad = None
        if self._nll.requires_grad:
            self._nll.backward()
        gradients = [leaf.grad for leaf in self._leaves.values()]
        for name, tensor in self._rest.items():
            if tensor.grad is not None:
                for own, gradient in zip(self._own, tensor.grad, strict=True):
                    own[name].grad = gradient
        return [
            trainee.move([None if g is None else g[k] for g in gradients], [], factor)
            for k, (trainee, factor) in enumerate(zip(self._trainees, self._factors, strict=True))
        ]

    def release(self) -> None:
        """Give each network tensors of its own again."""
        for elbo in self._elbos:
            net = elbo.bnn.net
            for tensor in (*net.parameters(), *net.buffers()):
                tensor.data = tensor.data.clone()

    def _outputs(self, inputs: Inputs, *, separate: bool) -> Tensor:
        args, kwargs = arguments_of(inputs)

        def run(
            leaves: Mapping[str, Tensor],
            others: Mapping[str, Tensor],
            args: tuple[Any, ...],
            kwargs: Mapping[str, Any],
        ) -> Tensor:
            given = {place: leaves[name] for name in leaves for place in self._places[name]}
            return as_tensor(stateless.run_with(self._net, {**given, **others}, args, kwargs))

        data = 0 if separate else None
        run_all = torch.vmap(run, in_dims=(0, 0, data, data), randomness="different")
        outputs: Tensor = run_all(self._leaves, {**self._rest, **self._buffers}, args, kwargs)
        return outputs


def _stacked(owned: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of the networks with a leading axis, of which the networks' own become views."""
    stacked: dict[str, Tensor] = {}
    made: dict[int, Tensor] = {}  # what bears two names is one
    for name, tensor in owned[0].items():
        if id(tensor) not in made:
            made[id(tensor)] = torch.stack([each[name].detach() for each in owned])
            for each, row in zip(owned, made[id(tensor)], strict=True):
                each[name].data = row
        stacked[name] = made[id(tensor)]
    return stacked


def _likeness(bnn: BayesianModule) -> tuple[object, ...]:
    mean = bnn.posterior.mean
    kind = type(bnn.weight_prior), type(bnn.likelihood)
    return bnn.layout, str(bnn.net), _settings(bnn.net), mean.dtype, mean.device, *kind


def _settings(net: nn.Module) -> list[dict[str, object]]:
    """The plain attributes of each module, which decide what it does and ``str`` may not show."""
    kinds = (bool, int, float, str, tuple, type(None))
    return [
        {name: value for name, value in vars(module).items() if isinstance(value, kinds)}
        for module in net.modules()
    ]


def _check(elbos: Sequence[ELBO], optimizers: Sequence[Optimizer]) -> None:
    if not elbos or len(elbos) != len(optimizers):
        raise ValueError(
            f"there must be at least one objective and an optimiser for each, got {len(elbos)} "
            f"and {len(optimizers)}"
        )
    if len({id(elbo.bnn) for elbo in elbos}) != len(elbos):
        raise ValueError("the objectives must be of different networks; wrap the net once for each")
    first = elbos[0].bnn
    for number, (elbo, optimizer) in enumerate(zip(elbos, optimizers, strict=True)):
        reason = why_not_fused(elbo, optimizer)
        if reason is None and leaf_kind(elbo) != "weights":
            reason = f"the estimator is {elbo.bnn.perturbation}, not WeightSampling()"
        if reason is None and elbo.num_samples > 1:
            reason = f"its step takes {elbo.num_samples} weight samples, not one"
        if reason is not None:
            raise ValueError(f"network {number} cannot be trained with others at once: {reason}")
        bnn = elbo.bnn
        if _likeness(bnn) != _likeness(first):
            raise ValueError(
                f"the networks must be of one architecture, on one device, with priors of one "
                f"kind, but network {number} differs from network 0"
            )
