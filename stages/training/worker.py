"""A worker process of a training: ``python -m stages.training.worker PARENT``.

A node (`stages/training/node.py`), whose process id is ``PARENT``, starts it with the variables
that ``torchrun`` sets, too, and reads its events, among them why it failed.
"""

import os
import sys
from datetime import timedelta

from stages.contract.errors import EXIT_STOPPED
from stages.contract.events import Emitter
from stages.harness.program import deferred_stop, run_program
from stages.harness.supervisor import die_with_parent
from stages.training.launch import fit_of, load_call

# All wait while the first process writes the checkpoint. Nodes notice by themselves what fails.
_TIMEOUT = timedelta(hours=6)


def _train(events: Emitter) -> None:
    import torch
    from torch.distributed import PrefixStore, TCPStore

    from stages.training.engine import Process

    rank, local_rank, world_size, port = (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
    )
    with deferred_stop() as stop_requested:
        store = TCPStore(os.environ["MASTER_ADDR"], port)
        ctx = load_call(store.get("call"), events)
        on_gpu = ctx.request.resources.gpus > 0
        if on_gpu:
            torch.cuda.set_device(local_rank)
        # DeepSpeed uses this process group, too.
        torch.distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=PrefixStore("workers", store),
            rank=rank,
            world_size=world_size,
            timeout=_TIMEOUT,
        )
        process = Process(rank, local_rank, world_size, events, stop_requested)
        fit_of(ctx)(ctx, process).run()
        process.check_stop()


if __name__ == "__main__":
    # A retry must find no one at work.
    die_with_parent()
    if os.getppid() != int(sys.argv[1]):
        os._exit(EXIT_STOPPED)
    run_program(_train)
