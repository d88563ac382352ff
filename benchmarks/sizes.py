"""Sizes of the Llamas of random weights whose memory is measured."""

from __future__ import annotations

import argparse
from typing import Any


def llama_sizes(asked: argparse.Namespace) -> dict[str, Any]:
    """Arguments of :func:`tests.tiny_models.make_tiny_llama` for options of the command line.

    Args:
        asked: ``width`` of the hidden states, ``layers``, and words of the ``vocabulary``.
    """
    return {
        "words": [f"word{index}" for index in range(asked.vocabulary)],
        "hidden_size": asked.width,
        "intermediate_size": asked.width * 11 // 4,
        "num_hidden_layers": asked.layers,
        "num_attention_heads": asked.width // 64,
        "num_key_value_heads": asked.width // 64,
        "initializer_range": 0.02,
    }
