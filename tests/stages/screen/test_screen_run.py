import pytest

from stages.contract.digests import prompt_id
from stages.contract.errors import UserError
from stages.screen.params import ScreenParams
from stages.screen.run import STAGE
from stages.tables.schemas import PROMPTS, read_rows
from tests.stage_calls import call, metrics, response, user_turn, write_prompts, write_scored


@pytest.fixture
def screen(store, tmp_path):
    """Screens prompts whose samples have the scores given; in two shards."""

    def run(scores, **params):
        prompts = write_prompts(tmp_path / "prompts.parquet", list(scores))
        shards = [list(scores)[:2], list(scores)[2:]]
        tables = [
            write_scored(
                tmp_path,
                [
                    (response(text, sample, "word"), score)
                    for text in shard
                    for sample, score in enumerate(scores[text] or [])
                ],
                name=f"{number}-",
            )
            for number, shard in enumerate(shards)
        ]
        inputs = {
            "prompts": [prompts],
            "responses": [table[0] for table in tables],
            "scores": [table[1] for table in tables],
        }
        artifact = call(STAGE, ScreenParams(num_samples=2, **params), inputs, store)
        kept = [row["prompt_id"] for row in read_rows(artifact.path / "prompts.parquet", PROMPTS)]
        return kept, metrics(artifact)

    return run


def ids(*texts):
    return [prompt_id(user_turn(text)) for text in texts]


def test_what_a_sample_solves_is_dropped_and_the_order_stays(screen):
    kept, report = screen(
        {"never": [0.0, 0.0], "once": [0.0, 1.0], "twice": [1.0, 1.0], "also never": [0.0, 0.0]}
    )
    assert kept == ids("never", "also never")
    assert report == {"prompts": 4, "solved": 2, "kept": 2}


def test_what_is_not_known_to_be_solved_stays(screen):
    kept, _ = screen({"unscored": [None, 0.0], "no response": None, "solved": [None, 1.0]})
    assert kept == ids("unscored", "no response")


def test_how_good_is_solved_can_be_set(screen):
    kept, _ = screen({"a": [0.4, 0.2], "b": [0.6, 0.0], "c": [0.5, 0.0]}, solved_score=0.5)
    assert kept == ids("a")


def test_nothing_left_is_an_error(screen):
    with pytest.raises(UserError, match="solves all 3 prompts"):
        screen({"a": [1.0], "b": [1.0], "c": [1.0]})
