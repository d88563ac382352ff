"""``vllm serve`` on loopback, in vLLM's own environment."""

import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.vllm_session import ENVIRONMENT, PYTHON

MODEL, KEY = "tiny", "sesame"
_START_SECONDS = 400


@contextmanager
def vllm_server(model: Path, log: Path) -> Iterator[str]:
    """Serves a checkpoint as :data:`MODEL` under :data:`KEY`; gives the address up to ``/v1``."""
    assert PYTHON.exists(), f"no interpreter at {PYTHON}: run `make setup-vllm`"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", MODEL, "--api-key", KEY, "--host", "127.0.0.1"),
        *("--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "384"),
    ]
    environment = {**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        _wait_until_ready(server, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        # Its engine is a process of its own and would outlive it.
        family = [*psutil.Process(server.pid).children(recursive=True), psutil.Process(server.pid)]
        for each in family:
            each.kill()
        server.wait()
        psutil.wait_procs(family)


def _wait_until_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    patience = 0.5
    for _ in range(int(_START_SECONDS / patience)):
        try:
            with opener.open(url, timeout=60):
                return
        except (urllib.error.URLError, ConnectionError):
            try:
                code = server.wait(patience)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"ended with {code}:\n{log.read_text()[-4000:]}") from None
    raise AssertionError(f"not ready:\n{log.read_text()[-4000:]}")
