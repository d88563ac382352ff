"""Hub data sets, through the real client against a stand-in hub on this machine."""

import json

import pytest
import yaml

from stages.contract.errors import EXIT_FAILED, EXIT_USER
from stages.contract.events import Failure, parse_event
from stages.contract.request import HubInput
from stages.prepare.params import PrepareParams
from stages.store.base import Store
from stages.tables.schemas import PROMPTS, read_rows
from tests.flows.loop import ROOT
from tests.local_hub import COMMIT, run_with_hub, serve_dataset
from tests.stage_calls import request_for

REPO = "RLHFlow/ultrafeedback_iter1"
ROWS = [
    {"context_messages": [{"role": "user", "content": f"question {n}"}], "context": "unused"}
    for n in range(30)
]


@pytest.fixture(scope="module")
def hub():
    content = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    with serve_dataset(REPO, {"data/train.jsonl": content, "README.md": b"# Prompts\n"}) as url:
        yield url


def prepare(tmp_path, endpoint, repo, given="train", **params):
    """Runs the stage as a program; gives its exit code, its artifact's folder, its last word."""
    source = HubInput(repo=repo, revision=COMMIT, repo_type="dataset")
    settings = {"messages_column": "context_messages", "test_prompts": 3} | params
    prepare_params = PrepareParams.model_validate(settings)
    request = request_for(prepare_params, {given: source}, tmp_path / "store")
    ended = run_with_hub(endpoint, request, tmp_path)
    events = [parse_event(line) for line in ended.stdout.splitlines()]
    path = Store.in_folder(request.store).artifact_path("prepare", request.key)
    return ended.returncode, path, events[-1]


def test_the_papers_data_sets_load_by_name(tmp_path, hub):
    code, path, last = prepare(tmp_path, hub, REPO)
    assert code == 0, last
    names = ["iteration-1", "iteration-2", "iteration-3", "test"]
    texts = [
        row["messages"][0]["content"]
        for name in names
        for row in read_rows(path / f"{name}.parquet", PROMPTS)
    ]
    assert sorted(texts) == sorted(f"question {n}" for n in range(30))


@pytest.mark.parametrize(
    ("repo", "params", "message"),
    [
        ("RLHFlow/no_such_data", {}, "RLHFlow/no_such_data, split train"),
        (REPO, {"split": "validation"}, 'Unknown split "validation"'),
        (REPO, {"messages_column": "messages"}, "row 1: no prompt in column"),
        (REPO, {"hub_file": "../x"}, "has no file ../x"),
    ],
)
def test_a_wrong_name_is_a_users_mistake(tmp_path, hub, repo, params, message):
    code, path, last = prepare(tmp_path, hub, repo, **params)
    assert code == EXIT_USER, last
    assert isinstance(last, Failure)
    assert message in last.message
    assert last.remedy
    assert not path.exists()


@pytest.mark.slow
def test_a_hub_that_does_not_answer_may_be_tried_again(tmp_path):
    code, path, last = prepare(tmp_path, "http://127.0.0.1:9", REPO)
    assert code == EXIT_FAILED
    assert REPO in last.message
    assert not path.exists()


INSTRUCTIONS = {
    "instruction_id_list": ["punctuation:no_comma"],
    "kwargs": [{"num_words": None, "relation": None}],
}
# Files of the shipped suites' repositories, each with a row of columns that the hub's has.
OF_SHIPPED = {
    "math500": (
        "math.yaml",
        "test.jsonl",
        {"problem": "What is $1+1$?", "solution": "It is $\\boxed{2}$.", "answer": "2", "level": 1},
        "2",
    ),
    "olympiadbench": (
        "math.yaml",
        "OE_TO_maths_en_COMP/data.jsonl",
        {"question": "What is $1+1$?", "solution": ["It is $2$."], "final_answer": ["2"]},
        "2",
    ),
    "ifeval": (
        "ifeval.yaml",
        "ifeval_input_data.jsonl",
        {"key": 1000, "prompt": "What is $1+1$?", **INSTRUCTIONS},
        json.dumps(INSTRUCTIONS),
    ),
    "alpaca_eval": (
        "alpaca-eval.yaml",
        "alpaca_eval_gpt4_baseline.json",
        [{"instruction": "What is $1+1$?", "output": "It is 2.", "dataset": "helpful_base"}],
        "It is 2.",
    ),
    "arena_hard": (
        "arena-hard.yaml",
        "data/arena-hard-v2.0/question.jsonl",
        {"uid": "0001", "category": "hard_prompt", "prompt": "What is $1+1$?"},
        None,
    ),
    "ultrafeedback": (
        "ultrafeedback.yaml",
        "data/train.jsonl",
        {"context_messages": [{"role": "user", "content": "What is $1+1$?"}], "context": "unused"},
        None,
    ),
}


@pytest.mark.parametrize("name", OF_SHIPPED)
def test_the_shipped_suites_load(tmp_path, name):
    file, path_there, row, reference = OF_SHIPPED[name]
    suite = yaml.safe_load((ROOT / "configs/suites" / file).read_text())["suites"][name]
    repo = suite["prompts"].partition("@")[0]
    params = {"messages_column": "messages", "iterations": 0, **suite["prepare"]}
    files = {path_there: (json.dumps(row) + "\n").encode()}
    if params.get("subset"):
        card = f"configs:\n- config_name: {params['subset']}\n  data_files: {path_there}\n"
        files["README.md"] = f"---\n{card}---\n".encode()
    if params.get("hub_file"):
        # What a repository holds besides, and would be read with it.
        files["leaderboard.jsonl"] = b'{"model": "m"}\n'
    with serve_dataset(repo, files) as url:
        code, path, last = prepare(tmp_path, url, repo, "test", **params)
    assert code == 0, last
    [row] = read_rows(path / "test.parquet", PROMPTS)
    assert row["messages"][-1] == {"role": "user", "content": "What is $1+1$?"}
    assert row["reference_answer"] == reference
