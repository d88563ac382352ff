from __future__ import annotations

import json
import math
import re
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from stages.contract.digests import prompt_id, sha256_file
from stages.contract.errors import GebError, UserError
from stages.contract.events import Log, Progress
from stages.contract.params import Settings
from stages.contract.program import Stage
from stages.contract.request import Resources
from stages.contract.tables import RESPONSES, SCORES, read_rows, write_table
from stages.score.oracle import Verdict
from stages.score.params import ORACLES, OracleEntry, ScoreParams
from stages.score.run import STAGE
from tests.stage_calls import call_request, request_for, score_params, user_turn
from tests.tiny_models import (
    CHAT_TEMPLATE,
    WORDS,
    make_tiny_llama,
    make_tiny_reward_model,
)

# Float32 sums in another order.
ROUNDING = 1e-5


def response_rows(num_prompts=10, num_samples=2):
    for index in range(num_prompts):
        messages = user_turn(" ".join(WORDS[: 1 + index % len(WORDS)]))
        for sample in range(num_samples):
            yield {
                "prompt_id": prompt_id(messages),
                "sample_index": sample,
                "messages": messages,
                "reference_answer": str(index) if index % 2 else None,
                "prompt_token_ids": [1],
                "response_token_ids": [7, 2],
                "response_logprobs": [-1.0, -1.0],
                "response": " ".join(WORDS[(index + sample) % 5 :]),
                "finish_reason": "stop",
                "seed": 0,
            }


@pytest.fixture
def score(tmp_path):
    """Runs the stage and returns the rows, the metrics and the events."""

    def run(*, code=None, model=None, rows=None, resources=None, **params):
        responses = tmp_path / "responses.parquet"
        write_table(responses, RESPONSES, response_rows() if rows is None else rows)
        inputs = {"responses": responses}
        if code is not None:
            inputs["code"] = tmp_path / "oracle.py"
            inputs["code"].write_text(textwrap.dedent(code))
        if model is not None:
            inputs["model"] = model
        params = {"oracle": "python" if model is None else "reward_model", **params}
        store = tmp_path / f"store-{resources.processes if resources else 1}"
        request = request_for(score_params(**params), inputs, store, resources=resources)
        artifact, events = call_request(STAGE, request)
        scores = list(read_rows(artifact.path / "scores.parquet", SCORES))
        return scores, json.loads((artifact.path / "metrics.json").read_text()), events

    return run


LENGTHS = """
    def score(prompts, responses, references):
        return [len(response.split()) for response in responses]
"""


