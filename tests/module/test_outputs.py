"""Networks that return more than one tensor, batches as mappings, and a class for each token."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.loops import loop_over
from torch import Tensor, nn
from torch.nn import functional as F

import bayesify as bf
from bayesify.datasets import TensorLoader
from bayesify.estimators import Estimator
from bayesify.io import StorageError

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")

N, T, K = 6, 5, 3
ESTIMATORS: list[Estimator] = [bf.WeightSampling(), bf.Flipout()]
PADDING = -100


class ModelOutput(OrderedDict[str, Tensor]):
    """A mapping whose fields are attributes too, as Hugging Face's models return it."""

    def __getattr__(self, name: str) -> Tensor:
        return self[name]


class Tagger(nn.Module):
    """A class for each token; the result is a ``ModelOutput``."""

    def __init__(self, *, by_text: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 4), nn.Linear(4, K)
        self.by_text = by_text

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> ModelOutput:
        states = self.embed(input_ids)
        if attention_mask is not None:
            states = states * attention_mask.unsqueeze(-1)
        if self.by_text:
            states = states.mean(1)
        return ModelOutput(states=states, logits=self.head(states))


def tokens() -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(11, (N, T), generator=generator)
    mask = torch.ones(N, T)
    mask[0, 3:] = 0.0
    classes = ids % K
    classes[0, 3:] = PADDING
    return {"input_ids": ids, "attention_mask": mask}, classes


def tagger(estimator: Estimator | None = None, **options: Any) -> bf.BayesianModule:
    torch.manual_seed(0)
    options = {"output": "logits", "likelihood": bf.CategoricalLikelihood(PADDING), **options}
    return bf.BayesianModule(Tagger(), estimator=estimator, **options)


PICKS: list[Any] = ["logits", lambda result: result.logits, lambda result: result["logits"]]


@loop_over("pick", PICKS)
@loop_over("estimator", ESTIMATORS)
def test_a_part_of_the_result_is_picked(estimator: Estimator, pick: Any) -> None:
    bnn = tagger(estimator, output=pick)
    inputs, targets = tokens()
    assert set(bnn(**inputs)) == {"states", "logits"}, "the network itself returns all"
    terms = bf.ELBO(bnn, num_data=N, num_samples=2)(inputs, targets)
    assert terms.outputs.shape == (2, N, T, K)
    p = bnn.predict(inputs, 4, keep_samples=True)
    assert p.mean.shape == (N, T, K)
    assert p.samples is not None
    assert p.samples.shape == (4, N, T, K)
    assert p.epistemic.shape == p.total.shape == p.prediction.shape == (N, T)
    assert torch.equal(bnn.mean_outputs(inputs), bnn.to_module()(**inputs).logits)
    # To rounding: products of other numbers of rows may add in another order.
    batched = bnn.predict(inputs, 4, batch_size=2).mean
    torch.testing.assert_close(p.mean, batched, rtol=1e-6, atol=1e-7)


def test_without_a_part_the_error_names_it() -> None:
    inputs, targets = tokens()
    bnn = tagger(output=None)
    with pytest.raises(
        TypeError, match=r'ModelOutput with states, logits; pick it with .*output="logits"'
    ):
        bnn.predict(inputs)
    wrong = tagger(output="logit")
    with pytest.raises(TypeError, match=r"must have a tensor 'logit', got ModelOutput with states"):
        bf.ELBO(wrong, num_data=N)(inputs, targets)
    no_tensor = tagger(output=lambda result: [result])
    with pytest.raises(TypeError, match=r"function output must return one tensor .* got list"):
        no_tensor.predict(inputs)
    with pytest.raises(TypeError, match="output must be the name of a field"):
        tagger(output=1)


def test_it_is_stored_by_its_name(tmp_path: Path) -> None:
    inputs, _ = tokens()
    path = tmp_path / "model.safetensors"
    named, by_function = tagger(), tagger(output=PICKS[1])
    bf.save(named, path)
    again = bf.load(path, Tagger())
    assert again.output == "logits"
    assert again.likelihood.config() == {"ignore_index": PADDING}
    assert torch.equal(again.predict(inputs, 3).mean, named.predict(inputs, 3).mean)
    bf.save(by_function, path)
    with pytest.raises(StorageError, match=r"pass it to load\(..., output=...\)"):
        bf.load(path, Tagger())
    again = bf.load(path, Tagger(), output=PICKS[2])
    assert torch.equal(again.predict(inputs, 3).mean, named.predict(inputs, 3).mean)


class Batches:
    """Batches as a collator makes them, with the targets under "labels"."""

    def __init__(self, drop: str = "") -> None:
        self.drop = drop

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        inputs, targets = tokens()
        whole = {**inputs, "labels": targets}
        for start in range(0, N, 2):
            yield {k: v[start : start + 2] for k, v in whole.items() if k != self.drop}


