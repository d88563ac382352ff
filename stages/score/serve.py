"""Program of a model's server: ``python -m stages.score.serve REQUEST.json``.

It starts vLLM's server and keeps its address in the store while it answers. It never ends well:
the run stops it, or it fails.
"""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

from stages.contract.atomic import write_atomically
from stages.contract.errors import GebError, UserError
from stages.harness.context import StageContext
from stages.harness.program import Stage, main
from stages.score.serving import SERVED_NAME, Address, ServeParams, address_path

_LOOPBACK = "127.0.0.1"
_LOOK_SECONDS = 2.0
# A machine that is busy with other work may be slow to answer.
_ANSWER_SECONDS = 30.0
_MOST_MISSED = 3
# Exit code of a program that does not know an option.
_WRONG_OPTION = 2
# As in `stages.generate.vllm_engine`: vLLM would take nine tenths of the host's memory.
_CPU_OPTIONS = {"enforce_eager": True, "kv_cache_memory_bytes": 4 << 30}


def run(ctx: StageContext[ServeParams]) -> None:
    """Serves the input ``model`` until SIGTERM.

    Raises:
        UserError: vLLM does not know an option.
        GebError: The server ended, or answers no more.
    """
    source, resources = ctx.model("model"), ctx.request.resources
    name = _own_name(ctx.params.machine)
    host = name if name == _LOOPBACK else "0.0.0.0"
    with socket.create_server((host, 0)) as probe:
        port = probe.getsockname()[1]
    options = {
        "model": source.name_or_path,
        **({"revision": source.revision} if source.revision else {}),
        "served_model_name": SERVED_NAME,
        "host": host,
        "port": port,
        "tensor_parallel_size": max(1, resources.gpus),
        "disable_uvicorn_access_log": True,
        **({} if resources.gpus else _CPU_OPTIONS),
        **ctx.params.engine_args,
    }
    address = Address(url=f"http://{name}:{port}", token=secrets.token_hex(16))
    environment = {"VLLM_API_KEY": address.token, "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *_flags(options)]
    path = address_path(ctx.store, ctx.request.key)
    server = subprocess.Popen(command, env=os.environ | environment)
    try:
        code = _watch(server, f"http://127.0.0.1:{port}/health", path, address)
    finally:
        path.unlink(missing_ok=True)
        # The supervisor kills what the server has started.
        server.kill()
        server.wait()
    if code == _WRONG_OPTION:
        log = ctx.store.log_path(ctx.request.stage, ctx.request.key)
        raise UserError(
            f"vLLM's server refuses an option; the log in {log} tells which",
            "correct the oracle's engine_args: names and values of `vllm serve`",
        )
    said = "does not answer any more" if code is None else f"ended with exit code {code}"
    raise GebError(f"vLLM's server {said}")


def _own_name(machine: str) -> str:
    """Name or address under which the programs that shall ask this one reach it."""
    own = socket.gethostname()
    # A container has a name of its own, unless it shares the host's network.
    if own == machine:
        return _LOOPBACK
    try:
        # Others know a container or pod by its address alone.
        address = socket.gethostbyname(own)
    except OSError:
        return own
    # Debian's hosts have their own names for loopback.
    return own if address.startswith("127.") else address


def _watch(
    server: subprocess.Popen[bytes], health: str, path: Path, address: Address
) -> int | None:
    """Keeps the address in its file while the server answers; returns its exit code if it ends."""
    missed = 0
    with httpx.Client(timeout=_ANSWER_SECONDS, trust_env=False) as client:
        while missed < _MOST_MISSED:
            # Its end is noticed at once: a step that fails of it looks whether the address is gone.
            with contextlib.suppress(subprocess.TimeoutExpired):
                return server.wait(_LOOK_SECONDS)
            try:
                client.get(health).raise_for_status()
            except httpx.HTTPError:
                # A server that starts does not answer yet.
                missed += path.exists()
            else:
                missed = 0
                write_atomically(path, address.model_dump_json())
    return None


def _flags(options: Mapping[str, object]) -> Iterator[str]:
    for name, value in options.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{dashed}" if value else f"--no-{dashed}"
        else:
            yield from (f"--{dashed}", str(value))


if __name__ == "__main__":
    main(Stage(ServeParams, run))
