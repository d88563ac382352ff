"""Peak memory of each process that holds a whole model: evaluate's reference, and a reward model.

    python -m benchmarks.model_memory [--processes 1 2 4] [--stored float32]

computes log-probabilities of made-up responses with a Llama in float32, and rewards with a Llama
that has one output, and samples the anonymous resident memory (`RssAnon`) of the processes that
compute: what is mapped from files is in the machine once and can be given back, and is left out.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from benchmarks.memory_peaks import memory_peaks
from benchmarks.sizes import llama_sizes
from stages.contract.context import ModelSource
from stages.contract.request import Resources
from stages.modeling.load import DTYPES
from tests.tiny_models import make_tiny_llama, make_tiny_reward_model

_ROWS, _TOKENS, _BATCH_TOKENS = 32, 64, 512
_PARTS = ("reference", "reward model")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--stored", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--compute", nargs=3, metavar=("PART", "MODEL", "PROCESSES"))
    asked = parser.parse_args()
    if asked.compute:
        part, model, count = asked.compute
        _COMPUTE[part](Path(model), Resources(processes=int(count)))
        return
    folder = Path(tempfile.mkdtemp(prefix="model-memory-"))
    try:
        _measure(asked, folder)
    finally:
        shutil.rmtree(folder)


def _measure(asked: argparse.Namespace, folder: Path) -> None:
    for part in _PARTS:
        model, size = _make(part, folder / part, asked)
        print(f"\n{part}: {size:.0f} MiB in float32; stored in {asked.stored}\n")
        print("| processes | peak of each process, MiB | largest × processes / that of one |")
        print("| --- | --- | ---: |", flush=True)
        alone = 0.0
        for count in asked.processes:
            command = [sys.executable, "-m", "benchmarks.model_memory"]
            command += ["--compute", part, str(model), str(count)]
            with (
                subprocess.Popen(command, stderr=subprocess.DEVNULL) as program,
                memory_peaks(program.pid, lambda: "computing", _computes) as peaks,
            ):
                program.wait()
            if program.returncode:
                raise SystemExit(f"{' '.join(command)} ended with {program.returncode}")
            # With several processes the program itself only deals out the rows.
            found = sorted(peaks["computing"].values(), reverse=True)[:count]
            alone = found[0] if count == 1 else alone
            shown = ", ".join(f"{each / 2**20:.0f}" for each in found)
            share = f"{found[0] * count / alone:.2f}" if alone else ""
            print(f"| {count} | {shown} | {share} |", flush=True)
        shutil.rmtree(model)


def _make(part: str, path: Path, asked: argparse.Namespace) -> tuple[Path, float]:
    make, of_class = {
        "reference": (make_tiny_llama, LlamaForCausalLM),
        "reward model": (make_tiny_reward_model, LlamaForSequenceClassification),
    }[part]
    make(path, **llama_sizes(asked))
    stored = of_class.from_pretrained(path, dtype=DTYPES[asked.stored])
    stored.save_pretrained(path)
    return path, 4 * stored.num_parameters() / 2**20


def _computes(process: psutil.Process) -> bool:
    return not any("resource_tracker" in part for part in process.cmdline())


def _reference(model: Path, resources: Resources) -> None:
    from stages.evaluate.reference import Reference

    random = np.random.default_rng(0)
    prompts, responses = (
        [random.integers(3, 99, _TOKENS // 2, dtype=np.int32) for _ in range(_ROWS)]
        for _ in range(2)
    )
    with tempfile.TemporaryDirectory(dir=model.parent) as scratch:
        source = ModelSource(str(model))
        reference = Reference(source, "float32", _BATCH_TOKENS, resources, Path(scratch))
        with closing(reference):
            reference.log_probabilities(prompts, responses)


def _reward_model(model: Path, resources: Resources) -> None:
    from functools import partial

    from stages.modeling.device_pool import DevicePool
    from stages.modeling.mapped import folder_to_share
    from stages.score.reward_model import load_classifier

    random = np.random.default_rng(0)
    batches = random.integers(3, 99, (_ROWS * _TOKENS // _BATCH_TOKENS, 8, _TOKENS)).tolist()
    with tempfile.TemporaryDirectory(dir=model.parent) as scratch:
        folder = folder_to_share(resources, Path(scratch))
        name = folder.name if folder else None
        load = partial(load_classifier, ModelSource(str(model)), "float32", name)
        with closing(DevicePool(load, resources, folder)) as pool:
            list(pool.map(batches))


_COMPUTE = dict(zip(_PARTS, (_reference, _reward_model), strict=True))


if __name__ == "__main__":
    main()
