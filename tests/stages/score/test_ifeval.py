"""IFEval's instructions, checked by lm-eval's own code in its environment."""

import json
from pathlib import Path
from typing import Any

import pytest

from stages.contract.errors import EXIT_OK, EXIT_USER
from stages.store.base import Store
from stages.tables.schemas import RESPONSES, SCORES, read_rows, write_table
from tests.eval_environment import run_there, write_punkt
from tests.stage_calls import request_for, response, score_params

pytestmark = pytest.mark.slow

# Rows of the data set as `prepare` joins them: every argument of every instruction, most of them
# null.
NONE = {"num_words": None, "keywords": None, "relation": None, "num_sentences": None}


def wanted(*instructions: tuple[str, dict[str, Any]]) -> str:
    return json.dumps(
        {
            "instruction_id_list": [name for name, _ in instructions],
            "kwargs": [{**NONE, **arguments} for _, arguments in instructions],
        }
    )


NO_COMMA_TWO_WORDS = wanted(
    ("punctuation:no_comma", {}),
    ("length_constraints:number_words", {"relation": "at least", "num_words": 3}),
)
SENTENCES = wanted(
    ("length_constraints:number_sentences", {"relation": "at least", "num_sentences": 3})
)
ROWS = [
    response("q", 0, "One two three.", reference_answer=NO_COMMA_TWO_WORDS),
    response("q", 1, "One, two.", reference_answer=NO_COMMA_TWO_WORDS),
    # The loose check forgives an introduction.
    response("q", 2, "Sure, here it is:\nOne two three.", reference_answer=NO_COMMA_TWO_WORDS),
    response("r", 0, "It rains. It snows. It ends.", reference_answer=SENTENCES),
    response("s", 0, "Anything.", reference_answer="42"),
    response("t", 0, "Anything.", reference_answer=wanted(("no:such", {}))),
]


def score(tmp_path: Path, environment: dict[str, str]) -> tuple[int, str, list[dict[str, Any]]]:
    responses = tmp_path / "responses.parquet"
    write_table(responses, RESPONSES, ROWS)
    settings = score_params("ifeval", max_null_share=0.5)
    request = request_for(settings, {"responses": responses}, tmp_path / "store")
    code, said = run_there(request, tmp_path, environment)
    store = Store.open(str(tmp_path / "store"))
    artifact = store.load("score", request.key)
    return code, said, list(read_rows(artifact.path / "scores.parquet", SCORES)) if artifact else []


def test_instructions_are_checked_by_lm_eval(tmp_path: Path) -> None:
    data = write_punkt(tmp_path / "nltk_data")
    code, said, rows = score(tmp_path, {"NLTK_DATA": str(data)})
    assert code == EXIT_OK, said
    assert [row["score"] for row in rows] == [1.0, 0.0, 0.0, 1.0, None, None]
    assert dict(rows[1]["components"]) == {
        "prompt_loose": 0.0,
        "instructions": 2.0,
        "instructions_strict": 0.0,
        "instructions_loose": 0.0,
    }
    loose = dict(rows[2]["components"])
    assert (loose["prompt_loose"], loose["instructions_strict"]) == (1.0, 1.0)
    assert "holds no instructions" in rows[4]["error"]
    assert "cannot be checked (KeyError: 'no:such')" in rows[5]["error"]
    assert rows[0]["oracle"] == "ifeval:lm_eval-0.4.13"


def test_data_that_the_library_would_fetch_is_asked_for(tmp_path: Path) -> None:
    code, said, _ = score(tmp_path, {"NLTK_DATA": str(tmp_path), "HOME": str(tmp_path)})
    assert code == EXIT_USER
    assert "needs nltk's data punkt_tab" in said
    assert "nltk.downloader punkt_tab" in said
