"""Check that a PAC-Bayes bound can hold for a network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._pytree import tree_map_only

from bayesify.distributions.kl import has_closed_form
from bayesify.distributions.likelihoods import CategoricalLikelihood
from bayesify.distributions.posteriors import MeanFieldGaussian
from bayesify.distributions.priors import BlockPrior
from bayesify.estimators import stateless
from bayesify.estimators.network_state import copy_network, frozen_in_evaluation
from bayesify.estimators.out_of_memory import is_out_of_memory
from bayesify.module.bayesian import BayesianModule
from bayesify.module.inputs import Inputs, arguments_of, count_examples
from bayesify.noise.keys import NoiseKey, Stream, kept_generators

__all__ = ["check_certifiable"]


def check_certifiable(bnn: BayesianModule, inputs: Inputs | None = None) -> None:
    """Raise ValueError where training may change what a PAC-Bayes bound does not count.

    The bound is on the posterior against a fixed prior. All else must not depend on the examples
    of the bound.

    Args:
        bnn: the network.
        inputs: some examples, with which the buffers that training changes are found; without
            them only those of PyTorch's normalisation layers are.
    """
    prior = bnn.weight_prior
    parts = prior.priors if isinstance(prior, BlockPrior) else (prior,)
    if not isinstance(bnn.posterior, MeanFieldGaussian):
        raise ValueError(
            "a PAC-Bayes bound needs a posterior with a KL, and is written for a mean field, got "
            f"{type(bnn.posterior).__name__}; use MeanFieldGaussian"
        )
    if prior.is_learned:
        learned = next(type(part).__name__ for part in parts if part.is_learned)
        raise ValueError(
            "a PAC-Bayes bound needs a prior that is fixed before the data, got "
            f"{learned.removesuffix('Block')}, which is learned from them; use Gaussian(std) "
            "around prior_mean"
        )
    if not prior.is_proper:
        raise ValueError(
            f"a PAC-Bayes bound needs a proper prior, got {type(bnn.prior).__name__}, whose KL is "
            "known up to a constant only; use Gaussian(std) around prior_mean"
        )
    if not has_closed_form(bnn.posterior, prior):
        raise ValueError(
            f"a PAC-Bayes bound needs the exact KL, which {type(bnn.prior).__name__} does not "
            "have; use Gaussian(std)"
        )
    if not isinstance(bnn.likelihood, CategoricalLikelihood):
        raise ValueError(
            "a PAC-Bayes bound is on the error of a classifier, got the likelihood "
            f"{type(bnn.likelihood).__name__}; use CategoricalLikelihood"
        )
    if bnn.likelihood.ignore_index is not None:
        raise ValueError(
            "a PAC-Bayes bound counts every example, got a likelihood with ignore_index="
            f"{bnn.likelihood.ignore_index}; leave the examples without a class out, and use "
            "CategoricalLikelihood()"
        )
    if bnn.posterior.mask is not None:
        raise ValueError(
            "a PAC-Bayes bound needs a density of every weight, but some are removed: pruning "
            "chooses them by the data; certify the network before it is pruned"
        )
    own = {id(each) for each in bnn.posterior.parameters()}
    trained = [n for n, p in bnn.named_parameters() if p.requires_grad and id(p) not in own]
    if trained:
        raise ValueError(
            f"a PAC-Bayes bound counts the random parameters only, but {', '.join(trained[:3])} "
            "would be trained too; freeze them with requires_grad_(False), or include them"
        )
    norms = torch.nn.modules.batchnorm
    for name, module in bnn.net.named_modules():
        if isinstance(module, norms._BatchNorm) and module.running_mean is None:
            raise ValueError(
                f"a PAC-Bayes bound is of predictions for one example, but {name} normalises each "
                "by the others of its batch; use GroupNorm or LayerNorm"
            )
        if isinstance(module, norms._NormBase) and module.track_running_stats:
            raise ValueError(
                f"a PAC-Bayes bound does not count statistics that training collects, as {name} "
                "does; use GroupNorm or LayerNorm"
            )
    name = None if inputs is None else _collected(bnn, inputs)
    if name is not None:
        raise ValueError(
            "a PAC-Bayes bound does not count statistics that training collects, but a pass in "
            f"training mode changes the buffer {name}; compute it from the example alone, as "
            "GroupNorm and LayerNorm do, or set the frozen part that holds it to evaluation mode"
        )


@torch.no_grad()
def _collected(bnn: BayesianModule, inputs: Inputs) -> str | None:
    """Return the name of a buffer that depends on the examples or weights of a training pass.

    None if there is none. Other changes are allowed, such as those of a counter: one training pass
    with other examples and weights, but with the same random numbers, ends with the same buffer.

    Raises:
        ValueError: the network fails in training mode.
    """
    if next(bnn.net.buffers(), None) is None:
        return None
    count = count_examples(inputs)
    rows = torch.arange(count)
    noise = bnn.posterior.noise(NoiseKey(bnn.seed, Stream.CERTIFICATE, 0), range(2))
    weights = [bnn.placed(bnn.layout.unflatten(each)) for each in bnn.posterior.draw(noise).weights]

    def arguments(of: Tensor, scale: float) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def chosen(each: Tensor) -> Tensor:
            return scale * each[of] if each.is_floating_point() else each[of]

        return arguments_of(tree_map_only(Tensor, chosen, inputs))

    def buffers_after(draw: int, of: Tensor, scale: float) -> dict[str, Tensor]:
        net = copy_network(bnn.net)
        frozen = frozen_in_evaluation(net, bnn.layout)  # as ``fit`` leaves it
        net.train()
        for part in frozen:
            part.eval()
        with kept_generators():
            try:
                stateless.run_with(net, weights[draw], *arguments(of, scale))
            except Exception as error:  # of any kind that a network raises
                if is_out_of_memory(error):
                    raise
                raise ValueError(
                    "a network with buffers must run in training mode, to find those that training "
                    f"changes, but it failed on {count} examples, which certify passes as they are "
                    "and once more with halved values; let it take any number of examples, or set "
                    "frozen parts to evaluation mode. The error is "
                    f"{type(error).__name__}: {error}"
                ) from error
            # A buffer that every pass fills anew, as a cache, is the same after this.
            stateless.run_with(net.eval(), weights[0], *arguments(rows, 1.0))
        return dict(net.named_buffers())

    one = buffers_after(0, rows, 1.0)
    # Half of the examples, each twice, so that means differ; halved, so that extremes do.
    other = buffers_after(1, rows // 2, 0.5)
    for name in one | other:
        try:  # of any shape and layout, also sparse
            assert_close(other.get(name), one.get(name), rtol=0.0, atol=0.0, equal_nan=True)
        except AssertionError:
            return name
    return None
