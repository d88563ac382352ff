import json
import math
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stages.contract.errors import UserError
from stages.evaluate.params import EvaluateParams
from stages.evaluate.run import STAGE
from stages.evaluate.summary import DistinctCounter
from tests.stage_calls import EventLog, call, metrics, response, write_scored
from tests.tiny_models import make_tiny_llama, response_logprobs

Tables = tuple[Path, Path]
Row = tuple[dict[str, object], float | None]


def answers(question, *scored, **changes):
    return [
        (response(question, sample, text, **changes), score)
        for sample, (text, score) in enumerate(scored)
    ]


POLICY = [
    *answers("a", ("red one", 1.0), ("red one", 0.0)),
    *answers("b", ("blue", 0.5), ("", 0.5), finish_reason="length"),
    *answers("c", ("two cat", 0.25), ("dog runs fast", 0.5)),
]
BASE = [
    *answers("a", ("red", 0.25), ("blue", 0.5)),
    *answers("b", ("red", 0.75), ("red", 0.25)),
    *answers("c", ("red", 1.0), ("red", 1.0)),
]


def evaluate(store, policy, base, *, reference=None, events=None, **params):
    default = {} if reference else {"log_pi_ref": "off"}
    settings = EvaluateParams.model_validate(default | params)
    inputs = {
        "responses": [pair[0] for pair in policy],
        "scores": [pair[1] for pair in policy],
        "base_responses": [pair[0] for pair in base],
        "base_scores": [pair[1] for pair in base],
        **({"reference": [reference]} if reference else {}),
    }
    return call(STAGE, settings, inputs, store, events=events)


@pytest.fixture
def tables(tmp_path):
    return write_scored(tmp_path, POLICY, "policy-"), write_scored(tmp_path, BASE, "base-")


def evaluate_rows(store, folder, policy, base):
    tables = write_scored(folder, policy, "policy-"), write_scored(folder, base, "base-")
    return evaluate(store, [tables[0]], [tables[1]])


def test_metrics_by_hand(store, tables):
    figures = metrics(evaluate(store, [tables[0]], [tables[1]]))
    # Sums of rewards: a 1.0 to 0.75 (won), b 1.0 to 1.0 (tied), c 0.75 to 2.0 (lost).
    assert figures["win_rate"] == pytest.approx(1 / 3)
    assert (figures["tied_prompts"], figures["uncompared_prompts"]) == (1, 0)
    assert figures["mean_reward"] == pytest.approx(2.75 / 6)
    assert figures["base_mean_reward"] == pytest.approx(3.75 / 6)
    # Means of the prompts: 0.5, 0.5, 0.375.
    assert figures["mean_reward_se"] == pytest.approx(math.sqrt(0.125**2 * 2 / 9 * 3 / 2 / 3))
    assert figures["distinct_1"] == pytest.approx(8 / 10)
    assert figures["distinct_2"] == pytest.approx(4 / 5)
    assert figures["distinct_4"] is None
    assert figures["base_distinct_1"] == pytest.approx(2 / 6)
    assert figures["mean_response_tokens"] == pytest.approx(10 / 6)
    assert figures["truncated_share"] == pytest.approx(2 / 6)
    assert figures["mean_log_pi"] == pytest.approx(-5 / 6)
    assert figures["mean_log_pi_ref"] is None


def test_a_figure_that_is_the_same_for_every_prompt_has_no_interval(store, tmp_path):
    policy = [*answers("a", ("red", 1.0)), *answers("b", ("blue", 1.0))]
    base = [*answers("a", ("one", 0.0)), *answers("b", ("two cat", 1.0))]
    artifact = evaluate_rows(store, tmp_path, policy, base)
    assert metrics(artifact)["tied_prompts"] == 1
    rows = pq.read_table(artifact.file("figures.parquet")).to_pylist()
    rewards = {row["model"]: row for row in rows if row["figure"] == "mean_reward"}
    assert (rewards["policy"]["value"], rewards["policy"]["low"]) == (1.0, None)
    assert (rewards["base"]["low"], rewards["base"]["high"]) == (0.0, 1.0)


def test_the_same_responses_tie_whatever_their_rewards_last_bits(store, tmp_path):
    policy = answers("a", ("red", 0.1 + 0.2), ("blue", 0.0))
    base = answers("a", ("blue", 0.0), ("red", 0.3))
    figures = metrics(evaluate_rows(store, tmp_path, policy, base))
    assert (figures["win_rate"], figures["tied_prompts"]) == (0.0, 1)


