"""The features of texts: the mean of a pretrained network's last states over their tokens."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.encoders import save_encoder
from torch import Tensor

from bayesify.tabular.columns import TextColumn, TokenColumn, column_from_json
from bayesify.tabular.files import TableError
from bayesify.tabular.text_encoder import TextEncoder, Tokenizer, encoder_of, tokenizer_of

pytestmark = pytest.mark.filterwarnings("ignore:.*SwigPy|.*swigvarlink:DeprecationWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder") / "net")


def test_the_mean_over_the_tokens(folder: Path) -> None:
    import transformers

    network = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["word1", "word2 word3 word4", "word5 nothing word6 word7 word8"]
    features = TextEncoder(str(folder)).features(texts)
    for text, found in zip(texts, features, strict=True):  # alone, so without padding
        states = network(**tokenizer(text, return_tensors="pt")).last_hidden_state
        assert np.allclose(found, states[0].mean(0).detach().numpy(), atol=1e-6)


def test_a_long_text_is_cut(folder: Path) -> None:
    encoder = TextEncoder(str(folder))
    long = " ".join(["word1"] * 254)
    assert np.allclose(*encoder.features([long, f"{long} word2 word3"]), atol=1e-6)
    assert not np.allclose(*encoder.features([long, f"word2 {long}"]), atol=1e-6)


def with_settings(folder: Path, new: Path, **settings: object) -> str:
    """The encoder with other settings of its tokenizer."""
    shutil.copytree(folder, new)
    path = new / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return str(new)


def test_a_tokenizer_that_pads_and_cuts_on_the_left(tmp_path: Path) -> None:
    import transformers

    folder = save_encoder(tmp_path / "net")
    sides = {"padding_side": "left", "truncation_side": "left"}
    left = with_settings(folder, tmp_path / "left", **sides)
    assert transformers.AutoTokenizer.from_pretrained(left).padding_side == "left"
    long = " ".join(["word1"] * 300 + ["word2"])
    encoder = TextEncoder(left)
    (alone,) = encoder.features(["word1 word2"])
    assert np.allclose(encoder.features(["word1 word2", long])[0], alone, atol=1e-6)
    assert Tokenizer(left).tokens([long], 5) == Tokenizer(str(folder)).tokens([long], 5)


def test_the_digest_is_that_of_the_stored_weights(folder: Path, tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)  # the pooler is not in the file, and is drawn anew
        again = TextEncoder(str(folder)).sha256
    assert TextEncoder(str(folder)).sha256 == again
    assert TextEncoder(str(save_encoder(tmp_path / "b", seed=1))).sha256 != again


@pytest.mark.parametrize("kind", [TextColumn, TokenColumn])
def test_another_tokenizer_of_the_same_weights_is_noticed(
    kind: type[TextColumn | TokenColumn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_encoder(tmp_path / "net")
    stored = kind.of("query", "net").to_json()
    with_settings(tmp_path / "net", tmp_path / "cut", model_max_length=200)
    with_settings(tmp_path / "net", tmp_path / "cased", do_lower_case=False)
    padding = {"padding_side": "left", "extra": "setting"}
    with_settings(tmp_path / "net", tmp_path / "same", **padding)
    tokenizer_of("same").batch(["word1", "word1 word2"], 5)  # its state changes as it is used
    column_from_json({**stored, "encoder": "same"}).check_network()
    for other in ("cut", "cased"):
        column = column_from_json({**stored, "encoder": other})
        with pytest.raises(TableError, match=r"must have the tokenizer of the training, with SHA"):
            column.parse(np.array(["word1"], dtype=object))
        del (old := column.to_json())["reader_sha256"]  # as earlier versions stored it
        column_from_json(old).check_network()


@pytest.mark.slow
def test_the_digest_of_a_tokenizer_is_that_of_every_process(folder: Path) -> None:
    script = (
        "import sys; from bayesify.tabular.text_encoder import Tokenizer\n"
        "print(Tokenizer(sys.argv[1]).reader_sha256)\n"
    )
    options: dict[str, Any] = {"check": True, "capture_output": True, "text": True}
    told = subprocess.run([sys.executable, "-c", script, str(folder)], **options).stdout
    assert told.strip() == Tokenizer(str(folder)).reader_sha256


def column(folder: Path, texts: list[str]) -> tuple[TextColumn, np.ndarray]:
    draft = TextColumn.of("query", str(folder))
    values = draft.parse(np.array(texts, dtype=object))
    return draft.fit(values), values


def test_features_are_standardised(folder: Path) -> None:
    texts = [f"word{n} word{n + 1}" for n in range(20)]
    fitted, values = column(folder, texts)
    inputs = fitted.encode(values)
    assert inputs.shape == (20, 8) == (20, len(fitted.features))
    assert np.allclose(inputs.mean(0), 0.0, atol=1e-5)
    assert np.allclose(inputs.std(0), 1.0, atol=1e-4)
    assert column_from_json(fitted.to_json()) == fitted


def test_a_missing_text_has_an_input_of_its_own(folder: Path) -> None:
    fitted, values = column(folder, ["word1", "", "word3", " "])
    inputs = fitted.encode(values)
    assert fitted.features[-1] == "query is missing"
    assert inputs[:, -1].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert not inputs[1, :-1].any()
    assert fitted.outside(values).tolist() == [0.0] * 4


def test_a_missing_text_lies_outside_where_training_had_none(folder: Path) -> None:
    fitted, values = column(folder, ["word1", "word2", "word3"])
    assert not fitted.outside(values).any()
    new = fitted.parse(np.array(["", "word1"], dtype=object))
    assert fitted.outside(new).tolist() == [np.inf, 0.0]


def test_features_far_from_trainings_lie_outside(folder: Path) -> None:
    fitted, _ = column(folder, [f"word{n} word{n + 1}" for n in range(20)])
    far = np.asarray(fitted.means) + 10.0 * np.asarray(fitted.stds)
    assert fitted.outside(far[None]).tolist() > [1.0]


def test_nothing_is_asked_of_the_hub_for_a_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    options = []
    load = transformers.AutoModel.from_pretrained

    def watched(source: str, **given: object) -> object:
        options.append(given)
        return load(source, **given)

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", watched)
    TextEncoder(str(folder))
    assert [given["local_files_only"] for given in options] == [True]
    with pytest.raises(TableError, match=r"\(there is no such folder\)"):
        TextEncoder(str(folder / "none"))
    assert len(options) == 1


def test_what_is_no_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(TableError, match="must be the folder, or the name on Hugging Face's hub"):
        TextEncoder(str(tmp_path))
    monkeypatch.setattr("bayesify.tabular.pretrained_model.find_spec", lambda name: None)  # noqa: ARG005
    with pytest.raises(TableError, match=r"needs transformers; pip install 'bayesify\[cli,trans"):
        TextEncoder(str(tmp_path))


SMALL = {
    "vocab_size": 45,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 40,
}


def save_as(folder: Path, config: Any, **settings: object) -> str:
    """Write an encoder of another kind with the tokenizer of ours, in other settings."""
    import transformers

    source = with_settings(save_encoder(folder / "bert"), folder / "net", **settings)
    transformers.AutoModel.from_config(config).save_pretrained(source)
    return source


def test_encoders_that_read_no_texts_alone(tmp_path: Path) -> None:
    import transformers

    vision = {**SMALL, "image_size": 16, "patch_size": 8}
    pair = transformers.CLIPConfig(text_config=SMALL, vision_config=vision, projection_dim=8)
    with pytest.raises(
        TableError, match=r"net must be a model whose states .* got CLIPModel \(.+\)"
    ):
        TextEncoder(save_as(tmp_path / "clip", pair))
    fourier = transformers.FNetConfig(**{k: v for k, v in SMALL.items() if "heads" not in k})
    without_mask = {"model_input_names": ["input_ids", "token_type_ids"]}
    with pytest.raises(
        TableError, match=r"follow from texts alone, got FNetModel \('attention_mas"
    ):
        TextEncoder(save_as(tmp_path / "fnet", fourier, **without_mask))
    unpadded = save_as(tmp_path / "unpadded", transformers.BertConfig(**SMALL), pad_token=None)
    with pytest.raises(TableError, match=r"got BertModel \(Asking to pad but the tokenizer does"):
        TextEncoder(unpadded)


def test_features_are_as_many_as_the_states_are_wide(tmp_path: Path) -> None:
    import transformers

    names = {"vocab_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"}
    sizes = {name: SMALL[name] for name in names}
    config = transformers.OPTConfig(**sizes, hidden_size=8, ffn_dim=8, word_embed_proj_dim=4)
    encoder = TextEncoder(save_as(tmp_path / "opt", config))
    assert encoder.features(["word1", "word2 word3"]).shape == (2, encoder.size) == (2, 4)


def renamed(
    folder: Path, new: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> str:
    """The encoder with other weights in its file."""
    shutil.copytree(folder, new)
    weights = change(load_file(new / "model.safetensors"))
    save_file(weights, new / "model.safetensors", metadata={"format": "pt"})
    return str(new)


def test_weights_that_are_not_in_the_file_are_named(folder: Path, tmp_path: Path) -> None:
    other = renamed(folder, tmp_path / "a", lambda t: {f"module.{n}": t[n] for n in t})
    part = renamed(folder, tmp_path / "b", lambda t: {n: t[n] for n in t if "attention" not in n})
    for source in (other, part):
        with pytest.raises(TableError, match=r"its file lacks \d+ of the weights, such as \w+"):
            TextEncoder(source)
        with pytest.raises(TableError, match="its file lacks"):
            encoder_of(source)
    pooled = renamed(folder, tmp_path / "c", lambda t: {n: t[n] for n in t if "pooler" not in n})
    assert np.allclose(
        TextEncoder(pooled).features(["word1"]), TextEncoder(str(folder)).features(["word1"])
    )


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "gpt2"])
def test_a_folder_without_its_tokenizer(kind: str, tmp_path: Path) -> None:
    import transformers

    config = transformers.AutoConfig.for_model(kind)
    config.save_pretrained(tmp_path)
    with pytest.raises(TableError, match=r"encoder .* must"):
        Tokenizer(str(tmp_path))


def test_a_text_has_no_more_tokens_than_the_model_has_positions(
    folder: Path, tmp_path: Path
) -> None:
    import transformers

    few = str(shutil.copytree(folder, tmp_path / "few"))
    config = transformers.BertConfig.from_pretrained(few, max_position_embeddings=20)
    config.save_pretrained(few)
    assert Tokenizer(few).longest == 20
    behind = str(shutil.copytree(folder, tmp_path / "behind"))
    config = transformers.RobertaConfig(max_position_embeddings=20, pad_token_id=1)
    config.save_pretrained(behind)
    assert Tokenizer(behind).longest == 18
