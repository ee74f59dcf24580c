"""A small text encoder with random weights, in a folder as ``transformers`` writes it."""

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
        **{"hidden_size": size, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"intermediate_size": size, "vocab_size": len(WORDS)},
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformers.BertModel(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    return folder