def pairs() -> list[tuple[dict[str, Tensor], Tensor]]:
    return [({k: v for k, v in b.items() if k != "labels"}, b["labels"]) for b in Batches()]


@loop_over("estimator", ESTIMATORS)
def test_batches_with_labels_train_as_pairs(estimator: Estimator) -> None:
    rows, weights = [], []
    for loader in (Batches(), pairs()):
        elbo = bf.ELBO(tagger(estimator), num_data=N)
        history = bf.fit(elbo, loader, loader, epochs=3)
        rows.append({name: history[-1][name] for name in ("nll", "kl", "validation_nll")})
        weights.append(elbo.bnn.posterior.mean)
    assert rows[0] == rows[1]
    assert torch.equal(*weights)


def test_replicas_train_on_batches_with_labels() -> None:
    elbos = [bf.ELBO(tagger(seed=seed), num_data=N) for seed in range(2)]
    histories = bf.fit_replicas(elbos, Batches(), epochs=1)
    alone = bf.ELBO(tagger(), num_data=N)
    [row] = bf.fit(alone, Batches(), epochs=1)
    assert histories[0][0]["nll"] == pytest.approx(row["nll"], rel=1e-4)


def test_batches_without_labels() -> None:
    with pytest.raises(
        ValueError, match=r"targets under .*labels.*, got the names input_ids, att.*collate"
    ):
        bf.fit(bf.ELBO(tagger(), num_data=N), Batches(drop="labels"), epochs=1)


# ---- a class in each position -------------------------------------------------------------------


def test_positions_are_summed_and_padding_adds_nothing() -> None:
    _, targets = tokens()
    logits = torch.randn(2, N, T, K, generator=torch.Generator().manual_seed(1))
    likelihood = bf.CategoricalLikelihood(ignore_index=PADDING)
    found = likelihood.log_prob(logits, targets)
    expected = [
        [-F.cross_entropy(logits[s, n], targets[n], reduction="sum") for n in range(N)]
        for s in range(2)
    ]
    torch.testing.assert_close(found, torch.tensor(expected))
    # One position is the same as none.
    flat = bf.CategoricalLikelihood().log_prob(logits[:, :, 0], targets[:, 0])
    torch.testing.assert_close(likelihood.log_prob(logits[:, :, :1], targets[:, :1]), flat)
    wrong = logits[0].argmax(-1) != targets
    counted = targets != PADDING
    share = 100.0 * float(wrong[counted].double().mean())
    assert float(likelihood.error(logits[0], targets)) == pytest.approx(share)
    assert counted.sum() < targets.numel()
    assert math.isnan(likelihood.error(logits[0], torch.full((N, T), PADDING)))


def test_padding_has_no_gradient() -> None:
    _, targets = tokens()
    logits = torch.randn(1, N, T, K, requires_grad=True)
    bf.CategoricalLikelihood(PADDING).log_prob(logits, targets).sum().backward()
    assert logits.grad is not None
    assert not logits.grad[0, 0, 3:].any()
    assert logits.grad[0, 0, :3].any()
    endless = torch.full((1, N, T, K), -math.inf, requires_grad=True)
    nowhere = torch.full((N, T), PADDING)
    bf.CategoricalLikelihood(PADDING).log_prob(endless, nowhere).sum().backward()
    assert endless.grad is not None
    assert not endless.grad.any()


@loop_over(
    ("likelihood", "outputs", "targets", "message"),
    [
        (None, torch.zeros(1, 2, 4, 3), torch.full((2, 4), PADDING), "ignore_index=-100. leaves"),
        (None, torch.zeros(1, 2, 4, 3), torch.zeros(2, dtype=torch.long), r"of shape \(2, 4\)"),
        (None, torch.zeros(1, 2), torch.zeros(1, dtype=torch.long), r"\(N, K\) .*, or \(N, ..., K"),
        (PADDING, torch.zeros(1, 2, 3), torch.tensor([0, 3]), "from 0 to 2 .*, got 3$"),
        (PADDING, torch.zeros(1, 2, 3), torch.tensor([0, -1]), "from 0 to 2 .*, got -1$"),
    ],
)
def test_wrong_targets(
    likelihood: int | None, outputs: Tensor, targets: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        bf.CategoricalLikelihood(likelihood).log_prob(outputs, targets)


def test_the_predictive_distribution_of_each_position() -> None:
    inputs, targets = tokens()
    bnn = tagger()
    p = bnn.predict(inputs, 5, keep_samples=True)
    classes = targets.clamp_min(0)
    expected = p.mean.gather(-1, classes.unsqueeze(-1)).squeeze(-1).log()
    torch.testing.assert_close(p.log_prob(classes), expected)
    with pytest.raises(ValueError, match="from 0, got -100; leave positions"):
        p.log_prob(targets)
    with pytest.raises(ValueError, match=r"class indices from 0 to \d+, got \d+; count"):
        p.log_prob(classes + p.mean.shape[-1])
    together = bf.DeepEnsemble([bnn, tagger(seed=1)]).predict(inputs, 5)
    assert together.epistemic.shape == (N, T)
    assert p.subset([0, 1]).mean.shape == (N, T, K)


# ---- baselines ----------------------------------------------------------------------------------


def test_dropout_picks_too() -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, K))

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.net(x)}

    x = torch.ones(4, 3)
    plain = bf.MCDropout(net, bf.CategoricalLikelihood()).predict(x, 3).mean
    make: list[Callable[[], bf.MCDropout]] = [
        lambda: bf.MCDropout(Named(), bf.CategoricalLikelihood(), output="logits"),
        lambda: bf.MCDropout(
            bf.BayesianModule(Named(), posterior=bf.Delta, output=lambda made: made["logits"])
        ),
    ]
    for each in make:
        assert torch.equal(each().predict(x, 3).mean, plain)


