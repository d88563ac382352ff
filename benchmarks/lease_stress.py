"""Stress of the lease: processes take it over from holders that die, while others look at it.

``python -m benchmarks.lease_stress --takeovers 10000`` prints one line and exits with 1 where two
processes held the lease at once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path

from stages.store.locks import FileLease


def _take_over(folder: Path, takeovers: int, found: list[str]) -> None:
    """Takes the lease again and again and dies with it, until all takers together are done."""
    counter = folder / "counter"
    mark = folder / "held"
    while True:
        lease = FileLease(folder / "key")
        if lease._try_acquire() is not None:
            continue
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            found.append(f"pid {os.getpid()} and another")
        count = int(counter.read_text()) + 1
        counter.write_text(str(count))
        mark.unlink(missing_ok=True)
        # As the kernel does for a killed process: the lock goes, the record stays.
        lease._alive.free()
        if count >= takeovers:
            return


def _look(folder: Path, ended: Event) -> None:
    while not ended.is_set():
        FileLease(folder / "key").holder()


def main() -> int:
    """Runs the stress; 1 where the lease had two holders."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lease_stress")
    parser.add_argument("--takeovers", type=int, default=10_000)
    parser.add_argument("--takers", type=int, default=3)
    parser.add_argument("--pollers", type=int, default=2)
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name, context.Manager() as manager:
        folder = Path(name)
        (folder / "counter").write_text("0")
        found: list[str] = manager.list()  # type: ignore[assignment]
        ended = context.Event()
        started = time.monotonic()
        takers = [
            context.Process(target=_take_over, args=(folder, options.takeovers, found))
            for _ in range(options.takers)
        ]
        pollers = [
            context.Process(target=_look, args=(folder, ended)) for _ in range(options.pollers)
        ]
        for each in (*takers, *pollers):
            each.start()
        for each in takers:
            each.join()
        ended.set()
        for each in pollers:
            each.join()
        seconds = time.monotonic() - started
        print(
            f"{options.takeovers} take-overs by {options.takers} processes, {options.pollers} "
            f"looking on, {seconds:.0f} s: {len(found)} times two holders"
        )
        return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
