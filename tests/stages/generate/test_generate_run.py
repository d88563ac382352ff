from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, GPT2Config, MistralConfig

from stages.contract.context import ModelSource
from stages.contract.digests import derive_seed, prompt_id
from stages.contract.errors import StoppedError, UserError
from stages.contract.events import Log, Progress, parse_event
from stages.contract.program import execute
from stages.contract.tables import RESPONSES, read_rows
from stages.generate.params import BACKENDS, GenerateParams
from stages.generate.run import STAGE
from stages.modeling.load import load_causal_lm
from tests.stage_calls import EventLog, call_request, request_for, user_turn, write_prompts
from tests.tiny_adapters import save_tiny_adapters
from tests.tiny_models import (
    BOS_ID,
    CHAT_TEMPLATE,
    EOS_ID,
    SPECIAL,
    WORDS,
    make_tiny_llama,
    make_tiny_tokenizer,
)

TEXTS = [" ".join(WORDS[: 1 + index % 11]) + f" {WORDS[index // 11]}" for index in range(23)]
PARAMS = {
    "num_samples": 3,
    "max_new_tokens": 12,
    "dtype": "float32",
    "transformers": {"batch_size": 16},
}
# Float32 sums in another order: what differs between batch layouts.
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture
def generate(policy, tmp_path):
    """Runs the stage on texts and returns the rows, the metrics and the events."""

    def run(texts=TEXTS, *, model=None, adapter=None, seed=0, **params):
        prompts = write_prompts(tmp_path / "prompts.parquet", texts)
        inputs = {"policy": model or policy, "prompts": prompts}
        if adapter is not None:
            inputs["adapter"] = adapter
        request = request_for(
            GenerateParams(**{**PARAMS, **params}), inputs, tmp_path / "store", seed=seed
        )
        artifact, events = call_request(STAGE, request)
        rows = list(read_rows(artifact.path / "responses.parquet", RESPONSES))
        return rows, json.loads((artifact.path / "metrics.json").read_text()), events

    return run


def assert_same_responses(rows, others):
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        assert row.pop("response_logprobs") == pytest.approx(
            other.pop("response_logprobs"), abs=ROUNDING
        )
        assert row == other


def test_rows_come_grouped_by_prompt_in_the_prompts_order(generate):
    rows, metrics, _ = generate()
    ids = [prompt_id(user_turn(text)) for text in TEXTS]
    assert [row["prompt_id"] for row in rows] == [each for each in ids for _ in range(3)]
    assert [row["sample_index"] for row in rows] == [0, 1, 2] * len(TEXTS)
    assert metrics["responses"] == len(rows) == 3 * metrics["prompts"]
    assert metrics["prompts_dropped_too_long"] == 0


def test_a_row_says_what_was_sampled(generate):
    rows, metrics, _ = generate(seed=5)
    for row in rows:
        assert row["prompt_token_ids"][0] == BOS_ID
        assert row["seed"] == derive_seed(5, row["prompt_id"], row["sample_index"])
        stopped = row["response_token_ids"][-1] == EOS_ID
        assert row["finish_reason"] == ("stop" if stopped else "length")
        assert stopped or len(row["response_token_ids"]) == 12
        assert EOS_ID not in row["response_token_ids"][:-1]
        assert "</s>" not in row["response"]
    assert metrics["finish_reasons"].keys() == {"stop", "length"}
    assert metrics["response_tokens"] == sum(len(row["response_token_ids"]) for row in rows)


def assert_raw_logprobs(rows, policy, adapter=None):
    """Checks log-probabilities against a forward pass of each row alone, without padding."""
    model = load_causal_lm(ModelSource(str(policy)), dtype="float32")
    model = model if adapter is None else PeftModel.from_pretrained(model, str(adapter)).eval()
    for row in rows:
        prompt, response = row["prompt_token_ids"], row["response_token_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
        assert row["response_logprobs"] == pytest.approx(expected.tolist(), abs=ROUNDING)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_p": 0.7}])
def test_logprobs_are_the_raw_policys(generate, policy, sampling):
    rows, _, _ = generate(**sampling)
    assert_raw_logprobs(rows, policy)


@pytest.mark.parametrize(
    "config",
    [
        # Absolute positions: an error that rotary ones cancel shows.
        GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.4),
        # A window shorter than prompt and response.
        MistralConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            sliding_window=6,
            initializer_range=0.4,
        ),
    ],
    ids=["gpt2", "mistral"],
)
def test_other_architectures(generate, tmp_path, config):
    tokenizer = make_tiny_tokenizer()
    config.vocab_size = len(tokenizer)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = BOS_ID, EOS_ID, 0
    model = tmp_path / "model"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    rows, _, _ = generate(model=model)
    assert_raw_logprobs(rows, model)


