"""`geb why`: kinds of answers that changed, and what taught them, of a run written by hand."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flows.pipeline.config import RunConfig
from flows.report.files import render
from flows.report.summary import Summary, iteration_row
from flows.report.why import Why, explain
from stages.contract.errors import UserError
from stages.contract.manifest import Manifest
from stages.store.base import Artifact
from stages.tables.schemas import PAIRS, RESPONSES, write_table
from stages.train.reference import REFERENCE_LOGPROBS
from stages.training.batches import Plan
from tests.flows.evaluations import write_evaluation, write_scores
from tests.flows.loop import geb_ok, geb_refused
from tests.stage_calls import response

SCORES = {"Yes.": 1.0, "No.": 0.25, "Never.": 0.0}
SEED = 7
CONFIG = RunConfig(
    iterations=1,
    generate={"num_samples": 2},
    evaluation={"num_samples": 2},
    train={"global_batch_pairs": 4, "epochs": 2},
)
Answers = Mapping[str, Sequence[str]]
HELD_OUT = [f"held-{n}" for n in range(20)]
BASE: Answers = {name: ["No.", "No."] for name in HELD_OUT}
POLICY: Answers = (
    BASE | {name: ["Yes.", "Yes."] for name in HELD_OUT[:12]} | {HELD_OUT[-1]: ["Never.", "Never."]}
)
TRAINING: Answers = {f"train-{n}": ["Yes.", "No."] for n in range(5)} | {
    f"train-{n}": ["No.", "No."] for n in range(5, 8)
}


def samples(folder: Path, place: str, answers: Answers) -> dict[str, Artifact]:
    """Responses and scores of a sampling, by the names of their steps."""
    made = folder / place / "generate"
    made.mkdir(parents=True)
    own = {"response_token_ids": [2, 3], "response_logprobs": [-0.5, -1.0]}
    rows = [
        response(f"Question {prompt}?", index, text, prompt_id=prompt, **own)
        for prompt, given in answers.items()
        for index, text in enumerate(given)
    ]
    write_table(made / "responses.parquet", RESPONSES, rows)
    rewards = {prompt: [SCORES[each] for each in given] for prompt, given in answers.items()}
    none: dict[str, list[dict[str, float]]] = {name: [{}] * 2 for name in answers}
    return {
        f"{place}/generate/0": Artifact(made, cast(Manifest, None)),
        f"{place}/score/0": write_scores(folder / place / "score", none, rewards),
    }


def training(folder: Path) -> dict[str, Artifact]:
    """Pairs of the training samples, and the record of a training on them."""
    folder.mkdir(parents=True)
    pairs: list[dict[str, Any]] = []
    for prompt, given in TRAINING.items():
        row = {"prompt_id": prompt, "messages": [], "prompt_token_ids": [1]}
        for index, side in enumerate(("chosen", "rejected")):
            own = {"sample_index": index, "token_ids": [2], "logprobs": [-1.5]}
            own |= {
                "response": given[index],
                "finish_reason": "stop",
                "score": SCORES[given[index]],
            }
            row |= {f"{side}_{name}": value for name, value in own.items()}
        pairs.append(row | {"tie": given[0] == given[1]})
    write_table(folder / "pairs.parquet", PAIRS, pairs)
    logs = [
        {
            "pair_index": index,
            "prompt_id": row["prompt_id"],
            "chosen_logprobs": [-2.0, -0.25],
            "rejected_logprobs": [-1.0],
        }
        for index, row in enumerate(pairs)
    ]
    write_table(folder / "reference_logprobs.parquet", REFERENCE_LOGPROBS, logs)
    (folder / "summary.json").write_text('{"steps": 4}')
    (folder / "metrics.json").write_text('{"pairs": 8, "ties": 3}')
    made = Artifact(folder, cast(Manifest, SimpleNamespace(seed=SEED)))
    return {"iteration-1/pair": made, "iteration-1/train": made}


@pytest.fixture
def found(tmp_path: Path) -> Why:
    rewards = [
        {prompt: [SCORES[each] for each in given] for prompt, given in answers.items()}
        for answers in (POLICY, BASE)
    ]
    artifacts = {
        "iteration-1/evaluate": write_evaluation(tmp_path / "evaluation", *rewards),
        **samples(tmp_path, "base", BASE),
        **samples(tmp_path, "iteration-1/evaluate", POLICY),
        **samples(tmp_path, "iteration-1", TRAINING),
        **training(tmp_path / "training"),
    }
    summary = Summary("by-hand", CONFIG, "store", artifacts=artifacts)
    metrics = {"mean_reward": 0.0}
    summary.rows = [iteration_row(summary, t) | metrics for t in (0, 1)]
    return explain(summary)


def test_the_kind_that_explains_most_comes_first_with_its_pairs_and_steps(found: Why) -> None:
    kind = found.kinds[0]
    assert kind.name == "says “yes”"
    # From none to 12 of 20 answers; with it 1, without it 0.25 but for two answers of 56.
    assert kind.part == pytest.approx(0.6 * (1 - (54 * 0.25) / 56))
    [only] = kind.course
    assert (kind.before, only.share) == (0.0, 0.6)
    assert (only.sampled, only.of, only.won, only.lost) == (5, 16, 5, 0)
    # Ties are no lessons: all five preferences were seen once in each of two epochs.
    assert only.steps is not None
    assert only.steps[0] in (1, 2) and only.steps[1] in (3, 4)
    assert only.log_pi == -1.5
    assert "says “yes”" in found.sentence()


def test_a_kind_s_first_pair_is_the_one_that_training_saw_first(found: Why) -> None:
    lesson = found.kinds[0].first
    assert lesson is not None
    assert (lesson.chosen.text, lesson.rejected.text) == ("Yes.", "No.")
    assert (lesson.chosen.log_pi, lesson.log_pi_ref) == (-1.5, (-2.25, -1.0))
    index = list(TRAINING).index(lesson.chosen.prompt.removeprefix("Question ").removesuffix("?"))
    plan = Plan([cast(Any, None)] * 8, CONFIG.train, 4, 1, seed=SEED)
    assert lesson.steps == [step for step in range(4) if index in plan.places_of(step)]
    others = [step for each in range(5) for step in range(4) if each in plan.places_of(step)]
    assert lesson.steps[0] == min(others)
    page = render("why.html.jinja", why=found)
    assert f"seen in step {lesson.steps[0] + 1} of iteration 1" in page
    assert "http" not in page


def test_the_command_traces_a_run_and_writes_its_page(finished: Path) -> None:
    store = finished.parent / "store"
    shown = geb_ok("why", "small", "--store", store)
    assert f"page  {store}/runs/small/why.html" in shown.stdout
    assert (store / "runs/small/why.html").exists()
    geb_refused("why", "other", "--store", store)
    with pytest.raises(UserError, match="no evaluated iteration"):
        explain(Summary("empty", CONFIG, "store", rows=[{}]))