def test_a_table_of_one_target_is_no_mapping() -> None:
    """Pairs of tensors are taken as before."""
    loader = TensorLoader(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long), batch_size=2)
    [row] = bf.fit(bf.ELBO(bf.BayesianModule(nn.Linear(3, 2)), num_data=4), loader, epochs=1)
    assert row["nll"] > 0.0


# ---- a loss of the network's own ----------------------------------------------------------------


class WithLoss(Tagger):
    """Computes a loss of its own from labels, as Hugging Face's models do."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> ModelOutput:
        made = super().forward(input_ids, attention_mask)
        if labels is not None:
            made["loss"] = F.cross_entropy(made.logits.flatten(0, -2), labels.flatten())
        return made


def test_a_loss_without_the_kl_is_warned_of() -> None:
    inputs, targets = tokens()
    bnn = bf.BayesianModule(
        WithLoss(), output="logits", likelihood=bf.CategoricalLikelihood(PADDING)
    )
    with pytest.warns(bf.MissingKLWarning, match=r"train bayesify.ELBO\(bnn, num_data=N\)"):
        bnn(**inputs, labels=targets)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bnn(**inputs)
        bf.ELBO(bnn, num_data=N)(inputs, targets).loss.backward()
        bnn.predict(inputs, 2)
        with torch.no_grad():
            bnn(**inputs, labels=targets)
        bnn.eval()(**inputs, labels=targets)


class Switched(nn.Module):
    """Has arguments that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, twice: bool = False
    ) -> Tensor:
        x = x if mask is None else x * mask
        return self.layer(x) * scale * (1 + twice)


def test_arguments_that_are_no_tensors_are_those_of_all_examples() -> None:
    x, y = torch.randn(20, 3), torch.randint(2, (20,))
    inputs = {"mask": None, "twice": True, "scale": 0.5, "x": x}
    bnn = bf.BayesianModule(Switched(), init_std=0.3)
    expected = bnn.predict(x, 8)
    plain = [(dict(inputs, x=x[i : i + 8]), y[i : i + 8]) for i in range(0, 20, 8)]
    for options in ({}, {"batch_size": 3}, {"max_memory": "3 MB"}):
        found = bnn.predict(inputs, 8, **options)
        torch.testing.assert_close(found.mean, expected.mean)
        alone = bnn.predict_mean(inputs, **options)
        torch.testing.assert_close(alone.mean, bnn.predict_mean(x).mean)
    other = bnn.predict({**inputs, "scale": 1.5}, 8)
    assert not torch.allclose(other.mean, expected.mean)
    history = bf.fit(bf.ELBO(bnn, num_data=20), plain, plain, epochs=2, progress=False)
    assert history[-1]["validation_nll"] is not None
    for scales, message in (((0.5, 0.5), ""), ((0.5, 2.0), "the same in all minibatches")):
        batches = [
            {**inputs, "x": x[i : i + 10], "scale": s} for i, s in zip((0, 10), scales, strict=True)
        ]
        loader = torch.utils.data.DataLoader(batches, batch_size=None)
        if message:
            with pytest.raises(ValueError, match=message):
                bnn.predict(loader, 8)
        else:
            torch.testing.assert_close(bnn.predict(loader, 8).mean, bnn.predict(inputs, 8).mean)
    with pytest.raises(TypeError, match="got bool; use torch"):
        bnn.predict({"twice": True})


def test_a_loss_in_a_tuple_is_warned_of_too() -> None:
    class Labelled(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            outputs = super().forward(x)
            return outputs.square().mean(), outputs

    bnn = bf.BayesianModule(Labelled(3, 2), output=lambda result: result[1])
    with pytest.warns(bf.MissingKLWarning, match="lacks the KL"):
        bnn(torch.zeros(4, 3))