def test_temperature_zero_agrees_with_transformers_generate(generate, policy):
    rows, _, _ = generate(temperature=0.0, num_samples=1)
    model = load_causal_lm(ModelSource(str(policy)), dtype="float32")
    for row in rows:
        prompt = row["prompt_token_ids"]
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert row["response_token_ids"] == output[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "layout",
    [
        {"transformers": {"batch_size": 1}},
        {"transformers": {"batch_size": 7}},
        {"chunk_prompts": 5},
    ],
)
def test_responses_do_not_depend_on_batches(generate, policy, tmp_path, layout):
    rows, _, _ = generate()
    prompts = tmp_path / "prompts.parquet"
    request = request_for(
        GenerateParams(**{**PARAMS, **layout}),
        {"policy": policy, "prompts": prompts},
        tmp_path / "other",
    )
    artifact, _ = call_request(STAGE, request)
    assert_same_responses(list(read_rows(artifact.path / "responses.parquet", RESPONSES)), rows)


@pytest.mark.parametrize("num_shards", [2, 7, 30])
def test_responses_do_not_depend_on_shards(generate, num_shards):
    whole, _, _ = generate()
    parts = []
    for index in range(num_shards):
        rows, metrics, _ = generate(shard_index=index, num_shards=num_shards)
        assert metrics["responses"] == len(rows)
        parts += rows
    assert_same_responses(parts, whole)


def test_another_seed_gives_other_responses(generate):
    first, _, _ = generate(seed=0)
    second, _, _ = generate(seed=1)
    assert [row["response"] for row in first] != [row["response"] for row in second]


def test_samples_of_a_prompt_differ(generate):
    rows, _, _ = generate(["red cat"], num_samples=8)
    assert len({tuple(row["response_token_ids"]) for row in rows}) > 1


def test_a_stop_id_ends_the_response_and_is_kept(generate):
    word = len(SPECIAL) + WORDS.index("cat")
    rows, _, _ = generate(stop_token_ids=(word,), num_samples=8)
    stopped = [row for row in rows if word in row["response_token_ids"]]
    assert stopped
    for row in stopped:
        assert row["response_token_ids"].index(word) == len(row["response_token_ids"]) - 1
        assert row["finish_reason"] == "stop"
        assert "cat" not in row["response"]


def test_prompts_that_are_too_long_are_dropped_and_counted(generate):
    # Three tokens of template: the context of 20 leaves 8 for a prompt with 12 new tokens.
    texts = ["red " * 5, "blue " * 6, "green " * 2]
    rows, metrics, events = generate(texts, max_length_tokens=20)
    kept = [prompt_id(user_turn(texts[index])) for index in (0, 2)]
    assert [row["prompt_id"] for row in rows[::3]] == kept
    assert metrics["prompts_dropped_too_long"] == 1
    warnings = [each for each in events if isinstance(each, Log) and each.level == "warning"]
    assert "1 of 3 prompts are too long" in warnings[0].message


def test_progress_reaches_the_total(generate):
    _, _, events = generate()
    last = [each for each in events if isinstance(each, Progress)][-1]
    assert (last.done, last.total, last.unit) == (69, 69, "responses")


def test_no_prompt_that_fits_is_an_error(generate):
    with pytest.raises(UserError, match="2 of 2 prompts are too long"):
        generate(["red " * 9, "blue " * 9], max_length_tokens=20)


def test_a_prompt_without_user_turn_is_named(generate):
    messages = [{"role": "system", "content": "red"}]
    with pytest.raises(UserError, match=f"prompt {prompt_id(messages)}: .*no user turn"):
        generate(["red", messages])


def test_an_empty_table_is_an_error(generate):
    with pytest.raises(UserError, match="empty"):
        generate([])


def test_a_policy_without_chat_template_is_refused(generate, tmp_path):
    model = make_tiny_llama(tmp_path / "bare", chat_template=None)
    with pytest.raises(UserError, match="no chat template"):
        generate(model=model)


def test_a_policy_without_tokenizer_is_refused(generate, tmp_path):
    model = make_tiny_llama(tmp_path / "bare")
    (model / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="no tokenizer"):
        generate(model=model)


def test_a_tokenizer_of_another_model_is_refused(generate, tmp_path):
    model = make_tiny_llama(tmp_path / "small", words=WORDS[:4])
    make_tiny_tokenizer().save_pretrained(model)
    with pytest.raises(UserError, match="not in the policy's vocabulary of 11"):
        generate(["red", "cat dog"], model=model)


def test_the_system_prompt_comes_first(generate):
    rows, _, _ = generate(["red"], system_prompt="blue")
    assert rows[0]["messages"] == user_turn("red")
    system, user = SPECIAL.index("<system>"), SPECIAL.index("<user>")
    blue, red = (len(SPECIAL) + WORDS.index(word) for word in ("blue", "red"))
    assert rows[0]["prompt_token_ids"][:5] == [BOS_ID, system, blue, user, red]


