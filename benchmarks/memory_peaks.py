"""Peak memory of the processes of a tree, sampled while a block of code runs."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_SAMPLE_SECONDS = 0.02

Peaks = dict[str, dict[int, float]]
"""Bytes by phase and process id."""


@contextmanager
def memory_peaks(
    pid: int,
    phase: Callable[[], str | None],
    counts: Callable[[psutil.Process], bool] = lambda process: True,
) -> Iterator[Peaks]:
    """Samples the anonymous resident memory (`RssAnon`) of a process and of all below it.

    Memory that is mapped from a file can be given back, and is left out.

    Args:
        pid: The process.
        phase: Name of the phase at the moment; None where memory does not count.
        counts: Tells the processes that count.
    """
    peaks: Peaks = defaultdict(lambda: defaultdict(float))
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(_SAMPLE_SECONDS):
            for process in _tree(pid):
                try:
                    if (now := phase()) is not None and counts(process):
                        found = peaks[now]
                        found[process.pid] = max(found[process.pid], _anonymous(process.pid))
                except (psutil.Error, OSError):
                    # It has just ended.
                    continue

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peaks
    finally:
        ended.set()
        thread.join()


def _tree(pid: int) -> list[psutil.Process]:
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.Error:
        return []


def _anonymous(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024.0
    return 0.0
