"""Container options for a stage request: mounts, resource limits, dropped privileges."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from docker.types import DeviceRequest, LogConfig, Mount

from flows.pipeline.placement import DockerSettings
from flows.runners.command_lines import thread_variables
from flows.runners.place import writable_folders
from stages.contract.manifest import IMAGE_VARIABLE
from stages.contract.request import FileInput, HubInput, Request
from stages.store.base import Store

_GIB = 1 << 30
_NO_NETWORK = "none"
# Processes and threads: a stage that forks without end must not take the host with it.
_MOST_PROCESSES = 4096

STAGE_LABEL = "geb.stage"
KEY_LABEL = "geb.key"
STORE_LABEL = "geb.store"
GPUS_LABEL = "geb.gpus"


def mounts_for(request: Request, store: Store, settings: DockerSettings) -> list[Mount]:
    """Mounts of a stage: files and folders of the host, at the path that they have there."""
    root = str(store.root)
    modes = {root: "ro"}
    for folder in writable_folders(request):
        modes[str(folder)] = "rw"
    for source in request.sources():
        if isinstance(source, FileInput):
            location = Path(source.location)
            if not location.is_relative_to(root):
                for path in _with_link_targets(location):
                    modes[str(path)] = "ro"
    modes |= settings.mounts
    return [
        Mount(place, place, type="bind", read_only=mode == "ro") for place, mode in modes.items()
    ]


def _with_link_targets(path: Path) -> Iterator[Path]:
    """A file or folder, and what links in it lead to: the hub's cache is made of links."""
    yield path
    if path.is_dir():
        for inner in path.rglob("*"):
            if inner.is_symlink() and not inner.resolve().is_relative_to(path):
                yield inner.resolve()


def environment_for(request: Request, settings: DockerSettings) -> dict[str, str]:
    """Environment variables that a stage adds to its image's; none of them is a secret."""
    # Libraries ask for the user's name, which the image knows for its own user alone.
    environment = {"USER": "geb", "LOGNAME": "geb"}
    if settings.network.get(request.stage, _NO_NETWORK) == _NO_NETWORK:
        environment |= {
            "HF_HUB_OFFLINE": "1",
            # Without a network the host's name leads nowhere; workers talk over loopback.
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
        }
    return (
        environment
        | thread_variables(request.resources)
        | settings.environment.get(request.stage, {})
    )


def container_options(
    request: Request,
    store: Store,
    settings: DockerSettings,
    *,
    image: str,
    user: str,
    command: list[str],
    devices: Sequence[str] = (),
) -> dict[str, Any]:
    """Arguments for the engine's `containers.create`: limits, mounts, and what is forbidden."""
    resources = request.resources
    memory = None if resources.memory_gib is None else int(resources.memory_gib * _GIB)
    gpus = [DeviceRequest(device_ids=list(devices), capabilities=[["gpu"]])] if devices else None
    return {
        "entrypoint": command,
        "command": [],
        "user": user,
        "environment": environment_for(request, settings) | {IMAGE_VARIABLE: image},
        "labels": {
            STAGE_LABEL: request.stage,
            KEY_LABEL: request.key,
            STORE_LABEL: store.identity,
            GPUS_LABEL: ",".join(devices),
        },
        # Attached and open once: the end of the orchestrator is then the end of stdin, which ends
        # the stage.
        "stdin_open": True,
        "mounts": mounts_for(request, store, settings),
        "tmpfs": {"/tmp": f"rw,exec,nosuid,nodev,mode=1777,size={int(settings.tmp_gib * _GIB)}"},
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "network_mode": settings.network.get(request.stage, _NO_NETWORK),
        "ipc_mode": "private",
        "mem_limit": memory,
        # The same as the limit of memory: none of it may be swapped out.
        "memswap_limit": memory,
        "nano_cpus": None if resources.cpus is None else int(resources.cpus * 1e9),
        "shm_size": int(settings.shm_gib * _GIB),
        "pids_limit": _MOST_PROCESSES,
        "device_requests": gpus,
        # The events are read from the engine's log.
        "log_config": LogConfig(type=LogConfig.types.JSON),
    }


def needs_network(request: Request, settings: DockerSettings) -> bool:
    """True if an input comes from the hub and neither a network nor a cache can bring it."""
    from_hub = any(isinstance(source, HubInput) for source in request.sources())
    has_cache = "HF_HOME" in settings.environment.get(request.stage, {})
    return from_hub and not has_cache and request.stage not in settings.network
