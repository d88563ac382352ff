"""Orchestrators in separate processes, for tests that kill them."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path

CODE = """
import sys
from pathlib import Path
from flows.pipeline.placement import Execution
from flows.runners import place
from flows.runners.choose import make_runner
from stages.contract.records import read_record
from stages.contract.request import Request
# The shortest time in which a busy machine renews its sign of life.
place.EXPIRY_SECONDS = 20
hear = lambda event: print(event.model_dump_json(), flush=True)
request = read_record(Path(sys.argv[1]), Request)
make_runner(Execution.model_validate_json(sys.argv[2])).run(request, hear)
"""


@contextlib.contextmanager
def orchestrator(request, execution, until="pids ", folder=None):
    """A process that runs a stage, and the stage's processes; killed at the end of the block.

    Args:
        request: The stage, a probe.
        execution: How it is started.
        until: Part of the event that is waited for.
        folder: Folder of the request's file; unset, the one that holds the store.
    """
    path = (folder or Path(request.store).parent) / "request.json"
    request.write(path)
    command = [sys.executable, "-c", CODE, str(path), execution.model_dump_json()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            pids = []
            for line in process.stdout:
                numbers = line.partition("pids ")[2].partition('"')[0]
                pids += [int(pid) for pid in re.findall(r"\d+", numbers)]
                if until in line:
                    break
            yield process, pids
        finally:
            process.kill()
