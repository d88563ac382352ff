"""One process of a distributed training: ``python -m stages.train.worker JOB.json``.

Started by ``stages.train.launch``, which sets the variables of torch's rendezvous.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TextIO

from stages.contract.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_USER,
    StoppedError,
    UserError,
)
from stages.contract.events import Emitter, Failure
from stages.train.job import Job, Process
from stages.train.memory import EXIT_OUT_OF_MEMORY, OutOfMemoryError


def main() -> int:
    """Takes part in a training and returns the exit code."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda signum, frame: stop.set())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    said = _claim_stdout()
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    # Only the first process reports how far it is; each says why it failed.
    report = Emitter(said if rank == 0 else os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    failures = Emitter(said)
    try:
        job = Job.parse(Path(sys.argv[1]).read_text())
        _join(job, local_rank)
        from stages.train.fit import fit

        world_size = int(os.environ["WORLD_SIZE"])
        process = Process(rank, local_rank, world_size, report, stop.is_set)
        fit(job, process)
        process.check_stop()
    except UserError as error:
        failures.emit(Failure(kind="user", message=error.message, remedy=error.remedy))
        return EXIT_USER
    except StoppedError as error:
        failures.emit(Failure(kind="stopped", message=str(error)))
        return EXIT_STOPPED
    except OutOfMemoryError as error:
        failures.emit(Failure(kind="crash", message=str(error)))
        return EXIT_OUT_OF_MEMORY
    except Exception as error:
        traceback.print_exc()
        failures.emit(Failure(kind="crash", message=f"{type(error).__name__}: {error}"))
        return EXIT_FAILED
    return EXIT_OK


def _join(job: Job, local_rank: int) -> None:
    """Makes the process group; accelerate and DeepSpeed then use it."""
    import torch

    if job.on_gpu:
        torch.cuda.set_device(local_rank)
    torch.distributed.init_process_group("nccl" if job.on_gpu else "gloo")


def _end_with_parent() -> None:
    """Ends this process when the stage's process is gone: a retry must find no one at work."""
    while os.read(0, 1):
        pass
    os._exit(EXIT_STOPPED)


def _claim_stdout() -> TextIO:
    """Keeps stdout for events; whatever libraries print goes to stderr, the log."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stream


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Without waiting for threads that libraries left, or for peers that are gone.
    os._exit(code)