class TestPython:
    def test_rows_follow_the_responses(self, score, tmp_path):
        scores, _, _ = score(code=LENGTHS, rows_per_batch=3)
        rows = list(response_rows())
        identity = f"python:score@{sha256_file(tmp_path / 'oracle.py')[:16]}"
        assert [
            (each["prompt_id"], each["sample_index"], each["score"], each["oracle"])
            for each in scores
        ] == [
            (row["prompt_id"], row["sample_index"], len(row["response"].split()), identity)
            for row in rows
        ]

    def test_the_function_sees_messages_texts_and_references(self, score):
        scores, _, _ = score(
            code="""
            def mark(prompts, responses, references):
                for prompt, response in zip(prompts, responses):
                    assert prompt[0]["role"] == "user" and isinstance(response, str)
                return [0 if reference is None else int(reference) for reference in references]
            """,
            function="mark",
        )
        assert [each["score"] for each in scores[::2]] == [0, 1, 0, 3, 0, 5, 0, 7, 0, 9]

    def test_metrics_are_those_of_the_scores(self, score):
        scores, metrics, events = score(code=LENGTHS, rows_per_batch=3)
        values = [each["score"] for each in scores]
        assert metrics["mean"] == pytest.approx(statistics.fmean(values))
        assert metrics["std"] == pytest.approx(statistics.pstdev(values))
        assert (metrics["min"], metrics["max"]) == (min(values), max(values))
        assert (metrics["responses"], metrics["null_scores"]) == (20, 0)
        last = [each for each in events if isinstance(each, Progress)][-1]
        assert (last.done, last.total) == (20, 20)

    @pytest.mark.parametrize("value", ["math.nan", "math.inf", "-math.inf", "'good'", "[1.0]"])
    def test_a_value_that_is_no_score_is_named_with_its_place(self, score, value):
        code = f"""
        import math
        def score(prompts, responses, references):
            return [{value} if response.startswith("blue") else 1 for response in responses]
        """
        row = next(row for row in response_rows() if row["response"].startswith("blue"))
        with pytest.raises(UserError) as caught:
            score(code=code)
        assert f"prompt {row['prompt_id']}, sample {row['sample_index']}" in str(caught.value)
        shown = {"math.nan": "nan", "math.inf": "inf", "-math.inf": "-inf"}.get(value, value)
        assert f"returned score {shown} for" in str(caught.value)

    def test_numbers_of_other_libraries_and_truth_values_are_scores(self, score):
        scores, _, _ = score(
            code="""
            import numpy
            def score(prompts, responses, references):
                return numpy.array([response.startswith("blue") for response in responses])
            """
        )
        assert {each["score"] for each in scores} == {0.0, 1.0}

    def test_a_mapping_names_the_components_of_the_score(self, score):
        code = """
        def score(prompts, responses, references):
            return [{"score": 1, "warmth": len(response) / 100} for response in responses]
        """
        scores, _, _ = score(code=code)
        for each, row in zip(scores, response_rows(), strict=True):
            assert each["score"] == 1.0
            assert dict(each["components"]) == {"warmth": len(row["response"]) / 100}

    def test_a_mapping_needs_a_score(self, score):
        with pytest.raises(UserError, match="a mapping without 'score'"):
            score(code="def score(prompts, *rest): return [{'warmth': 1.0} for _ in prompts]")

    def test_a_component_must_be_a_number(self, score):
        code = "def score(prompts, *rest): return [{'score': 1, 'warmth': None} for _ in prompts]"
        with pytest.raises(UserError, match="returned warmth None for prompt"):
            score(code=code)

    def test_a_wrong_count_is_an_error(self, score):
        code = "def score(prompts, responses, references): return [1.0]"
        with pytest.raises(UserError, match="returned 1 scores for 20 responses"):
            score(code=code)

    def test_no_sequence_is_an_error(self, score):
        code = "def score(prompts, responses, references): return 1.0"
        with pytest.raises(UserError, match="returned float, not a sequence"):
            score(code=code)

    def test_what_the_function_raises_is_named_with_its_line(self, score):
        code = "def score(prompts, responses, references):\n    return responses[99]"
        with pytest.raises(UserError, match=r"IndexError: .*line 2 of oracle\.py"):
            score(code=code)

    def test_a_failing_network_may_be_retried(self, score):
        code = "def score(*columns): raise ConnectionError('reset')"
        with pytest.raises(
            GebError, match=r"oracle\.py:score raised ConnectionError: reset"
        ) as said:
            score(code=code)
        assert not isinstance(said.value, UserError)

    def test_a_file_that_the_function_may_not_read_is_not_blamed_on_the_store(self, score):
        code = "def score(*columns): raise PermissionError(13, 'denied', '/etc/shadow')"
        with pytest.raises(GebError, match=r"oracle\.py:score raised PermissionError.*/etc/shadow"):
            score(code=code)

    @pytest.mark.parametrize(
        "code",
        [
            "import sys\ndef score(*columns): sys.exit(0)",
            "import sys\nsys.exit(0)",
            "def score(prompts, *rest):\n    yield 1.0\n    raise SystemExit",
        ],
        ids=["in-the-function", "in-the-file", "in-a-generator"],
    )
    def test_code_that_ends_the_program_is_the_persons_mistake(self, score, code):
        with pytest.raises(UserError, match=r"oracle\.py.* SystemExit"):
            score(code=code)

    def test_a_number_beyond_all_floats_is_named_in_short(self, score):
        with pytest.raises(UserError, match="returned score 1000") as said:
            score(code="def score(prompts, *rest): return [10**400 for _ in prompts]")
        assert len(said.value.message) < 500

    def test_a_missing_function_is_named_with_those_there_are(self, score):
        with pytest.raises(UserError, match="no function 'absent'; it has: score"):
            score(code=LENGTHS.strip(), function="absent")

    def test_a_file_that_does_not_run_is_an_error(self, score):
        with pytest.raises(UserError, match=r"oracle\.py raised SyntaxError"):
            score(code="def score(")

    def test_the_request_must_bring_the_code(self, score):
        with pytest.raises(UserError, match="'code'"):
            score()


