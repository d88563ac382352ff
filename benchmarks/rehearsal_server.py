"""A hub on the loopback interface.

It answers the calls that `huggingface_hub` and `datasets` make of the real one: a repository's
record, its tree, and its files.
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serves ``models/OWNER/NAME`` and ``datasets/OWNER/NAME`` of a folder.

    Each repository has any revision. Yields the server's address.
    """
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    commit = hashlib.sha1("".join(_digest(file.read_bytes()) for file in files).encode())
    entry = {"folder": folder, "commit": commit.hexdigest()}
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (HubHandler,), entry)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class HubHandler(BaseHTTPRequestHandler):
    """Requests to the hub."""

    folder: Path
    commit: str
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answers a call."""
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        match parts:
            case ["api", kind, owner, name, *call]:
                self._describe(f"{owner}/{name}", self.folder / kind / owner / name, call)
            case ["datasets", owner, name, "resolve", _, *path]:
                self._file(self.folder.joinpath("datasets", owner, name), path)
            case [owner, name, "resolve", _, *path]:
                self._file(self.folder.joinpath("models", owner, name), path)
            case _:
                self._missing("RepoNotFound")

    do_HEAD = do_GET

    def _describe(self, repo: str, place: Path, call: list[str]) -> None:
        files = [path for path in sorted(place.rglob("*")) if path.is_file()]
        if not files:
            self._missing("RepoNotFound")
        elif call[:1] == ["tree"]:
            folder = place.joinpath(*call[2:])
            is_whole = "recursive=true" in urlsplit(self.path).query.lower()
            paths = folder.rglob("*") if is_whole else folder.glob("*")
            self._json([_entry(path, place) for path in sorted(paths)])
        else:
            names = [{"rfilename": file.relative_to(place).as_posix()} for file in files]
            self._json({"id": repo, "sha": self.commit, "tags": [], "siblings": names})

    def _file(self, repo: Path, names: list[str]) -> None:
        path = repo.joinpath(*names)
        if not path.is_file():
            self._missing("EntryNotFound" if repo.is_dir() else "RepoNotFound")
            return
        content = path.read_bytes()
        headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": self.commit}
        first = 0
        last = len(content) - 1
        status = 200
        if wanted_range := self.headers.get("Range"):
            start, _, end = wanted_range.removeprefix("bytes=").partition("-")
            first = int(start)
            last = min(int(end or last), last)
            status = 206
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self._send(status, content[first : last + 1], headers)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _missing(self, code: str) -> None:
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
        """Keeps the terminal for the runs."""


def _entry(path: Path, place: Path) -> dict[str, Any]:
    name = path.relative_to(place).as_posix()
    if path.is_dir():
        return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
    content = path.read_bytes()
    return {"type": "file", "oid": _digest(content), "size": len(content), "path": name}


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
