"""A judge and a reward model, as a run serves them by real vLLM."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from flows.pipeline.loading import load_config
from stages.contract.errors import UserError
from stages.score.run import STAGE as SCORE
from stages.score.serving import find_address
from stages.tables.schemas import RESPONSES, SCORES, read_rows, write_table
from tests.fake_vllm import served_judge
from tests.flows.test_servers import QUICKSTART, run, score_step, scores
from tests.stage_calls import call_request, request_for, response, score_params
from tests.stages.score.responses import response_rows
from tests.tiny_models import SPECIAL, WORDS, make_tiny_llama, make_tiny_reward_model
from tests.vllm_session import PYTHON

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

VOCABULARY = [*WORDS, "Score:", "Verdict:", "A", "B", "7"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def policy(folder):
    """A model whose likeliest answer to anything is "Score: 7"."""
    path = make_tiny_llama(
        folder / "judge",
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
def config(folder, policy):
    overrides = ["max_null_share=1", "judge.max_tokens=16", "judge.engine_args.dtype=float32"]
    asked = [f"score.{each}" for each in (*overrides, "judge.engine_args.max_model_len=384")]
    served = [f"inputs.oracle_model={policy}", f"execution.interpreters.serve={PYTHON}"]
    return load_config(QUICKSTART, [*served_judge(folder), *asked, *served])


@pytest.fixture(scope="module")
def executor(config):
    with run(config) as executor:
        yield executor


def test_its_mark_is_the_score(config, executor, tmp_path):
    artifact = executor.execute(score_step(config, tmp_path), {}).artifact
    rows = list(read_rows(artifact.file("scores.parquet"), SCORES))
    assert [row["score"] for row in rows] == [7.0] * len(rows)
    assert all(dict(row["components"])["judge_completion_tokens"] > 0 for row in rows)


def test_a_wrong_key_is_named(executor, tmp_path, monkeypatch):
    [folder] = (executor.store.root / "work/serve").iterdir()
    address = find_address(executor.store, folder.name)
    monkeypatch.setenv("SERVER_KEY", "wrong")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    settings = {"url": f"{address.url}/v1/chat/completions", "key_env": "SERVER_KEY", "model": "m"}
    write_table(tmp_path / "responses.parquet", RESPONSES, [response("red?", 0, "cat")])
    inputs = {"responses": tmp_path / "responses.parquet"}
    request = request_for(score_params("judge", **settings), inputs, tmp_path / "store")
    with pytest.raises(UserError, match="refuses the key"):
        call_request(SCORE, request)


def test_a_served_reward_model_gives_the_scores_of_transformers(folder, tmp_path):
    model = make_tiny_reward_model(tmp_path / "reward", hidden_size=128)
    settings = ["oracle=reward_model", "reward_model.dtype=float32", "reward_model.engine=vllm"]
    # Several requests: what is answered out of order keeps its place.
    settings += ["reward_model.tokens_per_batch=64"]
    overrides = [
        *served_judge(tmp_path),
        *(f"score.{each}" for each in settings),
        f"inputs.oracle_model={model}",
        f"execution.interpreters.serve={PYTHON}",
    ]
    config = load_config(QUICKSTART, overrides)
    plain = load_config(QUICKSTART, [*overrides, "score.reward_model.engine=transformers"])
    read = []
    for each in (config, plain):
        with run(each) as executor:
            read.append(scores(executor, score_step(each, tmp_path, responses=response_rows())))
    assert len({round(each, 3) for each in read[1]}) > 5
    assert read[0] == pytest.approx(read[1], abs=1e-4)
