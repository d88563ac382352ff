"""Trial of an oracle of one's own before the first stage: imported, and called once."""

import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.execution.trial import LOCK, TRIED, call_on_trial
from flows.pipeline.config import RunConfig
from flows.pipeline.external import resolve
from stages.contract.data_files import FILE_SUFFIXES, files_of_folder, read_data_file
from stages.contract.events import Log
from stages.contract.request import FileInput
from stages.prepare.params import PrepareParams

# What a trial may say at its end, see `stages.score.python_function`, which flows do not import.
_ALIKE = "tried alike"
_PROMPTS = 2
_RESPONSES = ("A trial response.", "Another trial response,\nof two lines.")
# Messages, and the reference answer.
_Prompt = tuple[list[dict[str, str]], str | None]
_MADE_UP: _Prompt = ([{"role": "user", "content": "A trial prompt."}], None)


def try_oracle(config: RunConfig) -> str | None:
    """Calls the ``python`` oracle on trial responses, in the environment of the score stage.

    Once for each oracle in a process. Oracles of other kinds, and runners that start stages
    elsewhere, are not tried. Where the first prompts, or their reference answers, are not read
    here (a data set of the hub, `prepare.reference_columns`), an error within the function is no
    reason to refuse it: it may be the made-up prompt's, or that of a reference answer that lacks.

    Returns:
        A warning, if the oracle does not tell the responses to a prompt apart.

    Raises:
        UserError: The function cannot be loaded, fails, or returns no scores.
    """
    code = config.inputs.oracle_code
    if "python" not in config.score.parts or code is None or config.execution.runner != "process":
        return None
    source = resolve(code, "dataset")
    if not isinstance(source, FileInput):
        return None
    interpreter = config.execution.interpreters.get("score", sys.executable)
    function = config.score.python.function
    with LOCK:
        name = source.digest, source.location, function, interpreter
        if name in TRIED:
            return None
        prompts = _prompts(config)
        certainty = "made-up" if prompts is None else "read"
        program = ["stages.score.python_function", source.location, function, certainty]
        rows = _rows(prompts or [_MADE_UP], _warm_answer(config))
        is_alike = _try(config, program, rows)
        TRIED.add(name)
    # The other parts of a sum may tell them apart.
    if not is_alike or config.score.oracle != "python":
        return None
    return (
        f"{Path(source.location).name}:{function} gives all trial responses to a prompt the same "
        "reward. If it does so to the policy's, no pair has a winner, and training learns no "
        "preference. Make it tell responses apart"
    )


def _try(config: RunConfig, program: list[str], rows: list[dict[str, Any]]) -> bool:
    """Calls the oracle on the rows; True if all responses to each prompt have the same reward."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(rows, file)
        file.flush()
        said = call_on_trial(config, "score", "oracle", [*program, file.name])
    return isinstance(said, Log) and said.message == _ALIKE


def _rows(prompts: Sequence[_Prompt], answers: Sequence[str]) -> list[dict[str, Any]]:
    """Rows as the score stage reads them; answers and references may be of a form that scores."""
    return [
        {
            "prompt_id": f"trial-{number}",
            "sample_index": index,
            "messages": messages,
            "response": response,
            "reference_answer": reference,
        }
        for number, (messages, reference) in enumerate(prompts)
        for index, response in enumerate([*_RESPONSES, *answers, *filter(None, [reference])])
    ]


def _warm_answer(config: RunConfig) -> list[str]:
    """The first answer of the warm start's data; none if it is not plain to read."""
    path = _data_file(config.inputs.warm_start)
    row = next((row for _, row in read_data_file(path)), {}) if path else {}
    turns = row.get(config.sft.messages_column) or [
        {"content": row.get(config.sft.response_column)}
    ]
    last = turns[-1] if isinstance(turns, list) else None
    return [str(last["content"])] if isinstance(last, dict) and last.get("content") else []


def _prompts(config: RunConfig) -> list[_Prompt] | None:
    """The first prompts with their reference answers; None if they are not plain to read."""
    params = config.prepare
    # That none is named, the plan says.
    path = _data_file(config.inputs.prompts[0] if config.inputs.prompts else None)
    if path is None or params.reference_columns or params.reference_item is not None:
        return None
    rows = [row for _, row in itertools.islice(read_data_file(path), _PROMPTS)]
    # A dot leads into a column of structs.
    is_plain = all(params.reference_column in row for row in rows)
    is_plain = is_plain or "." not in params.reference_column
    return [_prompt(row, params) for row in rows] if rows and is_plain else None


def _data_file(place: str | None) -> Path | None:
    """The first file at a place, if it is on this machine."""
    if place is None:
        return None
    path = Path(place).expanduser()
    files = files_of_folder(path) if path.is_dir() else [path]
    return next((each for each in files if each.is_file() and each.suffix in FILE_SUFFIXES), None)


def _prompt(row: dict[str, Any], params: PrepareParams) -> _Prompt:
    """A prompt as far as it is plain; `prepare` says what is wrong with others."""
    found = row.get(params.messages_column) or row.get(params.prompt_column)
    if not isinstance(found, list):
        found = [{"role": "user", "content": str(found)}]
    reference = row.get(params.reference_column)
    return found, None if reference is None else str(reference)
