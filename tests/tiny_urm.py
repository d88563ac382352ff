"""A tiny checkpoint laid out like LxzGordon/URM-LLaMa-3.1-8B.

Its tensors are written by their names in that checkpoint, without the model class of the project:
a sequence classifier's of ten outputs, and the gate's ``weights.fc.{0,2,4}``.
"""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForSequenceClassification

from tests.tiny_models import CHAT_TEMPLATE, make_tiny_tokenizer, tiny_config

NUM_OUTPUTS = 10
NUM_GATES = 5


def make_tiny_urm(path, *, chat_template=CHAT_TEMPLATE):
    """Writes checkpoint and tokenizer to ``path`` and returns it."""
    tokenizer = make_tiny_tokenizer(chat_template=chat_template)
    torch.manual_seed(0)
    config = tiny_config(len(tokenizer), num_labels=NUM_OUTPUTS, initializer_range=0.2)
    classifier = LlamaForSequenceClassification(config)
    width = classifier.config.hidden_size
    shapes = {"0": (width, width), "2": (width, width), "4": (NUM_GATES, width)}
    gate = {}
    for layer, shape in shapes.items():
        gate[f"weights.fc.{layer}.weight"] = 0.2 * torch.randn(shape)
        gate[f"weights.fc.{layer}.bias"] = 0.2 * torch.randn(shape[0])
    classifier.save_pretrained(path)
    tokenizer.save_pretrained(path)
    # As in the original, the gate is in float16.
    change_weights(path, add={name: tensor.half() for name, tensor in gate.items()})
    # The original's configuration names code of the model's repository, which is not run here.
    file = path / "config.json"
    auto_map = {"AutoModelForSequenceClassification": "modeling_custom.UrmWithItsOwnCode"}
    file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": auto_map}, indent=2))
    return path


def change_weights(path, *, add=None, drop=None):
    """Adds tensors to the checkpoint at ``path``, or takes those away that begin with ``drop``."""
    file = path / "model.safetensors"
    tensors = {**load_file(file), **(add or {})}
    kept = {
        name: tensor for name, tensor in tensors.items() if not drop or not name.startswith(drop)
    }
    save_file(kept, file, metadata={"format": "pt"})
