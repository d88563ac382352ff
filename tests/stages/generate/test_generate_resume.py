"""A sampling that was killed or stopped goes on, and ends with the undisturbed one's bytes."""

import pytest

from stages.contract.errors import StoppedError
from stages.contract.events import Progress
from stages.generate import run as generate_run
from stages.generate.params import GenerateParams
from stages.generate.run import STAGE
from stages.harness.program import execute
from stages.tables.parts import split_parts
from stages.tables.schemas import RESPONSES
from tests.stage_calls import EventLog, call_request, metrics, request_for, write_prompts
from tests.stages.generate.small_runs import PARAMS, TEXTS


def test_a_retry_after_some_chunks_gives_the_same_bytes(policy, tmp_path):
    """Also where prompts too long are dropped: batches never reach from one chunk into the next."""
    texts = ["red cat " * 15 if index % 3 == 2 else TEXTS[index % 23] for index in range(24)]
    prompts = write_prompts(tmp_path / "prompts.parquet", texts)
    settings = {"max_length_tokens": 40, "transformers": {"batch_size": 5}, "chunk_prompts": 4}
    params = GenerateParams(**{**PARAMS, **settings})
    inputs = {"policy": policy, "prompts": prompts}
    whole, _ = call_request(STAGE, request_for(params, inputs, tmp_path / "whole"))
    assert metrics(whole)["prompts_dropped_too_long"] == 8

    request = request_for(params, inputs, tmp_path / "killed")
    log = StoppingLog("wrote the responses to prompts 4 to 7")
    with pytest.raises(StoppedError):
        execute(STAGE, request, log)
    artifact, events = call_request(STAGE, request)
    assert any("2 of 6 chunks are there already" in str(event) for event in events)
    assert artifact.manifest.digest() == whole.manifest.digest()


def test_a_retry_within_a_chunk_goes_on_and_gives_the_same_bytes(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(generate_run, "SAVE_SECONDS", 0.0)
    prompts = write_prompts(tmp_path / "prompts.parquet", TEXTS)
    params = GenerateParams(**{**PARAMS, "transformers": {"batch_size": 5}})
    inputs = {"policy": policy, "prompts": prompts}
    whole, _ = call_request(STAGE, request_for(params, inputs, tmp_path / "whole"))
    request = request_for(params, inputs, tmp_path / "killed")
    with pytest.raises(StoppedError):
        execute(STAGE, request, LogStoppedAt(32))
    artifact, events = call_request(STAGE, request)
    first = next(event for event in events if isinstance(event, Progress))
    assert first.done == 31
    assert artifact.manifest.digest() == whole.manifest.digest()


class LogStoppedAt(EventLog):
    """An emitter that stops the stage at a number of responses."""

    def __init__(self, done: int) -> None:
        super().__init__()
        self._stop_at = done

    def progress(self, done: int, total: int, unit: str, note: str = "") -> None:
        super().progress(done, total, unit, note)
        if unit == "responses" and done == self._stop_at:
            raise StoppedError(f"at {done}")


class StoppingLog(EventLog):
    """An emitter that stops the stage when it says something."""

    def __init__(self, message: str) -> None:
        super().__init__()
        self._message = message

    def info(self, message: str) -> None:
        super().info(message)
        if message == self._message:
            raise StoppedError(message)


def test_chunks_of_another_size_have_other_files(tmp_path):
    small, large = (split_parts(tmp_path, RESPONSES, 0, 12, size) for size in (4, 6))
    assert not {chunk.path for chunk in small} & {chunk.path for chunk in large}
