"""The `openai` backend against a server that is scripted to answer, and to fail, as servers do."""

from __future__ import annotations

import json
import math
import threading
import time

import pytest

from stages.contract.errors import UserError
from stages.contract.tables import RESPONSES, read_rows
from stages.generate.params import GenerateParams
from stages.generate.run import STAGE
from stages.remote.client import RemoteError
from tests.stage_calls import call_request, request_for, write_prompts
from tests.tiny_models import EOS_ID, SPECIAL, WORDS, make_tiny_llama

TEXTS = ["red cat", "blue dog", "green bird runs"]
CAT, DOG = (len(SPECIAL) + WORDS.index(word) for word in ("cat", "dog"))


def completion(ids=(CAT, EOS_ID), logprobs=(-0.5, -0.25), reason="stop", text="cat", **choice):
    values = {
        "index": 0,
        "text": text,
        "finish_reason": reason,
        "token_ids": list(ids),
        "logprobs": {"token_logprobs": list(logprobs)},
    }
    return 200, {"id": "1", "choices": [values | choice]}


def chat(text="cat dog", **answer):
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return 200, {"id": "1", "choices": [choice], **answer}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture
def generate(policy, tmp_path):
    def run(server, texts=TEXTS, *, server_settings=None, seed=3, **params):
        settings = {
            "url": f"{server.origin if server else 'http://127.0.0.1:9'}/v1/",
            "model": "some-policy",
            "wait_seconds": 0.0,
            "timeout_seconds": 60.0,
            **(server_settings or {}),
        }
        request = request_for(
            GenerateParams(
                backend="openai", max_new_tokens=8, top_p=0.9, openai=settings, **params
            ),
            {"policy": policy, "prompts": write_prompts(tmp_path / "prompts.parquet", texts)},
            tmp_path / "store",
            seed=seed,
        )
        artifact, _ = call_request(STAGE, request)
        return list(read_rows(artifact.path / "responses.parquet", RESPONSES)), artifact

    return run


class TestAnswers:
    def test_ids_and_logprobs_are_the_servers(self, serve, generate):
        server = serve(lambda number, request: completion())
        rows, artifact = generate(server)
        assert len(rows) == 6
        for row in rows:
            assert row["response_token_ids"] == [CAT, EOS_ID]
            assert row["response_logprobs"] == [-0.5, -0.25]
            assert (row["response"], row["finish_reason"]) == ("cat", "stop")
        assert artifact.manifest.notes["server_model"] == "some-policy"
        assert artifact.manifest.notes["token_ids"] == "of the server"
        assert artifact.manifest.notes["responses_without_logprobs"] == 0

    def test_the_server_is_told_how_to_sample(self, serve, generate):
        server = serve(lambda number, request: completion())
        rows, _ = generate(server, stop_token_ids=(DOG,))
        assert set(server.paths) == {"/v1/completions"}
        asked = {(tuple(each["prompt"]), each["seed"]): each for each in server.requests}
        assert asked.keys() == {(tuple(row["prompt_token_ids"]), row["seed"]) for row in rows}
        for each in asked.values():
            assert (each["model"], each["temperature"], each["top_p"]) == ("some-policy", 1.0, 0.9)
            assert each["max_tokens"] == 8
            assert each["stop_token_ids"] == [EOS_ID, DOG]
            assert (each["top_k"], each["repetition_penalty"]) == (0, 1.0)
            assert each["return_token_ids"] is True

    def test_chat_sends_the_messages_and_checks_how_they_are_read(self, serve, generate):
        ids = {"token_ids": [DOG], "logprobs": {"content": [{"token": "dog", "logprob": -1.5}]}}

        def behave(number, request):
            status, answer = chat()
            answer["choices"][0] |= ids
            [system, user] = request["messages"]
            assert system == {"role": "system", "content": "green"}
            words = [SPECIAL.index(f"<{each['role']}>") for each in (system, user)]
            read = [1, words[0], 9, words[1]]
            read += [len(SPECIAL) + WORDS.index(word) for word in user["content"].split()]
            return status, {**answer, "prompt_token_ids": [*read, SPECIAL.index("<assistant>")]}

        server = serve(behave)
        rows, _ = generate(server, server_settings={"endpoint": "chat"}, system_prompt="green")
        assert set(server.paths) == {"/v1/chat/completions"}
        assert {(*row["response_token_ids"], *row["response_logprobs"]) for row in rows} == {
            (DOG, -1.5)
        }

    def test_a_prompt_that_the_server_reads_otherwise_is_refused(self, serve, generate):
        server = serve(lambda number, request: completion(prompt_token_ids=[1, 2]))
        with pytest.raises(UserError, match=r"reads a prompt as 2 tokens that are not the"):
            generate(server)

    def test_no_more_requests_at_once_than_allowed(self, serve, generate):
        lock, running, most = threading.Lock(), [0], [0]
        two = threading.Barrier(2)

        def behave(number, request):
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            two.wait(60)
            with lock:
                running[0] -= 1
            return completion()

        generate(serve(behave), server_settings={"concurrency": 2})
        assert most[0] == 2

    @pytest.mark.parametrize(
        ("answer", "what"),
        [
            (completion(reason="content_filter"), "'content_filter'"),
            ((200, {"choices": []}), "choices"),
            ((200, "<html>"), "Invalid JSON"),
        ],
    )
    def test_what_is_no_response_is_named(self, serve, generate, answer, what):
        with pytest.raises(UserError, match=what):
            generate(serve(lambda number, request: answer))


