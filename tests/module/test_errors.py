"""Every documented error of the core: what must hold, what was got, and how to mend it."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable

import pytest
import torch
from tests.cases import mlp, normals
from tests.loops import loop_over
from torch import Tensor, nn

from bayesify import (
    ELBO,
    BayesianModule,
    CategoricalLikelihood,
    Delta,
    Gaussian,
    GaussianLikelihood,
    Laplace,
    MeanFieldGaussian,
    ParameterLayout,
    ScaleMixture,
    acquire,
    kl_divergence,
    parameter_groups,
    prune,
    rank_one,
    snr,
)
from bayesify.distributions.kl import minibatch_weight
from bayesify.module import networks
from bayesify.module.pruning import snr_decibels
from bayesify.prediction import (
    BernoulliPredictive,
    CategoricalPredictive,
    GaussianPredictive,
    PoissonPredictive,
)

X = torch.zeros(5, 3, dtype=torch.float64)
Y = torch.zeros(5, dtype=torch.int64)
Q = MeanFieldGaussian(torch.zeros(4), std=1.0)
INF, NAN = math.inf, math.nan
ARRAY = "targets must be a tensor, got ndarray; use torch.as_tensor(targets)"


class Pair(nn.Module):
    """A network that returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x


def bnn(**options: object) -> BayesianModule:
    return BayesianModule(mlp(), **options)


def locked() -> nn.Module:
    net = mlp()
    net[0].lock = threading.Lock()  # type: ignore[index,union-attr]
    return net


def frozen() -> nn.Module:
    return mlp().requires_grad_(requires_grad=False)


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2))


def mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())


def complex_net() -> nn.Module:
    return nn.Linear(2, 2, dtype=torch.complex64)


def weight(**options: object) -> float:
    known = {"batch_index": 0, "num_batches": 3, "batch_size": 1, "num_data": 3}
    return minibatch_weight("geometric", **{**known, **options})


def gaussian_loss(outputs: tuple[int, ...], targets: tuple[int, ...]) -> Tensor:
    return GaussianLikelihood().log_prob(torch.zeros(2, *outputs), torch.zeros(targets))


def classes(targets: Tensor, outputs: tuple[int, ...] = (2, 5, 4)) -> Tensor:
    return CategoricalLikelihood().log_prob(torch.zeros(outputs), targets)


of = ParameterLayout.of
categorical = CategoricalPredictive(torch.zeros(5, 4), torch.zeros(5))
gaussian = GaussianPredictive(torch.zeros(2, 5), torch.tensor(1.0))
binary = BernoulliPredictive.from_logits([torch.zeros(5)])
counts = PoissonPredictive(torch.zeros(2, 5))

Row = tuple[Callable[[], object], type[Exception], str]

