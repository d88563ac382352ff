"""Trial of an oracle of one's own before the first stage: imported, and called once."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from flows.pipeline.config import RunConfig
from flows.pipeline.inputs import resolve
from flows.runners.local.environment import stage_environment
from stages.contract.data_files import DATA_SUFFIXES, read_data_file
from stages.contract.errors import EXIT_USER, UserError
from stages.contract.request import FileInput
from stages.prepare.params import PrepareParams

# An oracle that loads a model may take longer; then its stage is the one to try it.
_LIMIT_SECONDS = 60.0
_PROMPTS = 2
_RESPONSES = ("A trial response.", "Another trial response,\nof two lines.")
_TRIED: set[tuple[str, str, str, str]] = set()
_LOCK = threading.Lock()


def try_oracle(config: RunConfig) -> None:
    """Calls the ``python`` oracle on trial responses, in the environment of the score stage.

    Once for each oracle in a process. Oracles of other kinds, and runners that start stages
    elsewhere, are not tried.

    Raises:
        UserError: The function cannot be loaded, fails, or returns no scores.
    """
    code = config.inputs.oracle_code
    if "python" not in config.score.parts or code is None or config.execution.runner != "process":
        return
    source = resolve(code, "dataset")
    if not isinstance(source, FileInput):
        return
    interpreter = config.execution.interpreters.get("score", sys.executable)
    function = config.score.python.function
    with _LOCK:
        name = source.digest, source.location, function, interpreter
        if name in _TRIED:
            return
        command = [interpreter, "-m", "stages.score.trial", source.location, function]
        environment = stage_environment(in_bucket="://" in config.store)
        _try(command, _rows(config), environment)
        _TRIED.add(name)


def _try(command: list[str], rows: list[dict[str, Any]], environment: dict[str, str]) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(rows, file)
        file.flush()
        try:
            done = subprocess.run(
                [*command, file.name],
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=_LIMIT_SECONDS,
                env=environment,
            )
        except (subprocess.TimeoutExpired, OSError):
            # The check of interpreters names one that is missing.
            return
    if done.returncode == EXIT_USER:
        said = json.loads(done.stdout)
        raise UserError(f"the oracle was tried before the run: {said['message']}", said["remedy"])


def _rows(config: RunConfig) -> list[dict[str, Any]]:
    """Rows as the score stage reads them: trial responses to the first prompts."""
    return [
        {
            "prompt_id": f"trial-{number}",
            "sample_index": index,
            "messages": messages,
            "response": response,
            "reference_answer": reference,
        }
        for number, (messages, reference) in enumerate(_prompts(config))
        for index, response in enumerate(_RESPONSES)
    ]


def _prompts(config: RunConfig) -> list[tuple[list[dict[str, str]], str | None]]:
    # That none is named, the plan says.
    path = Path(next(iter(config.inputs.prompts), ""))
    if path.suffix not in DATA_SUFFIXES or not path.is_file():
        return [([{"role": "user", "content": "A trial prompt."}], None)]
    rows = itertools.islice(read_data_file(path), _PROMPTS)
    return [_prompt(row, config.prepare) for _, row in rows]


def _prompt(row: dict[str, Any], params: PrepareParams) -> tuple[list[dict[str, str]], str | None]:
    """A prompt as far as it is plain; `prepare` says what is wrong with others."""
    found = row.get(params.messages_column) or row.get(params.prompt_column)
    if not isinstance(found, list):
        found = [{"role": "user", "content": str(found)}]
    reference = row.get(params.reference_column)
    return found, None if reference is None else str(reference)