def test_repetition_and_refusals_of_both_models(store, tmp_path):
    loop = "go round and round and round and round"
    policy = answers("a", (loop, 1.0), ("I’m sorry, no.", 0.0), ("He said I cannot", 0.0))
    base = answers("a", (f"{loop} and", 1.0), ("  As an AI I can't", 0.0), ("I CAN'T", 0.0))
    figures = metrics(evaluate_rows(store, tmp_path, policy, base))
    # Loop: "go round and round", then "round and round and" and "and round and round" in turn:
    # 3 different ones of 5; the longer one 3 of 6. Three words have no 4-gram.
    assert figures["repetition"] == pytest.approx((2 / 5 + 0) / 2)
    assert figures["base_repetition"] == pytest.approx((3 / 6 + 0) / 2)
    assert figures["refusal_share"] == pytest.approx(1 / 3)
    assert figures["base_refusal_share"] == pytest.approx(2 / 3)


def test_neither_shards_nor_row_groups_change_anything(store, tmp_path):
    draw = random.Random(0)

    def model(name):
        rows = [
            row
            for n in range(900)
            for row in answers(
                f"q{n}", *[(f"{draw.choice('xyz')} {n}", draw.random()) for _ in range(3)]
            )
        ]
        whole = write_scored(tmp_path, rows, f"{name}-")
        halves = [
            write_scored(tmp_path, rows[:300], f"{name}-1-"),
            write_scored(tmp_path, rows[300:], f"{name}-2-"),
        ]
        for path in halves[1]:
            pq.write_table(pq.read_table(path), path, row_group_size=97)
        return [whole], halves

    (policy, policy_halves), (base, base_halves) = model("policy"), model("base")
    one = evaluate(store, policy, base)
    other = evaluate(store, policy_halves, base_halves)
    assert metrics(one) == metrics(other)
    assert one.file("samples.jsonl").read_text() == other.file("samples.jsonl").read_text()
    drawn, again = (pq.read_table(artifact.file("prompts.parquet")) for artifact in (one, other))
    assert drawn.equals(again)


def test_unscored_responses_leave_their_prompt_out_of_rewards(store, tmp_path, tables):
    unscored = answers("b", ("blue", None), ("red", 9.0))
    rows = [*POLICY[:2], *unscored, *POLICY[4:], *answers("only the policy's", ("red", 0.0))]
    events = EventLog()
    policy = write_scored(tmp_path, rows, "nulls-")
    figures = metrics(evaluate(store, [policy], [tables[1]], events=events))
    assert (figures["compared_prompts"], figures["uncompared_prompts"]) == (2, 2)
    assert figures["mean_reward"] == pytest.approx((1.0 + 0.0 + 0.25 + 0.5 + 0.0) / 5)
    assert any("2 prompts are not in the win rate" in str(event) for event in events.events)


def test_components_of_the_scores_are_averaged(store, tmp_path, tables):
    parts = [{"style": 1.0}, None, {"style": 0.0, "slots": 3.0}, {"style": 0.5}, {}, None]
    policy = write_scored(tmp_path, POLICY, "parts-", parts)
    artifact = evaluate(store, [policy], [tables[1]])
    figures = pq.read_table(artifact.file("figures.parquet")).to_pylist()
    values = {
        (row["model"], row["figure"]): row["value"]
        for row in figures
        if row["figure"].startswith("components.")
    }
    assert values == {("policy", "components.slots"): 3.0, ("policy", "components.style"): 0.5}


def test_samples_show_the_same_prompts_of_both_models(store, tables, monkeypatch):
    monkeypatch.setattr("stages.evaluate.run._SAMPLE_PROMPTS", 2)
    monkeypatch.setattr("stages.evaluate.run._SAMPLES_PER_PROMPT", 1)
    artifact = evaluate(store, [tables[0]], [tables[1]])
    rows = [json.loads(line) for line in (artifact.path / "samples.jsonl").read_text().splitlines()]
    ids = sorted({row["prompt_id"] for row, _ in POLICY})
    assert [row["prompt_id"] for row in rows] == ids[:2]
    for row in rows:
        for side, source in (("policy", POLICY), ("base", BASE)):
            first, score = next(
                sample for sample in source if sample[0]["prompt_id"] == row["prompt_id"]
            )
            assert row["messages"] == first["messages"]
            assert row[side] == [
                {
                    "sample_index": 0,
                    "response": first["response"],
                    "finish_reason": first["finish_reason"],
                    "score": score,
                    "log_pi_ref": None,
                }
            ]


