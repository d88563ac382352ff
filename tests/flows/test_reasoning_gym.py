"""Tasks of reasoning-gym as prompts and as an oracle, by the library in the environment eval."""

import json
from pathlib import Path
from typing import Any

import pytest

from stages.contract.errors import EXIT_OK, EXIT_USER
from stages.prepare.params import PrepareParams
from stages.prepare.run import STAGE as PREPARE
from stages.store.base import Store
from stages.tables.schemas import PROMPTS, RESPONSES, SCORES, read_rows, write_table
from tests.eval_environment import PYTHON, need_eval_environment, run_there
from tests.flows.loop import geb_refused, plan, write_config
from tests.stage_calls import call, request_for, response, score_params

pytestmark = pytest.mark.slow
SUM = "reasoning_gym:chain_sum size=4 seed=7 min_terms=2 max_terms=2"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_eval_environment()
    monkeypatch.setenv("GEB_CACHE", str(tmp_path / "cache"))


def config(folder: Path, *prompts: str, **execution: Any) -> Path:
    return write_config(
        folder,
        inputs={"prompts": list(prompts)},
        iterations=len(prompts),
        prepare={"test_prompts": 1},
        score={"oracle": "reasoning_gym"},
        execution={"interpreters": {"eval": str(PYTHON)}} | execution,
    )


def made(tmp_path: Path, place: str) -> list[dict[str, Any]]:
    """The prompts that `prepare` makes of a place, by the file that the plan wrote."""
    plan(config(tmp_path, place))
    (file,) = (tmp_path / "cache/prompts").glob("*.jsonl")
    params = PrepareParams(iterations=0)
    artifact = call(PREPARE, params, {"test": [file]}, Store.open(str(tmp_path / "s"), create=True))
    return list(read_rows(artifact.path / "test.parquet", PROMPTS))


def test_the_task_its_settings_and_its_seed_are_in_the_key(tmp_path: Path) -> None:
    def key(*prompts: str) -> str:
        return str(plan(config(tmp_path, *prompts))["prepare"]["key"])

    # Generators that draw from Python's own stream, or from a set's order.
    for same in (SUM, "reasoning_gym:list_functions size=4", "reasoning_gym:ransom_note size=4"):
        assert key(same) == key(same)
    changed = [
        SUM.replace("size=4", "size=5"),
        SUM.replace("seed=7", "seed=8"),
        f"{SUM} max_digits=1",
    ]
    # A curriculum: prompts of each iteration by settings of their own.
    keys = [key(SUM), *map(key, changed), key(SUM, f"{SUM} max_digits=1")]
    assert len(set(keys)) == 5


def test_a_prompt_brings_what_its_scorer_needs(tmp_path: Path) -> None:
    for row in made(tmp_path, SUM):
        kept = json.loads(row["reference_answer"])
        assert row["messages"] == [{"role": "user", "content": kept["entry"]["question"]}]
        assert kept["entry"]["metadata"]["num_terms"] == 2
        assert kept["settings"] == {"size": 4, "seed": 7, "min_terms": 2, "max_terms": 2}
        assert (kept["task"], kept["version"]) == ("chain_sum", "0.1.25")


def scored(
    tmp_path: Path, answers: list[tuple[str, str | None]], **settings: Any
) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit code, last words and scores of the stage for pairs of response and reference answer."""
    responses = tmp_path / "responses.parquet"
    rows = [response("q", n, text, reference_answer=kept) for n, (text, kept) in enumerate(answers)]
    write_table(responses, RESPONSES, rows)
    params = score_params("reasoning_gym", **settings)
    request = request_for(params, {"responses": responses}, tmp_path / "store")
    code, said = run_there(request, tmp_path)
    artifact = Store.open(str(tmp_path / "store")).find("score", request.key, warn=print)
    return code, said, list(read_rows(artifact.path / "scores.parquet", SCORES)) if artifact else []


def test_a_response_gets_the_library_s_score(tmp_path: Path) -> None:
    kept = made(tmp_path, SUM)[0]["reference_answer"]
    right = json.loads(kept)["entry"]["answer"]
    sentence, tagged = f"It is {right}", f"<answer>1</answer>, no: <answer>{right}</answer>!"
    answers = [right, f" {right}\n", tagged, sentence, "no idea"]
    code, said, rows = scored(
        tmp_path, [*((each, kept) for each in answers), (right, "42")], max_null_share=0.5
    )
    assert code == EXIT_OK, said
    assert [row["score"] for row in rows] == [1, 1, 1, len(right) / len(sentence), 0, None]
    assert [dict(row["components"])["tagged"] for row in rows[:5]] == [0, 0, 1, 0, 0]
    assert "the reference answer holds no task" in rows[5]["error"]
    assert rows[0]["oracle"] == "reasoning_gym:0.1.25"


def test_an_answer_that_breaks_its_scorer_costs_no_run(tmp_path: Path) -> None:
    # The scorer evaluates what looks like a list.
    place = "reasoning_gym:spiral_matrix size=1 seed=7 max_n=3"
    kept = made(tmp_path, place)[0]["reference_answer"]
    right = json.loads(kept)["entry"]["answer"]
    answers = ["[*iter(int, 1)]", "[__import__('os')._exit(1)]", right]
    settings = {"max_null_share": 0.9, "timeout_seconds": 2.0, "processes": 1}
    code, said, rows = scored(tmp_path, [(each, kept) for each in answers], **settings)
    assert code == EXIT_OK, said
    assert [row["score"] for row in rows] == [None, None, 1]
    assert "took more than 2 s" in rows[0]["error"]
    assert "died" in rows[1]["error"]


def test_prompts_of_another_version_are_refused(tmp_path: Path) -> None:
    kept = json.loads(made(tmp_path, SUM)[0]["reference_answer"]) | {"version": "0.1.19"}
    code, said, _ = scored(tmp_path, [("1", json.dumps(kept))])
    assert code == EXIT_USER
    assert "reasoning-gym 0.1.19 made the prompts, and the oracle has 0.1.25" in said


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("chain_sums", "no task 'chain_sums' remedy did you mean chain_sum or"),
        ("chain_sum max_term=2", "no setting 'max_term' remedy did you mean max_terms or"),
        ("chain_sum max_terms=0", "the task cannot be made (AssertionError: "),
        ("chain_sum max_terms", "'max_terms' is not NAME=VALUE"),
        ("rearc size=1", "the right answer's score is 1.0, and 0.05 from a table"),
    ],
)
def test_a_wrong_task_is_refused_before_anything_starts(
    tmp_path: Path, place: str, said: str
) -> None:
    told = geb_refused("plan", config(tmp_path, f"reasoning_gym:{place}"))
    assert f"reasoning_gym:{place}:" in told
    assert said in told


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    told = geb_refused("plan", config(tmp_path, SUM, interpreters={}))
    assert SUM in told
    assert "lacks reasoning-gym" in told
    assert "make setup-eval" in told
