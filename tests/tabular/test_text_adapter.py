"""A network of an encoder with an adapter: which noise it has in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bayesify.tabular.text_adapter import adapter_net

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    return transformers.BertModel(config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=30, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.5
    )
    return transformers.T5EncoderModel(config)


def bart() -> Any:
    config = transformers.BartConfig(
        vocab_size=30,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        dropout=0.5,
        attention_dropout=0.5,
        activation_dropout=0.5,
    )
    return transformers.BartModel(config).get_encoder()


@pytest.mark.parametrize("make", [bert, t5, bart])
def test_an_encoder_drops_nothing_in_training(make: Any) -> None:
    """Dropout is a module in some encoders, and the argument of a function in others."""
    encoder = make().eval().requires_grad_(False)
    net = adapter_net(
        encoder, texts=[range(6)], others=[], rank=2, hidden=(4,), num_outputs=2, seed=0
    )
    tokens = torch.tensor([[3.0, 4.0, 5.0, 6.0, 7.0, 8.0], [9.0, 10.0, 11.0, -1.0, -1.0, -1.0]])
    net.train()
    assert torch.equal(net(tokens), net(tokens))