def test_bad_inputs_are_refused(store, tmp_path, tables):
    policy, base = tables
    empty = write_scored(tmp_path, [], "empty-")
    more = write_scored(tmp_path, answers("a", ("x", 1.0), ("x", 1.0), ("x", 1.0)), "more-")
    other = write_scored(tmp_path, answers("z", ("x", 1.0), ("x", 1.0)), "other-")
    cases = [
        ([empty], [base], "no scored prompt in common"),
        ([policy], [more], "2 samples of the policy and 3 of the base model"),
        ([policy], [other], "no scored prompt in common"),
        ([(other[0], more[1])], [base], "does not hold the scores of"),
    ]
    for mine, others, message in cases:
        with pytest.raises(UserError) as caught:
            evaluate(store, mine, others)
        assert message in caught.value.message
        assert caught.value.remedy
    with pytest.raises(UserError, match="input 'reference' wants one model"):
        evaluate(store, [policy], [base], log_pi_ref="policy")


@pytest.fixture
def reference(tmp_path):
    return make_tiny_llama(tmp_path / "reference")


@pytest.mark.parametrize("batch_tokens", [1, 9, 10_000])
def test_log_pi_ref_equals_the_response_alone(store, tables, reference, batch_tokens, monkeypatch):
    monkeypatch.setattr("stages.evaluate.reference.BATCH_TOKENS", batch_tokens)
    artifact = evaluate(store, [tables[0]], [tables[1]], reference=reference)
    model = AutoModelForCausalLM.from_pretrained(reference)
    expected = [
        response_logprobs(model, row["prompt_token_ids"], row["response_token_ids"]).sum().item()
        for row, _ in [*POLICY, *BASE]
    ]
    samples = map(json.loads, artifact.file("samples.jsonl").read_text().splitlines())
    rows = {row["prompt_id"]: row for row in samples}
    for side, source, start in (("policy", POLICY, 0), ("base", BASE, 6)):
        for place, (row, _) in enumerate(source, start):
            sample = rows[row["prompt_id"]][side][row["sample_index"]]
            assert sample["log_pi_ref"] == pytest.approx(expected[place], abs=1e-5)
    figures = metrics(artifact)
    assert figures["mean_log_pi_ref"] == pytest.approx(sum(expected[:6]) / 6, abs=1e-5)
    assert figures["base_mean_log_pi_ref"] == pytest.approx(sum(expected[6:]) / 6, abs=1e-5)


@pytest.mark.parametrize("dropped", [0, 2])
def test_a_policy_of_another_tokenizer_has_no_log_pi_ref(
    store, tmp_path, tables, reference, dropped
):
    # Its context may have had no room for the first prompt.
    rows = [(row | {"prompt_token_ids": [2, 6]}, score) for row, score in POLICY[dropped:]]
    foreign = write_scored(tmp_path, rows, "foreign-")
    events = EventLog()
    artifact = evaluate(store, [foreign], [tables[1]], reference=reference, events=events)
    figures = metrics(artifact)
    assert figures["mean_log_pi_ref"] is None
    assert figures["base_mean_log_pi_ref"] < 0
    assert figures["uncompared_prompts"] == dropped // 2
    rows = pq.read_table(artifact.file("figures.parquet")).to_pylist()
    assert "kl_to_base" not in {row["figure"] for row in rows}
    assert any("log π_ref of the policy is left out" in str(event) for event in events.events)


def test_the_base_is_skipped_and_an_unfit_reference_refused(store, tmp_path, tables, reference):
    policy, base = tables
    figures = metrics(evaluate(store, [policy], [base], reference=reference, log_pi_ref="policy"))
    assert figures["mean_log_pi_ref"] < 0
    assert figures["base_mean_log_pi_ref"] is None
    row, score = POLICY[0]
    row = row | {"response_token_ids": [10_000], "response_logprobs": [-1.0]}
    strange = write_scored(tmp_path, [(row, score)], "s-")
    with pytest.raises(UserError, match="hold token 10000, the reference has"):
        evaluate(store, [strange], [base], reference=reference)
    weights = load_file(reference / "model.safetensors")
    weights["lm_head.weight"] *= 6e4 / weights["lm_head.weight"].abs().max()
    save_file(weights, reference / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="are not numbers in float16"):
        evaluate(store, [policy], [base], reference=reference, dtype="float16")


texts = st.lists(st.lists(st.sampled_from("abcd"), max_size=8).map(" ".join), max_size=20)


def by_definition(corpus, n):
    grams = [
        tuple(words[start : start + n])
        for words in (text.split() for text in corpus)
        for start in range(len(words) - n + 1)
    ]
    return len(set(grams)) / len(grams) if grams else None


@given(corpus=texts, cut=st.integers(0, 20))
def test_agrees_with_the_definition_however_the_corpus_is_cut(corpus, cut):
    counter = DistinctCounter()
    counter.add(corpus[:cut])
    counter.add(corpus[cut:])
    assert counter.per_ngram() == [by_definition(corpus, n) for n in range(1, 5)]
