"""Calling stages in tests as the flow does: a request in, an artifact or an error out."""

import io
import json
from pathlib import Path

from stages.contract.digests import digest_of, prompt_id
from stages.contract.events import Emitter, parse_event
from stages.contract.params import OutputSpec, StageParams
from stages.contract.request import FileInput, make_request
from stages.harness.program import Stage, execute
from stages.pair.params import PairParams
from stages.score.params import ORACLES, ScoreParams
from stages.store.base import Store
from stages.tables.schemas import PROMPTS, RESPONSES, SCORES, write_table


def file_input(path):
    """A file or folder outside the store as an input."""
    digest = digest_of(path) if path.exists() else "of nothing"
    return FileInput(location=str(path), digest=digest)


def stand_ins(params):
    """A file for each input that a stage needs; it has no content."""
    source = FileInput(location="/nowhere/file", digest="d1")
    return {name: [source] for name, spec in params.inputs.items() if not spec.optional}


def request_of(store, params=None, **fields):
    """A request of a stage (`pair` if none is named) that is never computed."""
    params = params or PairParams()
    inputs = stand_ins(params) | fields.pop("inputs", {})
    return make_request(params, inputs=inputs, seed=0, store=str(store.root), **fields)


def user_turn(text):
    """A prompt of one user message."""
    return [{"role": "user", "content": text}]


def write_prompts(path, prompts):
    """Writes a PROMPTS table of texts or conversations and returns its path."""
    conversations = [user_turn(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    write_table(
        path,
        PROMPTS,
        (
            {"prompt_id": prompt_id(messages), "messages": messages, "reference_answer": None}
            for messages in conversations
        ),
    )
    return path


def request_for(params, inputs, store, *, seed=0, resources=None):
    """A request whose inputs are files, folders or references to artifacts."""
    Store.in_folder(str(store), create=True)
    return make_request(
        params,
        inputs={
            name: [file_input(source) if isinstance(source, Path) else source]
            for name, source in inputs.items()
        },
        seed=seed,
        store=str(store),
        resources=resources,
    )


def metrics(artifact):
    """Metrics of an artifact."""
    return json.loads(artifact.file("metrics.json").read_text())


def score_params(oracle, **settings):
    """Parameters of the score stage; a name that the stage lacks is a field of the oracle."""
    whole = {name: settings.pop(name) for name in ScoreParams.model_fields if name in settings}
    section = {ORACLES[oracle].section: settings} if settings else {}
    return ScoreParams.model_validate({"oracle": oracle, **whole, **section})


def call_request(stage, request):
    """Executes a request in this process and returns the artifact and the stage's events."""
    log = EventLog()
    return execute(stage, request, log), log.events


def call(stage, params, inputs, store, *, seed=0, events=None, **options):
    """Runs a stage in this process and returns its artifact."""
    given = {
        name: [file_input(member) if isinstance(member, Path) else member for member in group]
        for name, group in inputs.items()
    }
    request = make_request(params, inputs=given, seed=seed, store=str(store.root), **options)
    return execute(stage, request, events or Emitter(io.StringIO()))


class TrainedParams(StageParams):
    """A stage that leaves what training leaves."""

    stage = "train"
    version = "1"
    outputs = {"checkpoint": OutputSpec("model")}
    weights: str


def checkpoint_artifact(store, weights):
    """An artifact with a checkpoint folder whose weights are a text."""

    def run(ctx):
        (ctx.out / "checkpoint").mkdir()
        (ctx.out / "checkpoint/model.safetensors").write_text(ctx.params.weights)

    return call(Stage(TrainedParams, run), TrainedParams(weights=weights), {}, store)


class EventLog(Emitter):
    """An emitter that remembers."""

    def __init__(self):
        self.stream = io.StringIO()
        super().__init__(self.stream)

    @property
    def events(self):
        """Everything emitted so far."""
        parsed = [parse_event(line) for line in self.stream.getvalue().splitlines()]
        return [event for event in parsed if event is not None]


def response(question, sample, text, **changes):
    """One row of a responses table; each word of ``text`` has a token id."""
    messages = [{"role": "user", "content": question}]
    words = text.split()
    row = {
        "prompt_id": prompt_id(messages),
        "sample_index": sample,
        "messages": messages,
        "reference_answer": None,
        "prompt_token_ids": [1, 5],
        "response_token_ids": [7 + len(word) % 10 for word in words],
        "response_logprobs": [-0.5] * len(words),
        "response": text,
        "finish_reason": "stop",
        "seed": 0,
    }
    return row | changes


def write_jsonl(path, rows):
    """Writes a line of JSON for each row and returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_scored(folder, rows, name="", components=None):
    """Writes responses with their scores as the two tables; returns their paths."""
    responses, scores = folder / f"{name}responses.parquet", folder / f"{name}scores.parquet"
    write_table(responses, RESPONSES, [row for row, _ in rows])
    write_table(
        scores,
        SCORES,
        [
            {
                "prompt_id": row["prompt_id"],
                "sample_index": row["sample_index"],
                "score": score,
                "error": None if score is not None else "not scored",
                "components": parts,
                "oracle": "test",
            }
            for (row, score), parts in zip(rows, components or [None] * len(rows), strict=True)
        ],
    )
    return responses, scores
