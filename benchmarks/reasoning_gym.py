"""How often a model solves the tasks of reasoning-gym: which of them can it learn by sampling?

    python -m benchmarks.reasoning_gym                    # SmolLM2-135M-Instruct, all short tasks
    python -m benchmarks.reasoning_gym --tasks 'chain_sum max_terms=2 max_digits=2' lcm

Training on a task needs right answers that are rare but not absent. For each task the policy
answers some prompts several times, and the task's own scorer scores every answer, by the stages
`prepare`, `generate` and `score`. A row has the share of prompts that k samples solve (score 1;
unbiased estimate, Chen et al. 2021) and the mean score. A task is left out if an answer would not
fit ``--max-new-tokens`` or a question has more than ``--question`` characters. What the store has
is not computed again: a run that was cut off goes on there.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np

from benchmarks.inputs import file_input
from flows.commands.fetch import smollm2
from flows.pipeline.external import checkpoint_of, resolve
from flows.report.statistics import pass_at_k
from stages.contract.errors import GebError
from stages.contract.events import Emitter
from stages.contract.params import StageParams
from stages.contract.request import FileInput, Request, make_request
from stages.generate.params import GenerateParams
from stages.generate.run import STAGE as GENERATE
from stages.harness.program import execute
from stages.prepare.params import PrepareParams
from stages.prepare.run import STAGE as PREPARE
from stages.score.params import ScoreParams
from stages.store.base import Store
from stages.tables.schemas import SCORES, read_rows

ROOT = Path(__file__).parents[1]
KS = (1, 4, 16)
# An answer's token has about three characters, and its sentence takes some ten tokens.
_CHARACTERS, _SENTENCE = 3, 10
_SYSTEM = "Reply with the answer alone, without any other words."
_QUIET = Emitter(io.StringIO())
_EASIER = """
basic_arithmetic max_terms=2 max_digits=1
calendar_arithmetic offset_upper_bound=7
chain_sum min_terms=2 max_terms=2 max_digits=1
chain_sum min_terms=2 max_terms=2 min_digits=2 max_digits=2
chain_sum min_terms=3 max_terms=3 max_digits=1
count_bits max_n=31
count_primes max_n=20
decimal_chain_sum max_terms=2 max_digits=1
fraction_simplification max_value=10 min_factor=2 max_factor=3
gcd max_value=20
lcm max_value=10
leg_counting max_animals=2 max_instances=2
letter_counting max_words=5
number_sorting min_numbers=3 max_numbers=3 max_decimals=0 max_value=20
prime_factorization max_value=20
products max_digits=1
simple_equations min_terms=2 max_terms=2 max_value=10
spell_backward min_word_len=3 max_word_len=3
spell_backward min_word_len=4 max_word_len=5
word_sorting min_words=3 max_words=3
word_sequence_reversal min_words=3 max_words=3
"""


class Tasks:
    """The stages, with what all tasks share.

    Args:
        asked: The command line.
    """

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        self._store = Store.open(str(asked.store), create=True)
        self._policy = file_input(asked.policy or checkpoint_of(smollm2()))

    def row(self, task: str) -> str:
        """A task's row of the table.

        Raises:
            GebError: The task cannot be made, is too long, or cannot be scored.
        """
        asked = self._asked
        place = f"reasoning_gym:{task} size={asked.prompts} seed={asked.seed}"
        made = resolve(place, "dataset", str(asked.interpreter))
        assert isinstance(made, FileInput)
        _require_short(Path(made.location), asked.question, asked.max_new_tokens)
        params = PrepareParams(iterations=0, system_prompt=asked.system_prompt or None)
        prompts = execute(PREPARE, self._request(params, test=made), _QUIET)
        sampling = GenerateParams.model_validate(
            {
                "num_samples": asked.samples,
                "max_new_tokens": asked.max_new_tokens,
                "dtype": asked.dtype,
                "transformers": {"batch_size": 192},
            }
        )
        test = file_input(prompts.path / "test.parquet")
        request = self._request(sampling, policy=self._policy, prompts=test)
        sampled = execute(GENERATE, request, _QUIET)
        correct, scores, tagged = self._scored(sampled.path / "responses.parquet")
        tried = np.full(len(correct), asked.samples)
        cells = [f"{pass_at_k(correct, tried, k).mean():.3f}" for k in KS if k <= asked.samples]
        return " | ".join([task, *cells, f"{np.mean(scores):.3f}", f"{np.mean(tagged):.2f}"])

    def _request(self, params: StageParams, **inputs: FileInput) -> Request:
        given = {name: [each] for name, each in inputs.items()}
        return make_request(params, inputs=given, seed=0, store=str(self._store.root))

    def _scored(self, responses: Path) -> tuple[np.ndarray, list[float], list[float]]:
        """Right answers of each prompt; scores and tags of all responses."""
        params = ScoreParams(oracle="reasoning_gym", max_null_share=0.1)
        request = self._request(params, responses=file_input(responses))
        artifact = self._store.find("score", request.key, warn=print)
        if artifact is None:
            with tempfile.NamedTemporaryFile(suffix=".json") as file:
                request.write(Path(file.name))
                command = [str(self._asked.interpreter), "-m", "stages.score", file.name]
                subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
            artifact = self._store.load("score", request.key)
        rows = list(read_rows(artifact.path / "scores.parquet", SCORES))
        correct: dict[str, int] = defaultdict(int)
        for row in rows:
            correct[row["prompt_id"]] += row["score"] is not None and row["score"] >= 1
        scores = [row["score"] or 0.0 for row in rows]
        tagged = [dict(row["components"] or {}).get("tagged", 0.0) for row in rows]
        return np.array(list(correct.values())), scores, tagged


def _require_short(prompts: Path, question: int, max_new_tokens: int) -> None:
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    longest = max(len(row["prompt"]) for row in rows)
    answers = [str(json.loads(row["reference_answer"])["entry"]["answer"]) for row in rows]
    room = _CHARACTERS * (max_new_tokens - _SENTENCE)
    if longest > question or max(map(len, answers)) > room:
        raise GebError(
            f"questions have up to {longest} characters, answers {max(map(len, answers))}"
        )


def _all_tasks(interpreter: Path) -> list[str]:
    code = "from reasoning_gym.factory import DATASETS; print(*sorted(DATASETS))"
    done = subprocess.run([interpreter, "-c", code], check=True, capture_output=True, text=True)
    return sorted([*done.stdout.split(), *filter(None, _EASIER.splitlines())])


def main() -> None:
    """Prints the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tasks", nargs="+", help="tasks with their settings; all if unset")
    parser.add_argument("--policy", type=Path, help="checkpoint; SmolLM2-135M-Instruct if unset")
    parser.add_argument("--prompts", type=int, default=24, help="prompts of each task")
    parser.add_argument("--samples", type=int, default=16, help="samples of each prompt")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--question", type=int, default=300, help="longest question, characters")
    parser.add_argument("--system-prompt", default=_SYSTEM, help="system turn of all prompts")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--store", type=Path, default=ROOT / "store-reasoning-gym")
    parser.add_argument("--interpreter", type=Path, default=ROOT / ".venv-eval/bin/python")
    asked = parser.parse_args()
    tasks = Tasks(asked)
    heads = [f"pass@{k}" for k in KS if k <= asked.samples]
    print("| task |", " | ".join([*heads, "mean score", "in tags"]), "|")
    print("| --- |", " | ".join(["---:"] * (len(heads) + 2)), "|")
    left_out = []
    for task in asked.tasks or _all_tasks(asked.interpreter):
        try:
            print("|", tasks.row(task), "|", flush=True)
        except GebError as error:
            left_out.append(f"{task}: {str(error).splitlines()[0]}")
    print("\nleft out:", *left_out, sep="\n")


if __name__ == "__main__":
    main()
