"""Small transformers with adapters, and the marks of their tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

import bayesify as bf

MARKS = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # peft 0.21 asks transformers 5.23 by an old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
N, T, K = 16, 5, 3
SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 11}
INPUTS = {
    "input_ids": torch.randint(11, (N, T), generator=torch.Generator().manual_seed(0)),
    "attention_mask": torch.ones(N, T, dtype=torch.long),
}
TARGETS = INPUTS["input_ids"][:, 0] % K


def bert(kind: Any = transformers.BertForSequenceClassification) -> nn.Module:
    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return kind(transformers.BertConfig(**SIZES, **dropout, intermediate_size=8, num_labels=K))


def lora(base: nn.Module | None = None, **options: Any) -> PeftModel:
    config = {"task_type": "SEQ_CLS", "r": 2, "target_modules": ["query", "value"]} | options
    return get_peft_model(bert() if base is None else base, LoraConfig(**config))


def trained(bnn: bf.BayesianModule, targets: Tensor = TARGETS, epochs: int = 30) -> bf.History:
    loader = [{**INPUTS, "labels": targets}]
    groups = lambda g: torch.optim.Adam(g, lr=0.02)  # noqa: E731
    return bf.fit(bf.ELBO(bnn, num_data=N), loader, epochs=epochs, optimizer=groups)
