"""End-of-sequence ids of a checkpoint of the hub, whose generation configuration may not answer."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from stages.generate.params import GenerateParams
from stages.generate.policy import load_policy
from stages.harness.context import ModelSource
from tests.local_hub import COMMIT
from tests.tiny_models import EOS_ID, make_tiny_llama

TURN_END_ID = 5
PARAMS = GenerateParams(max_new_tokens=4)


class _Hub(BaseHTTPRequestHandler):
    """One model's files; that of the generation configuration with a status of its own."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        name = self.path.partition("?")[0].rpartition("/")[2]
        path = self.server.model / name
        status = 200 if "/resolve/" in self.path and path.is_file() else 404
        if name == "generation_config.json":
            status = self.server.status
        body = path.read_bytes() if status == 200 else b""
        self.send_response(status)
        self.send_header("ETag", f'"{name}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *arguments: object) -> None:
        """Keeps the test's output clean."""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.model = make_tiny_llama(tmp_path / "model")
    ids = {"eos_token_id": [EOS_ID, TURN_END_ID]}
    (server.model / "generation_config.json").write_text(json.dumps(ids))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


SOURCE = ModelSource("owner/model", COMMIT)


@pytest.mark.parametrize(
    ("status", "expected"), [(200, {EOS_ID, TURN_END_ID}), (404, {EOS_ID})], ids=["there", "none"]
)
def test_a_checkpoint_need_not_have_a_generation_configuration(hub, status, expected):
    hub.status = status
    assert load_policy(SOURCE, PARAMS).stop_ids == expected


def test_a_hub_that_does_not_answer_is_no_checkpoint_without_one(hub):
    """Else responses would go on past the end of the turn."""
    hub.status = 403
    with pytest.raises(OSError, match="owner/model"):
        load_policy(SOURCE, PARAMS)
