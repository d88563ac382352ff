"""Checkpoints from GGUF files: the weights are dequantised and written as safetensors.

It is a program of its own, ``python -m stages.modeling.gguf FILE FOLDER DTYPE``, for callers that
load no torch.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import cast

from stages.contract.digests import sha256_file
from stages.contract.errors import UserError
from stages.contract.events import Emitter, dump_json
from stages.contract.number_types import NumberType
from stages.harness.program import run_program
from stages.modeling.load import DTYPES

RECORD = "gguf.json"
"""File beside the weights: digest and quantisation of the GGUF file, and the type written."""
CARD = "README.md"
"""Model card with the licence that the file names; an exported model's card repeats it."""


def convert(source: Path, target: Path, dtype: NumberType) -> None:
    """Writes the checkpoint that a GGUF file holds: weights, tokenizer and chat template.

    Raises:
        UserError: ``gguf`` is not installed, or transformers' reader does not know the file's
            architecture or cannot read the file.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError(
            f"{source} needs the package gguf, which is not installed",
            "pip install gguf, or name a checkpoint in safetensors",
        ) from error
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        file = GGUFReader(source)
        types = Counter(tensor.tensor_type.name for tensor in file.tensors)
        where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
        tokenizer = AutoTokenizer.from_pretrained(**where)
        read = AutoModelForCausalLM.from_pretrained(**where, dtype=DTYPES[dtype])
    except (ValueError, KeyError, IndexError, OSError, NotImplementedError) as error:
        raise UserError(
            f"{source} cannot be read as a GGUF file of a language model: {error}",
            "name a file of an architecture that transformers' GGUF reader knows, or the original "
            "checkpoint in safetensors",
        ) from error
    # transformers writes no model that came from GGUF; its weights are plain tensors by now.
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    config = type(read.config).from_dict(settings)
    model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = read.generation_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    digest = sha256_file(source)
    record = {"sha256": digest, "tensors": dict(sorted(types.items())), "dtype": dtype}
    (target / RECORD).write_text(dump_json(record))
    if licence := file.get_field("general.license"):
        text = f"---\nlicense: {licence.contents()}\n---\nFrom {source.name}, SHA-256 {digest}.\n"
        (target / CARD).write_text(text)
    for path in target.iterdir():
        # Containers of other users read it.
        path.chmod(0o644)


def _convert(events: Emitter) -> None:
    """Converts as the command line says."""
    source, target, dtype = sys.argv[1:]
    convert(Path(source), Path(target), cast(NumberType, dtype))
    events.info("converted")


if __name__ == "__main__":
    run_program(_convert)
