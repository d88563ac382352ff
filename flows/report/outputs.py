"""A model's sampled responses in the formats of AlpacaEval, Arena-Hard and lm-eval."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from flows.report.files import write_file
from stages.contract.data_files import read_data_file
from stages.contract.errors import UserError
from stages.contract.tables import RESPONSES, SCORES, read_rows

_COLUMNS = ("prompt_id", "sample_index", "messages", "reference_answer", "response")
Row = dict[str, Any]


@dataclass(frozen=True)
class Outputs:
    """Responses of a model that are to be exported.

    Attributes:
        model: Name that the files give the model.
        task: Name that they give the prompts.
        responses: Responses, shard by shard.
        scores: Their scores, in the same order.
        questions: Arena-Hard's `question.jsonl`, of which the ids of its prompts are.
    """

    model: str
    task: str
    responses: Sequence[Path]
    scores: Sequence[Path]
    questions: Path | None = None

    def prompts(self) -> Iterator[list[Row]]:
        """Samples of each prompt, with their scores."""
        for responses, scores in zip(self.responses, self.scores, strict=True):
            rows = read_rows(responses, RESPONSES, columns=_COLUMNS)
            scored = read_rows(scores, SCORES, columns=("score",))
            joined = (row | score for row, score in zip(rows, scored, strict=True))
            for _, samples in groupby(joined, lambda row: row["prompt_id"]):
                yield list(samples)


def parse_export(text: str, questions: Path | None) -> tuple[str, Path]:
    """Format and file of ``FORMAT=FILE``.

    Raises:
        UserError: There is no such format, no file, or no questions where they are needed, or they
            are not Arena-Hard's; or the file cannot be written.
    """
    name, _, place = text.partition("=")
    if name not in FORMATS or not place:
        raise UserError(
            f"--export {text!r} is not FORMAT=FILE", f"formats: {', '.join(sorted(FORMATS))}"
        )
    # Before the evaluation, which may take hours.
    path = Path(place).expanduser()
    _require_writable(path, text)
    if name == "arena_hard":
        _question_ids(questions)
    return name, path


def _require_writable(path: Path, text: str) -> None:
    parent = next(each for each in path.absolute().parents if each.exists())
    if path.is_dir():
        why = f"{path} is a folder"
    elif not parent.is_dir():
        why = f"{parent} is no folder"
    elif not os.access(path if path.exists() else parent, os.W_OK):
        why = f"{path} cannot be written"
    else:
        return
    raise UserError(f"--export {text!r}: {why}", "name a file in a folder of yours")


def export(name: str, path: Path, outputs: Outputs) -> None:
    """Writes the responses in a format.

    Raises:
        UserError: The format cannot hold these prompts, or wants to know more of them.
    """
    write_file(path, FORMATS[name](outputs))


def _alpaca_eval(outputs: Outputs) -> str:
    """`model_outputs` of AlpacaEval: the first sample of each prompt, one JSON array."""
    rows = [
        {
            "instruction": _instruction(samples[0]),
            "output": samples[0]["response"],
            "generator": outputs.model,
            "dataset": outputs.task,
            "datasplit": "eval",
        }
        for samples in outputs.prompts()
    ]
    return json.dumps(rows, ensure_ascii=False, indent=2) + "\n"


def _arena_hard(outputs: Outputs) -> str:
    """`model_answer/MODEL.jsonl` of Arena-Hard v2: the first sample of each prompt."""
    ids = _question_ids(outputs.questions)
    lines = []
    for samples in outputs.prompts():
        prompt = _instruction(samples[0])
        if prompt not in ids:
            raise UserError(
                f"the prompt {prompt[:80]!r} is not in {outputs.questions}",
                "name the questions that the model was evaluated on",
            )
        answer = {"role": "assistant", "content": {"answer": samples[0]["response"]}}
        lines.append(
            {
                "uid": ids[prompt],
                "ans_id": _digest(f"{outputs.model} {samples[0]['prompt_id']}")[:22],
                "model": outputs.model,
                "messages": [{"role": "user", "content": prompt}, answer],
                "tstamp": 0.0,
            }
        )
    return _lines(lines)


def _question_ids(questions: Path | None) -> dict[str, str]:
    """Ids of Arena-Hard's questions, by their prompts."""
    remedy = "add --questions with its file data/arena-hard-v2.0/question.jsonl"
    if questions is None or not questions.is_file():
        raise UserError(
            "Arena-Hard names its prompts by ids of its own, and --questions "
            + ("is not given" if questions is None else f"{questions} is no file"),
            remedy,
        )
    ids = {}
    for place, row in read_data_file(questions):
        if missing := {"prompt", "uid"} - row.keys():
            raise UserError(
                f"{place}: a question has no {' and no '.join(sorted(missing))}",
                remedy,
            )
        ids[row["prompt"]] = row["uid"]
    return ids


def _lm_eval(outputs: Outputs) -> str:
    """`samples_TASK.jsonl` as lm-eval logs them: all samples of a prompt, and their mean score."""
    lines = []
    for number, samples in enumerate(outputs.prompts()):
        first = samples[0]
        texts = [row["response"] for row in samples]
        scores = [row["score"] for row in samples]
        known = [score for score in scores if score is not None]
        document = {
            "prompt_id": first["prompt_id"],
            "messages": first["messages"],
            "reference_answer": first["reference_answer"],
        }
        # The messages, as lm-eval sends them to a server of chat completions.
        prompt = json.dumps(first["messages"], ensure_ascii=False)
        target = first["reference_answer"] or ""
        lines.append(
            {
                "doc_id": number,
                "doc": document,
                "target": target,
                "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": {}}},
                "resps": [texts],
                "filtered_resps": [texts],
                "filter": "none",
                "metrics": ["score"],
                "doc_hash": _digest(json.dumps(document, indent=2, ensure_ascii=False)),
                "prompt_hash": _digest(prompt),
                "target_hash": _digest(target),
                "score": sum(known) / len(known) if len(known) == len(scores) else None,
            }
        )
    return _lines(lines)


FORMATS: Mapping[str, Callable[[Outputs], str]] = {
    "alpaca_eval": _alpaca_eval,
    "arena_hard": _arena_hard,
    "lm_eval": _lm_eval,
}


def _instruction(row: Row) -> str:
    """The one user turn of a prompt; a system message before it is not part of these formats."""
    turns = [each for each in row["messages"] if each["role"] != "system"]
    if len(turns) != 1:
        raise UserError(
            f"the prompt {row['prompt_id']} is a conversation of {len(turns)} turns, and this "
            "format holds one",
            "export as lm_eval, or evaluate on prompts of one turn",
        )
    return str(turns[0]["content"])


def _lines(rows: Sequence[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
