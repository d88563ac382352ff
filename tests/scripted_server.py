"""A scripted HTTP server on loopback, for what asks one."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def completion(text):
    """A model's answer, as a server of OpenAI's protocol gives it."""
    message = {"role": "assistant", "content": text}
    choices = [{"index": 0, "finish_reason": "stop", "message": message}]
    return 200, {"id": "1", "model": "scripted", "choices": choices}


@contextmanager
def served(handler):
    """The URL of a server with this handler."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class ScriptedServer(ThreadingHTTPServer):
    """Answers by ``behave(number of the request, its JSON)``: status, value or text, headers.

    Attributes:
        requests: JSON of the requests so far.
        headers_seen: Their headers.
        released: Set when the test is over, for replies that wait.
        url: Address of a path; any other path answers alike.
    """

    daemon_threads = True

    def __init__(self, behave):
        served = self
        self.requests = []
        self.headers_seen = []
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
                status, value, *headers = behave(number, request)
                content = (value if isinstance(value, str) else json.dumps(value)).encode()
                self.send_response(status)
                for name, text in (headers[0] if headers else {}).items():
                    self.send_header(name, text)
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
