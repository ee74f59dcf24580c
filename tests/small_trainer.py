"""A small classifier of texts, its data, and Hugging Face's Trainer for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import bayesify as bf
from bayesify.integrations.transformers import ELBOTrainer

MARKS = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
N, T, K = 16, 5, 3
SIZES = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 11,
    "num_labels": K,
}


class Texts(torch.utils.data.Dataset):
    """Texts with a class each, or with one for each token."""

    def __init__(self, by_token: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(11, (N, T), generator=generator)
        self.labels = self.ids % K if by_token else self.ids[:, 0] % K

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.ids[index]
        mask = torch.ones(T, dtype=torch.long)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": self.labels[index],
            "unused": torch.zeros(1),
        }


def classifier(**options: Any) -> bf.ELBO:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    net = transformers.BertForSequenceClassification(config)
    return bf.ELBO(bf.BayesianModule(net, output="logits", **options), num_data=N)


def arguments(folder: Path, **changes: Any) -> Any:
    settings = {
        "output_dir": str(folder),
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "optim": "adamw_torch",
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return transformers.TrainingArguments(**{**settings, **changes})


def trained(folder: Path, elbo: bf.ELBO | None = None, **changes: Any) -> ELBOTrainer:
    options = {
        name: changes.pop(name)
        for name in ("kl_warmup_epochs", "kl_warmup_power", "rho_lr_scale", "eval_samples")
        if name in changes
    }
    elbo = classifier() if elbo is None else elbo
    trainer = ELBOTrainer(
        elbo, arguments(folder, **changes), train_dataset=Texts(), eval_dataset=Texts(), **options
    )
    trainer.train()
    return trainer


class Batches:
    """The same minibatches for ``fit``."""

    def __init__(self, size: int = 4) -> None:
        self.size = size

    def __len__(self) -> int:
        return N // self.size

    def __iter__(self) -> Any:
        data = Texts()
        for start in range(0, N, self.size):
            part = slice(start, start + self.size)
            mask = torch.ones(self.size, T, dtype=torch.long)
            batch = {"input_ids": data.ids[part], "attention_mask": mask}
            yield {**batch, "labels": data.labels[part]}


def language_model(kind: type[Any], **options: Any) -> bf.BayesianModule:
    config = transformers.GPT2Config(
        n_embd=8, n_layer=1, n_head=2, vocab_size=11, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    net = kind(config)
    net.transformer.wte.weight.requires_grad_(False)  # tied with the last layer
    likelihood = bf.CategoricalLikelihood(ignore_index=-100)
    return bf.BayesianModule(net, output="logits", likelihood=likelihood, **options)
