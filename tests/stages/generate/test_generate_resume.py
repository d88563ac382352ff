"""A sampling that was stopped goes on, and ends with the undisturbed one's bytes."""

import pytest

from stages.contract.errors import StoppedError
from stages.contract.events import Progress
from stages.generate import run as generate_run
from stages.generate.params import GenerateParams
from stages.generate.run import STAGE
from stages.harness.program import execute
from stages.tables.parts import Part, split_parts
from stages.tables.schemas import RESPONSES
from tests.stage_calls import EventLog, call_request, metrics, request_for, write_prompts
from tests.stages.generate.small_runs import PARAMS, TEXTS


class StoppingLog(EventLog):
    """An emitter that stops the stage when an event's text has a part."""

    def __init__(self, part):
        super().__init__()
        self._part = part

    def emit(self, event):
        super().emit(event)
        if self._part in str(event):
            raise StoppedError(self._part)


def test_a_retry_after_some_chunks_gives_the_same_bytes(policy, tmp_path):
    """Also where prompts too long are dropped: batches never reach from one chunk into the next."""
    texts = ["red cat " * 15 if index % 3 == 2 else TEXTS[index % 23] for index in range(24)]
    settings = {"max_length_tokens": 40, "transformers": {"batch_size": 5}, "chunk_responses": 12}
    whole, artifact, events = resumed(
        policy, tmp_path, texts, "wrote the responses to prompts 4 to 7", settings
    )
    assert metrics(whole)["prompts_dropped_too_long"] == 8
    assert any("2 of 6 chunks are there already" in str(event) for event in events)
    assert artifact.manifest.digest() == whole.manifest.digest()


def test_a_retry_within_a_chunk_goes_on_and_gives_the_same_bytes(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(generate_run, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(generate_run, "SAVE_SPACING", 0)
    monkeypatch.setattr("stages.contract.events.PROGRESS_INTERVAL_SECONDS", 0.0)
    settings = {"transformers": {"batch_size": 5}}
    whole, artifact, events = resumed(policy, tmp_path, TEXTS, "done=32", settings)
    first = next(event for event in events if isinstance(event, Progress))
    assert first.done == 31
    assert artifact.manifest.digest() == whole.manifest.digest()


def test_saves_that_take_long_are_rare(policy, tmp_path, monkeypatch):
    now = 0.0
    saves = []

    def ten_seconds_later():
        nonlocal now
        now += 10.0
        return now

    def save_slowly(part, rows):
        nonlocal now
        now += 50.0
        saves.append(part)
        save(part, rows)

    save = Part.save
    monkeypatch.setattr(Part, "save", save_slowly)
    monkeypatch.setattr(generate_run.time, "monotonic", ten_seconds_later)
    prompts = write_prompts(tmp_path / "prompts.parquet", TEXTS)
    inputs = {"policy": policy, "prompts": prompts}
    call_request(STAGE, request_for(GenerateParams(**PARAMS), inputs, tmp_path / "store"))
    assert saves
    assert 50.0 * len(saves) < 0.1 * now


def resumed(policy, tmp_path, texts, stops_at, settings):
    """An undisturbed artifact, one that a second attempt finished, and that attempt's events."""
    prompts = write_prompts(tmp_path / "prompts.parquet", texts)
    params = GenerateParams(**{**PARAMS, **settings})
    inputs = {"policy": policy, "prompts": prompts}
    whole, _ = call_request(STAGE, request_for(params, inputs, tmp_path / "whole"))
    request = request_for(params, inputs, tmp_path / "stopped")
    with pytest.raises(StoppedError):
        execute(STAGE, request, StoppingLog(stops_at))
    artifact, events = call_request(STAGE, request)
    return whole, artifact, events


def test_chunks_of_another_size_have_other_files(tmp_path):
    small, large = (split_parts(tmp_path, RESPONSES, 0, 12, size) for size in (4, 6))
    assert not {chunk.path for chunk in small} & {chunk.path for chunk in large}
