"""Small encoders of texts and of images with random weights, as ``transformers`` writes them."""

from __future__ import annotations

from pathlib import Path

import torch

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{n}" for n in range(40))]


def save_encoder(folder: Path, *, seed: int = 0, size: int = 8) -> Path:
    """Write an encoder that knows the words word0 to word39; return its folder."""
    import transformers

    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    config = transformers.BertConfig(
        hidden_size=size,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=size,
        vocab_size=len(WORDS),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformers.BertModel(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    return folder


def save_image_encoder(folder: Path, *, seed: int = 0, size: int = 8, kind: str = "vit") -> Path:
    """Write an encoder of images of 16 x 16 pixels; return its folder.

    It is a vision transformer, with its pooler or without, or a convolutional network.
    """
    import json

    import transformers

    folder.mkdir(parents=True)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "resnet":
            config = transformers.ResNetConfig(
                embedding_size=4, hidden_sizes=[4, size], depths=[1, 1], layer_type="basic"
            )
            model = transformers.ResNetModel(config)
        else:
            config = transformers.ViTConfig(
                hidden_size=size,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=size,
                image_size=16,
                patch_size=8,
            )
            model = transformers.ViTModel(config, add_pooling_layer=kind == "vit with pooler")
        model.save_pretrained(folder)
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": 16, "width": 16},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder
