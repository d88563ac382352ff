"""Requests for stages under test: small tables, files as inputs, a store in a temporary folder."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.contract.digests import prompt_id, sha256_file, sha256_tree
from stages.contract.events import Emitter, Event, parse_event
from stages.contract.params import StageParams
from stages.contract.program import Stage, execute
from stages.contract.request import FileInput, Request, make_request
from stages.contract.store import Artifact, Store
from stages.contract.tables import PROMPTS, write_table


def file_input(path: Path) -> FileInput:
    """A file or folder as input, addressed by its content."""
    if path.is_dir():
        files = {
            each.relative_to(path).as_posix(): sha256_file(each)
            for each in path.rglob("*")
            if each.is_file()
        }
        return FileInput(location=str(path), digest=sha256_tree(files))
    return FileInput(location=str(path), digest=sha256_file(path))


def user_turn(text: str) -> list[dict[str, str]]:
    """A prompt of one user message."""
    return [{"role": "user", "content": text}]


def write_prompts(path: Path, prompts: Sequence[str | list[dict[str, str]]]) -> Path:
    """Writes a PROMPTS table of texts or conversations and returns its path."""
    conversations = [user_turn(each) if isinstance(each, str) else each for each in prompts]
    write_table(
        path,
        PROMPTS,
        (
            {"prompt_id": prompt_id(messages), "messages": messages, "reference_answer": None}
            for messages in conversations
        ),
    )
    return path


def request_for(
    params: StageParams, inputs: Mapping[str, Any], store: Path, *, seed: int = 0
) -> Request:
    """A request whose inputs are files, folders or references to artifacts."""
    Store.open(str(store), create=True)
    return make_request(
        params,
        inputs={
            name: [file_input(each) if isinstance(each, Path) else each]
            for name, each in inputs.items()
        },
        seed=seed,
        store=str(store),
    )


def call(stage: Stage[Any], request: Request) -> tuple[Artifact, list[Event]]:
    """Executes a request in this process and returns the artifact and the stage's events."""
    stream = io.StringIO()
    artifact = execute(stage, request, Emitter(stream))
    events = [parse_event(line) for line in stream.getvalue().splitlines()]
    return artifact, [event for event in events if event is not None]
