"""Learn tasks one after the other: variational continual learning, and fine-tuning."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.datasets import TensorLoader
from bayesify.distributions.families import named_posterior
from bayesify.distributions.posteriors import Delta
from bayesify.distributions.priors import Gaussian
from bayesify.estimators import LocalReparameterization
from bayesify.module.bayesian import BayesianModule
from bayesify.module.multi_head import MultiHead
from bayesify.module.networks import mlp
from bayesify.noise.keys import Stream, derived_seed
from bayesify.reproduce.harness.experiment import Context, EpochProgress
from bayesify.reproduce.papers.continual.task_sequences import Task, with_head
from bayesify.training.coreset import choose_coreset
from bayesify.training.elbo import ELBO
from bayesify.training.fit import fit
from bayesify.training.schedules import cosine
from bayesify.training.streaming import StreamingELBO

__all__ = ["learn", "make_network"]

#: Inputs of the network, and targets.
_Examples = tuple[Sequence[Tensor], Tensor]


def make_network(config: Mapping[str, Any], tasks: Sequence[Task], seed: int) -> BayesianModule:
    """Create a perceptron with one head, or with one for each task if the tasks have heads."""
    hidden = config["hidden"]
    net: nn.Module
    if tasks[0].head is None:
        net = mlp(784, hidden, 10, seed=seed)
    else:
        layers = mlp(784, hidden, 2 * len(tasks), seed=seed)
        weights, biases = (each.detach().split(2) for each in layers[-1].parameters())
        heads = [nn.Linear(hidden[-1], 2) for _ in tasks]
        for head, weight, bias in zip(heads, weights, biases, strict=True):
            head.load_state_dict({"weight": weight, "bias": bias})
        net = MultiHead(layers[:-1], heads)
    if config["method"] == "fine-tuning":
        return BayesianModule(net, posterior=Delta, seed=seed)
    return BayesianModule(
        net,
        posterior=named_posterior(config.get("posterior", "mean-field")),
        prior=Gaussian(config["prior_std"]),
        init_std=config["init_std"],
        prior_mean=config["prior_mean"],
        estimator=LocalReparameterization(),
        seed=seed,
    )


def learn(
    bnn: BayesianModule,
    tasks: Sequence[Task],
    config: Mapping[str, Any],
    seed: int,
    context: Context,
) -> Iterator[BayesianModule]:
    """Train on each task in turn, and yield after each the network that predicts.

    With coresets that is a copy, trained on the coresets of all tasks so far; the posterior that
    is passed on to the next task has not seen them (algorithm 1 of the paper).
    """
    coresets: list[_Examples] = []
    for number, task in enumerate(tasks):
        bnn.seed = derived_seed(seed, Stream.TRAINING, number)
        inputs, targets = task.train()
        if config["coreset"] is not None:
            chosen = choose_coreset(
                inputs, config["coreset_size"], config["coreset"], seed=bnn.seed
            )
            others = torch.ones(len(inputs), dtype=torch.bool)
            others[chosen] = False
            coresets.append((with_head(inputs[chosen], task.head), targets[chosen]))
            inputs, targets = inputs[others], targets[others]
        part = context.part(f"task-{number}", number, len(tasks))
        _train(
            _objective(bnn, number, task, len(targets), config),
            (with_head(inputs, task.head), targets),
            config,
            config["epochs"],
            part,
        )
        yield bnn if not coresets else _refined(bnn, coresets, config)


def _objective(
    bnn: BayesianModule, number: int, task: Task, num_data: int, config: Mapping[str, Any]
) -> ELBO:
    if isinstance(bnn.posterior, Delta):
        return ELBO(bnn, num_data=num_data, temperature=0.0)
    new = [] if task.head is None else [f"heads.{task.head}.*"]
    if number == 0:
        new = ["*"] if task.head is None else ["body.*", *new]
    init_std = config["init_std"] if config["narrow"] else None
    return StreamingELBO(bnn, num_data=num_data, new=new, init_std=init_std)


def _refined(
    bnn: BayesianModule, coresets: Sequence[_Examples], config: Mapping[str, Any]
) -> BayesianModule:
    """Return a copy that is trained on the coresets too."""
    refined = copy.deepcopy(bnn)
    inputs = [torch.cat(parts) for parts in zip(*(inputs for inputs, _ in coresets), strict=True)]
    targets = torch.cat([targets for _, targets in coresets])
    objective = StreamingELBO(refined, num_data=len(targets))
    _train(objective, (inputs, targets), config, config["coreset_epochs"], Context())
    return refined


def _train(
    objective: ELBO, examples: _Examples, config: Mapping[str, Any], epochs: int, context: Context
) -> None:
    inputs, targets = examples
    seed = objective.bnn.seed
    fit(
        objective,
        TensorLoader(
            inputs if len(inputs) > 1 else inputs[0], targets, config["batch_size"], seed=seed
        ),
        epochs=epochs,
        optimizer=partial(torch.optim.Adam, lr=config["lr"], fused=True),
        scheduler=cosine,
        rho_lr_scale=config["rho_lr_scale"],
        checkpoint_dir=context.work,
        resume=True,
        callback=EpochProgress(context, epochs),
    )
