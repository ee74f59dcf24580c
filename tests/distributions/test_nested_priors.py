"""Priors made of priors, in use: their errors, in the objective, in files, and compiled."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases import PRIORS, Case, mlp, normals
from tests.distributions.test_priors_by_group import MLP, NESTED, posterior
from tests.loops import loop_over
from tests.saved_networks import check_same, trained
from torch import Tensor

from bayesify import (
    ELBO,
    BayesianModule,
    ByGroup,
    Delta,
    Gaussian,
    Laplace,
    MeanFieldGaussian,
    Prior,
    ScaleMixture,
    StudentT,
    kl_divergence,
    load,
    prune,
    save,
)
from bayesify.distributions.kl import has_closed_form
from bayesify.distributions.priors import BlockPrior
from bayesify.io import StorageError, model_meta, model_tensors, read_tensors, write_tensors
from bayesify.noise.keys import NoiseKey, Stream

ALL: dict[str, Prior] = {"student-t": StudentT(4.0, 0.5), **NESTED}
COMPILED: dict[str, Prior] = {**PRIORS, **NESTED}
CASE = Case("gaussian", "mean-field", "categorical")
each = loop_over("name", ALL)
each_centre = loop_over("prior_mean", [None, "initial"])


def bnn(name: str, **options: Any) -> BayesianModule:
    """Away from its initial values, so that a prior mean is not the posterior's."""
    return trained(BayesianModule(mlp(), prior=ALL[name], seed=11, **options))


def groups(*pairs: object) -> Prior:
    return ByGroup(pairs)


ERRORS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: ByGroup({}), ValueError, "at least one pattern, got none; write ByGroup({"),
    (
        lambda: ByGroup("*"),
        TypeError,
        "mapping of name patterns or pairs, got '*'; write ByGroup({",
    ),
    (lambda: ByGroup(Gaussian()), TypeError, "mapping .*got Gaussian(std=1.0); write"),
    (lambda: ByGroup([Gaussian()]), TypeError, "mapping .*got [Gaussian(std=1.0)]; write"),
    (lambda: groups((3, Gaussian())), TypeError, "patterns of parameter names such as .*got 3"),
    (lambda: groups(("*", 0.3)), TypeError, "priors such as Gaussian(0.3), got 0.3 for '*'"),
    (
        lambda: groups(("*", Gaussian)),
        TypeError,
        "got <class 'bayesify.distributions.priors.Gaussian'> for '*'",
    ),
    (lambda: groups(("*", NESTED["closed"])), TypeError, "ByGroup(.*for '*'; list the patterns"),
    (
        lambda: groups(("*", BlockPrior((1,), (Gaussian(),)))),
        TypeError,
        "got BlockPrior(.*for '*'; list",
    ),
    (
        lambda: ByGroup({"*.bias": Gaussian()}).for_layout(MLP),
        ValueError,
        "every random parameter a prior, but no pattern matches '0.weight'; add \"*\"",
    ),
    (
        lambda: ByGroup({"head.*": Gaussian(), "*": Laplace()}).for_layout(MLP),
        ValueError,
        "decide a random parameter, but 'head.*' matches none of 0.weight, 0.bias, 2.weight, 2.bi",
    ),
    (
        lambda: ByGroup({"0.*": Gaussian(), "0.bias": Laplace(), "*": Laplace()}).for_layout(MLP),
        ValueError,
        "but '0.bias' matches only 0.bias, which earlier patterns decide; move it before them or",
    ),
    (
        lambda: BayesianModule(mlp(), include=("0.*",), prior=ByGroup({"2.*": Gaussian()})),
        ValueError,
        "no pattern matches '0.weight'",
    ),
    (
        lambda: NESTED["closed"].log_prob(torch.zeros(44)),
        TypeError,
        "which parameter .*use prior.for_layout(bnn.layout).log_prob(weights)",
    ),
    (lambda: BlockPrior((1, 2), (Gaussian(),)), ValueError, "one owner for each of 2 sizes"),
    (
        lambda: BlockPrior((1, 2), (Gaussian(),), (0, 1)),
        ValueError,
        "for each of 1 priors, got owners",
    ),
    (
        lambda: NESTED["closed"].for_layout(MLP).log_prob(torch.zeros(43)),
        ValueError,
        "is for 44 weights, got 43; create one for this network with prior.for_layout(bnn.layout)",
    ),
    (
        lambda: kl_divergence(
            MeanFieldGaussian(torch.zeros(3), 1.0), NESTED["closed"].for_layout(MLP)
        ),
        ValueError,
        "is for 44 weights, got 3",
    ),
    (
        lambda: kl_divergence(posterior(), NESTED["closed"]),
        TypeError,
        "a ByGroup prior must know which .*give prior.for_layout(bnn.layout)",
    ),
    (lambda: has_closed_form(posterior(), NESTED["closed"]), TypeError, "a ByGroup prior must"),
    (
        lambda: kl_divergence(posterior(), Gaussian(), prior_mean=torch.zeros(1)),
        ValueError,
        "prior_mean must hold one number for each weight, shape (44,), got shape (1,)",
    ),
]


