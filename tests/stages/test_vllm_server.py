"""The judge, against a real OpenAI-compatible server."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.contract.errors import UserError
from stages.score.run import STAGE as SCORE
from stages.tables.schemas import RESPONSES, SCORES, read_rows, write_table
from tests.stage_calls import call_request, request_for, response, score_params
from tests.tiny_models import SPECIAL, WORDS, make_tiny_llama
from tests.vllm_server import KEY, MODEL, vllm_server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

VOCABULARY = [*WORDS, "Score:", "Verdict:", "A", "B", "7"]
TEXTS = ["red cat", "blue dog runs", "green bird", "one two three four"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def policy(folder):
    """A model whose likeliest answer to anything is "Score: 7"."""
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
            return list(read_rows(artifact.path / "scores.parquet", SCORES))

        return run

    def test_its_mark_is_the_score(self, judge):
        rows = judge()
        assert [row["score"] for row in rows] == [7.0] * len(rows)
        assert all(dict(row["components"])["judge_completion_tokens"] > 0 for row in rows)

    def test_a_wrong_key_is_named(self, judge, monkeypatch):
        monkeypatch.setenv("SERVER_KEY", "wrong")
        with pytest.raises(UserError, match="refuses the key"):
            judge()
