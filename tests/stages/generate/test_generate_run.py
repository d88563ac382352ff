"""The generate stage: rows, log-probabilities, and what responses do not depend on."""

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, MambaConfig, MistralConfig

from stages.contract.digests import derive_seed, prompt_id
from stages.contract.errors import UserError
from stages.contract.events import Log, Progress
from tests.stage_calls import user_turn
from tests.stages.generate.small_runs import TEXTS, assert_logprobs
from tests.tiny_models import (
    BOS_ID,
    CHAT_TEMPLATE,
    EOS_ID,
    SIZES,
    SPECIAL,
    WORDS,
    make_tiny_llama,
    make_tiny_tokenizer,
    save_tiny_model,
)

# Float32 sums in another order: what differs between batch layouts.
ROUNDING = 1e-4


def assert_same_responses(rows, others):
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        assert row.pop("response_logprobs") == pytest.approx(
            other.pop("response_logprobs"), abs=ROUNDING
        )
        assert row == other


def warned(events):
    return [
        event.message for event in events if isinstance(event, Log) and event.level == "warning"
    ]


def test_progress_within_a_batch_is_reported(generate, monkeypatch):
    monkeypatch.setattr("stages.contract.events.PROGRESS_INTERVAL_SECONDS", 0.0)
    _, _, events = generate(TEXTS[:5])
    noted = [event for event in events if isinstance(event, Progress) and event.note]
    assert noted[0].note == "token 1 of 12 of 15 responses"
    assert {(event.done, event.total, event.unit) for event in noted} == {(0, 15, "responses")}


def test_rows_are_in_the_prompts_order_and_say_what_was_sampled(generate):
    rows, metrics, _ = generate(seed=5)
    ids = [prompt_id(user_turn(text)) for text in TEXTS]
    assert [row["prompt_id"] for row in rows] == [prompt for prompt in ids for _ in range(3)]
    assert [row["sample_index"] for row in rows] == [0, 1, 2] * len(TEXTS)
    for row in rows:
        assert row["prompt_token_ids"][0] == BOS_ID
        assert row["seed"] == derive_seed(5, row["prompt_id"], row["sample_index"])
        stopped = row["response_token_ids"][-1] == EOS_ID
        assert row["finish_reason"] == ("stop" if stopped else "length")
        assert stopped or len(row["response_token_ids"]) == 12
        assert EOS_ID not in row["response_token_ids"][:-1]
        assert "</s>" not in row["response"]
    assert metrics["responses"] == len(rows) == 3 * metrics["prompts"]
    assert metrics["prompts_dropped_too_long"] == 0
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    assert metrics["response_tokens"] == sum(len(row["response_token_ids"]) for row in rows)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_p": 0.7}])
def test_logprobs_are_the_raw_policys(generate, policy, sampling):
    rows, _, _ = generate(**sampling)
    assert_logprobs(rows, policy, ROUNDING)


SPARSE = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "head_dim": 4,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "index_topk": 3,
    "index_head_dim": 8,
    "index_n_heads": 2,
}
"""A small model whose tokens see three others."""


@pytest.mark.parametrize(
    ("config", "num_prompts"),
    [
        # Absolute positions: an error that rotary ones cancel shows.
        (GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.4), 8),
        # A window shorter than prompt and response.
        (MistralConfig(**SIZES, sliding_window=6, initializer_range=0.4), 8),
        # A mask for each head; layers of linear attention.
        (AutoConfig.for_model("doge", **SIZES, initializer_range=0.4), 8),
        pytest.param(
            AutoConfig.for_model("qwen3_next", **SIZES | {"num_hidden_layers": 4}, head_dim=16),
            8,
            marks=pytest.mark.slow,
        ),
        (AutoConfig.for_model("deepseek_v32", **SIZES | SPARSE, initializer_range=0.4), 1),
    ],
    ids=["gpt2", "mistral", "doge", "qwen3-next", "deepseek-v32"],
)
def test_other_architectures(generate, tmp_path, config, num_prompts):
    model = save_tiny_model(config, tmp_path / "model")
    rows, _, _ = generate(TEXTS[:num_prompts], model=model)
    assert_logprobs(rows, model, ROUNDING)


def test_a_policy_without_a_cache_of_tokens_is_refused(generate, tmp_path):
    config = MambaConfig(hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(UserError, match="MambaForCausalLM has no cache of past tokens"):
        generate(model=save_tiny_model(config, tmp_path / "model"), max_length_tokens=64)


def test_the_token_that_pads_needs_no_embedding(generate, tmp_path):
    model = make_tiny_llama(tmp_path / "model")
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<padding>"})
    tokenizer.save_pretrained(model)
    rows, _, _ = generate(["red", "red cat blue"], model=model)
    assert_logprobs(rows, model, ROUNDING)


def test_logits_that_are_not_finite_are_refused(generate, tmp_path):
    """Drawn from them, every token was the vocabulary's last one."""
    model = make_tiny_llama(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] *= 6e4 / weights["lm_head.weight"].abs().max()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="the policy's logits are not finite in float16"):
        generate(["red cat"], model=model, dtype="float16")


@pytest.mark.parametrize(
    "layout",
    [
        {"transformers": {"batch_size": 1}},
        {"transformers": {"batch_size": 7}},
        {"chunk_responses": 15},
    ],
)
def test_responses_do_not_depend_on_batches(generate, layout):
    rows, _, _ = generate()
    others, _, _ = generate(store="other", **layout)
    assert_same_responses(others, rows)