@loop_over(("call", "kind", "message"), ERRORS)
def test_a_documented_error(
    call: Callable[[], object], kind: type[Exception], message: str
) -> None:
    pattern = ".*".join(re.escape(part) for part in message.split(".*"))
    with pytest.raises(kind, match=pattern) as caught:
        call()
    assert caught.type is kind
    assert "\n" not in str(caught.value)


@each
@each_centre
def test_the_objective_has_the_kl_from_the_networks_own_prior(
    name: str, prior_mean: str | None
) -> None:
    network = bnn(name, prior_mean=prior_mean)
    elbo = ELBO(network, num_data=50, num_samples=2)
    terms = elbo(*CASE.data(6))
    noise = NoiseKey(11, Stream.TRAINING, 0).normals(range(2), 44, dtype=torch.float64)
    q, centre = network.posterior, None
    if prior_mean is not None:
        centre = MLP.flatten(dict(mlp().named_parameters())).detach()
    expected = kl_divergence(q, ALL[name].for_layout(MLP), q.draw(noise), prior_mean=centre)
    assert terms.kl.item() == pytest.approx(expected.item(), rel=1e-12)
    assert terms.loss.item() == pytest.approx((terms.nll + terms.kl / 50).item(), rel=1e-12)
    terms.loss.backward()
    assert bool((q.mean.grad != 0.0).all())


@each_centre
def test_a_point_estimate_has_the_density_of_each_block(prior_mean: str | None) -> None:
    network = bnn("student-t", prior_mean=prior_mean, posterior=Delta)
    mixed = trained(
        BayesianModule(
            mlp(), prior=NESTED["monte-carlo"], prior_mean=prior_mean, posterior=Delta, seed=11
        )
    )
    for found in (network, mixed):
        shift = 0.0 if prior_mean is None else found.prior_mean
        terms = ELBO(found, num_data=50)(*CASE.data(6))
        expected = -found.weight_prior.log_prob(found.posterior.mean - shift).sum()
        assert terms.penalty.item() == pytest.approx(expected.item(), rel=1e-12)


@each
@each_centre
def test_a_network_comes_back_with_its_prior(
    name: str, prior_mean: str | None, tmp_path: Path
) -> None:
    network = bnn(name, prior_mean=prior_mean)
    save(network, tmp_path / "a")
    again = load(tmp_path / "a", mlp(seed=9))
    check_same(again, network, CASE.data(6)[0])
    assert again.weight_prior == network.weight_prior
    assert again.prior == ALL[name]
    terms = [ELBO(b, num_data=50)(*CASE.data(6)).loss for b in (network, again)]
    assert torch.equal(*terms)


@each
def test_a_pruned_networks_prior_mean_is_stored_where_weights_are_left(
    name: str, tmp_path: Path
) -> None:
    network = prune(bnn(name, prior_mean="initial"), 0.75)
    kept = network.posterior.mask
    assert int(kept.sum()) == 11
    stored = model_tensors(network)
    assert {stored[n].numel() for n in ("posterior.mean", "posterior.rho", "prior_mean")} == {11}
    save(network, tmp_path / "small")
    again = load(tmp_path / "small", mlp(seed=9))
    assert torch.equal(again.prior_mean[kept], network.prior_mean[kept])
    assert torch.equal(again.posterior.mask, kept)
    noise = normals(3, 44, seed=1)
    kls = [
        kl_divergence(b.posterior, b.weight_prior, b.posterior.draw(noise), prior_mean=b.prior_mean)
        for b in (network, again)
    ]
    assert torch.equal(*kls)


@each
def test_a_prior_is_described_in_json_as_it_is_read_again(name: str) -> None:
    """A run that goes on compares its own description with that of its checkpoint."""
    described = model_meta(bnn(name))["prior"]
    assert json.loads(json.dumps(described)) == described


