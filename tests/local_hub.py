"""A stand-in for the Hugging Face hub on the loopback interface.

Data sets are served as a rehearsal of the paper has them served. A hub for models takes pushes by
the client's protocol: repositories, branches, large files by LFS, and commits.
"""

import base64
import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.rehearsal_server import HubHandler, serve
from stages.contract.request import Request
from tests.programs import run_program
from tests.scripted_server import served

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve_dataset(repo: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """Serves one data set repository; gives the endpoint's URL.

    Args:
        repo: ``owner/name``.
        files: Content by path in the repository.
    """
    with TemporaryDirectory() as folder:
        for name, content in files.items():
            path = Path(folder, "datasets", repo, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        with serve(Path(folder)) as url:
            yield url


def run_with_hub(url: str, request: Request, folder: Path) -> CompletedProcess[str]:
    """Runs a stage as a program that asks this hub; its files lie in the folder."""
    request.write(folder / "request.json")
    # Neither a proxy nor the suite's offline mode stands between the client and the stand-in.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not any(word in name.lower() for word in ("proxy", "offline"))
    } | {"HF_ENDPOINT": url, "HF_HOME": str(folder / "hf")}
    program = (sys.executable, "-m", f"stages.{request.stage}", folder / "request.json")
    return run_program(*program, env=environment)


@dataclass
class ModelHub:
    """A hub for models, and what was pushed to it.

    Attributes:
        token: The token that it takes.
        url: Its endpoint.
        private: Whether each repository is private.
        branches: Files by path of each repository's branches.
        large: Content of the large files that have arrived, by digest.
        uploads: Digests of the large files that were sent, in the order of their ends.
        holds: Set to keep all large files but the first waiting.
        held: Set once one of them waits.
    """

    token: str
    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    branches: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    uploads: list[str] = field(default_factory=list)
    holds: threading.Event = field(default_factory=threading.Event)
    held: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def serve_models(token: str) -> Iterator[ModelHub]:
    """Serves a hub for models that takes this token."""
    hub = ModelHub(token)
    with served(type("Handler", (_ModelHandler,), {"hub": hub})) as hub.url:
        try:
            yield hub
        finally:
            hub.released.set()


class _ModelHandler(HubHandler):
    hub: ModelHub

    def do_GET(self) -> None:
        repo = self.path.removeprefix("/api/models/").partition("?")[0]
        if self.path.startswith("/api/models/") and repo in self.hub.private:
            self._answer(200, {"id": repo, "private": self.hub.private[repo], "siblings": []})
        else:
            self._answer(404, {"error": "not found"})

    def do_POST(self) -> None:
        path, body = self.path.partition("?")[0], self._body()
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._answer(403, {"error": "this token may not write here"})
        elif path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            asked = json.loads(body)
            owner = asked.get("organization") or "me"
            repo = f"{owner}/{asked['name']}"
            is_new = repo not in self.hub.private
            private = asked.get("private") or asked.get("visibility") == "private"
            self.hub.private.setdefault(repo, private)
            self.hub.branches.setdefault(repo, {"main": {}})
            self._answer(200 if is_new else 409, {"url": f"{self.hub.url}/{repo}"})
        elif path.endswith(".git/info/lfs/objects/batch"):
            asked = json.loads(body)["objects"]
            self._answer(200, {"objects": [self._action(each) for each in asked]})
        else:
            owner, name, call, place = path.removeprefix("/api/models/").split("/", 3)
            self._of_repo(f"{owner}/{name}", call, place, body)

    def do_PUT(self) -> None:
        digest, hub = self.path.rpartition("/")[2], self.hub
        body = self._body()
        with hub.lock:
            if hub.holds.is_set() and hub.large:
                hub.held.set()
                hub.released.wait()
            assert hashlib.sha256(body).hexdigest() == digest
            hub.large[digest] = body
            hub.uploads.append(digest)
        self._answer(200, {})

    def _of_repo(self, repo: str, call: str, place: str, body: bytes) -> None:
        branches = self.hub.branches[repo]
        if call == "branch":
            branches.setdefault(place, dict(branches["main"]))
            self._answer(200, {})
        elif call == "preupload":
            files = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for each in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        elif call == "commit":
            for line in map(json.loads, body.splitlines()):
                self._apply(branches[place], line["key"], line["value"])
            url = f"{self.hub.url}/{repo}/commit/{COMMIT}"
            self._answer(200, {"success": True, "commitOid": COMMIT, "commitUrl": url})
        else:
            self._answer(404, {"error": f"no call {call}"})

    def _apply(self, files: dict[str, bytes], kind: str, value: Mapping[str, Any]) -> None:
        if kind == "file":
            assert value["encoding"] == "base64"
            files[value["path"]] = base64.b64decode(value["content"])
        elif kind == "lfsFile":
            files[value["path"]] = self.hub.large[value["oid"]]

    def _action(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        known = {"oid": asked["oid"], "size": asked["size"]}
        if asked["oid"] in self.hub.large:
            return known
        return known | {"actions": {"upload": {"href": f"{self.hub.url}/large/{asked['oid']}"}}}

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, value: Any) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})
