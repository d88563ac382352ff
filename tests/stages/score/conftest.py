"""A scripted server on loopback for the oracles that ask one."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Served(ThreadingHTTPServer):
    """Answers by ``behave(number of the request, its JSON)``: a status and a value or text."""

    daemon_threads = True

    def __init__(self, behave):
        served = self
        self.requests, self.headers_seen = [], []
        self.released = threading.Event()
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    served.requests.append(request)
                    served.headers_seen.append(self.headers)
                    number = len(served.requests)
                status, value = behave(number, request)
                content = (value if isinstance(value, str) else json.dumps(value)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/score"

    def handle_error(self, request, client_address):
        # A client that hung up is what some tests are about.
        pass


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    servers = []

    def start(behave):
        server = Served(behave)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.released.set()
        server.shutdown()
        server.server_close()
