"""Peak memory of each process of a training, phase by phase, against that of one process.

    python -m benchmarks.training_memory [--processes 1 2 4] [--lora 8]

trains a Llama in float32 under ZeRO-3 on a few pairs, with a moved average as reference,
and samples the anonymous resident memory (`RssAnon`) of the workers: what is mapped from a
checkpoint's file can be given back, and is left out.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import tempfile
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import psutil
from transformers import LlamaForCausalLM

from benchmarks.memory_peaks import memory_peaks
from benchmarks.sizes import llama_sizes
from stages.contract.events import Emitter, Event, Log, Metric, Progress
from stages.harness.program import execute
from stages.modeling.load import DTYPES
from stages.train.run import STAGE
from tests.stages.train.train_helpers import make_pairs, request_for
from tests.tiny_models import make_tiny_llama

_PAIRS = 16
# Batches of 8 pairs.
_STEPS = 2


class _Phases(Emitter):
    """Follows a training's events to tell which phase it is in."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self._now = "reference"

    def emit(self, event: Event) -> None:
        super().emit(event)
        if isinstance(event, Progress) and event.unit == "pairs":
            # Reported after a pass: what comes after the last one is training.
            self._now = "training" if event.done == event.total else "reference"
        if isinstance(event, Metric) and event.step == _STEPS:
            self._now = "saving"
        if isinstance(event, Log) and "moved average" in event.message:
            self._now = "ema"

    def phase(self) -> str:
        """The phase of the moment."""
        return self._now


def _is_worker(process: psutil.Process) -> bool:
    return any(part.endswith(".worker") for part in process.cmdline())


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0 is none")
    parser.add_argument(
        "--stored", choices=list(DTYPES), default="float32", help="dtype of the files"
    )
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=32000)
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="training-memory-"))
    try:
        policy = make_tiny_llama(folder / "policy", **llama_sizes(asked))
        stored = LlamaForCausalLM.from_pretrained(policy, dtype=DTYPES[asked.stored])
        stored.save_pretrained(policy)
        size = 4 * stored.num_parameters() / 2**20
        del stored
        print(f"weights: {size:.0f} MiB in float32; stored in {asked.stored}\n")
        print(
            "| processes | phase | peak of each process, MiB | largest × processes / that of one |"
        )
        print("| --- | --- | --- | ---: |")
        pairs = make_pairs(folder / "pairs.parquet", _PAIRS)
        alone: dict[str, float] = {}
        seconds: dict[int, str] = {}
        for count in asked.processes:
            phases = _Phases()
            store = folder / f"store-{count}"
            request = request_for(
                store,
                policy,
                [pairs],
                processes=count,
                reference_kind="ema",
                epochs=1,
                lora={"rank": asked.lora},
                deepspeed={"zero_stage": 3},
            )
            before = getrusage(RUSAGE_CHILDREN)
            with memory_peaks(os.getpid(), phases.phase, _is_worker) as peaks:
                execute(STAGE, request, phases)
            after = getrusage(RUSAGE_CHILDREN)
            shutil.rmtree(store)
            for phase, found in peaks.items():
                shown = ", ".join(f"{each / 2**20:.0f}" for each in found.values())
                largest = max(found.values())
                if count == 1:
                    alone[phase] = largest
                share = f"{largest * count / alone[phase]:.2f}" if phase in alone else ""
                print(f"| {count} | {phase} | {shown} | {share} |", flush=True)
            spent = (after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime)
            seconds[count] = (
                f"{spent[0]:.0f} s of the program's and {spent[1]:.0f} s of the system's"
            )
        for count, said in seconds.items():
            print(f"\n{count} processes: {said} CPU time")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