def test_the_descriptions_of_plain_priors_have_not_changed() -> None:
    """Files that were written before there were nested priors must load."""
    known = {
        '{"type": "Gaussian", "std": 0.3}': Gaussian(0.3),
        '{"type": "Laplace", "scale": 0.5}': Laplace(0.5),
        '{"type": "ScaleMixture", "pi": 0.75, "std1": 1.0, "std2": 0.5}': ScaleMixture(std2=0.5),
    }
    for text, prior in known.items():
        described = model_meta(BayesianModule(mlp(), prior=prior))["prior"]
        assert json.dumps(described) == text


class Own(Prior):
    """A prior that bayesify does not know."""

    def log_prob(self, weights: Tensor) -> Tensor:
        return -weights.abs() - math.log(2.0)


def test_a_prior_of_ones_own_in_a_group_is_passed_by_hand(tmp_path: Path) -> None:
    prior = ByGroup({"*.bias": Own(), "*": Gaussian(0.3)})
    save(BayesianModule(mlp(), prior=prior), tmp_path / "a")
    assert load(tmp_path / "a", mlp(), prior=prior).prior is prior
    with pytest.raises(StorageError, match=r"has no prior named .*Own.*pass your own to load"):
        load(tmp_path / "a", mlp())


GROUP = {"type": "Gaussian", "std": 0.3}
WRONG: list[Any] = [
    None,
    3,
    "Gaussian",
    [],
    {},
    {"type": "ByGroup", "groups": []},
    {"type": "ByGroup", "groups": [["*", None]]},
    {"type": "ByGroup", "groups": [["*", {"std": 0.3}]]},
    {"type": "ByGroup", "groups": [["*", {"type": "Prior"}]]},
    {"type": "ByGroup", "groups": [["*", {"type": "empirical_variance"}]]},
    {"type": "ByGroup", "groups": [["*", {"type": ["Gaussian"]}]]},
    {"type": "ByGroup", "groups": [["*", {**GROUP, "mean": 0.0}]]},
    {"type": "ByGroup", "groups": [["*", {"type": "ByGroup", "groups": [["*", GROUP]]}]]},
    {"type": "ByGroup", "groups": [["0.*", GROUP]]},
    {"type": "ByGroup", "groups": [["*", GROUP], ["0.*", GROUP]]},
    {"type": "EmpiricalGaussian", "min_size": 0},
    {"type": "EmpiricalGaussian", "min_size": "x"},
    {"type": "StudentT", "df": -1.0},
    {"type": "BlockPrior", "sizes": [44], "priors": [GROUP, GROUP], "owners": []},
]


@loop_over("described", WRONG)
def test_a_wrong_description_is_refused(described: Any, tmp_path: Path) -> None:
    save(bnn("closed"), tmp_path / "a")
    tensors, meta = read_tensors(tmp_path / "a")
    write_tensors(tmp_path / "a", tensors, meta | {"model": meta["model"] | {"prior": described}})
    with pytest.raises(StorageError, match=str(tmp_path)) as caught:
        load(tmp_path / "a", mlp())
    assert "\n" not in str(caught.value)


@loop_over("wrong", [torch.zeros(43), torch.zeros(2, 22), torch.zeros(())])
def test_a_wrong_prior_mean_is_refused(wrong: Tensor, tmp_path: Path) -> None:
    for network in (bnn("closed", prior_mean="initial"), bnn("closed")):
        save(network, tmp_path / "a")
        tensors, meta = read_tensors(tmp_path / "a")
        write_tensors(tmp_path / "a", tensors | {"prior_mean": wrong}, meta)
        with pytest.raises(StorageError, match="does not describe a network that can be restored"):
            load(tmp_path / "a", mlp())


# torch itself makes an instance of every autograd function that it traces.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@loop_over(
    ("name", "method"),
    [(name, "auto") for name in COMPILED]
    + [("gaussian", "monte-carlo"), ("mixed", "monte-carlo"), ("empirical", "monte-carlo")],
)
def test_the_kl_compiles_into_one_graph(name: str, method: str) -> None:
    torch._dynamo.reset()
    q, prior = posterior(), COMPILED[name].for_layout(MLP)
    noise, centre = normals(2, 44, seed=1), normals(44, seed=3)

    def kl() -> Tensor:
        return kl_divergence(q, prior, q.draw(noise), method=method, prior_mean=centre)

    found = []
    for function in (kl, torch.compile(kl, fullgraph=True, backend="aot_eager")):
        value = function()
        found.append([value.detach()[None], *torch.autograd.grad(value, [q.mean, q.rho])])
    for compiled, eager in zip(*found, strict=True):
        assert torch.allclose(compiled, eager, rtol=1e-12, atol=1e-12)
