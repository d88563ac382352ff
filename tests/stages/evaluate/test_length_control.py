"""Length-controlled win rates by AlpacaEval's own code in its environment."""

import csv
import json
import math
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stages.contract.errors import EXIT_OK, EXIT_USER, UserError
from stages.contract.request import Request
from stages.evaluate.params import EvaluateParams
from stages.evaluate.run import STAGE
from stages.store.base import Store
from tests.eval_environment import PYTHON, run_there
from tests.stage_calls import call_request, request_for, response, write_scored

PROMPTS = 60
INSTRUCTIONS = [f"q{number}" for number in range(PROMPTS)]
# The judge's liking for length, and for the policy where both answers are as long: σ(0.3) = 0.574.
SLOPE, LIKING = 1 / 50, 0.3


def comparisons() -> tuple[list[Any], list[Any]]:
    """The base's answers have 300 letters, the policy's a random number, on average less."""
    draw = random.Random(7)
    policy, base = [], []
    for number in range(PROMPTS):
        longer = round(draw.gauss(-40, 100))
        points = 1 / (1 + math.exp(-(SLOPE * longer + LIKING)))
        answers = {"reference_answer": "x" * 300}
        policy.append((response(f"q{number}", 0, "x" * (300 + longer), **answers), points))
        base.append((response(f"q{number}", 0, "x" * 300, **answers), 0.5))
    return policy, base


def requested(tmp_path: Path, data: Path) -> Request:
    rows = comparisons()
    params = EvaluateParams(log_pi_ref="off", length_controlled=True)
    inputs: dict[str, Any] = {"length_control": data}
    for prefix, samples in zip(("", "base_"), rows, strict=True):
        responses, scores = write_scored(tmp_path, samples, prefix)
        inputs |= {f"{prefix}responses": responses, f"{prefix}scores": scores}
    return request_for(params, inputs, tmp_path / "store")


def metrics(tmp_path: Path, request: Request) -> dict[str, Any]:
    code, output = run_there(request, tmp_path)
    assert code == EXIT_OK, output
    artifact = Store.open(str(tmp_path / "store")).load("evaluate", request.key)
    assert artifact is not None
    figures = json.loads(artifact.file("metrics.json").read_text())
    assert isinstance(figures, dict)
    return figures


def write_data(folder: Path, instructions: Sequence[str] = INSTRUCTIONS) -> Path:
    """AlpacaEval's two files, as far as the regression reads them."""
    folder.mkdir()
    draw = random.Random(1)
    with (folder / "df_gamed.csv").open("w", newline="") as file:
        names = ["model", "index", "preference", "std_delta_len", "instruction_difficulty"]
        writer = csv.writer(file)
        writer.writerow([*names, "not_gamed_baseline"])
        for model in ("concise", "verbose"):
            for place in range(len(instructions)):
                row = [model, place, draw.random(), draw.gauss(0, 1), math.sin(place), False]
                writer.writerow(row)
    # In another order than the prompts'.
    rows = [{"instruction": text, "output": "x"} for text in reversed(instructions)]
    (folder / "alpaca_eval_gpt4_baseline.json").write_text(json.dumps(rows))
    return folder


@pytest.mark.slow
def test_the_win_rate_equals_the_published_regression(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    figures = metrics(tmp_path, requested(tmp_path, data))
    assert figures["mean_reward"] < 0.45, "short answers lose"
    assert figures["length_controlled_win_rate"] > figures["mean_reward"]
    # The same annotations, given to the library by hand.
    annotations = [
        {
            "index": PROMPTS - 1 - number,
            "generator_1": "opponent",
            "generator_2": "model",
            "output_1": "x" * 300,
            "output_2": row["response"],
            "preference": 1 + points,
        }
        for number, (row, points) in enumerate(comparisons()[0])
    ]
    program = (
        "import json, sys\n"
        "from alpaca_eval.metrics import glm_winrate as g\n"
        "g.hf_hub_download = lambda **_: sys.argv[1]\n"
        "a = json.load(sys.stdin)\n"
        "r = g.get_length_controlled_winrate(a, save_weights_dir=None)\n"
        "print(float(r['length_controlled_winrate']))\n"
    )
    command = [str(PYTHON), "-W", "ignore", "-c", program, str(data / "df_gamed.csv")]
    output = subprocess.run(
        command, input=json.dumps(annotations), capture_output=True, text=True, check=True
    )
    expected = float(output.stdout.splitlines()[-1]) / 100
    assert figures["length_controlled_win_rate"] == pytest.approx(expected, abs=1e-9)
    # The base's answers are as long as the baseline's: there is nothing to control.
    assert figures["base_length_controlled_win_rate"] is None


@pytest.mark.slow
def test_data_that_the_library_would_fetch_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/alpaca_eval_gpt4_baseline.json").write_text("[]")
    code, output = run_there(requested(tmp_path, tmp_path / "data"), tmp_path)
    assert code == EXIT_USER
    assert "has no file df_gamed.csv" in output
    assert "hf download tatsu-lab/alpaca_eval" in output


def test_without_the_library_the_environment_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        call_request(STAGE, requested(tmp_path, write_data(tmp_path / "data")))
    assert "AlpacaEval's own code" in str(caught.value)
    assert "make setup-eval" in caught.value.remedy


def test_log_pi_ref_needs_torch_which_its_environment_lacks() -> None:
    with pytest.raises(ValueError, match="set log_pi_ref to off"):
        EvaluateParams(length_controlled=True)
