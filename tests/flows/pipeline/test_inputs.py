"""Inputs from outside: hashed once, and again where a file has changed."""

import os
from http.server import BaseHTTPRequestHandler

import pytest

from flows.pipeline import external
from flows.pipeline.algorithm import resolve_run
from flows.pipeline.config import RunConfig
from flows.pipeline.external import HubUnreachableError, resolve
from flows.pipeline.loading import load_config
from stages.contract.errors import UserError
from tests.flows.loop import ROOT
from tests.scripted_server import served

QUICKSTART = ROOT / "configs/quickstart.yaml"


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


def test_a_recorded_run_keeps_the_commits_that_it_started_with(monkeypatch):
    commits = {"owner/model": "a" * 40, "owner/prompts": "b" * 40, "owner/suite": "c" * 40}
    monkeypatch.setattr(external, "_resolve_revision", lambda repo, *_: commits[repo])
    config = load_config(
        QUICKSTART,
        [
            "inputs.policy=owner/model",
            "inputs.warm_start=null",
            "inputs.prompts=[owner/prompts@main]",
            "suites={more: {prompts: owner/suite}}",
        ],
    )
    started = resolve_run(config).config
    assert started.inputs.policy == f"owner/model@{'a' * 40}"
    assert started.inputs.prompts == (f"owner/prompts@{'b' * 40}",)
    assert started.suites["more"].prompts == f"owner/suite@{'c' * 40}"
    assert RunConfig.model_validate_json(started.to_json()).inputs == started.inputs


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
