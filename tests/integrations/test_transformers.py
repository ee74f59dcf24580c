"""Hugging Face's Trainer for the ELBO, against ``fit`` and against its own silent errors."""

from __future__ import annotations

import math
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.small_trainer import (
    MARKS,
    SIZES,
    Batches,
    K,
    N,
    T,
    Texts,
    arguments,
    classifier,
    language_model,
    trained,
)
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.flop_counter import FlopCounterMode

import bayesify as bf
from bayesify.integrations.transformers import ELBOTrainer
from bayesify.training import ConvergenceWarning

pytestmark = MARKS


@pytest.mark.parametrize("warmup", [{}, {"kl_warmup_epochs": 1.5, "kl_warmup_power": 2.0}])
def test_the_weights_are_those_of_fit(warmup: dict[str, float], tmp_path: Path) -> None:
    trainer = trained(tmp_path, **warmup, rho_lr_scale=3.0)
    alone = classifier()
    optimizer = partial(AdamW, lr=1e-2, weight_decay=0.0)
    options: dict[str, Any] = {"rho_lr_scale": 3.0, **warmup}
    bf.fit(alone, Batches(), epochs=2, optimizer=optimizer, **options)
    found = trainer.model.bnn.posterior
    torch.testing.assert_close(found.mean, alone.bnn.posterior.mean)
    torch.testing.assert_close(found.rho, alone.bnn.posterior.rho)
    other = classifier()
    bf.fit(other, Batches(), epochs=2, optimizer=optimizer)
    assert not torch.allclose(found.rho, other.bnn.posterior.rho), "the options do something"


def test_the_parts_of_the_loss_are_logged(tmp_path: Path) -> None:
    each = [found for found in trained(tmp_path).state.log_history if "loss" in found]
    assert len(each) == 2 * N / 4
    for found in each:
        assert found["loss"] == pytest.approx(found["nll"] + found["kl"] / N)
    elbo = classifier()
    batch = dict(next(iter(Batches())))
    labels = batch.pop("labels")
    first = elbo(batch, labels)
    assert each[0]["nll"] == pytest.approx(first.nll.item(), rel=1e-5)
    assert each[0]["kl"] == pytest.approx(first.kl.item(), rel=1e-5)
    # Accumulated and between logs they are averaged, as the loss is.
    options = {"gradient_accumulation_steps": 2, "logging_steps": 2, "learning_rate": 0.0}
    several = trained(tmp_path, **options).state.log_history[0]
    alone = trained(tmp_path, learning_rate=0.0).state.log_history[:4]
    for name in ("loss", "nll", "kl"):
        assert several[name] == pytest.approx(sum(found[name] for found in alone) / 4, rel=1e-5)


