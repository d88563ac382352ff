"""A suite of a judge through a real flow."""

import re
from typing import Any

import pytest

from tests.flows.loop import geb_json, warm_started, write_config
from tests.scripted_server import Reply, completion
from tests.stage_calls import write_jsonl

pytestmark = pytest.mark.slow
_SHOWN = re.compile(r"<answer-A>\n(.*)\n</answer-A>\n<answer-B>\n(.*)\n</answer-B>", re.DOTALL)


def prefer_longer(number: int, request: dict[str, Any]) -> Reply:
    shown = _SHOWN.search(request["messages"][0]["content"])
    assert shown is not None
    first, second = map(len, shown.groups())
    verdict = "tie" if first == second else "A" if first > second else "B"
    return completion(f"Verdict: {verdict}")


def test_a_judge_s_suite_through_a_run(finished, tmp_path, serve):
    items = ["two towels", "four pillows", "five cups", "three keys", "two maps", "four lamps"]
    questions = [f"Please bring {item} to room {n}." for n, item in enumerate(items, 1)]
    compared = [
        {"prompt": text, "reference_answer": "Certainly. " * (n + 1)}
        for n, text in enumerate(questions)
    ]
    suites = {
        "compared": {
            "evaluation": {"num_samples": 2, "max_new_tokens": 16},
            "prompts": str(write_jsonl(tmp_path / "compared.jsonl", compared)),
            "score": {
                "oracle": "judge",
                "judge": {
                    "url": serve(prefer_longer).url,
                    "model": "scripted",
                    "mode": "pairwise",
                    "against": "reference",
                },
            },
        }
    }
    config = write_config(
        tmp_path,
        store=str(finished.parent / "store"),
        name="eval-suites",
        inputs=warm_started(finished),
        suites=suites,
    )
    tables = geb_json("run", config)["suites"]
    base, policy = tables["compared"]
    for row in (base, policy):
        assert 0 <= row["figures"]["mean_reward"]["value"] <= 1
