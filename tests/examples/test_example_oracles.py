"""The oracles in `examples/oracles`, in the environment of their libraries."""

import json
import os
from pathlib import Path

import pytest

from stages.contract.errors import EXIT_OK
from stages.contract.events import parse_event
from stages.store.base import Store
from stages.tables.schemas import RESPONSES, SCORES, read_rows, write_table
from tests.flows.loop import ROOT
from tests.programs import lacking, run_program
from tests.stage_calls import request_for, response, score_params
from tests.stages.score.responses import response_rows
from tests.tiny_models import make_tiny_reward_model

pytestmark = pytest.mark.slow
FOLDER = ROOT / "examples/oracles"
PYTHON = Path(os.environ.get("GEB_EVAL_PYTHON", ROOT / ".venv-eval/bin/python"))


def need_eval_environment():
    """Skips a test where the environment is not made."""
    if not PYTHON.exists():
        lacking(f"no interpreter at {PYTHON}: run `make setup-eval`")


def write_punkt(folder):
    """Writes nltk's data `punkt_tab` as an untrained splitter of sentences has it."""
    place = folder / "tokenizers/punkt_tab/english"
    place.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "ortho_context.tab"):
        (place / name).write_text("")
    (place / "abbrev_types.txt").write_text("dr\nmr\n")
    return folder


def run_there(request, folder, environment=None):
    """Runs a stage as a program in the environment; gives its exit code and its last words."""
    need_eval_environment()
    path = folder / f"{request.key}.json"
    request.write(path)
    offline = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    whole = {**os.environ, **offline, **(environment or {})}
    done = run_program(PYTHON, "-m", f"stages.{request.stage}", path, env=whole)
    last = str(parse_event(done.stdout.splitlines()[-1]))
    return done.returncode, last if done.returncode == EXIT_OK else f"{last}\n{done.stderr[-2000:]}"


# Rows of the data set as `prepare` joins them have every argument, most of them null.
NONE = {"num_words": None, "keywords": None, "relation": None, "num_sentences": None}


def score(folder, oracle, rows, **environment):
    """Scores by an oracle in Python for rows of a responses table."""
    return run_score(folder, "python", rows, {"code": FOLDER / oracle}, environment)


def run_score(folder, oracle, rows, inputs, environment=None):
    """Scores of the stage, run in the environment."""
    responses = folder / "responses.parquet"
    write_table(responses, RESPONSES, rows)
    inputs = {"responses": responses, **inputs}
    request = request_for(score_params(oracle), inputs, folder / "store")
    code, message = run_there(request, folder, environment)
    assert code == EXIT_OK, message
    artifact = Store.in_folder(str(folder / "store")).load("score", request.key)
    return list(read_rows(artifact.path / "scores.parquet", SCORES))


def instructions(*checks):
    return json.dumps(
        {
            "instruction_id_list": [name for name, _ in checks],
            "kwargs": [{**NONE, **arguments} for _, arguments in checks],
        }
    )


def test_ifeval_checks_instructions_by_lm_eval(tmp_path):
    plain = instructions(
        ("punctuation:no_comma", {}),
        ("length_constraints:number_words", {"relation": "at least", "num_words": 3}),
    )
    sentences = instructions(
        ("length_constraints:number_sentences", {"relation": "at least", "num_sentences": 3})
    )
    rows = [
        response("q", 0, "One two three.", reference_answer=plain),
        response("q", 1, "One, two.", reference_answer=plain),
        # The loose check forgives an introduction.
        response("q", 2, "Sure, here it is:\nOne two three.", reference_answer=plain),
        response("r", 0, "It rains. It snows. It ends.", reference_answer=sentences),
    ]
    data = write_punkt(tmp_path / "nltk_data")
    scores = score(tmp_path, "ifeval.py", rows, NLTK_DATA=str(data))
    assert [row["score"] for row in scores] == [1.0, 0.0, 0.0, 1.0]
    components = [dict(row["components"]) for row in scores]
    assert components[1] == {"instructions_strict": 0.0, "instructions_loose": 0.0}
    assert components[2] == {"instructions_strict": 0.5, "instructions_loose": 1.0}


def test_reasoning_tasks_makes_prompts_and_scores_their_answers(tmp_path):
    need_eval_environment()
    settings = ("chain_sum", "size=4", "min_terms=2", "max_terms=2")
    done = run_program(PYTHON, FOLDER / "reasoning_tasks.py", *settings)
    assert done.returncode == 0, done.stderr
    prompts = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({prompt["prompt"] for prompt in prompts}) == 4
    task = prompts[0]["reference_answer"]
    right = json.loads(task)["entry"]["answer"]
    sentence = f"It is {right}"
    answers = (right, f" {right}\n", f"no: <answer>{right}</answer>!", sentence, "no idea")
    rows = [response("q", n, text, reference_answer=task) for n, text in enumerate(answers)]
    scores = score(tmp_path, "reasoning_tasks.py", rows)
    assert [row["score"] for row in scores] == [1, 1, 1, len(right) / len(sentence), 0]


def test_reward_model_of_a_run_scores_beside_the_suites(tmp_path):
    model = make_tiny_reward_model(tmp_path / "model")
    rows = response_rows()
    scores = run_score(tmp_path, "reward_model", rows, {"model": model})
    assert len({row["score"] for row in scores}) > 1