LAYOUT: list[Row] = [
    (lambda: of(mlp(), include=("head.*",)), ValueError, "include must match.*'head.*' .*0.weight"),
    (lambda: of(mlp(), exclude=("x",)), ValueError, "exclude must match.*'x' matches none of 0.w"),
    (lambda: BayesianModule(mlp(), seed="1"), TypeError, "seed must be a whole number, got '1'"),
    (
        lambda: BayesianModule(mlp()).predict(normals(2, 3), seed=0.5),
        TypeError,
        "seed must be a whole number, got 0.5",
    ),
    (
        lambda: prune(BayesianModule(mlp()), "0.5"),
        TypeError,
        "fraction must be a number, got '0.5'",
    ),
    (lambda: rank_one(BayesianModule(mlp())), TypeError, "weights of net.0 are random already"),
    (lambda: of(mlp(), include="0.*"), TypeError, "got the string '0.*'; write include=('0.*',)"),
    (lambda: of(mlp(), exclude="0.*"), TypeError, "got the string '0.*'; write exclude=('0.*',)"),
    (lambda: of(mlp(), exclude=("*",)), ValueError, "at least one .*exclude=('*',) leave none"),
    (lambda: of(mlp(), include=()), ValueError, "at least one .*include=(), exclude=None"),
    (lambda: of(frozen()), ValueError, "at least one.*requires_grad=False) do not count"),
    (lambda: of(nn.ReLU()), ValueError, "at least one.*a network without parameters"),
    (lambda: of(complex_net()), TypeError, "'weight' is torch.complex64; .*exclude=('weight',)"),
    (lambda: of(mixed()), TypeError, "one dtype.*0.bias is torch.float32, 1.bias is torch.float64"),
    (
        lambda: of(mlp()).slice_of("3.bias"),
        KeyError,
        "of a random parameter, .*2.bias'), got '3.bias'",
    ),
]
POSTERIORS: list[Row] = [
    (lambda: MeanFieldGaussian(torch.zeros(2, 2), 1.0), ValueError, "shape (D,), got shape (2, 2)"),
    (lambda: MeanFieldGaussian(torch.zeros(2).long(), 1.0), ValueError, "dtype torch.int64"),
    (lambda: Delta(torch.zeros(())), ValueError, "shape (D,), got shape ()"),
    *(
        (lambda std=std: MeanFieldGaussian(torch.zeros(2), std), ValueError, f"positive.*got {std}")
        for std in (0.0, -1.0, INF, NAN, 1e-60)
    ),
    (lambda: MeanFieldGaussian(torch.zeros(2), torch.tensor([1.0, 0.0])), ValueError, "positive"),
    (lambda: Delta.centred_on(torch.zeros(2), 0.1), ValueError, "which has no std, got 0.1"),
    (lambda: bnn(posterior=Delta, init_std=0.1), ValueError, "which has no std, got 0.1"),
    (
        lambda: Delta(torch.zeros(2)).log_prob_of(Q.draw(torch.zeros(1, 4))),
        TypeError,
        "no density.*use ELBO, .*or a MeanFieldGaussian",
    ),
]
PRIORS: list[Row] = [
    *(
        (lambda kind=kind, bad=bad: kind(bad), ValueError, f"{name} must be positive.*got {bad}")
        for kind, name in ((Gaussian, "std"), (Laplace, "scale"))
        for bad in (0.0, -1.0, INF, NAN)
    ),
    *(
        (lambda pi=pi: ScaleMixture(pi=pi), ValueError, f"between 0 and 1, got {pi}; .*Gaussian")
        for pi in (0.0, 1.0, -0.5, 2.0, NAN)
    ),
    (lambda: ScaleMixture(0.5, 0.1, 0.2), ValueError, "std1=0.1 and std2=0.2; swap them and use 1"),
    (lambda: ScaleMixture(0.5, 0.1, 0.1), ValueError, "std1 must be larger"),
    (lambda: ScaleMixture(0.5, 1.0, 0.0), ValueError, "std2 must be positive.*got 0.0"),
    (lambda: ScaleMixture(0.5, INF, 0.1), ValueError, "std1 must be positive and finite, got inf"),
]
DIVERGENCE: list[Row] = [
    (lambda: kl_divergence(Q, Gaussian(), method="exact"), ValueError, "monte-carlo.*got 'exact'"),
    (
        lambda: kl_divergence(Q, ScaleMixture(), method="closed"),
        ValueError,
        'no registered closed form; use method="auto"',
    ),
    (lambda: kl_divergence(Q, ScaleMixture()), ValueError, "pass draw=q.draw"),
    (lambda: kl_divergence(Q, Gaussian(), method="monte-carlo"), ValueError, "pass draw=q.draw"),
    (lambda: weight(num_batches=None), ValueError, "num_batches of at least 1, got None"),
    (lambda: weight(num_batches=0), ValueError, "num_batches of at least 1, got 0"),
    (
        lambda: weight(batch_index=None),
        ValueError,
        "0 to 2, got None; call elbo(x, y, batch_index=i)",
    ),
    (lambda: weight(batch_index=3), ValueError, "from 0 to 2, got 3"),
    (lambda: weight(batch_index=-1), ValueError, "from 0 to 2, got -1"),
]
LIKELIHOODS: list[Row] = [
    *(
        (lambda std=std: GaussianLikelihood(std), ValueError, f"std must be positive.*got {std}")
        for std in (0.0, -2.0, INF, NAN)
    ),
    (lambda: gaussian_loss((5,), (5, 1)), ValueError, "(5,).*got (5, 1); nothing is.*squeeze(-1)"),
    (lambda: gaussian_loss((5, 1), (5,)), ValueError, "(5, 1).*got (5,); .*use y.unsqueeze(-1)"),
    (lambda: gaussian_loss((5, 2), (1, 2)), ValueError, "(5, 2).*got (1, 2); nothing is broadcast"),
    (lambda: classes(Y[:, None]), ValueError, "shape (5,), got shape (5, 1); flatten .*argmax(-1)"),
    (lambda: classes(Y[:1]), ValueError, "as many rows as the outputs, shape (5,), got (1,)"),
    (lambda: classes(torch.zeros(5, 4)), ValueError, "shape (5,), got shape (5, 4).*one-hot"),
    (lambda: classes(Y.float()), ValueError, "torch.int64, got torch.float32; .*.long()"),
    (lambda: classes(Y + 4), ValueError, "from 0 to 3 (the network has 4 outputs), got 4"),
    (lambda: classes(Y - 1), ValueError, "from 0 to 3 .*got -1"),
    (lambda: classes(Y, (2, 5)), ValueError, "logits of shape (N, K) .*, got (5,)"),
    (lambda: CategoricalLikelihood().error(X, Y[:, None]), ValueError, "(5,), got shape (5, 1)"),
    (lambda: GaussianLikelihood().error(X, X[:, 0]), ValueError, "(5, 3), got (5,); nothing is"),
]
PREDICTIVE: list[Row] = [
    (lambda: CategoricalPredictive.from_logits([]), ValueError, "at least one .*, got none"),
    (lambda: CategoricalPredictive.from_logits([Y.float()]), ValueError, "(N, ..., K), got (5,)"),
    (lambda: categorical.quantile(0.5), TypeError, "no order.*use mean"),
    (lambda: gaussian.quantile([0.1, 0.9]), TypeError, "q must be one number .*got [0.1, 0.9]; ca"),
    (lambda: gaussian.interval(torch.ones(2)), TypeError, "level must be one number between 0 and"),
    (lambda: categorical.log_prob(Y.numpy()), TypeError, ARRAY),
    (lambda: gaussian.log_prob(Y.numpy()), TypeError, ARRAY),
    (lambda: gaussian.cdf(Y.numpy()), TypeError, ARRAY),
    (lambda: binary.log_prob(Y.numpy()), TypeError, ARRAY),
    (lambda: counts.cdf(Y.numpy()), TypeError, ARRAY),
    (lambda: bnn().log_prob(X, Y.numpy(), 9), TypeError, ARRAY),
    (lambda: categorical.interval(0.5), TypeError, "no order.*use mean"),
    (lambda: categorical.log_prob(Y[:, None]), ValueError, "shape (5,), got shape (5, 1)"),
    (lambda: categorical.log_prob(Y[:2]), ValueError, "shape (5,), got shape (2,)"),
    (lambda: gaussian.log_prob(torch.zeros(5, 1)), ValueError, "(5,), got (5, 1); nothing is"),
    *(
        (lambda q=q: gaussian.quantile(q), ValueError, f"q must .*between 0 and 1, got {q}")
        for q in (0.0, 1.0, -0.1, NAN)
    ),
    *(
        (lambda v=v: gaussian.interval(v), ValueError, f"level must .*between 0 and 1, got {v}")
        for v in (0.0, 1.0, 95, NAN)
    ),
]
MODULE: list[Row] = [
    (lambda: BayesianModule("net"), TypeError, "net must be an nn.Module, got 'net'"),
    (lambda: BayesianModule(nn.Linear), TypeError, "net must be an nn.Module, got <class"),
    (
        lambda: BayesianModule(locked()),
        TypeError,
        "its attribute '0.lock', of type lock, cannot be copied; create it .*__deepcopy__ method",
    ),
    (lambda: rank_one(locked()), TypeError, "its attribute '0.lock', of type lock, cannot be co"),
    (lambda: bnn(likelihood="gaussian"), TypeError, "likelihood must be a .*got 'gaussian'"),
    (lambda: bnn(likelihood=GaussianLikelihood), TypeError, "likelihood must be a .*got <class"),
    (lambda: bnn(prior=1.0), TypeError, "prior must be a .*Prior.*, got 1.0"),
    (lambda: bnn(estimator="flipout"), TypeError, "estimator must be an .*got 'flipout'"),
    (lambda: bnn(posterior="delta"), TypeError, "a class such as MeanField.*got 'delta'"),
    (
        lambda: bnn(posterior=Q),
        TypeError,
        "a class such as MeanFieldGaussian or Delta, or a family.*got Mean",
    ),
    (lambda: bnn(init_std=0.0), ValueError, "std must be positive and finite, got 0.0"),
    (lambda: bnn().predict(X, 0), ValueError, "num_samples must be at least 1, got 0"),
    (lambda: bnn().predict(X, batch_size=0), ValueError, "batch_size must be at least 1, got 0"),
    (lambda: bnn().predict_mean(X, batch_size=-1), ValueError, "batch_size .*, got -1"),
    (lambda: bnn().predict(X, "9"), TypeError, "num_samples must be a whole number, got '9'"),
    (lambda: bnn().predict(X[0, 0]), ValueError, "N examples, got a single number; make it a row"),
    (lambda: ELBO(bnn(), num_data="9"), TypeError, "num_data must be a whole number, got '9'"),
    (
        lambda: ELBO(bnn(), num_data=9, num_batches=2.5),
        TypeError,
        "num_batches must be a whole number, got 2.5",
    ),
    (lambda: ELBO(bnn(), num_data=9, num_batches=0), ValueError, "num_batches must be at least 1"),
    (
        lambda: Gaussian(torch.ones(3)),
        TypeError,
        "std must be one number, got shape (3,); for priors that differ between parameters use ByG",
    ),
    (lambda: Gaussian("a"), TypeError, "std must be a number, got 'a'"),
    (lambda: ScaleMixture(pi="x"), TypeError, "pi must be a number, got 'x'"),
    (lambda: snr(ELBO(bnn(), num_data=9)), TypeError, "got ELBO; pass its network, elbo.bnn"),
    (lambda: prune(mlp(), 0.5), TypeError, "prune needs .*got Sequential; make one: Bayes"),
    (lambda: acquire(mlp(), X, 2), TypeError, "acquire needs .*got Sequential; make one: Bayes"),
    (
        lambda: bnn().predict(X).log_prob(Y.double()),
        ValueError,
        "indices of dtype torch.int64, got torch.float64; convert them with .long()",
    ),
    (
        lambda: ELBO(bnn(), num_data=9)(X, Y.double()),
        ValueError,
        "convert them with .long(); for numbers pass likelihood=GaussianLikelihood() to Bayesian",
    ),
    (lambda: bnn().predict(X[:0]), ValueError, "number of examples N > 0 .*got lengths [0]"),
    (lambda: bnn().predict((X, X[:2])), ValueError, "same number of examples .*got lengths [2, 5]"),
    (
        lambda: bnn().predict(X.numpy()),
        TypeError,
        "tensors whose first axis is N examples, or a .*, got ndarray; use torch.as_tensor(x)",
    ),
    (
        lambda: bnn().predict([X.numpy()] * 2),
        TypeError,
        "got ndarray; use torch.as_tensor(x)",
    ),
    (
        lambda: setattr(bnn(), "seed", 2.5),
        TypeError,
        "seed must be a whole number, got 2.5",
    ),
    (
        lambda: setattr(bnn(), "seed", 2**127),
        ValueError,
        "seed must have at most 128 bits with its sign, got 170",
    ),
    (
        lambda: bnn().predict([*X]),
        TypeError,
        "arguments of Sequential.forward, which takes 1, got 5 tensors; .*use torch.stack(x)",
    ),
    (
        lambda: parameter_groups(bnn()),
        TypeError,
        "parameter_groups needs an objective such .*got B",
    ),
    (lambda: bnn().predict(()), ValueError, "same number of examples .*got lengths []"),
    (
        lambda: BayesianModule(Pair()).predict(X.float()),
        TypeError,
        "one tensor.*tuple; pick it with .*result[0]",
    ),
    (lambda: ELBO(BayesianModule(Pair()), num_data=5)(X.float(), Y), TypeError, "tuple; pick it"),
]
NETWORKS: list[Row] = [
    *(
        (lambda h=hidden: networks.mlp(3, h, 2), ValueError, f"one unit each, got {list(hidden)}")
        for hidden in ((), (4, 0))
    ),
]
OBJECTIVE: list[Row] = [
    (lambda: ELBO(bnn(), num_data=9)(X, Y.numpy()), TypeError, ARRAY),
    (lambda: ELBO(bnn(), num_data=0), ValueError, "num_data must be at least 1, got 0"),
    (lambda: ELBO(bnn(), num_data=5, num_samples=0), ValueError, "num_samples must .*got 0"),
    *(
        (lambda t=t: ELBO(bnn(), num_data=5, temperature=t), ValueError, f"temperature .*got {t}")
        for t in (-0.1, INF, NAN)
    ),
    (lambda: ELBO(bnn(), num_data=5, kl="exact"), ValueError, "kl method must be .*got 'exact'"),
    (
        lambda: ELBO(bnn(prior=ScaleMixture()), num_data=5, kl="closed"),
        ValueError,
        'no registered closed form.*method="auto"',
    ),
    (lambda: ELBO(bnn(), num_data=5, kl_weighting="x"), ValueError, "kl_weighting .*got 'x'"),
    (
        lambda: ELBO(bnn(), num_data=5, kl_weighting="geometric"),
        ValueError,
        "num_batches of at least 1, got None",
    ),
    (
        lambda: ELBO(bnn(), num_data=5, kl_weighting="geometric", num_batches=2)(X, Y),
        ValueError,
        "from 0 to 1, got None; call elbo(x, y, batch_index=i)",
    ),
    (lambda: ELBO(bnn(), num_data=5)(X, Y[:, None]), ValueError, "shape (5,), got shape (5, 1)"),
]
PRUNING: list[Row] = [
    *(
        (lambda f=f: prune(bnn(), f), ValueError, f"between 0 and 1, got {f}")
        for f in (-0.1, 1.5, 95, NAN)
    ),
    *(
        (lambda call=call: call(bnn(posterior=Delta)), TypeError, "got Delta; train with posterior")
        for call in (snr, snr_decibels, lambda point: prune(point, 0.5))
    ),
]
ROWS = [
    *LAYOUT,
    *POSTERIORS,
    *PRIORS,
    *DIVERGENCE,
    *LIKELIHOODS,
    *PREDICTIVE,
    *MODULE,
    *NETWORKS,
    *OBJECTIVE,
    *PRUNING,
]


@loop_over(("call", "kind", "message"), ROWS)
def test_a_documented_error(
    call: Callable[[], object], kind: type[Exception], message: str
) -> None:
    # ".*" stands for anything, all else for itself.
    pattern = ".*".join(re.escape(part) for part in message.split(".*"))
    with pytest.raises(kind) as caught:
        call()
    assert caught.type is kind
    text = re.sub(r"\s+", " ", str(caught.value))
    assert re.search(pattern, text), f"{text!r} lacks {message!r}"


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_parameter_is_refused_until_it_is_initialised() -> None:
    net = lazy()
    with pytest.raises(TypeError, match=r"'1\.weight' is lazy; pass one batch"):
        of(net)
    net(torch.zeros(1, 3))
    assert of(net).num_weights == 20
