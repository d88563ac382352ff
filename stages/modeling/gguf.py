"""Checkpoints from GGUF files: the weights are dequantised and written as safetensors.

It is a program of its own, ``python -m stages.modeling.gguf FILE FOLDER DTYPE``, for callers that
load no torch.
"""

import argparse
import hashlib
import sys
from collections import Counter
from pathlib import Path

from stages.contract.errors import EXIT_USER, UserError
from stages.contract.events import dump_json
from stages.modeling.load import DTYPES, Precision

RECORD = "gguf.json"
"""File beside the weights: digest and quantisation of the GGUF file, and the type written."""


def convert(source: Path, target: Path, dtype: Precision) -> None:
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
        types = Counter(tensor.tensor_type.name for tensor in GGUFReader(source).tensors)
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
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    record = {"sha256": digest, "tensors": dict(sorted(types.items())), "dtype": dtype}
    (target / RECORD).write_text(dump_json(record))
    for path in target.iterdir():
        # Containers of other users read it.
        path.chmod(0o644)


def main() -> int:
    """Converts as the command line says; 64 for a file that cannot be converted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("dtype", choices=DTYPES)
    try:
        convert(**vars(parser.parse_args()))
    except UserError as error:
        sys.stderr.write(f"{error.message}\n{error.remedy}\n")
        return EXIT_USER
    return 0


if __name__ == "__main__":
    sys.exit(main())
