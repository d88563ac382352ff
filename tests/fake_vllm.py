"""A stand-in for vLLM's server, with one answer, and runs that serve a judge by it."""

import argparse
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.scripted_server import completion

ROOT = Path(__file__).parents[1]
# The program that takes the place of vLLM's.
SERVER = "from tests.fake_vllm import main\nmain()\n"


def served_judge(folder: Path) -> list[str]:
    """Overrides of a run that serves its judge, by a Python whose ``vllm`` is this module."""
    # Here: the server itself needs no torch.
    from tests.tiny_models import make_tiny_llama

    package = folder / "fake/vllm/entrypoints/openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(SERVER)
    python = folder / "fake/python"
    path = f"{folder}/fake:{ROOT}"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={path}:$PYTHONPATH exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    model = make_tiny_llama(folder / "model")
    # Containers and pods have a user of their own.
    for path in model.iterdir():
        path.chmod(0o644)
    return [
        f"store={folder / 'store'}",
        "inputs.oracle_code=null",
        f"inputs.oracle_model={model}",
        "score.oracle=judge",
        f"execution.interpreters.serve={python}",
        "execution.grace_seconds=5",
    ]


def main() -> None:
    """Serves until it is ended; ``--ends`` ends it before it has answered."""
    parser = argparse.ArgumentParser()
    for name in ("model", "served-model-name", "host", "tensor-parallel-size"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kv-cache-memory-bytes", type=int)
    parser.add_argument("--delay", type=float, default=0.0)
    for name in ("enforce-eager", "disable-uvicorn-access-log", "ends"):
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction)
    options = parser.parse_args()
    if options.ends:
        sys.exit("the fake server ends")
    token = f"Bearer {os.environ['VLLM_API_KEY']}"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(200 if self.path == "/health" else 404, {})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(options.delay)
            sent = self.headers["Authorization"], self.path, asked["model"]
            is_known = sent == (token, "/v1/chat/completions", options.served_model_name)
            self._reply(*completion("Score: 7")[:2] if is_known else (404, {}))

        def _reply(self, status: int, value: object) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()