class TestAdapter:
    def test_the_policy_wears_it(self, generate, policy, tmp_path):
        save_tiny_adapters(tmp_path / "adapter", policy)
        rows, _, _ = generate(adapter=tmp_path / "adapter")
        assert_raw_logprobs(rows, policy, tmp_path / "adapter")
        with pytest.raises(AssertionError):
            assert_raw_logprobs(rows, policy)

    def test_what_is_none_is_refused(self, generate, policy):
        with pytest.raises(UserError, match="no LoRA adapter"):
            generate(adapter=policy)


class TestChatTemplateArgs:
    def test_they_reach_the_template(self, generate, tmp_path):
        template = "{% if thinking %}{{ bos_token }}<system>{% else %}" + CHAT_TEMPLATE
        model = make_tiny_llama(tmp_path / "thinking", chat_template=template + "{% endif %}")
        rows, _, _ = generate(["red"], model=model, chat_template_args={"thinking": True})
        assert rows[0]["prompt_token_ids"] == [BOS_ID, SPECIAL.index("<system>")]
        rows, _, _ = generate(["red"], model=model)
        assert SPECIAL.index("<user>") in rows[0]["prompt_token_ids"]

    def test_options_of_the_rendering_are_refused(self, generate):
        with pytest.raises(UserError, match="'add_generation_prompt', which says how to render"):
            generate(chat_template_args={"add_generation_prompt": False})


def test_a_doubled_bos_is_refused(generate, tmp_path):
    model = make_tiny_llama(tmp_path / "double", chat_template="{{ bos_token }}" + CHAT_TEMPLATE)
    with pytest.raises(UserError, match="doubled BOS"):
        generate(model=model)


def test_a_shard_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="shard_index 2 does not exist"):
        GenerateParams(shard_index=2, num_shards=2)


def test_parameters_and_registry_name_the_same_backends():
    assert list(BACKENDS) == list(GenerateParams.model_fields["backend"].annotation.__args__)
    assert all(callable(importlib.import_module(each).load) for each in BACKENDS.values())


def test_what_only_changes_speed_is_not_in_the_key():
    fast = GenerateParams(transformers={"batch_size": 1}, chunk_prompts=1)
    assert fast.result_fields() == GenerateParams().result_fields()
    assert GenerateParams(top_p=0.9).result_fields() != GenerateParams().result_fields()


def test_a_retry_after_some_chunks_gives_the_same_bytes(policy, tmp_path):
    """Also where prompts too long are dropped: batches never reach from one chunk into the next."""
    texts = ["red cat " * 15 if index % 3 == 2 else TEXTS[index % 23] for index in range(24)]
    prompts = write_prompts(tmp_path / "prompts.parquet", texts)
    settings = {"max_length_tokens": 40, "transformers": {"batch_size": 5}, "chunk_prompts": 4}
    params = GenerateParams(**{**PARAMS, **settings})
    inputs = {"policy": policy, "prompts": prompts}
    whole, _ = call_request(STAGE, request_for(params, inputs, tmp_path / "whole"))
    assert json.loads((whole.path / "metrics.json").read_text())["prompts_dropped_too_long"] == 8

    request = request_for(params, inputs, tmp_path / "killed")
    log = StoppingLog("wrote the responses to prompts 4 to 7")
    with pytest.raises(StoppedError):
        execute(STAGE, request, log)
    artifact, _ = call_request(STAGE, request)
    assert json.loads((artifact.path / "timings.json").read_text())["chunks_reused"] == 2
    assert artifact.manifest.digest() == whole.manifest.digest()


class StoppingLog(EventLog):
    """An emitter that stops the stage when it says something."""

    def __init__(self, message: str) -> None:
        super().__init__()
        self._message = message

    def info(self, message: str) -> None:
        super().info(message)
        if message == self._message:
            raise StoppedError(message)


@pytest.mark.slow
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_shard_goes_on_where_it_was(policy, tmp_path, death):
    prompts = write_prompts(tmp_path / "prompts.parquet", TEXTS)
    # Long responses, so that the signal comes while most chunks are still to be done.
    params = GenerateParams(**{**PARAMS, "max_new_tokens": 60}, chunk_prompts=2)
    inputs = {"policy": policy, "prompts": prompts}
    request = request_for(params, inputs, tmp_path / "killed")
    path = tmp_path / "request.json"
    request.write(path)
    with subprocess.Popen(
        [sys.executable, "-m", "stages.generate", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as stage:
        assert stage.stdout is not None
        for line in stage.stdout:
            event = parse_event(line)
            if isinstance(event, Log) and event.message.startswith("wrote"):
                stage.send_signal(death)
    assert stage.returncode == {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143}[death]

    artifact, _ = call_request(STAGE, request)
    timings = json.loads((artifact.path / "timings.json").read_text())
    assert timings["chunks_reused"] >= 1
    assert timings["chunks_sampled"] >= 1
    whole, _ = call_request(STAGE, request_for(params, inputs, tmp_path / "whole"))
    for name in ("responses.parquet", "metrics.json"):
        assert (artifact.path / name).read_bytes() == (whole.path / name).read_bytes()
    assert artifact.manifest.digest() == whole.manifest.digest()