NULLS = """
    def score(prompts, responses, references):
        return [None if reference is None else 1.0 for reference in references]
"""


class TestNulls:
    def test_they_are_kept_with_a_reason_and_counted(self, score):
        scores, metrics, events = score(code=NULLS, max_null_share=0.5)
        assert [each["score"] for each in scores[:4]] == [None, None, 1.0, 1.0]
        assert [bool(each["error"]) for each in scores[:4]] == [True, True, False, False]
        assert (metrics["null_scores"], metrics["mean"]) == (10, 1.0)
        warnings = [each for each in events if isinstance(each, Log) and each.level == "warning"]
        assert "10 of 20 responses have no score" in warnings[0].message

    def test_too_many_stop_the_run(self, score):
        with pytest.raises(UserError, match=r"10 of 20 .* max_null_share allows 0\.49"):
            score(code=NULLS, max_null_share=0.49)

    def test_none_are_allowed_unless_said(self, score):
        with pytest.raises(UserError, match="max_null_share allows 0"):
            score(code=NULLS)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    return make_tiny_reward_model(tmp_path_factory.mktemp("reward") / "model")


def one_by_one(path, rows):
    """Scores by a plain forward pass of transformers for each conversation."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    scores = []
    for row in rows:
        messages = [*row["messages"], {"role": "assistant", "content": row["response"]}]
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        with torch.inference_mode():
            scores.append(model(torch.tensor([ids])).logits[0, 0].item())
    return scores


class TestRewardModel:
    @pytest.mark.parametrize("tokens_per_batch", [1, 64, 16384])
    def test_scores_are_those_of_one_by_one(self, score, reward_model, tokens_per_batch):
        scores, _, _ = score(model=reward_model, dtype="float32", tokens_per_batch=tokens_per_batch)
        expected = one_by_one(reward_model, response_rows())
        assert len({round(each, 3) for each in expected}) > 5
        assert [each["score"] for each in scores] == pytest.approx(expected, abs=ROUNDING)

    @pytest.mark.slow
    def test_two_processes_give_the_scores_of_one(self, score, reward_model):
        settings = {"model": reward_model, "dtype": "float32", "tokens_per_batch": 64}
        one, metrics, _ = score(**settings)
        two, same, _ = score(**settings, resources=Resources(processes=2))
        assert two == one
        assert same == metrics

    def test_a_model_without_padding_id_scores_the_same(self, score, tmp_path):
        # The conversation ends in the id that padding would take first.
        model = make_tiny_reward_model(
            tmp_path / "unpadded", pad_token_id=None, chat_template=CHAT_TEMPLATE + "<pad>"
        )
        scores, _, _ = score(model=model, dtype="float32")
        expected = one_by_one(model, response_rows())
        assert [each["score"] for each in scores] == pytest.approx(expected, abs=ROUNDING)

    def test_the_order_of_the_responses_does_not_matter(self, score, reward_model):
        forward, _, _ = score(model=reward_model, dtype="float32")
        rows = list(response_rows())
        backward, _, _ = score(model=reward_model, dtype="float32", rows=rows[::-1])
        assert [each["score"] for each in backward[::-1]] == pytest.approx(
            [each["score"] for each in forward], abs=ROUNDING
        )

    def test_bfloat16_is_near(self, score, reward_model):
        scores, _, _ = score(model=reward_model, dtype="bfloat16")
        expected = one_by_one(reward_model, response_rows())
        spread = statistics.pstdev(expected)
        for each, value in zip(scores, expected, strict=True):
            assert math.isclose(each["score"], value, abs_tol=spread / 2)

    def test_the_row_names_the_checkpoint(self, score, reward_model):
        scores, metrics, _ = score(model=reward_model)
        name, _, digest = metrics["oracle"].partition(":")
        assert name == "reward_model"
        assert len(digest) == 64
        assert {each["oracle"] for each in scores} == {metrics["oracle"]}

    def test_what_is_too_long_has_no_score(self, score, reward_model):
        scores, metrics, _ = score(model=reward_model, max_length_tokens=18, max_null_share=0.9)
        nulls = [each for each in scores if each["score"] is None]
        assert 0 < len(nulls) < len(scores)
        assert metrics["null_scores"] == len(nulls)
        assert "the reward model reads 18" in nulls[0]["error"]

    def test_a_doubled_bos_is_refused(self, score, tmp_path):
        model = make_tiny_reward_model(
            tmp_path / "double", chat_template="{{ bos_token }}" + CHAT_TEMPLATE
        )
        with pytest.raises(UserError, match="doubled BOS"):
            score(model=model)

    def test_several_outputs_are_refused(self, score, tmp_path):
        model = make_tiny_reward_model(tmp_path / "ten", num_labels=10)
        with pytest.raises(UserError, match="has 10 outputs, not one"):
            score(model=model)

    def test_a_causal_lm_is_refused(self, score, tmp_path):
        with pytest.raises(UserError, match=r"score\.weight"):
            score(model=make_tiny_llama(tmp_path / "policy"))

    def test_a_model_without_chat_template_is_refused(self, score, tmp_path):
        model = make_tiny_reward_model(tmp_path / "bare", chat_template=None)
        with pytest.raises(UserError, match="no chat template"):
            score(model=model)


def test_parameters_and_registry_name_the_same_oracles():
    assert list(ORACLES) == list(ScoreParams.model_fields["oracle"].annotation.__args__)
    sections = {
        name
        for name, field in ScoreParams.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings)
    }
    assert {each.section for each in ORACLES.values()} == sections


class ToySettings(Settings):
    bonus: float = 0.0


class ToyParams(ScoreParams):
    oracle: Literal["toy", "math_verify"] = "toy"
    toy: ToySettings = ToySettings()


class ToyOracle:
    identity = "toy:1"

    def __init__(self, bonus):
        self.bonus = bonus

    def score(self, rows):
        for place, row in enumerate(rows):
            yield place, Verdict(len(row["response"]) + self.bonus)


def load(ctx):
    """Makes the oracle, as an oracle's module does."""
    return ToyOracle(ctx.params.toy.bonus)


