"""Another node of a training on several: ``python -m stages.training.node WORK``.

Given the work folder of the first node's stage, on a file system that both see. It waits for that
stage, trains along with it, writes no artifact of its own, and ends when training ends.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path
from typing import NoReturn

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
from stages.training.launch import JOB_FILE, run_workers
from stages.training.rendezvous import join_rendezvous


def main() -> int:
    """Takes part in a training and returns the exit code."""
    signal.signal(signal.SIGTERM, _stop)
    events = Emitter(sys.stdout)
    try:
        if len(sys.argv) != 2:
            raise UserError("usage: python -m stages.training.node WORK")
        work = Path(sys.argv[1])
        rendezvous = join_rendezvous(work)
        events.info(f"joins {rendezvous.num_nodes} nodes at {rendezvous.host}")
        run_workers(work / JOB_FILE, rendezvous, events)
    except UserError as error:
        events.emit(Failure(kind="user", message=error.message, remedy=error.remedy))
        return EXIT_USER
    except StoppedError as error:
        events.emit(Failure(kind="stopped", message=str(error)))
        return EXIT_STOPPED
    except StageFailedError as error:
        events.emit(Failure(kind="crash", message=str(error)))
        return EXIT_FAILED
    return EXIT_OK


def _stop(signum: int, frame: object) -> NoReturn:
    raise StoppedError("asked to stop (SIGTERM)")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
