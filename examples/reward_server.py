"""A reward server for the oracle `http`: a function of a Python file behind an address.

    python examples/reward_server.py my_rewards.py --identity my-rewards@1 --port 8080

The file has a function ``score(prompts, responses, references)``, as the oracle `python` takes it:
one number per response, None where there is none, or a mapping with the number under ``score``.
With ``--key-env NAME`` requests must carry the value of that variable as a bearer token.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import runpy
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def answer(function: Callable[..., Any], identity: str, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request, both as in docs/oracles.md."""
    rows = request["responses"]
    scores = function(
        [row["messages"] for row in rows],
        [row["response"] for row in rows],
        [row["reference_answer"] for row in rows],
    )
    return {"oracle": identity, "scores": [_item(score) for score in scores]}


def _item(score: Any) -> dict[str, Any]:
    if score is None:
        return {"score": None, "error": "the function returned None"}
    values = (
        {name: float(value) for name, value in score.items()} if hasattr(score, "items") else {}
    )
    return {"score": values.pop("score", None) if values else float(score), "components": values}


def make_server(
    function: Callable[..., Any], identity: str, address: tuple[str, int], key: str | None = None
) -> ThreadingHTTPServer:
    """A server that is bound to ``address`` and waits for ``serve_forever``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if key is not None and not hmac.compare_digest(
                self.headers.get("Authorization", ""), f"Bearer {key}"
            ):
                self._send(401, {"error": "wrong or missing bearer token"})
                return
            try:
                reply = answer(function, identity, json.loads(body))
            except (KeyError, TypeError, ValueError) as error:
                self._send(422, {"error": f"{type(error).__name__}: {error}"})
            else:
                self._send(200, reply)

        def _send(self, status: int, value: dict[str, Any]) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return ThreadingHTTPServer(address, Handler)


def main() -> None:
    """Serves until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", help="Python file with the function")
    parser.add_argument("--function", default="score")
    parser.add_argument("--identity", required=True, help="name and version of this oracle")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--key-env", help="environment variable with the bearer token to ask for")
    options = parser.parse_args()
    function = runpy.run_path(options.file)[options.function]
    key = os.environ[options.key_env] if options.key_env else None
    server = make_server(function, options.identity, (options.host, options.port), key)
    host, port = server.server_address[:2]
    print(f"serving {options.identity} at http://{host!s}:{port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
