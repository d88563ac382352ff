"""Figures of a section, each written as soon as it is measured; small helpers of all sections."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

# Data sheets' rates of dense matrix products in bfloat16, by a part of the GPU's name.
NOMINAL_FLOPS = {"H100": 989e12, "H200": 989e12}


class Figures:
    """Takes the figures of a section: a line of JSON each, printed and added to a file."""

    def __init__(self, section: str, path: Path) -> None:
        self._section = section
        self._path = path
        self._started = time.monotonic()

    def write(self, name: str, **values: Any) -> None:
        """Writes a figure; numbers are rounded to five digits."""
        shown = {key: _rounded(value) for key, value in values.items()}
        at = round(time.monotonic() - self._started, 1)
        line = json.dumps({"section": self._section, "name": name, "at": at, **shown})
        print(line, flush=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    @contextlib.contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """A block whose failure is a figure, too, and ends nothing else."""
        try:
            yield
        except Exception as error:
            tail = "".join(traceback.format_exception(error))[-1500:]
            self.write(name, error=f"{type(error).__name__}: {error}"[:300], traceback=tail)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def wait(device: torch.device) -> None:
    """Waits for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(call: Callable[[], Any], device: torch.device, *, times: int) -> float:
    """Median time of a call, after one that does not count."""
    taken = []
    for _ in range(times + 1):
        wait(device)
        started = time.perf_counter()
        call()
        wait(device)
        taken.append(1e3 * (time.perf_counter() - started))
    return statistics.median(taken[1:])


def peak_gib(device: torch.device) -> float | None:
    """Most memory since the last reset, of a GPU."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def reset_peak(device: torch.device) -> None:
    """Starts to measure the most memory anew, with what is held now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def nominal_flops() -> float | None:
    """The data sheet's rate of this GPU, or None where it is in no table."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((rate for part, rate in NOMINAL_FLOPS.items() if part in name), None)
