"""GPUs of stages: a lock on each of this host.

Two stages never share a GPU. A lock is an advisory lock of the kernel on a file that all processes
of the host see. It is handed to the stage's supervisor as well, so that a GPU is free again when
its stage is gone, and not a moment earlier, however the orchestrator ended.
"""

import contextlib
import functools
import itertools
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flows.runners.place import NoRoomError
from stages.contract.errors import UserError
from stages.store.locks import try_lock

# Index or UUID of each GPU that stages may use, separated by commas, if it is not for
# nvidia-smi to say.
DEVICES_VARIABLE = "GEB_GPUS"
# Folder of the locks: one for all containers of a host that share its GPUs.
FOLDER_VARIABLE = "GEB_GPU_LOCKS"
_NO_DEVICE = ("-1", "NoDevFiles")
_LIST_SECONDS = 30.0


def gpus_of_this_host() -> list[str]:
    """The GPUs that stages may use here: ``GEB_GPUS``, ``CUDA_VISIBLE_DEVICES``, or all."""
    for variable in (DEVICES_VARIABLE, "CUDA_VISIBLE_DEVICES"):
        if (named := os.environ.get(variable)) is not None:
            devices = (name.strip() for name in named.split(",") if name.strip())
            # CUDA sees the devices before the first that there cannot be: `-1` hides all.
            return list(itertools.takewhile(lambda name: name not in _NO_DEVICE, devices))
    return list(_uuids())


def _uuids() -> dict[str, str]:
    """UUIDs of the GPUs that nvidia-smi lists, by index; none without it."""
    try:
        return _listed_gpus()
    except (OSError, subprocess.SubprocessError):
        return {}


@functools.cache
def _listed_gpus() -> dict[str, str]:
    """UUIDs of GPUs by index, asked for once: a stage that waits for a GPU asks often."""
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
        timeout=_LIST_SECONDS,
    )
    return dict(re.findall(r"(\d+), (\S+)", listed.stdout))


def device_variables(devices: Iterable[str]) -> dict[str, str]:
    """Environment variables of a process that sees some of :func:`gpus_of_this_host` alone."""
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
    if DEVICES_VARIABLE in os.environ or "CUDA_VISIBLE_DEVICES" not in os.environ:
        # As nvidia-smi counts them; CUDA itself begins with the fastest one.
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return variables


def require_gpus(number: int, devices: Sequence[str]) -> None:
    """Refuses a stage that asks for more GPUs than this host's ``devices``."""
    if number > len(devices):
        raise UserError(
            f"the stage asks for {number} GPUs, this host has {len(devices)}",
            "lower resources.<stage>.gpus (0 runs on the CPU), or run on a host or a cluster that "
            "has them",
        )


@contextmanager
def hold_gpus(number: int) -> Iterator[dict[str, int]]:
    """Holds GPUs of this host for the time of the block.

    Yields:
        Their indices or UUIDs, each with the open file that holds its lock: a process that inherits
        the file holds the lock too.

    Raises:
        UserError: This host has fewer.
        NoRoomError: Other stages hold them.
    """
    devices = gpus_of_this_host() if number else []
    require_gpus(number, devices)
    locks: dict[str, int] = {}
    with contextlib.ExitStack() as held:
        for device in devices:
            if len(locks) == number:
                break
            # Another GPU may have this index in a job or a container of this host.
            descriptor = try_lock(_folder() / f"gpu-{_uuids().get(device, device)}.lock")
            if descriptor is not None:
                held.callback(os.close, descriptor)
                locks[device] = descriptor
                # Whatever this user's umask is: the next holder may be another user.
                with contextlib.suppress(PermissionError):
                    os.fchmod(descriptor, 0o666)
        if len(locks) < number:
            # All are free again: two that want several must not wait for each other for ever.
            raise NoRoomError(f"{number} of this host's GPUs are not free")
        yield locks


def _folder() -> Path:
    # The same for all processes of the host, whatever their TMPDIR is.
    default = Path("/tmp/geb-gpu-locks")
    folder = Path(os.environ.get(FOLDER_VARIABLE, default))
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Every user of the host may add a lock, and remove none of another's.
        with contextlib.suppress(PermissionError):
            folder.chmod(0o1777)
    return folder
