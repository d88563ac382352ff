"""Stages started as a runner starts them: as programs that see only the GPUs they are given."""

import os
import subprocess
import sys

from flows.runners.local.gpus import gpus_of_this_host
from stages.store.base import Store
from tests.programs import ROOT, VLLM_PYTHON


def run_stage(request, path, *, vllm=False):
    """Runs a request, which must succeed, and returns the artifact's folder.

    Args:
        request: Its resources say how many GPUs the program sees; with none it is on the CPU.
        path: File for the request; the log has the same folder.
        vllm: Use the interpreter of the vLLM environment.
    """
    request.write(path)
    python = str(VLLM_PYTHON) if vllm else sys.executable
    visible = ",".join(gpus_of_this_host()[: request.resources.gpus])
    log = path.with_suffix(".log")
    with log.open("w") as file:
        done = subprocess.run(
            [python, "-m", f"stages.{request.stage}", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": visible},
            check=False,
        )
    assert done.returncode == 0, log.read_text()[-8000:]
    artifact = Store.in_folder(request.store).load(request.stage, request.key)
    return artifact.path