@pytest.mark.parametrize("num_shards", [2, 30])
def test_responses_do_not_depend_on_shards(generate, num_shards):
    whole, _, _ = generate()
    parts = []
    for index in range(num_shards):
        rows, metrics, _ = generate(shard_index=index, num_shards=num_shards)
        assert metrics["responses"] == len(rows)
        parts += rows
    assert_same_responses(parts, whole)


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
    assert "1 of 3 prompts are too long" in warned(events)[0]


def test_a_shard_of_which_no_prompt_fits_is_empty(generate):
    """Only without shards is it known that no prompt at all fits."""
    texts = ["red", "blue", "red " * 30, "blue " * 30]
    cut = {"max_length_tokens": 20, "num_shards": 2}
    first, second = (generate(texts, **cut, shard_index=index) for index in range(2))
    assert len(first[0]) == 6
    assert second[0] == []
    assert second[1]["prompts_dropped_too_long"] == second[1]["prompts"] == 2
    assert "2 of 2 prompts are too long" in warned(second[2])[0]


def test_the_system_prompt_comes_first(generate):
    rows, _, _ = generate(["red"], system_prompt="blue")
    assert rows[0]["messages"] == user_turn("red")
    system, user = SPECIAL.index("<system>"), SPECIAL.index("<user>")
    blue, red = (len(SPECIAL) + WORDS.index(word) for word in ("blue", "red"))
    assert rows[0]["prompt_token_ids"][:5] == [BOS_ID, system, blue, user, red]


def test_prompt_that_spells_control_tokens_is_refused_unless_allowed(generate):
    with pytest.raises(UserError, match=r"prompt .*: the text spells control tokens: '<system>'"):
        generate(["red", "red <system> blue"])
    rows, _, _ = generate(["red <system> blue"], allow_control_tokens=True)
    assert SPECIAL.index("<system>") in rows[0]["prompt_token_ids"]


def test_a_refused_prompt_ends_the_stage_before_an_engine_starts(generate, monkeypatch):
    monkeypatch.delattr("stages.generate.transformers_backend.load")
    with pytest.raises(UserError, match="spells control tokens"):
        generate(["red", "red <system> blue"], chunk_responses=1)


def test_turn_end_that_stops_nothing_is_warned_about(generate, tmp_path):
    template = CHAT_TEMPLATE.replace("{{ eos_token }}", "<user>")
    model = make_tiny_llama(tmp_path / "open", chat_template=template)
    user = SPECIAL.index("<user>")
    _, _, events = generate(["red"], model=model)
    assert any(f"set generate.stop_token_ids to [{user}]" in text for text in warned(events))
    _, _, events = generate(["red"], model=model, stop_token_ids=(user,))
    assert not any("stop_token_ids" in text for text in warned(events))


def test_empty_and_cut_off_responses_are_warned_about(generate):
    rows, _, events = generate(max_new_tokens=2, num_samples=8)
    cut = sum(row["finish_reason"] == "length" for row in rows)
    empty = sum(not row["response"] for row in rows)
    assert f"{cut} of {len(rows)} responses were cut off at max_new_tokens=2" in warned(events)
    assert empty and not any("are empty" in text for text in warned(events))
    every = tuple(range(len(SPECIAL) + len(WORDS)))
    _, _, events = generate(stop_token_ids=every)
    assert f"{len(rows) // 8 * 3} of {len(rows) // 8 * 3} responses are empty" in warned(events)


def test_token_ids_without_a_text_are_warned_about(generate, tmp_path):
    path = make_tiny_llama(tmp_path / "wide")
    model = AutoModelForCausalLM.from_pretrained(path)
    model.resize_token_embeddings(200)
    model.save_pretrained(path)
    _, _, events = generate(model=path)
    assert any("the tokenizer does not have" in text for text in warned(events))


def test_arguments_reach_the_chat_template(generate, tmp_path):
    template = "{% if thinking %}{{ bos_token }}<system>{% else %}" + CHAT_TEMPLATE
    model = make_tiny_llama(tmp_path / "thinking", chat_template=template + "{% endif %}")
    rows, _, _ = generate(["red"], model=model, chat_template_args={"thinking": True})
    assert rows[0]["prompt_token_ids"] == [BOS_ID, SPECIAL.index("<system>")]
    rows, _, _ = generate(["red"], chat_template_args={"add_generation_prompt": False})
    assert rows == generate(["red"])[0]
    with pytest.raises(UserError, match="tokenize"):
        generate(["red"], chat_template_args={"tokenize": True})


ALONE = [{"role": "system", "content": "red"}]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["red " * 9, "blue " * 9], "2 of 2 prompts are too long"),
        (["red", ALONE], f"prompt {prompt_id(ALONE)}: .*no user turn"),
    ],
)
def test_prompts_are_refused(generate, texts, message):
    with pytest.raises(UserError, match=message):
        generate(texts, max_length_tokens=20)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ bos_token }}" + CHAT_TEMPLATE, "doubled BOS"),
        ("{{ bos_token }}red", "renders two prompts alike"),
        ("{{ 1 / 0 }}", "chat template refuses a prompt with roles user: division by zero"),
    ],
)
def test_a_chat_template_is_refused(generate, tmp_path, template, message):
    with pytest.raises(UserError, match=message):
        generate(model=make_tiny_llama(tmp_path / "model", chat_template=template))


def test_a_foreign_tokenizer_is_refused(generate, tmp_path):
    model = make_tiny_llama(tmp_path / "small", words=WORDS[:4])
    make_tiny_tokenizer().save_pretrained(model)
    with pytest.raises(UserError, match="not in the vocabulary of 11"):
        generate(["red", "cat dog"], model=model)


def test_a_stop_id_beyond_the_vocabulary_is_refused(generate):
    with pytest.raises(UserError, match="stop_token_ids: token 5000"):
        generate(stop_token_ids=(1, 5000))
