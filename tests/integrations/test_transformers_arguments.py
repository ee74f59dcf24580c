"""Settings of Hugging Face's Trainer that would train something else raise a clear error."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.small_trainer import MARKS, N, T, Texts, arguments, classifier, language_model
from torch import nn

import bayesify as bf
from bayesify.integrations.transformers import ELBOTrainer

pytestmark = MARKS


@pytest.mark.parametrize(
    ("scale", "error", "says"),
    [
        (-1.0, ValueError, "rho_lr_scale must be positive and finite, got -1.0"),
        (math.nan, ValueError, "rho_lr_scale must be positive and finite, got nan"),
        ("3", TypeError, "rho_lr_scale must be a number, got '3'"),
    ],
)
def test_a_wrong_scale_of_rho_is_refused(
    scale: Any, error: type[Exception], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        ELBOTrainer(classifier(), arguments(tmp_path), rho_lr_scale=scale)


def test_a_scale_that_would_do_nothing_is_refused(tmp_path: Path) -> None:
    elbo = classifier()
    own = torch.optim.SGD(bf.parameter_groups(elbo), lr=0.1)
    with pytest.raises(ValueError, match="rho_lr_scale needs the Trainer to make the optimiser"):
        ELBOTrainer(elbo, arguments(tmp_path), optimizers=(own, None), rho_lr_scale=2.0)
    with pytest.raises(ValueError, match="needs a posterior with a rho, got Delta"):
        ELBOTrainer(classifier(posterior=bf.Delta), arguments(tmp_path), rho_lr_scale=2.0)


def test_the_trainer_around_the_network_is_warned_of(tmp_path: Path) -> None:
    """Without the ELBO the Trainer trains on the network's own loss, which lacks the KL."""
    bnn = classifier().bnn
    args = arguments(tmp_path, remove_unused_columns=False, max_steps=1)
    data = [
        {name: each for name, each in row.items() if name != "unused"}
        for row in (Texts()[index] for index in range(N))
    ]
    plain = transformers.Trainer(bnn, args, train_dataset=data)
    with pytest.warns(bf.MissingKLWarning, match="ELBOTrainer"):
        plain.train()
    with pytest.raises(TypeError, match=r"must be an ELBO, got BayesianModule; pass ELBO"):
        ELBOTrainer(bnn, args)


def test_wrong_arguments(tmp_path: Path) -> None:
    elbo = classifier()
    wrong = copy.deepcopy(elbo)
    wrong.num_data = 7
    with pytest.raises(ValueError, match="number of training examples, 16, got 7"):
        ELBOTrainer(wrong, arguments(tmp_path), train_dataset=Texts())
    with pytest.raises(ValueError, match="eval_samples must be at least 0, got -1"):
        ELBOTrainer(elbo, arguments(tmp_path), eval_samples=-1)
    with pytest.raises(TypeError, match=r"eval_samples must be a whole number, got 2\.5"):
        ELBOTrainer(elbo, arguments(tmp_path), eval_samples=2.5)
    with pytest.raises(ValueError, match="power"):
        ELBOTrainer(elbo, arguments(tmp_path), kl_warmup_epochs=1, kl_warmup_power=-1)
    geometric = bf.ELBO(elbo.bnn, num_data=16, kl_weighting="geometric", num_batches=4)
    with pytest.raises(ValueError, match="geometric weights need the place of a minibatch"):
        ELBOTrainer(geometric, arguments(tmp_path))
    trainer = ELBOTrainer(elbo, arguments(tmp_path))
    with pytest.raises(ValueError, match="remove_unused_columns=False"):
        trainer.compute_loss(elbo, {"labels": torch.zeros(2, dtype=torch.long)})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor is for .* got 0\.1"),
        ({"gradient_checkpointing": True}, r"net\.gradient_checkpointing_enable"),
        ({"neftune_noise_alpha": 5.0}, r"neftune_noise_alpha is for .* got 5\.0"),
    ],
)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_settings_of_hugging_faces_own_models_are_refused(
    setting: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        ELBOTrainer(classifier(), arguments(tmp_path, **setting), train_dataset=Texts())


def test_a_loss_that_would_not_be_called_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compute_loss_func would not be called"):
        ELBOTrainer(classifier(), arguments(tmp_path), compute_loss_func=lambda *_: 0.0)


def test_an_optimizer_of_the_network_that_was_copied_is_refused(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="it holds none of them"):
        ELBOTrainer(classifier(), arguments(tmp_path), optimizers=(optimizer, None))


def test_labels_that_are_not_shifted_are_refused() -> None:
    bnn = language_model(transformers.GPT2LMHeadModel)
    elbo = bf.ELBO(bnn, num_data=N)
    ids = Texts().ids
    mask = torch.ones_like(ids)
    labels = ids.masked_fill(torch.arange(T) < 2, -100)  # of a prompt, which does not count
    message = "labels must be the tokens that follow, got those of input_ids themselves"
    with pytest.raises(ValueError, match=message):
        bf.fit(elbo, [{"input_ids": ids, "attention_mask": mask, "labels": labels}], epochs=1)
    with pytest.raises(ValueError, match=message):
        elbo({"input_ids": ids, "attention_mask": mask}, labels)
    step = bf.make_step(elbo, torch.optim.SGD(elbo.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=message):
        step({"input_ids": ids, "attention_mask": mask}, labels)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    bf.fit(elbo, [{"input_ids": ids, "attention_mask": mask, "labels": shifted}], epochs=1)


def test_labels_that_are_shifted_already_are_refused(tmp_path: Path) -> None:
    elbo = bf.ELBO(language_model(transformers.GPT2LMHeadModel), num_data=N)
    data = Texts(by_token=True)
    # Not the numbers themselves, in which a token can equal its neighbour.
    data.ids = (torch.arange(T) + torch.arange(N).unsqueeze(1)) % 11
    data.labels = nn.functional.pad(data.ids[:, 1:], (0, 1), value=-100)
    with pytest.raises(ValueError, match="got the tokens that follow; do not shift them"):
        ELBOTrainer(elbo, arguments(tmp_path), train_dataset=data).train()
    data.labels = data.ids
    ELBOTrainer(elbo, arguments(tmp_path), train_dataset=data).train()
    # An answer in the last place, which has a token of no meaning in the inputs.
    data.labels = torch.full_like(data.ids, -100).index_fill(1, torch.tensor([T - 1]), 3)
    data.ids = data.ids.index_fill(1, torch.tensor([T - 1]), 0)
    ELBOTrainer(elbo, arguments(tmp_path), train_dataset=data).train()
