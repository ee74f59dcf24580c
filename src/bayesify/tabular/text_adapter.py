"""A pretrained encoder of texts with an adapter, and a head on it and a table's other columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.distributions.likelihoods import Likelihood
from bayesify.distributions.posteriors import Delta
from bayesify.distributions.priors import Gaussian, Prior
from bayesify.estimators import Estimator
from bayesify.module.bayesian import BayesianModule
from bayesify.noise.keys import seeded_initialization
from bayesify.tabular.files import TableError
from bayesify.tabular.model import Noise, TableNet
from bayesify.tabular.pretrained_model import mean_of_tokens

__all__ = ["TextNet", "adapter_baseline", "adapter_module", "adapter_net"]

#: Scale of an adapter's change as a multiple of its rank.
_ALPHA = 2
#: A density that is level as far as weights move, for maximum likelihood.
_LEVEL = Gaussian(1e3)


class TextNet(nn.Module):
    """An encoder of texts, and a network of a table on what it reads and the other inputs.

    A text becomes the mean of the encoder's last states over its tokens, of mean 0 and variance 1
    over the features; a missing text becomes zeros.

    Args:
        encoder: a network of ``transformers`` that takes ``input_ids`` and ``attention_mask``.
        size: number F of its features.
        texts: for each text the places of its tokens among the inputs; no token is negative.
        others: the places of the other inputs.
        head: a network of F inputs for each text, and of the others.

    Example:
        >>> from types import SimpleNamespace
        >>> class Letters(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.states = nn.Embedding(9, 4)
        ...     def forward(self, input_ids, attention_mask):
        ...         return SimpleNamespace(last_hidden_state=self.states(input_ids))
        >>> net = TextNet(Letters(), 4, [range(3)], [3], nn.Linear(5, 2))
        >>> net(torch.tensor([[1.0, 5.0, -1.0, 0.3], [-1.0, -1.0, -1.0, 0.7]])).shape
        torch.Size([2, 2])
    """

    def __init__(
        self,
        encoder: nn.Module,
        size: int,
        texts: Sequence[Sequence[int]],
        others: Sequence[int],
        head: nn.Module,
    ) -> None:
        super().__init__()
        self.encoder, self.head, self.size = encoder, head, size
        self.texts, self.others = [list(places) for places in texts], list(others)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the head's outputs for inputs (N, D)."""
        parts = [self._features(inputs[:, places]) for places in self.texts]
        outputs: Tensor = self.head(torch.cat([*parts, inputs[:, self.others]], dim=1))
        return outputs

    def _features(self, tokens: Tensor) -> Tensor:
        is_token = tokens >= 0
        longest = max(1, int(is_token.sum(1).max()))
        ids, is_token = tokens[:, :longest].clamp_min(0).long(), is_token[:, :longest]
        # A row without tokens attends to one place, since the softmax over none is not a number.
        seen = is_token.clone()
        seen[:, 0] = True
        outputs: Any = self.encoder(input_ids=ids, attention_mask=seen.long())
        mean = mean_of_tokens(outputs.last_hidden_state, is_token)
        return nn.functional.layer_norm(mean, (self.size,)) * is_token.any(1, keepdim=True)


def adapter_net(
    encoder: Any,
    *,
    texts: Sequence[Sequence[int]],
    others: Sequence[int],
    rank: int,
    hidden: Sequence[int],
    num_outputs: int,
    noise: Noise | None = None,
    log_rates: Sequence[float] | None = None,
    seed: int = 0,
) -> Any:
    """Return an encoder with a low-rank adapter and a new head, as ``peft`` wraps it.

    The adapter is on the layers that peft names for this kind of model (queries and values of most
    transformers), and on all linear layers of a kind that it does not know. The encoder's dropout
    is turned off: the noise in training is that of the weights.

    Args:
        encoder: a frozen network of ``transformers``.
        texts: as for :class:`TextNet`.
        others: as for :class:`TextNet`.
        rank: of the adapter.
        hidden: units of each hidden layer of the head, a ``TableNet``.
        num_outputs: classes or targets.
        noise: as for ``TableNet``.
        log_rates: as for ``TableNet``.
        seed: the initial values are a function of it.

    Raises:
        TableError: the encoder has no linear layer.
    """
    from peft import LoraConfig, get_peft_model
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    size = int(encoder.config.hidden_size)
    usual = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(encoder.config.model_type, ())
    known = re.compile(rf"(.*\.)?({'|'.join(map(re.escape, usual))})") if usual else None
    layers = [
        f"encoder.{name}"
        for name, layer in encoder.named_modules()
        if name and (known.fullmatch(name) if known else isinstance(layer, nn.Linear))
    ]
    if not layers:
        raise TableError(
            f"--adapter needs an encoder with linear layers, got {type(encoder).__name__}; leave "
            "--adapter out"
        )
    for module in encoder.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():  # as functions get it, in T5 and BART
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    head = TableNet(
        size * len(texts) + len(others),
        hidden,
        num_outputs,
        noise=noise,
        log_rates=log_rates,
        seed=seed,
    )
    config = LoraConfig(
        r=rank, lora_alpha=_ALPHA * rank, target_modules=layers, modules_to_save=["head"]
    )
    # peft draws initial values from torch's generator.
    with seeded_initialization(seed):
        return get_peft_model(TextNet(encoder, size, texts, others, head), config)


def adapter_module(
    net: Any,
    *,
    likelihood: Likelihood,
    prior: Prior,
    init_std: float,
    estimator: Estimator,
    seed: int,
) -> BayesianModule:
    """Return a variational adapter: the factors A are random, B and the head are trained as points.

    Args:
        net: a network of :func:`adapter_net`.
        likelihood: likelihood of its outputs.
        prior: prior of A.
        init_std: standard deviation of the posterior at the start.
        estimator: gradient estimator.
        seed: all noise is a function of it.
    """
    from bayesify.adapters import bayesian_adapter

    return bayesian_adapter(
        net,
        likelihood=likelihood,
        prior=prior,
        init_std=init_std,
        estimator=estimator,
        output=None,
        seed=seed,
    )


def adapter_baseline(net: Any, *, likelihood: Likelihood, seed: int) -> BayesianModule:
    """Return a plain adapter, to be trained by maximum likelihood.

    Args:
        net: a network of :func:`adapter_net`.
        likelihood: likelihood of its outputs.
        seed: seed of the module.
    """
    trained = [name for name, each in net.named_parameters() if each.requires_grad]
    return BayesianModule(
        net,
        likelihood=likelihood,
        posterior=Delta,
        prior=_LEVEL,
        include=trained,
        exclude=(),
        seed=seed,
    )
