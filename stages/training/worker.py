"""One process of a distributed training: ``python -m stages.training.worker JOB.json PARENT``.

``stages.training.launch`` starts it with the variables that ``torchrun`` sets, too, and hears on
its stdout what it reports and why it failed. ``PARENT`` is the process id of the stage.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel

from stages.contract.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_STOPPED,
    StageFailedError,
    StoppedError,
    UserError,
)
from stages.contract.events import Emitter
from stages.training.job import Job, Process


def main() -> NoReturn:
    """Takes part in a training and ends the process with its exit code."""
    connection = Connection(os.dup(1), readable=False)
    # Whatever libraries print goes to stderr, the log.
    os.dup2(2, 1)
    code = EXIT_OK
    try:
        _work(connection)
    except StoppedError:
        code = EXIT_STOPPED
    except Exception as error:
        code = EXIT_FAILED
        said: Exception = error
        if not isinstance(error, UserError):
            traceback.print_exc()
            named = "training process {RANK} of {WORLD_SIZE} failed".format_map(os.environ)
            said = StageFailedError(f"{named}: {type(error).__name__}: {error}")
        connection.send(("failed", (time.time(), said)))
    sys.stderr.flush()
    # Without waiting for threads that libraries left, or for peers that are gone.
    os._exit(code)


def _end_with_parent(parent: int) -> None:
    """Ends this process when the one that started it ends: a retry must find no one at work."""

    def wait() -> None:
        try:
            handle = os.pidfd_open(parent)
            if os.getppid() == parent:
                select.select([handle], [], [])
        except ProcessLookupError:
            pass
        os._exit(EXIT_STOPPED)

    threading.Thread(target=wait, daemon=True).start()


def _work(connection: Connection) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda signum, frame: stop.set())
    _end_with_parent(int(sys.argv[2]))
    rank, local_rank, world_size = (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    )
    # Only the first process reports how far it is; each says why it failed.
    report = _Sender(connection) if rank == 0 else Emitter(io.StringIO())
    given = json.loads(Path(sys.argv[1]).read_text())
    stage: Any = importlib.import_module(f"stages.{given['stage']}.run")
    job: Job[Any] = Job[stage.STAGE.params].model_validate(given)
    _join(job, rank, local_rank, world_size)
    from stages.training.fit import run_fit

    if job.params.deepspeed.zero_stage != "off" and not job.on_gpu:
        from stages.training.zero import reduce_by_gloo

        reduce_by_gloo()
    process = Process(rank, local_rank, world_size, report, stop.is_set)
    run_fit(job, process)
    process.check_stop()


def _join(job: Job[Any], rank: int, local_rank: int, world_size: int) -> None:
    """Makes the process group, which DeepSpeed then uses, too."""
    import torch
    from torch.distributed import PrefixStore, TCPStore

    if job.on_gpu:
        torch.cuda.set_device(local_rank)
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    torch.distributed.init_process_group(
        "nccl" if job.on_gpu else "gloo",
        store=PrefixStore("workers", store),
        rank=rank,
        world_size=world_size,
    )


class _Sender(Emitter):
    """Emitter whose events go to the stage's process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._last_progress = float("-inf")

    def emit(self, event: BaseModel) -> None:
        """Sends one event."""
        self._connection.send(("event", event))


if __name__ == "__main__":
    main()
