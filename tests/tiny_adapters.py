"""Adapters of a small checkpoint, saved as a training saves them."""

from pathlib import Path

import torch

from stages.harness.context import ModelSource
from stages.modeling.load import load_causal_lm
from stages.training.adapters import add_adapters, save_adapters
from stages.training.params import LoraParams


def save_tiny_adapters(folder: Path, base: Path) -> Path:
    """Adapters of all linear layers that change what a checkpoint answers.

    Args:
        folder: Where to.
        base: The checkpoint that they are for.
    """
    source = ModelSource(str(base))
    policy = add_adapters(load_causal_lm(source, dtype="float32"), LoraParams(rank=4, alpha=8.0))
    torch.manual_seed(1)
    for name, weight in policy.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.1)
    save_adapters(policy, policy.state_dict(), source, folder)
    return folder
