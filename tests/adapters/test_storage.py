"""A folder of an adapter is read by peft alone, and the posterior comes back with it."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from tests.docs.test_snippets import run_snippets
from tests.small_adapters import INPUTS, MARKS, SIZES, TARGETS, K, N, bert, lora, trained
from torch import nn

import bayesify as bf
from bayesify.adapters import bayesian_adapter, load_adapter, save_adapter
from bayesify.io import StorageError

pytestmark = MARKS


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
    monkeypatch.undo()
    (folder / ".part-abc").mkdir()  # of a process that was killed
    (folder / ".part-abc" / "adapter_config.json").write_text("{")
    save_adapter(bnn, folder)
    assert {path.name for path in folder.iterdir()} == set(before)


@pytest.mark.filterwarnings("ignore:no noise loses:UserWarning")  # of so little data
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loader = [{**INPUTS, "labels": TARGETS}]
    given = {"base": bert(), "dataset": TARGETS, "loader": loader, "held_out_loader": loader}
    names = run_snippets("docs/adapters.md", {**given, "inputs": INPUTS})
    assert names["p"].mean.shape == (N, K)
    again = load_adapter(tmp_path / "adapter", bert())
    assert torch.equal(again.posterior.mean, names["bnn"].posterior.mean)


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


def test_a_network_without_an_adapter_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="net must be a PeftModel, got Linear"):
        save_adapter(bf.BayesianModule(nn.Linear(2, 2)), tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
