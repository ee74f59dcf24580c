"""A posterior around a trained adapter, without training (Shi et al. 2024)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from bayesify.adapters.lora import active_adapter, bayesian_adapter
from bayesify.distributions.likelihoods import Likelihood
from bayesify.distributions.posteriors import MeanFieldGaussian
from bayesify.distributions.softplus import inverse_softplus
from bayesify.estimators.network_state import copy_network
from bayesify.module.bayesian import BayesianModule
from bayesify.module.outputs import Output
from bayesify.noise.arguments import positive_number, whole_number
from bayesify.prediction.predictive import P_co
from bayesify.training.minibatches import pair_of

__all__ = ["widen"]

_FIRST, _LARGEST = 1e-3, 1e3


def widen(
    net: nn.Module,
    loader: Iterable[Any],
    tolerance: float = 0.01,
    *,
    num_samples: int = 10,
    precision: float = 0.05,
    likelihood: Likelihood[P_co] | None = None,
    output: Output | None = "logits",
    seed: int = 0,
) -> BayesianModule[P_co]:
    """Return the widest isotropic posterior around a trained LoRA adapter that predicts as well.

    Training-free Bayesianization (Shi et al. 2024, *Training-Free Bayesianization for Low-Rank
    Adapters of Large Language Models*): with B = U diag(d) V^T the adapter is rewritten as (U
    diag(d)) (V^T A), and row i of the new A has the standard deviation sigma / d_i. The change of
    each layer's W then has noise of one standard deviation sigma in the columns of U. Sigma is the
    largest with which the nll on ``loader``, averaged over weight samples, is at most ``tolerance``
    above that of the trained adapter; it is found by doubling and bisection, in about 15
    predictions of the whole loader. It fits no bound, so that the KL says nothing.

    Args:
        net: a ``PeftModel`` with one trained LoRA adapter; it is not changed. Its W is shared, so
            that merging its adapter later changes the returned network too.
        loader: minibatches as ``bayesify.fit`` takes them: some hundred held-out examples.
        tolerance: the nll that may be lost, in nats per example.
        num_samples: weight samples that a prediction averages.
        precision: the relative error of sigma at which the bisection ends.
        likelihood: as for ``BayesianModule``.
        output: as for ``BayesianModule``; default the logits of Hugging Face's models.
        seed: the seed of all noise.

    Returns:
        The network; ``bnn.posterior.std`` holds the standard deviations.

    Raises:
        TypeError: the network is no ``PeftModel``, or ``num_samples`` is no whole number.
        ValueError: there is no LoRA adapter, it is merged or one of a grouped convolution, its B is
            0, a parameter is out of its range, the loader is empty or can be read only once, or the
            nll is not finite or rises by more than the tolerance with the least noise.

    Warns:
        UserWarning: no noise loses as much, so that the data do not decide.

    Example:
        >>> from peft import LoraConfig, get_peft_model
        >>> _ = torch.manual_seed(0)
        >>> config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
        >>> net = get_peft_model(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), config)
        >>> x = torch.randn(50, 8)
        >>> bnn = widen(net, [(x, net(x).argmax(-1))], output=None)
        >>> bnn.posterior.std.shape
        torch.Size([16])
    """
    active_adapter(net)
    if iter(loader) is loader:
        raise ValueError(
            "the loader must be one that can be read several times, got "
            f"{type(loader).__name__}; pass a DataLoader, or a list of minibatches"
        )
    for name, value in (("tolerance", tolerance), ("precision", precision)):
        positive_number(name, value)
    num_samples = whole_number("num_samples", num_samples)
    rotated: Any = copy_network(net)
    for name, parameter in rotated.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:  # of an adapter that was loaded to predict
            parameter.requires_grad_(True)
    scales = _rotate(rotated)
    bnn = bayesian_adapter(
        rotated, likelihood=likelihood, output=output, init_std=_FIRST, seed=seed
    )
    inverse = bnn.layout.flatten(scales)
    posterior = bnn.posterior
    assert isinstance(posterior, MeanFieldGaussian)

    @torch.no_grad()
    def set_sigma(sigma: float) -> None:
        posterior.rho.copy_(inverse_softplus(sigma * inverse))

    bound = _nll(bnn, loader, 0) + tolerance
    if not math.isfinite(bound):
        raise ValueError(
            "the adapter's nll on the loader must be finite, got "
            f"{bound - tolerance}; leave out data that are no numbers"
        )

    def is_good(sigma: float) -> bool:
        set_sigma(sigma)
        return _nll(bnn, loader, num_samples) <= bound

    low, high = 0.0, _FIRST
    while high < _LARGEST and is_good(high):
        low, high = high, 2.0 * high
    if low == 0.0:
        low = high / 2.0
        while not is_good(low):
            if low <= _FIRST * 1e-6:
                raise ValueError(
                    f"the tolerance must leave room for some noise, but with {tolerance:g} nats an "
                    "example even the least loses more; raise it, or num_samples"
                )
            low, high = low / 2.0, low
    if high >= _LARGEST:
        warnings.warn(
            f"no noise loses {tolerance:g} nats an example, so that the data decide nothing: sigma "
            f"is at its limit, {low:g}; lower the tolerance, or pass other data",
            UserWarning,
            stacklevel=2,
        )
    while high < _LARGEST and high / low > 1.0 + precision:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_good(middle) else (low, middle)
    set_sigma(low)
    return bnn


@torch.no_grad()
def _nll(bnn: BayesianModule, loader: Iterable[Any], num_samples: int) -> float:
    """Return the nll in nats per example, of the mean weights or averaged over weight samples."""
    total, count = 0.0, 0
    for batch in loader:
        inputs, targets = pair_of(batch)
        if num_samples:
            found = bnn.log_prob(inputs, targets, num_samples)
        else:
            outputs = bnn.mean_outputs(inputs).unsqueeze(0)
            found = bnn.likelihood.log_prob(outputs, targets.to(outputs.device))
        total -= float(found.double().sum())
        count += len(targets)
    if not count:
        raise ValueError("the loader must have data, got none")
    return total / count


@torch.no_grad()
def _rotate(net: nn.Module) -> dict[str, Tensor]:
    """Rewrite B A as (U diag(d)) (V^T A) in place; return 1 / d for each weight of the new A."""
    inverses: dict[str, Tensor] = {}
    adapter = active_adapter(net)
    for path, layer in net.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        if type(layer).__name__ == "ParamWrapper":
            raise ValueError(
                "widen takes layers and no target_parameters, whose factors hold several experts, "
                f"got an adapter of {path}"
            )
        if adapter in layer.lora_embedding_A:
            raise ValueError(f"widen takes layers and no embeddings, got an adapter of {path}")
        if adapter not in layer.lora_A:
            continue
        if getattr(layer.lora_B[adapter], "groups", 1) > 1:
            raise ValueError(
                "widen takes no grouped convolutions, whose groups have factors of their own, got "
                f"an adapter of {path}"
            )
        a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        rank = b.shape[1]
        u, d, vh = torch.linalg.svd(b.double().flatten(1), full_matrices=rank > len(b))
        u, d = (nn.functional.pad(each, (0, rank - each.shape[-1])) for each in (u, d))
        if not float(d[0]) > 0.0:
            raise ValueError(
                f"the adapter must be trained, but B of {path} is 0, so that no noise in A shows"
            )
        b.copy_((u * d).view_as(b))
        a.copy_((vh @ a.double().flatten(1)).view_as(a))
        # A direction that B hardly has would have a standard deviation without bound.
        inverse = (1.0 / d.clamp(min=1e-4 * float(d[0]))).to(a)
        rows = inverse.unsqueeze(1).expand(a.flatten(1).shape)
        inverses[f"{path}.lora_A.{adapter}.weight"] = rows.reshape(a.shape)
    return inverses