def test_an_oracle_is_a_section_a_row_and_a_module(monkeypatch, tmp_path):
    """The places that CONTRIBUTING names: nothing else has to know of it."""
    monkeypatch.setitem(ORACLES, "toy", OracleEntry(__name__, "toy"))
    write_table(tmp_path / "responses.parquet", RESPONSES, response_rows())
    inputs = {"responses": tmp_path / "responses.parquet"}

    def request(**settings):
        return request_for(ToyParams(**settings), inputs, tmp_path / "store")

    stage = Stage(ToyParams, STAGE.run)
    artifact, _ = call_request(stage, request(toy={"bonus": 0.5}))
    scores = list(read_rows(artifact.path / "scores.parquet", SCORES))
    assert [each["score"] for each in scores] == [
        len(row["response"]) + 0.5 for row in response_rows()
    ]
    assert {each["oracle"] for each in scores} == {"toy:1"}
    assert request(toy={"bonus": 0.5}).key != request().key == request(judge={"max_tokens": 9}).key
    other = request(oracle="math_verify").key
    assert request(oracle="math_verify", toy={"bonus": 0.5}).key == other


def test_an_oracle_in_python_starts_without_torch():
    code = (
        "import stages.score.run, stages.score.python_function, sys; print('torch' in sys.modules)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == "False"


def test_the_documentation_tells_of_each_oracle():
    table = (Path(__file__).parents[3] / "docs" / "oracles.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \|$", table.partition("\n## ")[0], re.MULTILINE)
    assert rows == list(ScoreParams.model_fields["oracle"].annotation.__args__)
