"""One process of a distributed training: ``python -m stages.training.worker JOB.json PARENT``.

``stages.training.launch`` starts it with the variables that ``torchrun`` sets, too, and reads the
file in which a worker says why it failed. ``PARENT`` is the process id of the stage.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn, TextIO

from stages.contract.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_USER,
    StoppedError,
    UserError,
)
from stages.contract.events import Emitter
from stages.modeling.allocator import give_back_freed_memory
from stages.training.job import Job, Process
from stages.training.start import EXIT_OUT_OF_MEMORY, OutOfMemoryError

ERROR_FILE = "GEB_ERROR_FILE"
"""Environment variable with the file in which a worker says why it failed."""


def main() -> NoReturn:
    """Takes part in a training and ends the process with its exit code."""
    code = _work()
    sys.stderr.flush()
    # Without waiting for threads that libraries left, or for peers that are gone.
    os._exit(code)


def _work() -> int:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda signum, frame: stop.set())
    threading.Thread(target=_end_with_parent, args=(int(sys.argv[2]),), daemon=True).start()
    said = _claim_stdout()
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    # Only the first process reports how far it is; each says why it failed.
    report = Emitter(said if rank == 0 else os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    try:
        text = Path(sys.argv[1]).read_text()
        stage = importlib.import_module(f"stages.{json.loads(text)['stage']}.run")
        job = Job.parse(text, stage.STAGE.params)
        if job.params.sharding == "fsdp2":
            give_back_freed_memory()
        _join(job, local_rank)
        from stages.training.fit import run_fit

        if job.params.deepspeed.zero_stage != "off" and not job.on_gpu:
            from stages.training.zero import reduce_by_gloo

            reduce_by_gloo()
        world_size = int(os.environ["WORLD_SIZE"])
        process = Process(rank, local_rank, world_size, report, stop.is_set)
        run_fit(stage.load_fit(), job, process)
        process.check_stop()
    except UserError as error:
        _tell_failure(error.message, error.remedy)
        return EXIT_USER
    except StoppedError:
        return EXIT_STOPPED
    except OutOfMemoryError as error:
        _tell_failure(str(error))
        return EXIT_OUT_OF_MEMORY
    except Exception as error:
        traceback.print_exc()
        _tell_failure(f"{type(error).__name__}: {error}")
        return EXIT_FAILED
    return EXIT_OK


def _tell_failure(message: str, remedy: str = "") -> None:
    said = {"message": message, "remedy": remedy, "failed_at": time.time()}
    Path(os.environ[ERROR_FILE]).write_text(json.dumps(said))


def _join(job: Job[Any], local_rank: int) -> None:
    """Makes the process group, which DeepSpeed then uses, too."""
    import torch
    from torch.distributed import PrefixStore, TCPStore

    host, world_size = os.environ["MASTER_ADDR"], int(os.environ["WORLD_SIZE"])
    if world_size > int(os.environ["LOCAL_WORLD_SIZE"]):
        from stages.training.rendezvous import interface_towards

        interface = interface_towards(host)
        # Otherwise both take the address that the host's name stands for, often loopback.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if interface is not None:
                os.environ.setdefault(name, interface)
    if job.on_gpu:
        torch.cuda.set_device(local_rank)
    torch.distributed.init_process_group(
        "nccl" if job.on_gpu else "gloo",
        store=PrefixStore("workers", TCPStore(host, int(os.environ["MASTER_PORT"]))),
        rank=int(os.environ["RANK"]),
        world_size=world_size,
    )


def _end_with_parent(parent: int) -> None:
    """Ends this process when the stage's process is gone: a retry must find no one at work."""
    try:
        handle = os.pidfd_open(parent)
        if os.getppid() == parent:
            select.select([handle], [], [])
    except ProcessLookupError:
        pass
    os._exit(EXIT_STOPPED)


def _claim_stdout() -> TextIO:
    """Keeps stdout for events; whatever libraries print goes to stderr, the log."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stream


if __name__ == "__main__":
    main()
