"""Clients of an OpenAI-compatible server, against a real one: sampling, and the judge."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.contract.context import ModelSource
from stages.contract.errors import UserError
from stages.contract.tables import RESPONSES, SCORES, read_rows, write_table
from stages.generate.params import GenerateParams
from stages.generate.run import STAGE as GENERATE
from stages.modeling.load import load_causal_lm
from stages.score.run import STAGE as SCORE
from tests.stage_calls import call_request, request_for, response, score_params, write_prompts
from tests.tiny_models import SPECIAL, WORDS, make_tiny_llama
from tests.vllm_server import KEY, MODEL, vllm_server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

VOCABULARY = [*WORDS, "Score:", "Verdict:", "A", "B", "7"]
TEXTS = ["red cat", "blue dog runs", "green bird", "one two three four"]
# Two engines, two orders of summation.
ROUNDING = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def policy(folder):
    """A model whose likeliest answer to anything is "Score: 7", and that samples variously."""
    path = make_tiny_llama(
        folder / "model",
        words=VOCABULARY,
        hidden_size=128,
        initializer_range=0.2,
        max_position_embeddings=512,
    )
    tokens = [*SPECIAL, *VOCABULARY]
    following = {"<assistant>": "Score:", "Score:": "7", "7": "</s>"}
    weights = load_file(path / "model.safetensors")
    # What a token says of the next one outweighs what attention and MLPs add.
    states = torch.linalg.qr(torch.randn(128, 128, generator=torch.Generator().manual_seed(0)))[0]
    weights["model.embed_tokens.weight"] = states[: len(tokens)].contiguous()
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] *= 0.01
    weights["lm_head.weight"] *= 0.3
    for token, successor in following.items():
        row = weights["lm_head.weight"][tokens.index(successor)]
        row += 0.45 * states[tokens.index(token)]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def server(folder, policy):
    with vllm_server(policy, folder / "server.log") as url:
        yield url


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("SERVER_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


class TestSampling:
    @pytest.fixture
    def sample(self, server, policy, tmp_path):
        prompts = write_prompts(tmp_path / "prompts.parquet", TEXTS)

        def run(*, server_settings=None, **params):
            settings = {"url": server, "model": MODEL, "key_env": "SERVER_KEY"}
            values = {
                "backend": "openai",
                "max_new_tokens": 12,
                "num_samples": 3,
                "dtype": "float32",
                "openai": settings | (server_settings or {}),
            }
            request = request_for(
                GenerateParams(**(values | params)),
                {"policy": policy, "prompts": prompts},
                tmp_path / "store",
                seed=5,
            )
            artifact, _ = call_request(GENERATE, request)
            return list(read_rows(artifact.path / "responses.parquet", RESPONSES))

        return run

    def test_token_ids_and_logprobs_are_exact(self, sample, policy):
        model = load_causal_lm(ModelSource(str(policy)), dtype="float32")
        rows = sample()
        assert len(rows) == 3 * len(TEXTS)
        assert len({tuple(row["response_token_ids"]) for row in rows}) > len(TEXTS)
        for row in rows:
            prompt, ids = row["prompt_token_ids"], row["response_token_ids"]
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
            assert row["response_logprobs"] == pytest.approx(expected.tolist(), abs=ROUNDING)

    def test_both_endpoints_draw_the_same(self, sample):
        chat = sample(server_settings={"endpoint": "chat"})
        assert [row["response_token_ids"] for row in chat] == [
            row["response_token_ids"] for row in sample()
        ]

    def test_temperature_zero_agrees_with_the_transformers_backend(self, sample):
        greedy = {"temperature": 0.0, "num_samples": 1}
        ours = sample(backend="transformers", **greedy)
        for row, other in zip(sample(**greedy), ours, strict=True):
            assert row["response_token_ids"] == other["response_token_ids"]
            assert row["finish_reason"] == other["finish_reason"]

    def test_text_alone_is_read_by_the_tokenizer(self, sample):
        rows = sample(server_settings={"endpoint": "chat", "without_token_ids": "tokenize"})
        assert all(math.isnan(each) for row in rows for each in row["response_logprobs"])

    def test_a_wrong_key_and_a_wrong_model_are_named(self, sample, monkeypatch):
        with pytest.raises(UserError, match="does not exist"):
            sample(server_settings={"model": "other"})
        monkeypatch.setenv("SERVER_KEY", "wrong")
        with pytest.raises(UserError, match="refuses the key"):
            sample()

    def test_too_little_context_is_named(self, sample):
        with pytest.raises(UserError, match="status 400"):
            sample(max_new_tokens=400)


class TestJudge:
    @pytest.fixture
    def judge(self, server, tmp_path):
        responses = tmp_path / "responses.parquet"
        rows = [
            response(text, sample, " ".join(WORDS[: 3 + sample]))
            for text in TEXTS
            for sample in range(2)
        ]
        write_table(responses, RESPONSES, rows)

        def run(**params):
            settings = score_params(
                "judge",
                url=f"{server}/chat/completions",
                key_env="SERVER_KEY",
                model=MODEL,
                max_tokens=16,
                max_null_share=1,
                **params,
            )
            artifact, _ = call_request(
                SCORE, request_for(settings, {"responses": responses}, tmp_path / "store")
            )
            costs = json.loads((artifact.path / "costs.json").read_text())
            return list(read_rows(artifact.path / "scores.parquet", SCORES)), costs

        return run

    def test_its_mark_is_the_score(self, judge):
        rows, _ = judge()
        assert [row["score"] for row in rows] == [7.0] * len(rows)

    def test_an_answer_of_another_form_is_no_verdict(self, judge):
        rows, _ = judge(mode="pairwise")
        for row in rows:
            assert row["score"] is None
            assert "last line is 'Score: 7', not 'Verdict: A'" in row["error"]

    @pytest.mark.parametrize("mode", ["scored", "pairwise"])
    def test_tokens_count_and_cost(self, judge, mode):
        rows, costs = judge(mode=mode, prompt_price=2.0, completion_price=10.0)
        assert len(rows) == 2 * len(TEXTS)
        written = sum(dict(row["components"])["judge_completion_tokens"] for row in rows)
        assert costs["judge_completion_tokens"] == written > 0
        read = costs["judge_prompt_tokens"]
        assert costs["cost"] == pytest.approx((2 * read + 10 * written) / 1e6)

    def test_a_wrong_key_is_named(self, judge, monkeypatch):
        monkeypatch.setenv("SERVER_KEY", "wrong")
        with pytest.raises(UserError, match="refuses the key"):
            judge()
