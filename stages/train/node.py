"""Another node of a training on several: ``python -m stages.train.node WORK``.

Given the work folder of the first node's stage, on a file system that both see. It waits for that
stage, trains along with it, writes no artifact of its own, and ends when training ends.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from pathlib import Path

from stages.contract.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_USER,
    StageFailedError,
    StoppedError,
    UserError,
)
from stages.contract.events import Emitter, Failure
from stages.train.launch import JOB_FILE, run_workers
from stages.train.rendezvous import join_rendezvous


class _Node:
    """Events to stdout, and whether SIGTERM came."""

    def __init__(self) -> None:
        self.events = Emitter(sys.stdout)
        self._stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda signum, frame: self._stop.set())

    @property
    def stop_requested(self) -> bool:
        return self._stop.is_set()

    def check_stop(self) -> None:
        if self.stop_requested:
            raise StoppedError("asked to stop (SIGTERM)")


def main() -> int:
    """Takes part in a training and returns the exit code."""
    node = _Node()
    try:
        if len(sys.argv) != 2:
            raise UserError("usage: python -m stages.train.node WORK")
        work = Path(sys.argv[1])
        rendezvous = join_rendezvous(work, check_stop=node.check_stop)
        node.events.info(f"node {rendezvous.node} of {rendezvous.num_nodes} at {rendezvous.host}")
        run_workers(work / JOB_FILE, rendezvous, node)
        node.check_stop()
    except UserError as error:
        node.events.emit(Failure(kind="user", message=error.message, remedy=error.remedy))
        return EXIT_USER
    except StoppedError as error:
        node.events.emit(Failure(kind="stopped", message=str(error)))
        return EXIT_STOPPED
    except StageFailedError as error:
        node.events.emit(Failure(kind="crash", message=str(error)))
        return EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
