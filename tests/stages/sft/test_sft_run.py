import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from stages.contract.errors import UserError
from stages.contract.events import Log, Progress
from stages.harness.context import ModelSource
from stages.modeling.chat import render_prompt
from stages.modeling.load import load_causal_lm
from stages.modeling.tokenizers import load_tokenizer
from stages.sft.params import ArchitectureParams, SftParams
from stages.sft.run import STAGE
from tests.stage_calls import call_request, request_for, write_jsonl
from tests.tiny_models import make_tiny_llama

NUMBERS = ["one", "two", "three", "four", "five", "six"]
THINGS = ["cats", "dogs", "birds", "hens"]
ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"Count {number} {thing}."},
            {"role": "assistant", "content": f"Here are {number} {thing}."},
        ]
    }
    for number in NUMBERS
    for thing in THINGS
]
ARCHITECTURE = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 32}
OPTIMIZER = {"epochs": 2, "learning_rate": 1e-2, "global_batch_rows": 5}
NUM_STEPS = 2 * 5


def params(**changes):
    return SftParams(
        architecture=ArchitectureParams(**ARCHITECTURE),
        precision="float32",
        **{**OPTIMIZER, **changes},
    )


@pytest.fixture
def data(tmp_path):
    return write_jsonl(tmp_path / "data.jsonl", ROWS)


@pytest.fixture
def sft(data, tmp_path):
    """Runs the stage and returns the artifact's folder and the events."""

    def run(*, seed=0, data=data, policy=None, store="store", **changes):
        inputs = {"data": data} | ({"policy": policy} if policy else {})
        request = request_for(params(**changes), inputs, tmp_path / store, seed=seed)
        artifact, events = call_request(STAGE, request)
        return artifact.path, events

    return run


def weights(artifact):
    return load_file(artifact / "checkpoint" / "model.safetensors")


def assert_equal_weights(artifact, other):
    first, second = weights(artifact), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def losses(artifact):
    lines = (artifact / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_a_policy_from_scratch_learns_to_answer(sft):
    artifact, events = sft(epochs=40)
    source = ModelSource(str(artifact / "checkpoint"))
    tokenizer, model = load_tokenizer(source), load_causal_lm(source, dtype="float32")
    prompt = render_prompt(tokenizer, ROWS[7]["messages"][:-1], SftParams())
    sampled = model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)[0]
    assert sampled[-1] == tokenizer.eos_token_id
    answer = tokenizer.decode(sampled[len(prompt) :], skip_special_tokens=True)
    assert answer == "Here are two hens."
    progress = [event for event in events if isinstance(event, Progress)]
    assert (progress[-1].done, progress[-1].total) == (40 * 5, 40 * 5)
    assert losses(artifact)[-1] < 0.05


def test_the_seed_decides_the_weights(sft):
    first, _ = sft(seed=1)
    again, _ = sft(seed=1, store="another")
    other, _ = sft(seed=2)
    assert_equal_weights(first, again)
    names = weights(first)
    assert any(not torch.equal(names[name], weights(other)[name]) for name in names)


def test_micro_batches_change_nothing_but_rounding(sft):
    whole, _ = sft(gradient_checkpointing=False)
    parts, _ = sft(micro_batch_tokens=24, row_layout="padded", store="another")
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-3)


def test_learning_rate_rises_then_falls_to_nothing(sft):
    artifact, _ = sft(epochs=4, warmup_ratio=0.25)
    lines = (artifact / "metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line)["learning_rate"] for line in lines]
    assert rates[0] == 0
    assert rates[5] == max(rates) == 1e-2
    assert rates[12] == pytest.approx(1e-2 / 2 * (1 + math.cos(math.pi * 7 / 15)))
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert 0 < rates[-1] < 2e-4


def test_a_checkpoint_is_trained_further_and_keeps_its_tokenizer(sft, tmp_path):
    policy = make_tiny_llama(tmp_path / "policy")
    load_causal_lm(ModelSource(str(policy)), dtype="bfloat16").save_pretrained(policy)
    artifact, _ = sft(policy=policy)
    kept = load_tokenizer(ModelSource(str(artifact / "checkpoint")))
    assert kept.get_vocab() == load_tokenizer(ModelSource(str(policy))).get_vocab()
    before = load_file(policy / "model.safetensors")
    after = weights(artifact)
    assert before.keys() == after.keys()
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    assert losses(artifact)[-1] < losses(artifact)[0]


def test_a_checkpoint_without_a_chat_template_is_refused(sft, tmp_path):
    with pytest.raises(UserError, match="no chat template"):
        sft(policy=make_tiny_llama(tmp_path / "untemplated", chat_template=None))


def test_parquet_and_plain_columns_are_read_as_well(sft, tmp_path):
    expected, _ = sft()
    conversations = tmp_path / "data.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), conversations)
    plain = tmp_path / "plain.parquet"
    pq.write_table(
        pa.table(
            {
                "prompt": [row["messages"][0]["content"] for row in ROWS],
                "response": [row["messages"][1]["content"] for row in ROWS],
            }
        ),
        plain,
    )
    assert_equal_weights(sft(data=conversations)[0], expected)
    assert_equal_weights(sft(data=plain)[0], expected)


def test_a_length_above_the_policys_context_is_refused(sft, tmp_path):
    policy = make_tiny_llama(tmp_path / "policy")
    with pytest.raises(UserError, match=r"the context of .*policy is"):
        sft(policy=policy, max_length_tokens=100_000)


def test_too_long_conversations_are_counted_and_reported(sft, tmp_path):
    long = [{**ROWS[0]["messages"][0]}, {"role": "assistant", "content": "one " * 40}]
    _, events = sft(data=write_jsonl(tmp_path / "long.jsonl", [*ROWS, {"messages": long}]))
    warnings = [event.message for event in events if isinstance(event, Log)]
    assert any("1 of 25 conversations are longer than 32 tokens" in warning for warning in warnings)


USER = {"role": "user", "content": "Count one cats."}
ANSWER = {"role": "assistant", "content": "Here are one cats."}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "bad.jsonl has no conversations"),
        ([{"messages": [USER, ANSWER]}, {"messages": [USER]}], "line 2: .* does not end with an"),
        ([{"messages": [USER, {**ANSWER, "content": " "}]}], "line 1: .* does not end with an"),
        ([{"messages": [ANSWER]}], "line 1: .* has no user turn"),
        ([{"prompt": "Count one cats."}], "line 1: the row has neither messages"),
        ([{"prompt": "Count", "response": 3}], "line 1: column 'response' holds neither text"),
        ([{"messages": [USER, ANSWER], "tools": [{"name": "x"}]}], "the row holds tools"),
    ],
)
def test_bad_rows_are_refused_with_their_place(sft, tmp_path, rows, message):
    with pytest.raises(UserError, match=message) as caught:
        sft(data=write_jsonl(tmp_path / "bad.jsonl", rows))
    assert caught.value.remedy


def test_tokens_beyond_the_embeddings_are_refused(sft, tmp_path):
    policy = make_tiny_llama(tmp_path / "policy")
    tokenizer = load_tokenizer(ModelSource(str(policy)))
    tokenizer.add_tokens(["hens."])
    tokenizer.save_pretrained(policy)
    with pytest.raises(UserError, match="token 19 is not in the vocabulary of 19"):
        sft(policy=policy)
