"""The widest posterior around a trained adapter that predicts as well."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from tests.small_adapters import INPUTS, MARKS, TARGETS, K, T, bert, lora, trained
from torch import Tensor, nn

import bayesify as bf
from bayesify.adapters import bayesian_adapter, widen

pytestmark = MARKS


def wide_net() -> tuple[PeftModel, list[dict[str, Tensor]]]:
    net = lora(r=4, target_modules="all-linear")
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        loss = net(**INPUTS, labels=TARGETS).loss
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.2
    return net, [{**INPUTS, "labels": TARGETS}]


def nll(bnn: bf.BayesianModule, num_samples: int) -> float:
    p = bnn.predict(INPUTS, num_samples) if num_samples else bnn.predict_mean(INPUTS)
    return -float(p.log_prob(TARGETS).mean())


def test_the_widest_that_loses_no_more_than_the_tolerance() -> None:
    net, loader = wide_net()
    outputs = net.eval()(**INPUTS).logits
    narrow, wide = (widen(net, loader, tolerance, num_samples=20) for tolerance in (0.01, 0.1))
    for bnn, tolerance in ((narrow, 0.01), (wide, 0.1)):
        torch.testing.assert_close(bnn.mean_outputs(INPUTS), outputs)
        lost = nll(bnn, 20) - nll(bnn, 0)
        assert lost <= tolerance
        with torch.no_grad():  # 1.2 times as wide would be too wide
            std = bnn.posterior.std.clone()
            bnn.posterior.rho.copy_(torch.log(torch.expm1(1.2 * std)))
        assert nll(bnn, 20) - nll(bnn, 0) > tolerance
    assert (wide.posterior.std > narrow.posterior.std).all()


def test_the_noise_in_a_layer_is_isotropic() -> None:
    """The change of W has covariance sigma^2 I within the columns of B, whatever B's scales."""
    net, loader = wide_net()
    bnn = widen(net, loader, 0.05)
    name = next(n for n in bnn.layout.names if "query" in n)
    owner = bnn.net.get_submodule(name.rpartition(".lora_A")[0])
    b = owner.lora_B["default"].weight.detach()
    std = bnn.layout.unflatten(bnn.posterior.std.detach())[name]
    scales = torch.linalg.vector_norm(b, dim=0)
    products = scales.unsqueeze(1) * std
    torch.testing.assert_close(products, products.mean().expand_as(products), rtol=1e-4, atol=0.0)
    gram = b.T @ b
    torch.testing.assert_close(gram, gram.diagonal().diag(), rtol=1e-4, atol=1e-6)


def test_wrong_arguments() -> None:
    net, loader = wide_net()
    cases: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "tolerance must be positive and finite", lambda: widen(net, loader, 0.0)),
        (TypeError, "tolerance must be a number", lambda: widen(net, loader, None)),  # type: ignore[arg-type]
        (ValueError, "num_samples must be at least 1", lambda: widen(net, loader, num_samples=0)),
        (
            TypeError,
            "num_samples must be a whole number",
            lambda: widen(net, loader, num_samples=2.5),
        ),  # type: ignore[arg-type]
        (ValueError, "the loader must have data, got none", lambda: widen(net, [])),
        (ValueError, "must be trained, but B of", lambda: widen(lora(), loader)),
    ]
    for kind, message, wrong in cases:
        with pytest.raises(kind, match=re.escape(message)):
            wrong()


def test_experts_are_not_widened() -> None:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        vocab_size=11,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        num_labels=K,
        pad_token_id=0,
    )
    base = transformers.MixtralForSequenceClassification(config)
    net = get_peft_model(
        base,
        LoraConfig(r=2, task_type="SEQ_CLS", target_parameters=["mlp.experts.down_proj"]),
    )
    with pytest.raises(ValueError, match="no target_parameters, whose factors hold several"):
        widen(net, [{**INPUTS, "labels": TARGETS}])


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups:UserWarning")
def test_grouped_convolutions_are_not_widened() -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Flatten(), nn.Linear(8 * 4, 3))
    options = {"target_modules": ["0"], "init_lora_weights": False}
    net = get_peft_model(base, LoraConfig(r=4, **options))
    data = [(torch.randn(5, 4, 4, 4), torch.tensor([0, 1, 2, 0, 1]))]
    with pytest.raises(ValueError, match=r"no grouped convolutions, .* got an adapter of .*\.0"):
        widen(net, data, output=None)


def test_a_merged_adapter_is_refused() -> None:
    net = lora(init_lora_weights=False)
    net.merge_adapter()
    for make in (bayesian_adapter, lambda each: widen(each, [{**INPUTS, "labels": TARGETS}])):
        with pytest.raises(ValueError, match=r"merged into .*; call net\.unmerge_adapter"):
            make(net)
    net.unmerge_adapter()
    assert float(bayesian_adapter(net, init_std=0.5).predict(INPUTS, 5).epistemic.max()) > 1e-9


def test_an_adapter_that_was_loaded_to_predict_is_widened(tmp_path: Path) -> None:
    net, data = wide_net()
    net.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(bert(), str(tmp_path))
    with pytest.raises(ValueError, match=r"all are frozen; load it by .*is_trainable=True"):
        bayesian_adapter(loaded)
    expected = widen(net, data).posterior.std
    torch.testing.assert_close(widen(loaded, data).posterior.std, expected, rtol=1e-4, atol=0.0)


def test_a_rank_above_the_outputs_of_a_layer_is_widened() -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    config = LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False)
    net, x, y = get_peft_model(base, config), torch.randn(20, 8), torch.arange(20) % 3
    bnn = widen(net, [(x, y)], output=None)
    with torch.no_grad():
        torch.testing.assert_close(bnn.mean_outputs(x), net(x), rtol=1e-4, atol=1e-5)


def test_tokens_that_do_not_count_are_left_out_of_the_width() -> None:
    targets = INPUTS["input_ids"] % K
    net = lora(bert(transformers.BertForTokenClassification), task_type="TOKEN_CLS")
    bnn = bayesian_adapter(net)
    trained(bnn, targets)
    ignoring = bf.CategoricalLikelihood(ignore_index=-100)
    padded = targets.masked_fill(torch.arange(T) > 2, -100)
    found = widen(bnn.to_module(), [{**INPUTS, "labels": padded}], likelihood=ignoring)
    assert bool((found.posterior.std > 0.0).all())


@pytest.mark.parametrize("fault", ["nan", "nothing to lose", "once"])
def test_data_that_decide_nothing(fault: str) -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    net = get_peft_model(base, LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    x, y = torch.randn(20, 8), torch.arange(20) % 3
    if fault == "nothing to lose":
        with pytest.warns(UserWarning, match="the data decide nothing: sigma is at its limit"):
            widen(net, [(x, y)], tolerance=100.0, output=None)
    elif fault == "once":
        with pytest.raises(ValueError, match="can be read several times, got generator"):
            widen(net, ((x, y) for _ in range(1)), output=None)
    else:
        x[3, 0] = torch.nan
        with pytest.raises(ValueError, match="nll on the loader must be finite, got nan"):
            widen(net, [(x, y)], output=None)
