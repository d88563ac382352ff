"""Scores by a function in Python."""

import copy
import statistics

import pytest

from stages.contract.digests import sha256_file
from stages.contract.errors import GebError, UserError
from stages.contract.events import Log, Progress
from stages.score.python_function import PythonOracle
from tests.stage_calls import response
from tests.stages.score.responses import response_rows

LENGTHS = """
    def score(prompts, responses, references):
        return [len(response.split()) for response in responses]
"""


class TestPython:
    def test_rows_follow_the_responses(self, score, tmp_path, monkeypatch):
        monkeypatch.setattr("stages.score.run.BATCH_ROWS", 3)
        scores, _, _ = score(code=LENGTHS)
        rows = list(response_rows())
        identity = f"python:score@{sha256_file(tmp_path / 'oracle.py')[:16]}"
        assert [
            (row["prompt_id"], row["sample_index"], row["score"], row["oracle"]) for row in scores
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
        assert [row["score"] for row in scores[::2]] == [0, 1, 0, 3, 0, 5, 0, 7, 0, 9]

    def test_changed_messages_of_a_function_stay_its_own(self, tmp_path):
        path = tmp_path / "oracle.py"
        path.write_text(
            "def score(prompts, responses, references):\n"
            "    [prompt.append({}) or prompt[0].clear() for prompt in prompts]\n"
            "    return [1] * len(prompts)\n"
        )
        rows = list(response_rows())
        before = copy.deepcopy(rows)
        assert len(list(PythonOracle(path, "score").score(rows))) == len(rows)
        assert rows == before

    def test_metrics_describe_the_scores(self, score, monkeypatch):
        monkeypatch.setattr("stages.score.run.BATCH_ROWS", 3)
        scores, metrics, events = score(code=LENGTHS)
        values = [row["score"] for row in scores]
        assert metrics["mean"] == pytest.approx(statistics.fmean(values))
        assert metrics["std"] == pytest.approx(statistics.pstdev(values))
        assert (metrics["min"], metrics["max"]) == (min(values), max(values))
        assert (metrics["responses"], metrics["null_scores"]) == (20, 0)
        last = [event for event in events if isinstance(event, Progress)][-1]
        assert (last.done, last.total) == (20, 20)

    @pytest.mark.parametrize("value", ["math.nan", "math.inf", "-math.inf", "'good'", "[1.0]"])
    def test_an_invalid_score_is_named_with_its_place(self, score, value):
        code = f"""
        import math
        def score(prompts, responses, references):
            return [{value} if response.startswith("blue") else 1 for response in responses]
        """
        row = next(row for row in response_rows() if row["response"].startswith("blue"))
        place = f"prompt {row['prompt_id']}, sample {row['sample_index']}"
        with pytest.raises(UserError, match=f"returned score .* for {place}"):
            score(code=code)

    @pytest.mark.parametrize("character", "\0\r\v\f\x1e\x85\u2028\u2029")
    def test_characters_that_separate_lines_reach_function_and_table(self, score, character):
        word = f"a{character}b"
        code = f"""
        def score(prompts, responses, references):
            assert [prompts[0][0]["content"], *responses, *references] == [{word!a}] * 3
            print(references[0])
            return [{{"score": 1.0, references[0]: 2.0}}]
        """
        rows = [response(word, 0, word, reference_answer=word)]
        [row], _, _ = score(code=code, rows=rows)
        assert dict(row["components"]) == {word: 2.0}

    @pytest.mark.parametrize(
        ("code", "message"),
        [
            ("def score(*columns): return [{'warmth': 1.0}] * 20", "a mapping without 'score'"),
            (
                "def score(*columns): return [{'score': 1, 'warmth': None}] * 20",
                "returned component 'warmth' None for prompt",
            ),
            ("def score(*columns): return [1.0]", "returned 1 scores for 20 responses"),
            ("def score(*columns): return 1.0", "returned float, not a sequence"),
            (
                "def score(*columns): return dict.fromkeys(range(20), 0.5)",
                "returned dict, not a sequence of scores\n.*return a list",
            ),
            ("def score(*columns): return set(range(20))", "returned set, not a sequence"),
            (
                "import numpy\ndef score(*columns): return numpy.array(0.5)",
                "TypeError: iteration over a 0-d array",
            ),
            (
                "def score(prompts, responses, references):\n    return responses[99]",
                r"IndexError: .*line 2 of oracle\.py",
            ),
            ("def other(*columns): return []", "no function 'score'; it has: other"),
            ("def score(", r"oracle\.py raised SyntaxError"),
            ("import sys\nsys.exit(0)", r"oracle\.py.* SystemExit"),
            (
                "def score(prompts, *rest):\n    yield 1.0\n    raise SystemExit",
                r"oracle\.py.* SystemExit",
            ),
        ],
    )
    def test_code_that_gives_no_scores_is_a_users_mistake(self, score, code, message):
        with pytest.raises(UserError, match=message):
            score(code=code)

    def test_a_function_of_other_arguments_is_shown_its_signature(self, score):
        with pytest.raises(UserError, match=r"3 were given\n") as caught:
            score(code="def score(prompts, responses): return []")
        assert "(prompts, responses, references)" in caught.value.remedy

    @pytest.mark.parametrize("method", ["spawn", "forkserver"])
    def test_processes_that_are_no_forks_are_refused(self, score, method):
        code = f"""
            import multiprocessing

            def length(text):
                return float(len(text))

            def score(prompts, responses, references):
                with multiprocessing.get_context({method!r}).Pool(2) as pool:
                    return pool.map(length, responses)
        """
        with pytest.raises(UserError, match=r"by spawn or forkserver and cannot import this file"):
            score(code=code)
        scores, _, _ = score(code=code.replace(f"{method!r}", "'fork'"))
        assert min(row["score"] for row in scores) > 0

    def test_a_failing_network_may_be_retried(self, score):
        code = "def score(*columns): raise ConnectionError('reset')"
        with pytest.raises(
            GebError, match=r"oracle\.py:score raised ConnectionError: reset"
        ) as refused:
            score(code=code)
        assert not isinstance(refused.value, UserError)


NULLS = """
    def score(prompts, responses, references):
        return [None if reference is None else 1.0 for reference in references]
"""


class TestNulls:
    def test_they_are_kept_with_a_reason_and_counted(self, score):
        scores, metrics, events = score(code=NULLS, max_null_share=0.5)
        assert [row["score"] for row in scores[:4]] == [None, None, 1.0, 1.0]
        assert [bool(row["error"]) for row in scores[:4]] == [True, True, False, False]
        assert (metrics["null_scores"], metrics["mean"]) == (10, 1.0)
        warnings = [
            event for event in events if isinstance(event, Log) and event.level == "warning"
        ]
        assert "10 of 20 responses have no score" in warnings[0].message

    def test_too_many_stop_the_run(self, score):
        with pytest.raises(UserError, match=r"10 of 20 .* max_null_share allows 0\.49"):
            score(code=NULLS, max_null_share=0.49)
