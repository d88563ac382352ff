"""Inputs from outside: hashed once, and again where a file has changed."""

import os
from http.server import BaseHTTPRequestHandler

import pytest

from flows.pipeline.external import HubUnreachableError, resolve
from stages.contract.errors import UserError
from tests.scripted_server import served


def rewrite(path, text, modified):
    """Other bytes of the same length, in the same file, with a time of modification."""
    path.write_text(text)
    os.utime(path, ns=(modified, modified))


def test_a_file_is_read_again_only_where_it_was_changed(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    weights = checkpoint / "model.safetensors"
    rewrite(weights, "old", 1)
    first = resolve(str(checkpoint), "model")
    rewrite(weights, "new", 1)
    assert resolve(str(checkpoint), "model") == first, "it was read again"
    rewrite(weights, "new", 2)
    assert resolve(str(checkpoint), "model").digest != first.digest


class Refusing(BaseHTTPRequestHandler):
    """A hub that refuses every revision; why, the repository's name says."""

    def do_GET(self):
        why = "GatedRepo" if "gated" in self.path else "RevisionNotFound"
        self.send_response(403 if why == "GatedRepo" else 404)
        self.send_header("X-Error-Code", why)
        self.end_headers()

    def log_message(self, *arguments):
        """No lines of a log: requests are not printed."""


@pytest.fixture
def hub(monkeypatch):
    with served(Refusing) as url:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("owner/prompts@2024", "no dataset of that name at '2024' .RevisionNotFoundError"),
        ("owner/gated", "no such file or folder: owner/gated, .* .GatedRepoError"),
        ("owner/-prompts", "no such file or folder: owner/-prompts, .* .HFValidationError"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_a_wrong_name_differs_from_a_hub_that_does_not_answer(place, said):
    with pytest.raises(UserError, match=said):
        resolve(place, "dataset")


def test_a_hub_that_does_not_answer_is_a_failure_of_its_own(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubUnreachableError, match="owner/data, and the hub cannot be asked"):
        resolve("owner/data", "dataset")
