"""Low-rank adapters whose factors are random variables."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from peft import PeftModel
from torch import Tensor, nn

from bayesify.distributions.likelihoods import Likelihood
from bayesify.distributions.priors import Gaussian, Prior
from bayesify.estimators import Estimator, Flipout
from bayesify.module.bayesian import BayesianModule
from bayesify.module.outputs import Output
from bayesify.module.pretrained import PriorMean, RelativeStd
from bayesify.prediction.predictive import P_co

__all__ = ["Factor", "active_adapter", "bayesian_adapter", "names_of"]

#: What of an adapter is random: the factor A or B of x -> x + s B A x, or the new head.
Factor: TypeAlias = Literal["A", "B", "modules_to_save"]

_FOLDERS: dict[Factor, tuple[str, ...]] = {
    "A": ("lora_A", "lora_embedding_A"),
    "B": ("lora_B", "lora_embedding_B"),
    "modules_to_save": ("modules_to_save",),
}


def bayesian_adapter(
    net: PeftModel,
    random: Sequence[Factor] = ("A",),
    *,
    likelihood: Likelihood[P_co] | None = None,
    prior: Prior | None = None,
    init_std: float | Tensor | RelativeStd | None = None,
    prior_mean: PriorMean = None,
    estimator: Estimator | None = None,
    output: Output | None = "logits",
    seed: int = 0,
) -> BayesianModule[P_co]:
    """Make a LoRA network Bayesian: a layer is W + s B A with random A and the W that it had.

    Train it by the ELBO, with N the number of training examples, like any other network. B and a
    new head are points that are trained, as in BLoB (Wang et al. 2024); W stays. An adapter adds
    nothing at its start, since B = 0. ``bnn.to_module().merge_and_unload()`` is the plain network
    with the mean added to W, unless another module shares W: peft adds to the W of both. W shares
    the memory of ``net``: to merge the adapter of ``net`` itself changes it here too.

    With B a point, the bound does not depend on the scale of the prior: A and its prior c times as
    wide with B / c is the same model. What the prior's width decides is where training starts.

    Args:
        net: a network with one active LoRA adapter, as ``peft.get_peft_model`` makes it.
        random: what is random: ``"A"``, ``"B"`` and ``"modules_to_save"``, peft's name for what is
            trained as a whole, such as a new head.
        likelihood: as for ``BayesianModule``.
        prior: the prior of the random weights; default ``Gaussian(0.1)``.
        init_std: as for ``BayesianModule``.
        prior_mean: as for ``BayesianModule``.
        estimator: default ``Flipout()``, whose signs are one for an example, not for a token.
        output: as for ``BayesianModule``; default the logits of Hugging Face's models.
        seed: the seed of all noise.

    Raises:
        TypeError: the network is no ``PeftModel``.
        ValueError: no LoRA adapter is active, several are, or it lacks what should be random.

    Example:
        >>> from peft import LoraConfig, get_peft_model
        >>> net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> config = LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"])
        >>> bnn = bayesian_adapter(get_peft_model(net, config), output=None)
        >>> bnn.layout.num_weights, bnn.layout.names
        (16, ('base_model.model.0.lora_A.default.weight',))
    """
    names = names_of(net, random)
    return BayesianModule(
        net,
        likelihood=likelihood,
        prior=Gaussian(0.1) if prior is None else prior,
        init_std=init_std,
        prior_mean=prior_mean,
        estimator=Flipout() if estimator is None else estimator,
        include=[glob.escape(name) for name in names],
        exclude=(),
        output=output,
        seed=seed,
    )


def names_of(net: nn.Module, random: Sequence[Factor]) -> list[str]:
    """Return the names of the parameters of the active adapter that these words stand for.

    Raises:
        TypeError: the network is no ``PeftModel``, or ``random`` is a single string.
        ValueError: as for :func:`bayesian_adapter`.
    """
    adapter = active_adapter(net)
    if isinstance(random, str):
        raise TypeError(f"random must be a sequence such as ('A',), got the string {random!r}")
    if not isinstance(random, Iterable):
        raise TypeError(f"random must be a sequence such as ('A',), got {random!r}")
    if not random or not set(random) <= set(_FOLDERS):
        raise ValueError(f"random must name one or more of {tuple(_FOLDERS)}, got {tuple(random)}")
    found: list[str] = []
    for factor in random:
        inside = [f".{folder}.{adapter}" for folder in _FOLDERS[factor]]
        those = {
            name: parameter.requires_grad
            for name, parameter in net.named_parameters()
            if any(f"{each}." in f"{name}." for each in inside)
        }
        names = [name for name, is_trained in those.items() if is_trained]
        if those and not names:
            raise ValueError(
                f"the adapter {adapter!r} must have trained parameters of {factor!r}, but all are "
                "frozen; load it by PeftModel.from_pretrained(net, folder, is_trainable=True)"
            )
        if not names:
            raise ValueError(
                f"the adapter {adapter!r} must have trained parameters of {factor!r}, got none; "
                + (
                    "name them in LoraConfig(modules_to_save=[...])"
                    if factor == "modules_to_save"
                    else "bayesian_adapter is for LoRA; for other adapters choose the random "
                    "parameters by BayesianModule(net, include=[...])"
                )
            )
        found += names
    return found


def active_adapter(net: nn.Module) -> str:
    """Return the name of a network's only active adapter.

    Raises:
        TypeError: the network is no ``PeftModel``.
        ValueError: not exactly one is active, or it is merged.
    """
    if not isinstance(net, PeftModel):
        raise TypeError(
            f"net must be a PeftModel, got {type(net).__name__}; write "
            "peft.get_peft_model(net, peft.LoraConfig(...))"
        )
    active: list[str] = list(net.active_adapters)
    if len(active) != 1:
        raise ValueError(
            f"exactly one adapter must be active, got {active}; call net.set_adapter(name)"
        )
    merged = [path for path, layer in net.named_modules() if getattr(layer, "merged", False)]
    if merged:
        raise ValueError(
            f"the adapter must be apart from its network, but it is merged into {merged[0]}, whose "
            "factors are then not used; call net.unmerge_adapter()"
        )
    return active[0]
