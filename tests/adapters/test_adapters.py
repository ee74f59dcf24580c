"""Variational adapters against peft itself: what is random, and what a file holds."""

from __future__ import annotations

import copy
import re
import tempfile
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from tests.cases import normals
from tests.docs.test_snippets import run_snippets
from torch import Tensor, nn

import bayesify as bf
from bayesify.adapters import bayesian_adapter, load_adapter, save_adapter, widen
from bayesify.io import StorageError

pytestmark = [
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


# ------------------------------------------------------------------------------ what is random


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


# ----------------------------------------------------------------------------- folders of adapters


def test_peft_alone_loads_the_means_and_we_the_rest(tmp_path: Path) -> None:
    bnn = bayesian_adapter(lora(), seed=3)
    trained(bnn)
    save_adapter(bnn, tmp_path / "deep" / "adapter")
    folder = tmp_path / "deep" / "adapter"
    expected = bnn.mean_outputs(INPUTS)
    assert [path.name for path in folder.parent.iterdir()] == ["adapter"]
    # A new head is drawn with the base network: it is not the one that the file was saved with.
    base = bert()
    torch.nn.init.normal_(base.classifier.weight)
    alone = PeftModel.from_pretrained(copy.deepcopy(base), str(folder)).eval()
    torch.testing.assert_close(alone(**INPUTS).logits, expected)
    again = load_adapter(folder, copy.deepcopy(base))
    assert torch.equal(again.posterior.std, bnn.posterior.std)
    torch.testing.assert_close(again.predict(INPUTS, 5).mean, bnn.predict(INPUTS, 5).mean)
    assert (again.estimator, again.seed) == (bnn.estimator, 3)
    trained(again, epochs=1)
    # Only what is trained is on the disk, and the old head.
    with safe_open(folder / "posterior.safetensors", "pt") as file:
        names = list(file.keys())
    assert not [name for name in names if "embeddings" in name]
    save_adapter(again, folder)  # a folder that is there already


def test_merged_into_the_base() -> None:
    bnn = bayesian_adapter(lora())
    trained(bnn)
    merged = bnn.to_module().merge_and_unload().eval()
    assert type(merged) is transformers.BertForSequenceClassification
    torch.testing.assert_close(merged(**INPUTS).logits, bnn.mean_outputs(INPUTS))
    # The caller's network and the Bayesian one share what is frozen; neither is merged into.
    torch.testing.assert_close(bnn.mean_outputs(INPUTS), merged(**INPUTS).logits)


def test_another_base_is_refused(tmp_path: Path) -> None:
    save_adapter(bayesian_adapter(lora()), tmp_path / "adapter")
    base = bert()
    nn.init.normal_(base.bert.embeddings.word_embeddings.weight)
    names, outputs = list(base.state_dict()), base.eval()(**INPUTS).logits
    with pytest.raises(StorageError, match="those of the given network are others"):
        load_adapter(tmp_path / "adapter", base)
    assert list(base.state_dict()) == names
    assert all(parameter.requires_grad for parameter in base.parameters())
    assert torch.equal(base(**INPUTS).logits, outputs)


def test_a_folder_of_peft_alone(tmp_path: Path) -> None:
    lora().save_pretrained(tmp_path)
    with pytest.raises(StorageError, match=r"has no posterior\.safetensors"):
        load_adapter(tmp_path, bert())


def test_a_folder_of_another_file_system(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs another file system")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        (tmp_path / "link").symlink_to(folder)
        save_adapter(bayesian_adapter(lora()), tmp_path / "link")
        assert load_adapter(tmp_path / "link", bert()).layout.num_weights == 2 * 2 * 2 * 8
        assert not [path for path in Path(folder).iterdir() if path.name.startswith(".")]


def test_a_refused_base_keeps_its_hooks(tmp_path: Path) -> None:
    save_adapter(bayesian_adapter(lora()), tmp_path)
    base: Any = bert()
    nn.init.normal_(base.bert.embeddings.word_embeddings.weight)
    base.activation_checkpointing_enable()
    hooks = [len(module._forward_hooks) for module in base.modules()]
    handle = base.classifier.register_forward_hook(lambda *_: None)
    with pytest.raises(StorageError, match="those of the given network are others"):
        load_adapter(tmp_path, base)
    handle.remove()
    assert [len(module._forward_hooks) for module in base.modules()] == hooks


def test_a_base_with_a_traced_module(tmp_path: Path) -> None:
    def base() -> nn.Sequential:
        torch.manual_seed(0)
        traced = torch.jit.trace(nn.Linear(4, 4), torch.zeros(1, 4))
        return nn.Sequential(traced, nn.Linear(4, 3))

    net = get_peft_model(base(), LoraConfig(r=2, target_modules=["1"]))
    save_adapter(bayesian_adapter(net, output=None), tmp_path)
    assert load_adapter(tmp_path, base()).layout.num_weights == 8


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


def test_a_full_disk_leaves_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "adapter"
    bnn = bayesian_adapter(lora())
    save_adapter(bnn, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bayesify.adapters.storage.write_tensors", full)
    trained(bnn, epochs=1)
    with pytest.raises(OSError, match="No space"):
        save_adapter(bnn, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.filterwarnings("ignore:no noise loses:UserWarning")  # of so little data
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loader = [{**INPUTS, "labels": TARGETS}]
    given = {"base": bert(), "dataset": TARGETS, "loader": loader, "held_out_loader": loader}
    names = run_snippets("docs/adapters.md", {**given, "inputs": INPUTS})
    assert names["p"].mean.shape == (N, K)
    again = load_adapter(tmp_path / "adapter", bert())
    assert torch.equal(again.posterior.mean, names["bnn"].posterior.mean)


# ---------------------------------------------------------------------------------------- widening


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
        (ValueError, "tolerance must be a positive number", lambda: widen(net, loader, 0.0)),
        (TypeError, "tolerance must be one number", lambda: widen(net, loader, None)),  # type: ignore[arg-type]
        (ValueError, "num_samples must be at least 1", lambda: widen(net, loader, num_samples=0)),
        (ValueError, "the loader must have data, got none", lambda: widen(net, [])),
        (ValueError, "must be trained, but B of", lambda: widen(lora(), loader)),
        (TypeError, "net must be a PeftModel, got Linear", lambda: save_adapter(
            bf.BayesianModule(nn.Linear(2, 2)), "nowhere")),
    ]  # fmt: skip
    for kind, message, wrong in cases:
        with pytest.raises(kind, match=re.escape(message)):
            wrong()
    two = lora(task_type=None)
    two.add_adapter("other", LoraConfig(r=2, target_modules=["query"]))
    two.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match="exactly one adapter must be active"):
        bayesian_adapter(two)
    assert not Path("nowhere").exists()


def test_a_folder_that_peft_could_not_load_is_not_written(tmp_path: Path) -> None:
    mine = get_peft_model(
        bert(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]), adapter_name="mine"
    )
    two = lora()
    two.add_adapter("second", LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))
    for net, names in ((mine, "'mine'"), (two, "'default', 'second'")):
        with pytest.raises(ValueError, match=f'one adapter, called "default", .* got {names}'):
            save_adapter(bayesian_adapter(net), tmp_path / "adapter")
    changed = bayesian_adapter(lora(init_lora_weights="pissa_niter_2"))
    with pytest.raises(ValueError, match="init_lora_weights='pissa_niter_2', which changes the"):
        save_adapter(changed, tmp_path / "adapter")
    attention = nn.TransformerEncoderLayer(8, 2, 8)
    drifting = get_peft_model(attention, LoraConfig(r=2, target_modules=["self_attn"]))
    with pytest.raises(
        ValueError, match=r"no adapter of an nn\.MultiheadAttention, got .*self_att"
    ):
        save_adapter(bayesian_adapter(drifting, output=None), tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_experts_are_not_widened() -> None:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 11},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2},
        **{"num_labels": K, "pad_token_id": 0},
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


@pytest.mark.parametrize("fault", ["width", "adapted", "config", "no weights", "weights", "kind"])
def test_folders_that_cannot_be_loaded(fault: str, tmp_path: Path) -> None:
    bnn = bayesian_adapter(lora())
    save_adapter(bnn, tmp_path)
    base: Any = bert()
    if fault == "width":
        base = transformers.BertForSequenceClassification(
            transformers.BertConfig(**{**SIZES, "hidden_size": 16}, intermediate_size=8)
        )
    elif fault == "kind":
        base = nn.Linear(3, 2)
    elif fault == "config":
        (tmp_path / "adapter_config.json").write_text('{"r": 2,')
    elif fault == "no weights":
        (tmp_path / "adapter_model.safetensors").unlink()
    elif fault == "weights":
        (tmp_path / "adapter_model.safetensors").write_bytes(b"damaged")
    error = StorageError
    if fault == "adapted":
        base, error = lora(), TypeError
    names = list(base.state_dict())
    with pytest.raises(error):
        load_adapter(tmp_path, base)
    assert list(base.state_dict()) == names
    with pytest.raises(TypeError, match="save_adapter needs a BayesianModule, got PeftModel"):
        save_adapter(lora(), tmp_path)  # type: ignore[arg-type]
