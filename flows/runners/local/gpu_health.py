"""Health of this machine's GPUs as the stages' interpreters see them, for ``geb doctor --gpu``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from flows.runners.health import Finding
from flows.runners.local.gpu_locks import gpus_of_this_host
from stages.contract.errors import UserError

_TORCH = ("-m", "stages.training.gpu_health")
_VLLM = (
    "-c",
    "import vllm\n"
    "from vllm.platforms import current_platform as platform\n"
    "assert platform.is_cuda(), 'vLLM is the build for CPUs'\n"
    "print(f'vLLM {vllm.__version__} on {platform.get_device_name()}')",
)


def gpu_findings(vllm: Path) -> Iterator[Finding]:
    """Looks at the GPUs, with small trials of the kernels that only they have.

    Args:
        vllm: Interpreter of the vLLM environment.

    Raises:
        UserError: This machine has no GPU.
    """
    gpus = gpus_of_this_host()
    if not gpus:
        raise UserError(
            "this machine has no NVIDIA GPU that stages may use: nvidia-smi lists none, or "
            "GEB_GPUS or CUDA_VISIBLE_DEVICES is empty",
            "call it on a machine that has one; here stages run on the CPU "
            "(resources.<stage>.gpus: 0)",
        )
    yield Finding("GPUs", True, ", ".join(gpus))
    yield from _of_torch()
    code, said = _output(str(vllm), *_VLLM)
    yield Finding("vLLM", code == 0, said)


def _of_torch() -> Iterator[Finding]:
    code, said = _output(sys.executable, *_TORCH)
    if code:
        yield Finding("torch", False, said)
        return
    for found in json.loads(said):
        yield Finding(**found)


def _output(*command: str) -> tuple[int, str]:
    """Exit code and last line of a program; of an error, the error's."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return 1, f"{command[0]}: {error.strerror} (make setup-vllm)"
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    return done.returncode, (lines or ["no message"])[-1]
