"""Variational adapters: what of them is random, and what is trained."""

from __future__ import annotations

import copy
import re
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tests.cases import normals
from tests.small_adapters import INPUTS, MARKS, SIZES, TARGETS, K, N, T, bert, lora, trained
from torch import Tensor, nn

import bayesify as bf
from bayesify.adapters import bayesian_adapter

pytestmark = MARKS


def test_only_a_is_random_and_only_the_adapter_is_trained() -> None:
    net = lora()
    before = copy.deepcopy(net.state_dict())
    bnn = bayesian_adapter(net)
    assert bnn.layout.num_weights == 4 * 2 * 8
    assert all(name.endswith("lora_A.default.weight") for name in bnn.layout.names)
    history = trained(bnn)
    assert history[-1]["nll"] < 0.95 * history[0]["nll"]
    after = bnn.to_module().state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all("lora_" in name or ".modules_to_save." in name for name in moved)
    assert {name.split(".")[-3] for name in moved if "lora_" in name} == {"lora_A", "lora_B"}
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_ivon_trains_a_by_its_curvature_and_the_rest_by_adam() -> None:
    bnn = bayesian_adapter(lora())
    elbo = bf.ELBO(bnn, num_data=N)
    optimizer = bf.IVON(elbo, lr=0.02, betas=(0.9, 0.99), deterministic_lr=0.02)
    before = {name: each.detach().clone() for name, each in bnn.named_parameters()}
    loader = [{**INPUTS, "labels": TARGETS}]
    history = bf.fit(elbo, loader, epochs=30, optimizer=optimizer)
    assert history[-1]["nll"] < 0.95 * history[0]["nll"]
    parameters = dict(bnn.named_parameters())
    moved = {name for name, each in before.items() if not torch.equal(each, parameters[name])}
    assert {"posterior.mean", "posterior.rho"} <= moved
    assert any("lora_B" in name for name in moved)


@pytest.mark.parametrize(
    ("random", "count"), [(("A",), 64), (("B",), 64), (("A", "B", "modules_to_save"), 128 + 27)]
)
def test_random_is_what_was_asked_for(random: Any, count: int) -> None:
    assert bayesian_adapter(lora(), random).layout.num_weights == count


def test_each_example_has_its_own_weights() -> None:
    rows = bayesian_adapter(lora()).summary(**INPUTS)
    assert {(row.treatment, "each example" in row.reason) for row in rows} == {("exact", True)}
    # The same text twice in a minibatch gets two predictions in training, and one for all tokens.
    bnn = bayesian_adapter(lora(init_lora_weights=False), init_std=0.5)
    twice = {name: each[:1].repeat(2, 1) for name, each in INPUTS.items()}
    logits = bnn(**twice).logits
    assert not torch.allclose(logits[0], logits[1])


@pytest.mark.parametrize(
    ("kind", "task", "targets"),
    [
        (transformers.BertForTokenClassification, "TOKEN_CLS", INPUTS["input_ids"] % K),
        (transformers.GPT2LMHeadModel, "CAUSAL_LM", INPUTS["input_ids"].roll(-1, 1)),
    ],
)
def test_a_class_for_each_token(kind: Any, task: str, targets: Tensor) -> None:
    if kind is transformers.GPT2LMHeadModel:
        torch.manual_seed(0)
        config = transformers.GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2)
        net = lora(kind(config), task_type=task, target_modules=["c_attn"], fan_in_fan_out=True)
    else:
        net = lora(bert(kind), task_type=task)
    bnn = bayesian_adapter(net, likelihood=bf.CategoricalLikelihood(ignore_index=-100))
    assert {row.treatment for row in bnn.summary(**INPUTS)} == {"exact"}
    before = {name: each.detach().clone() for name, each in bnn.named_parameters()}
    history = trained(bnn, targets)
    assert history[-1]["loss"] < history[0]["loss"]
    after = dict(bnn.named_parameters())
    assert all(
        torch.equal(after[name], each) != after[name].requires_grad for name, each in before.items()
    )
    p = bnn.predict(INPUTS, 4)
    assert p.mean.shape == (N, T, 11 if task == "CAUSAL_LM" else K)
    assert p.epistemic.shape == (N, T)


