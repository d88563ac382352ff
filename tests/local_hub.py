"""A stand-in for the Hugging Face hub on the loopback interface: data set repositories of files.

It answers the calls that ``datasets.load_dataset`` makes of the real one: the repository's record,
its tree, and the files themselves.
"""

import hashlib
import json
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve_dataset(repo: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """Serves one data set repository; gives the endpoint's URL.

    Args:
        repo: ``owner/name``.
        files: Content by path in the repository.
    """

    handler = type("Handler", (_Handler,), {"repo": repo, "files": files})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    repo: str
    files: Mapping[str, bytes]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = urllib.parse.unquote(self.path.partition("?")[0])
        api, resolve = f"/api/datasets/{self.repo}", f"/datasets/{self.repo}/resolve/"
        if path.startswith(resolve):
            self._file(path.removeprefix(resolve).partition("/")[2])
        elif path in (api, f"{api}/revision/{COMMIT}", f"{api}/revision/main"):
            self._json(self._record())
        elif path.startswith(f"{api}/tree/"):
            folder = path.removeprefix(f"{api}/tree/").partition("/")[2]
            self._json(self._tree(folder))
        else:
            self._missing()

    do_HEAD = do_GET

    def _record(self) -> dict[str, Any]:
        return {
            "_id": "0" * 24,
            "id": self.repo,
            "author": self.repo.partition("/")[0],
            "sha": COMMIT,
            "lastModified": "2025-01-01T00:00:00.000Z",
            "createdAt": "2025-01-01T00:00:00.000Z",
            "private": False,
            "gated": False,
            "disabled": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "siblings": [{"rfilename": name} for name in self.files],
        }

    def _tree(self, folder: str) -> list[dict[str, Any]]:
        prefix = f"{folder}/" if folder else ""
        inside = [name for name in self.files if name.startswith(prefix)]
        folders = {
            prefix + name.removeprefix(prefix).partition("/")[0]
            for name in inside
            if "/" in name.removeprefix(prefix)
        }
        entries = [self._entry(n) for n in inside if "/" not in n.removeprefix(prefix)]
        return entries + [
            {"type": "directory", "oid": "0" * 40, "size": 0, "path": each} for each in folders
        ]

    def _entry(self, name: str) -> dict[str, Any]:
        content = self.files[name]
        return {"type": "file", "oid": _digest(content), "size": len(content), "path": name}

    def _file(self, name: str) -> None:
        content = self.files.get(name)
        if content is None:
            self._missing("EntryNotFound")
            return
        start, end, status = 0, len(content), 200
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1, end) if last else end
            status = 206
        headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT}
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        self._send(status, content[start:end], headers)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _missing(self, code: str = "RepoNotFound") -> None:
        self._send(404, b'{"error": "not found"}', {"X-Error-Code": code})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Keeps the test's output clean."""


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
