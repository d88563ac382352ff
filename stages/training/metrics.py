"""Metrics of training steps: one JSON object a line."""

import json
import resource
import time
from pathlib import Path
from typing import Any

import torch

from stages.contract.events import Emitter
from stages.training.batches import Plan

_FILE = "metrics.jsonl"
TIMINGS = ("step_seconds", "tokens_per_second", "peak_memory_mib")
"""Values that differ between computations of the same result; they stay out of the summary."""


class StepLog:
    """The records of a training's steps, which says how far it is; for the first process.

    The records of the checkpoint that is ``resumed`` come first.
    """

    def __init__(self, resumed: Path | None, events: Emitter, plan: Plan[Any]) -> None:
        self.records: list[dict[str, Any]] = []
        if resumed is not None:
            lines = (resumed / _FILE).read_text().splitlines()
            self.records = [json.loads(line) for line in lines]
        self._events = events
        self._plan = plan

    def start(self, done: int) -> None:
        """Starts the clock after ``done`` steps."""
        self._last = time.perf_counter()
        self._events.progress(done, self._plan.num_steps, "steps")

    def report(self, step: int, values: dict[str, float]) -> None:
        """Takes the values of a step, from 1."""
        now = time.perf_counter()
        seconds = now - self._last
        self._last = now
        record: dict[str, Any] = {
            "step": step,
            "epoch": (step - 1) // self._plan.steps_per_epoch + 1,
            **values,
            "step_seconds": seconds,
            "tokens_per_second": values["num_tokens"] / seconds,
        }
        self.records.append(record)
        self._events.metric(**record)
        self._events.progress(step, self._plan.num_steps, "steps", f"loss {values['loss']:.4f}")

    def write_to(self, folder: Path) -> None:
        """Writes all records so far into a folder."""
        lines = [json.dumps(record) + "\n" for record in self.records]
        (folder / _FILE).write_text("".join(lines))


def peak_memory_mib(device: torch.device) -> float:
    """Most memory that this process had so far: of the GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    # Linux gives it in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
