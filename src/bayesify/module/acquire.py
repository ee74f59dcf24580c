"""Active learning: choose the unlabelled examples whose labels are worth asking for."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from bayesify.distributions.posteriors import Delta
from bayesify.module.bayesian import BayesianModule
from bayesify.module.inputs import Inputs, count_examples, inputs_of
from bayesify.module.random_network import check_bayesian
from bayesify.noise.arguments import whole_number
from bayesify.noise.keys import Stream, derived_seed
from bayesify.prediction import BernoulliPredictive, CategoricalPredictive
from bayesify.prediction.acquisition import batch_bald, epig

__all__ = ["Acquisition", "acquire"]

Acquisition = Literal["batch-bald", "bald", "epig", "entropy", "random"]


def acquire(
    bnn: BayesianModule,
    pool: Inputs | Iterable[Any],
    num_examples: int,
    method: Acquisition = "batch-bald",
    *,
    target_inputs: Inputs | None = None,
    num_samples: int = 100,
    batch_size: int | Literal["all"] | None = None,
    max_memory: int | str | None = None,
    seed: int | None = None,
) -> Tensor:
    """Choose examples of a pool to be labelled next.

    Label them, move them from the pool to the training data, train anew, and ask again. Where an
    example has several labels, ``"bald"`` and ``"entropy"`` add up what each of them has alone.

    ========================  ==================================================================
    method                    chooses
    ========================  ==================================================================
    ``"batch-bald"``          the batch that says most about the weights, see ``batch_bald``
    ``"bald"``                the largest mutual information of label and weights, each alone
    ``"epig"``                the largest information about predictions at ``target_inputs``
    ``"entropy"``             the largest entropy, noise of the labels included: a baseline
    ``"random"``              at random: the baseline to beat
    ========================  ==================================================================

    Args:
        bnn: a trained classifier.
        pool: the inputs of N unlabelled examples, as for ``BayesianModule.predict``.
        num_examples: the number of examples to choose, from 1 to N.
        method: as above.
        target_inputs: for ``"epig"``, some hundred inputs such as those that will be predicted.
        num_samples: S, weight samples of the prediction. ``"batch-bald"`` and ``"epig"`` hold the
            S * N * K probabilities of the pool; from a large pool take a random part.
        batch_size: as for ``BayesianModule.predict``; with ``"all"`` an example is what has a row
            of outputs, such as the nodes of a graph.
        max_memory: as for ``BayesianModule.predict``, for each prediction.
        seed: of the weight samples and of random choices; None stands for the seed of the module.

    Returns:
        Indices into the pool, int64, shape (num_examples,), on the CPU, the first choice first.

    Raises:
        TypeError: ``bnn`` is another object, such as an ensemble, the likelihood is not of classes
            or binary labels, which ``"random"`` does not need, or ``num_examples``,
            ``num_samples`` or the seed is no whole number.
        ValueError: ``method`` is unknown, ``num_examples`` is out of range, ``target_inputs`` are
            missing, or given for another method, a score of the pool is not finite, a method that
            measures information is given a ``Delta`` or fewer than two weight samples,
            ``"batch-bald"`` or ``"epig"`` several labels an example, or some of these are to be
            ignored.

    Example:
        >>> from torch import nn
        >>> net = nn.Linear(3, 2)
        >>> _ = nn.init.zeros_(net.weight)
        >>> bnn = BayesianModule(net, init_std=1.0)
        >>> x = torch.tensor([[0.0, 0.0, 0.0], [5.0, 0.0, 0.0], [5.0, 0.0, 0.0], [0.0, 5.0, 0.0]])
        >>> acquire(bnn, x, 2).sort().values
        tensor([1, 3])
    """
    if hasattr(bnn, "members"):
        raise TypeError(
            f"acquire needs a BayesianModule, got {type(bnn).__name__}; rank its prediction: "
            "bayesify.prediction.acquisition.batch_bald(ensemble.predict(x, keep_samples=True), "
            "num_examples)"
        )
    check_bayesian(bnn, "acquire")
    if method not in get_args(Acquisition):
        raise ValueError(
            f"method must be one of {', '.join(get_args(Acquisition))}, got {method!r}"
        )
    if (method == "epig") is (target_inputs is None):
        raise ValueError(
            'target_inputs must be given for method="epig" and for no other: the inputs whose '
            f"predictions matter; got method={method!r} "
            f"{'without' if target_inputs is None else 'with'} target_inputs"
        )
    if method not in ("entropy", "random"):
        if isinstance(bnn.posterior, Delta):
            raise ValueError(
                f'method="{method}" needs a posterior with a spread, such as MeanFieldGaussian, '
                "got Delta, under which a label says nothing about the weights; use "
                'method="entropy"'
            )
        if whole_number("num_samples", num_samples) < 2:
            raise ValueError(
                f'num_samples must be at least 2 for method="{method}", which compares weight '
                f'samples, got {num_samples}; use some hundred, or method="entropy"'
            )
    pool = inputs_of(pool, bnn.posterior.mean.device, bnn.net)
    is_whole = batch_size == "all"
    count = len(bnn.mean_outputs(pool, batch_size="all")) if is_whole else count_examples(pool)
    num_examples = whole_number("num_examples", num_examples, None)
    if not 1 <= num_examples <= count:
        raise ValueError(
            f"num_examples must lie from 1 to {count}, the number of examples in the pool, got "
            f"{num_examples}"
        )
    seed = bnn.seed if seed is None else seed
    if method == "random":
        generator = torch.Generator().manual_seed(derived_seed(seed, Stream.ACTING, 0))
        return torch.randperm(count, generator=generator)[:num_examples]
    predict = partial(
        bnn.predict,
        num_samples=num_samples,
        keep_samples=method in ("batch-bald", "epig"),
        batch_size=batch_size,
        max_memory=max_memory,
        seed=seed,
    )
    predictive = predict(pool)
    if not isinstance(predictive, CategoricalPredictive | BernoulliPredictive):
        raise TypeError(
            "acquire needs a likelihood of classes or binary labels, got "
            f"{type(bnn.likelihood).__name__}; for numbers rank by bnn.predict(pool).epistemic"
        )
    ignored = getattr(bnn.likelihood, "ignore_index", None)
    if ignored is not None and predictive.total.numel() != count:
        raise ValueError(
            f"the labels of an example must all count, got a likelihood with ignore_index={ignored}"
            ", and acquire does not know which of the pool's are padding; add up "
            "bnn.predict(pool).epistemic over those that count, and take its topk"
        )
    if method in ("batch-bald", "epig") and predictive.total.numel() != count:
        raise ValueError(
            f'method="{method}" needs one label an example, got labels of shape '
            f'{tuple(predictive.total.shape)}; use method="bald" or "entropy", which add them up'
        )
    if method == "batch-bald":
        return batch_bald(predictive, num_examples, seed=seed)[0].cpu()
    if target_inputs is not None:
        scores = epig(predictive, predict(target_inputs))
    else:
        scores = predictive.epistemic if method == "bald" else predictive.total
    scores = scores.reshape(count, -1).sum(1)
    if not bool(scores.isfinite().all()):
        bad = int((~scores.isfinite()).nonzero()[0])
        raise ValueError(
            f"the scores of the pool must be finite, got {float(scores[bad])} of example {bad}; "
            "leave out examples that are no numbers"
        )
    return scores.topk(num_examples).indices.cpu()