@pytest.mark.parametrize(("warmup", "is_told"), [(2.0, True), (1.9, False)])
def test_a_warm_up_as_long_as_training_is_told(
    warmup: float, is_told: bool, tmp_path: Path
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        trained(tmp_path, kl_warmup_epochs=warmup)
    found = [str(each.message) for each in caught if each.category is ConvergenceWarning]
    assert len(found) == is_told
    assert not found or "takes 2 epochs and training only 2: the objective never" in found[0]


class Frozen(nn.Module):
    """A frozen body with a norm, and a head over its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).requires_grad_(False)
        self.head = nn.Linear(6, K)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        assert bool(attention_mask.all())
        return self.head(self.body(self.table(input_ids).mean(1)))


def test_a_frozen_body_in_evaluation_mode_stays_in_it(tmp_path: Path) -> None:
    def made() -> bf.ELBO:
        torch.manual_seed(0)
        net = Frozen()
        net.body.eval()
        return bf.ELBO(bf.BayesianModule(net), num_data=N)

    trainer, alone = trained(tmp_path, made(), eval_strategy="epoch"), made()
    bf.fit(alone, Batches(), epochs=2, optimizer=partial(AdamW, lr=1e-2, weight_decay=0.0))
    assert not trainer.model.bnn.net.body[1].running_mean.any()
    torch.testing.assert_close(trainer.model.bnn.posterior.mean, alone.bnn.posterior.mean)
    trainer.train()  # again, after an evaluation
    assert not trainer.model.bnn.net.body[1].running_mean.any()


def test_each_run_begins_with_a_new_objective_of_model_init(tmp_path: Path) -> None:
    made: list[bf.ELBO] = []

    def make(trial: Any) -> bf.ELBO:
        del trial
        made.append(classifier())
        return made[-1]

    trainer = ELBOTrainer(
        args=arguments(tmp_path), model_init=make, train_dataset=Texts(), rho_lr_scale=3.0
    )
    expected = trained(tmp_path, rho_lr_scale=3.0).model.bnn.posterior
    for _ in range(2):
        trainer.train()
        assert trainer.model is made[-1]
        found = trainer.model.bnn.posterior
        torch.testing.assert_close(found.mean, expected.mean)
        torch.testing.assert_close(found.rho, expected.rho)
    assert len(made) == 3
    with pytest.raises(TypeError, match="the model must be an ELBO, got BayesianModule"):
        ELBOTrainer(args=arguments(tmp_path), model_init=lambda: classifier().bnn)
    with pytest.raises(TypeError, match="the model must be an ELBO, got NoneType"):
        ELBOTrainer(args=arguments(tmp_path))


def test_trials_of_a_search_have_settings_of_their_own(tmp_path: Path) -> None:
    def make() -> bf.ELBO:
        return classifier()

    trainer = ELBOTrainer(
        args=arguments(tmp_path, max_steps=2),
        model_init=make,
        train_dataset=Texts(),
        eval_dataset=Texts(),
    )
    rates = iter([1e-3, 1e-1])
    best = trainer.hyperparameter_search(
        hp_space=lambda _: {"learning_rate": next(rates)},
        n_trials=2,
        backend="optuna",
        direction="minimize",
    )
    assert best.run_id == "1", "the larger rate learns more in two steps"
    assert best.objective < math.log(3.0)


def test_the_loss_is_that_of_the_elbo(tmp_path: Path) -> None:
    trainer = trained(tmp_path, max_steps=1)
    [inputs] = [batch for index, batch in enumerate(Batches()) if index == 0]
    targets = inputs.pop("labels")
    expected = classifier()(inputs, targets)
    logged = next(row["loss"] for row in trainer.state.log_history if "loss" in row)
    assert logged == pytest.approx(float(expected.loss.detach()), rel=1e-4)
    assert logged > 5.0 * float(expected.nll.detach()), "the KL is in it"


def test_an_encoder_runs_once_for_all_weight_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bayesify.module.trunk._LEAST_SAVING", -1e9)  # it is a tiny one
    bnn = classifier(include=("classifier.*",)).bnn
    batch = next(iter(Batches()))
    inputs = {name: each for name, each in batch.items() if name != "labels"}
    handle = bnn.net.register_forward_hook(lambda *_: None)  # must see every pass, as a whole
    with FlopCounterMode(display=False) as whole:
        expected = bnn.predict(inputs, 5)
    handle.remove()
    bnn.predict(inputs, 5)  # measures a pass, and compares one
    with FlopCounterMode(display=False) as part:
        found = bnn.predict(inputs, 5)
    assert part.get_total_flops() < 0.25 * whole.get_total_flops()
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.epistemic, expected.epistemic)


@pytest.mark.parametrize("estimator", [bf.WeightSampling(), bf.Flipout()], ids=str)
def test_layers_that_run_again_give_equal_gradients(estimator: bf.Estimator) -> None:
    batch = next(iter(Batches()))
    targets = batch.pop("labels")
    gradients, runs = [], [0, 0]
    for runs_again in (False, True):
        elbo = classifier(estimator=estimator)
        net = elbo.bnn.net

        def count(*_: Any, number: int = int(runs_again)) -> None:
            runs[number] += 1

        net.bert.encoder.layer[0].attention.register_forward_hook(count)
        if runs_again:
            net.activation_checkpointing_enable()
        elbo(batch, targets).loss.backward()
        gradients.append([p.grad for p in elbo.parameters() if p.grad is not None])
    assert runs[1] == runs[0] + 1
    torch.testing.assert_close(gradients[1], gradients[0])


def test_accumulated_minibatches_are_averaged(tmp_path: Path) -> None:
    """The gradients of two halves, each with noise of its own, and the KL once."""
    trainer = trained(
        tmp_path, max_steps=1, gradient_accumulation_steps=2, optim="sgd", learning_rate=0.1
    )
    alone = classifier()
    for index, inputs in enumerate(Batches()):
        if index < 2:
            targets = inputs.pop("labels")
            (0.5 * alone(inputs, targets).loss).backward()
    torch.optim.SGD(bf.parameter_groups(alone), lr=0.1).step()
    found = trainer.model.bnn.posterior
    torch.testing.assert_close(found.mean, alone.bnn.posterior.mean)
    torch.testing.assert_close(found.rho, alone.bnn.posterior.rho)


def test_weight_decay_leaves_rho_alone(tmp_path: Path) -> None:
    trainer = trained(tmp_path, weight_decay=0.1, max_steps=1)
    rho = trainer.model.bnn.posterior.rho
    groups = {id(p): group for group in trainer.optimizer.param_groups for p in group["params"]}
    assert groups[id(rho)]["weight_decay"] == 0.0
    assert groups[id(trainer.model.bnn.posterior.mean)]["weight_decay"] == 0.1
    assert len(groups) == len(list(trainer.model.parameters()))
    decaying = AdamW(trainer.model.parameters())
    with pytest.raises(ValueError, match="weight decay of rho must be 0"):
        ELBOTrainer(trainer.model, arguments(tmp_path), optimizers=(decaying, None))


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", save_strategy="steps", save_steps=3)
    again = ELBOTrainer(
        classifier(),
        arguments(tmp_path / "again", save_strategy="no"),
        train_dataset=Texts(),
    )
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert again.model.step == whole.model.step == 8
    for name in ("mean", "rho"):
        ours = getattr(again.model.bnn.posterior, name)
        assert torch.equal(ours, getattr(whole.model.bnn.posterior, name))


def test_labels_are_kept_that_the_network_does_not_take(tmp_path: Path) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, K)

        def forward(self, input_ids: Tensor) -> Tensor:
            out: Tensor = self.head(self.embedding(input_ids).mean(1))
            return out

    torch.manual_seed(0)
    elbo = bf.ELBO(bf.BayesianModule(Plain()), num_data=N)
    trainer = trained(tmp_path, elbo, max_steps=1)
    p = elbo.bnn.predict_mean(Texts().ids)
    expected = -float(p.log_prob(Texts().labels).mean())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("samples", [0, 5])
def test_an_evaluation_is_the_nll(samples: int, tmp_path: Path) -> None:
    trainer = trained(tmp_path, eval_samples=samples)
    bnn, data = trainer.model.bnn, Texts()
    inputs = {"input_ids": data.ids, "attention_mask": torch.ones(N, T, dtype=torch.long)}
    p = bnn.predict(inputs, samples) if samples else bnn.predict_mean(inputs)
    expected = -float(p.log_prob(data.labels).mean())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)
    found = trainer.predict(Texts())
    logits = torch.as_tensor(found.predictions)
    torch.testing.assert_close(logits.log_softmax(-1), p.log_mean, rtol=1e-4, atol=1e-5)
    assert torch.equal(torch.as_tensor(found.label_ids), data.labels)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_language_model_learns_the_next_token(accumulated: int, tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        n_embd=8, n_layer=1, n_head=2, vocab_size=11, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    net = transformers.GPT2LMHeadModel(config).eval()
    bnn = bf.BayesianModule(
        net, output="logits", likelihood=bf.CategoricalLikelihood(ignore_index=-100)
    )
    data = Texts(by_token=True)
    data.labels = data.ids
    trainer = ELBOTrainer(
        bf.ELBO(bnn, num_data=N),
        arguments(tmp_path, gradient_accumulation_steps=accumulated),
        train_dataset=data,
        eval_dataset=data,
    )
    with torch.no_grad():
        own = float(net(data.ids, labels=data.ids).loss)
    # The network's own loss is averaged over the tokens that have a next one.
    assert trainer.evaluate()["eval_loss"] == pytest.approx(own * (T - 1), rel=1e-4)
    trainer.train()
    with pytest.raises(ValueError, match=r"must ignore the last token.*ignore_index=-100"):
        ELBOTrainer(bf.ELBO(bf.BayesianModule(net, output="logits"), num_data=N))


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    classifier().bnn.to_module().save_pretrained(tmp_path / "tiny")
    data = Texts()
    ids, mask = data.ids, torch.ones(N, T, dtype=torch.long)
    names: dict[str, Any] = {
        "name": str(tmp_path / "tiny"),
        "dataset": data,
        "loader": Batches(),
        "ids": ids,
        "mask": mask,
        "training_arguments": arguments(tmp_path / "run"),
    }
    page = (Path(__file__).parents[2] / "docs" / "hugging-face.md").read_text()
    for snippet in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(snippet, names)
    assert names["bnn"].layout.names == ("classifier.weight", "classifier.bias")
    assert names["p"].mean.shape == (N, K)
    again = bf.load("model.safetensors", names["net"])
    inputs = {"input_ids": ids, "attention_mask": mask}
    assert torch.equal(again.predict(inputs, 3).mean, names["bnn"].predict(inputs, 3).mean)


def test_tied_frozen_parameters_are_saved_once(tmp_path: Path) -> None:
    class Own(transformers.GPT2LMHeadModel):
        """A language model by inheritance."""

    data = Texts(by_token=True)
    data.labels = data.ids
    trained = [language_model(kind) for kind in (Own, transformers.GPT2LMHeadModel)]
    for number, bnn in enumerate(trained):
        folder = tmp_path / str(number)
        args = arguments(folder, max_steps=2, save_strategy="steps", save_steps=1)
        ELBOTrainer(bf.ELBO(bnn, num_data=N), args, train_dataset=data).train()
    assert torch.equal(trained[0].posterior.mean, trained[1].posterior.mean)
    again = language_model(Own)
    args = arguments(tmp_path / "again", max_steps=2)
    trainer = ELBOTrainer(bf.ELBO(again, num_data=N), args, train_dataset=data)
    trainer.train(resume_from_checkpoint=str(tmp_path / "0" / "checkpoint-1"))
    assert torch.equal(again.posterior.mean, trained[0].posterior.mean)
    assert torch.equal(again.net.lm_head.weight, again.net.transformer.wte.weight)


class Noting(bf.ELBO):
    """Notes the KL's factors, and fails at minibatches that are too large as a GPU does."""

    def __init__(self, *args: Any, largest: int = N, **options: Any) -> None:
        super().__init__(*args, **options)
        self.largest, self.scales = largest, list[float]()

    def forward(self, *args: Any, kl_scale: float = 1.0, **options: Any) -> bf.ELBOTerms:
        if len(args[1]) > self.largest:
            raise RuntimeError("CUDA out of memory.")
        self.scales.append(round(kl_scale, 9))
        return super().forward(*args, kl_scale=kl_scale, **options)


@pytest.mark.parametrize(
    "length", [{"num_train_epochs": 1.25}, {"max_steps": 3}, {}, {"gradient_accumulation_steps": 3}]
)
def test_a_warm_up_ends_where_its_epochs_do(length: dict[str, float], tmp_path: Path) -> None:
    elbo = Noting(classifier().bnn, num_data=N)
    trained(tmp_path, elbo, kl_warmup_epochs=1, **length)
    expected = [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0, 1.0]
    assert elbo.scales == expected[: len(elbo.scales)]
    assert len(elbo.scales) >= 3


def test_a_warm_up_counts_the_minibatches_of_an_epoch(tmp_path: Path) -> None:
    cut = Noting(classifier().bnn, num_data=N)
    options = {"per_device_train_batch_size": 6, "dataloader_drop_last": True}
    trained(tmp_path / "cut", cut, kl_warmup_epochs=1, **options)
    assert cut.scales == [0.333333333, 0.666666667, 1.0, 1.0]  # two minibatches an epoch
    found = Noting(classifier().bnn, num_data=N, largest=2)
    options = {"auto_find_batch_size": True, "num_train_epochs": 1}
    trained(tmp_path / "found", found, kl_warmup_epochs=1, **options)
    assert found.scales == [round(step / 9, 9) for step in range(1, 9)]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_columns_are_those_of_the_network_in_an_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES)
    net = peft.get_peft_model(
        transformers.BertForSequenceClassification(config),
        peft.LoraConfig(r=2, target_modules=["query"]),  # without a task, forward takes anything
    )
    bnn = bf.BayesianModule(net, include=["*lora_A*"], exclude=(), output="logits")
    trainer = trained(tmp_path, bf.ELBO(bnn, num_data=N), num_train_epochs=1)
    assert trainer.state.global_step == N // 4


def test_an_evaluation_takes_the_targets_of_a_text_together(tmp_path: Path) -> None:
    bnn = language_model(transformers.GPT2LMHeadModel)
    data = Texts(by_token=True)
    data.labels = data.ids
    trainer = ELBOTrainer(
        bf.ELBO(bnn, num_data=N), arguments(tmp_path), eval_dataset=data, eval_samples=4
    )
    inputs = {"input_ids": data.ids, "attention_mask": torch.ones(N, T, dtype=torch.long)}
    shifted = nn.functional.pad(data.ids[:, 1:], (0, 1), value=-100)
    expected = -float(bnn.log_prob(inputs, shifted, 4).mean())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)


def test_an_evaluation_with_several_labels(tmp_path: Path) -> None:
    elbo = classifier(likelihood=bf.BernoulliLikelihood())
    data = Texts()
    data.labels = (data.ids[:, :K] > 5).float()
    trainer = ELBOTrainer(elbo, arguments(tmp_path), eval_dataset=data, eval_samples=3)
    inputs = {"input_ids": data.ids, "attention_mask": torch.ones(N, T, dtype=torch.long)}
    expected = -float(elbo.bnn.log_prob(inputs, data.labels, 3).mean())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)