class TestTextAlone:
    TEXT = staticmethod(lambda number, request: chat())

    def test_it_is_refused_unless_said_otherwise(self, serve, generate):
        with pytest.raises(UserError, match="without token ids") as caught:
            generate(serve(self.TEXT), server_settings={"endpoint": "chat"})
        assert "without_token_ids" in caught.value.remedy

    def test_its_ids_are_the_tokenizers_and_its_logprobs_unknown(self, serve, generate):
        server = serve(self.TEXT)
        settings = {"endpoint": "chat", "without_token_ids": "tokenize"}
        rows, artifact = generate(server, server_settings=settings)
        for row in rows:
            assert row["response_token_ids"] == [CAT, DOG, EOS_ID]
            assert len(row["response_logprobs"]) == 3
            assert all(map(math.isnan, row["response_logprobs"]))
        notes = artifact.manifest.notes
        assert "tokenizer" in notes["token_ids"]
        assert notes["responses_without_logprobs"] == len(rows)
        # A server of OpenAI's own refuses fields that it does not know.
        known = {"model", "messages", "max_tokens", "temperature", "top_p", "seed", "logprobs"}
        assert {name for each in server.requests for name in each} == known

    def test_what_the_server_cannot_be_told_is_refused(self):
        server = {"url": "http://x", "model": "m", "without_token_ids": "tokenize"}
        with pytest.raises(ValueError, match="stop_token_ids cannot be told"):
            GenerateParams(backend="openai", openai=server, stop_token_ids=(5,))


class TestFailures:
    def test_a_wrong_key_is_named_by_its_variable(self, serve, generate, monkeypatch):
        monkeypatch.setenv("SOME_KEY", "open sesame")
        server = serve(lambda number, request: (401, {"error": "Unauthorized"}))
        with pytest.raises(UserError, match="refuses the key") as caught:
            generate(server, server_settings={"key_env": "SOME_KEY"})
        assert "SOME_KEY" in caught.value.remedy
        assert "sesame" not in str(caught.value)
        assert server.headers_seen[0]["Authorization"] == "Bearer open sesame"

    def test_a_missing_key_is_named_before_anything_is_sent(self, generate, monkeypatch):
        monkeypatch.delenv("SOME_KEY", raising=False)
        with pytest.raises(UserError, match=r"generate\.openai\.key_env is SOME_KEY"):
            generate(None, server_settings={"key_env": "SOME_KEY"})

    def test_the_key_is_in_neither_request_nor_artifact(self, serve, generate, monkeypatch):
        monkeypatch.setenv("SOME_KEY", "open sesame")
        server = serve(lambda number, request: completion())
        _, artifact = generate(server, server_settings={"key_env": "SOME_KEY"})
        for path in artifact.path.glob("*.json"):
            assert "sesame" not in path.read_text()

    def test_a_wrong_model_is_named(self, serve, generate):
        error = {"error": {"message": "The model `some-policy` does not exist.", "code": 404}}
        with pytest.raises(UserError, match=r"404: .*does not exist") as caught:
            generate(serve(lambda number, request: (404, error)))
        assert "generate.openai.model" in caught.value.remedy

    def test_a_server_that_is_busy_says_when_to_come_back(self, serve, generate):
        times = []

        def behave(number, request):
            times.append(time.monotonic())
            return (429, {}, {"Retry-After": "1"}) if number == 1 else completion()

        rows, _ = generate(serve(behave), ["red"], num_samples=1)
        assert len(rows) == 1
        assert times[1] - times[0] >= 1

    @pytest.mark.parametrize("status", [429, 500, 503])
    def test_passing_failures_are_retried(self, serve, generate, status):
        server = serve(lambda number, request: (status, {}) if number <= 3 else completion())
        rows, _ = generate(server, server_settings={"concurrency": 1})
        assert len(rows) == 6
        assert len(server.requests) == 6 + 3

    def test_lasting_failures_fail_the_stage_for_a_later_attempt(self, serve, generate):
        server = serve(lambda number, request: (500, {"error": "CUDA out of memory"}))
        with pytest.raises(RemoteError, match=r"status 500: .*CUDA out of memory"):
            generate(server, server_settings={"attempts": 2})

    def test_a_server_that_hangs_is_given_up(self, serve, generate):
        server = serve(lambda number, request: server.released.wait(60) and completion())
        settings = {"timeout_seconds": 0.2, "attempts": 2}
        with pytest.raises(RemoteError, match="ReadTimeout"):
            generate(server, ["red"], num_samples=1, server_settings=settings)
        assert len(server.requests) == 2

    def test_what_was_sampled_before_a_failure_is_kept(self, serve, generate):
        down = threading.Event()
        server = serve(
            lambda number, request: (500, {}) if number > 4 and not down.is_set() else completion()
        )
        settings = {"attempts": 1, "concurrency": 1}
        layout = {"chunk_prompts": 1, "num_samples": 2}
        with pytest.raises(RemoteError):
            generate(server, server_settings=settings, **layout)
        first = len(server.requests)
        down.set()
        _, artifact = generate(server, server_settings=settings, **layout)
        timings = json.loads((artifact.path / "timings.json").read_text())
        assert timings["chunks_reused"] == 2
        assert len(server.requests) - first == 2


def test_address_and_model_are_needed():
    with pytest.raises(ValueError, match=r"openai\.url and openai\.model"):
        GenerateParams(backend="openai", openai={"model": "m"})


def test_address_and_patience_are_no_part_of_the_key():
    def fields(**server):
        named = {"url": "http://a", "model": "m", **server}
        return GenerateParams(backend="openai", openai=named).result_fields()

    assert fields(url="http://b", key_env="K", concurrency=1, attempts=9) == fields()
    assert fields(model="n") != fields()
