"""Peak memory of trainings beside the estimate of `geb plan --estimate`, on the CPU.

    python -m benchmarks.planned_memory [--processes 1 2] [--zero off 2 3] [--lora 0 8]

trains a small Llama in float32 for a few steps with each setting, as programs of their own, and
samples the anonymous resident memory (`RssAnon`) of the training processes. Short responses: it is
about weights, gradients and optimizer.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from benchmarks.memory_peaks import memory_peaks
from benchmarks.sizes import llama_sizes
from flows.planning.cost import GIB, this_cpu, training_memory
from flows.planning.sizes import read_shape
from stages.contract.events import Progress, parse_event
from stages.contract.request import Request
from stages.store.base import Store
from stages.train.params import TrainParams
from tests.stage_calls import file_input
from tests.stages.train.train_helpers import make_pairs, request_for
from tests.tiny_models import make_tiny_llama

_PAIRS = 24
_SHARDING: dict[str, dict[str, object]] = {
    "off": {},
    **{str(stage): {"deepspeed": {"zero_stage": stage}} for stage in (1, 2, 3)},
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--zero", nargs="+", choices=list(_SHARDING), default=["off", "2", "3"])
    parser.add_argument("--lora", type=int, nargs="+", default=[0, 8], help="ranks; 0 is none")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=16000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="planned-memory-") as place:
        folder = Path(place)
        policy = make_tiny_llama(folder / "policy", **llama_sizes(asked))
        pairs = make_pairs(folder / "pairs.parquet", _PAIRS)
        shape = read_shape(file_input(policy), Store.open(str(folder / "store"), create=True))
        print(f"weights: {shape.params * 4 / GIB:.2f} GiB in float32\n")
        print("| shards | LoRA | processes | measured, GiB | estimate, GiB | measured / estimate |")
        print("| --- | --- | ---: | ---: | ---: | ---: |")
        settings = itertools.product(asked.zero, asked.lora, asked.processes)
        for number, (zero, rank, processes) in enumerate(settings):
            changes = {
                **_SHARDING[zero],
                "lora": {"rank": rank},
                "epochs": 1,
            }
            request = request_for(
                folder / f"store-{number}", policy, [pairs], processes=processes, **changes
            )
            measured = peak_gib(request, folder / f"request-{number}.json")
            params = TrainParams.model_validate(request.params)
            planned = training_memory(shape, params, this_cpu(), processes) / GIB
            name = f"rank {rank}" if rank else "none"
            print(
                f"| {zero} | {name} | {processes} | {measured:.2f} | {planned:.2f} "
                f"| {measured / planned:.2f} |",
                flush=True,
            )


def peak_gib(request: Request, path: Path) -> float:
    """Most memory of a training process from its first step to its end, in GiB."""
    request.write(path)
    with subprocess.Popen(
        [sys.executable, "-m", "stages.train", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as stage:
        assert stage.stdout is not None
        trains = threading.Event()
        with memory_peaks(stage.pid, lambda: "training" if trains.is_set() else None) as peaks:
            for line in stage.stdout:
                event = parse_event(line)
                # The reference's pass has told of all pairs: what comes is training.
                is_pass = isinstance(event, Progress) and event.unit == "pairs"
                if is_pass and event.done == event.total:
                    trains.set()
    if stage.returncode:
        raise RuntimeError(f"the training ended with exit code {stage.returncode}")
    return max(peaks["training"].values()) / GIB


if __name__ == "__main__":
    main()