def test_a_vision_transformer() -> None:
    torch.manual_seed(0)
    sizes = {name: SIZES[name] for name in SIZES if name != "vocab_size"}
    config = transformers.ViTConfig(
        **sizes, intermediate_size=8, image_size=8, patch_size=4, num_channels=1, num_labels=K
    )
    base = transformers.ViTForImageClassification(config)
    names = [n for n, m in base.named_modules() if isinstance(m, nn.Linear) and "attention" in n]
    net = lora(base, task_type=None, target_modules=names, modules_to_save=["classifier"])
    bnn = bayesian_adapter(net)
    images = {"pixel_values": normals(4, 1, 8, 8, dtype=torch.float32)}
    assert {row.treatment for row in bnn.summary(**images)} == {"exact"}
    assert bnn.predict(images, 3).mean.shape == (4, K)


@pytest.mark.parametrize(
    "options", [{"use_dora": True}, {"use_rslora": True}, {"lora_dropout": 0.5}]
)
def test_kinds_of_lora(options: dict[str, Any]) -> None:
    history = trained(bayesian_adapter(lora(**options)))
    assert history[-1]["nll"] < history[0]["nll"]


def test_embeddings_are_sampled_once() -> None:
    bnn = bayesian_adapter(lora(target_modules=["query", "word_embeddings"]))
    treatments = {row.name.split(".")[-2]: row.treatment for row in bnn.summary(**INPUTS)}
    assert treatments == {"default": "exact", "lora_embedding_A": "sampled"}


OTHERS = {
    "IA3": peft.IA3Config(target_modules=["query", "intermediate.dense"],
                          feedforward_modules=["intermediate.dense"]),
    "LoHa": peft.LoHaConfig(r=2, target_modules=["query"]),
    "LoKr": peft.LoKrConfig(r=2, target_modules=["query"]),
    "OFT": peft.OFTConfig(r=2, oft_block_size=0, target_modules=["query"]),
    "VeRA": peft.VeraConfig(r=2, target_modules=["query"]),
    "BitFit": LoraConfig(r=2, target_modules=["query"], bias="all"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_adapters_are_chosen_by_pattern(name: str) -> None:
    net = get_peft_model(bert(), OTHERS[name])
    chosen = [n for n, each in net.named_parameters() if each.requires_grad]
    bnn = bf.BayesianModule(net, include=chosen, exclude=(), output="logits")
    assert bf.ELBO(bnn, num_data=N)(INPUTS, TARGETS).loss.isfinite()
    before = bnn.posterior.mean.detach().clone()
    trained(bnn, epochs=2)
    assert not torch.equal(bnn.posterior.mean, before)
    if name not in ("BitFit",):
        with pytest.raises(ValueError, match=r"parameters of 'A', got none.*BayesianModule\(net"):
            bayesian_adapter(net)


def test_names_with_brackets() -> None:
    net = get_peft_model(nn.Sequential(nn.Linear(4, 4)), LoraConfig(target_modules=["0"]), "v[1]")
    assert bayesian_adapter(net, output=None).layout.names == (
        "base_model.model.0.lora_A.v[1].weight",
    )


def test_the_prior_can_be_centred_on_an_adapter() -> None:
    net = lora(init_lora_weights=False)
    bnn = bayesian_adapter(net, prior_mean="initial")
    assert bnn.prior_mean is not None
    assert torch.equal(bnn.prior_mean, bnn.posterior.mean)
    assert bnn.prior_mean.abs().min() > 0.0


def test_wrong_arguments() -> None:
    cases: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "net must be a PeftModel, got BertFor", lambda: bayesian_adapter(bert())),
        (TypeError, "got the string 'A'", lambda: bayesian_adapter(lora(), "A")),
        (TypeError, "such as ('A',), got None", lambda: bayesian_adapter(lora(), None)),  # type: ignore[arg-type]
        (ValueError, "one or more of ('A', 'B', ", lambda: bayesian_adapter(lora(), ())),
        (ValueError, "got ('C',)", lambda: bayesian_adapter(lora(), ("C",))),  # type: ignore[arg-type]
        (
            ValueError,
            "trained parameters of 'modules_to_save', got none; name them in",
            lambda: bayesian_adapter(lora(task_type=None), ("modules_to_save",)),
        ),
    ]
    for kind, message, wrong in cases:
        with pytest.raises(kind, match=re.escape(message)):
            wrong()
    two = lora(task_type=None)
    two.add_adapter("other", LoraConfig(r=2, target_modules=["query"]))
    two.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match="exactly one adapter must be active"):
        bayesian_adapter(two)
