"""Share of reasoning-gym's tasks that a model solves: which of them can it learn by sampling?

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
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from benchmarks.inputs import file_input
from flows.commands.fetch import smollm2
from flows.pipeline.external import checkpoint_of, resolve
from flows.report.statistics import pass_at_k
from stages.contract.errors import GebError
from stages.contract.params import StageParams
from stages.contract.request import FileInput, make_request
from stages.generate.params import GenerateParams
from stages.prepare.params import PrepareParams
from stages.score.params import ScoreParams
from stages.store.base import Store
from stages.tables.schemas import RESPONSES, SCORES, read_rows

ROOT = Path(__file__).parents[1]
KS = (1, 4, 16)
# An answer's token has about three characters.
_CHARACTERS = 3
_SYSTEM = "Reply with the answer alone, without any other words."
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


class Sampler:
    """The stages, with what all tasks share.

    Args:
        asked: The command line.
    """

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        self._store = Store.open(str(asked.store), create=True)
        self._policy = file_input(asked.policy or checkpoint_of(smollm2()))

    def rows(self, prompts: Mapping[str, Path]) -> Iterator[str]:
        """Rows of the table for the files of prompts of some tasks, by the task."""
        asked, tasks = self._asked, {}
        lines: list[str] = []
        for task, file in prompts.items():
            for line in file.read_text().splitlines():
                tasks[json.loads(line)["reference_answer"]] = task
                lines.append(line)
        with tempfile.TemporaryDirectory() as folder:
            merged = Path(folder) / "prompts.jsonl"
            merged.write_text("\n".join(lines) + "\n")
            params = PrepareParams(iterations=0, system_prompt=asked.system_prompt or None)
            prepared = self._run(params, sys.executable, test=merged) / "test.parquet"
        sampling = GenerateParams.model_validate(
            {
                "backend": "vllm",
                "num_samples": asked.samples,
                "temperature": asked.temperature,
                "max_new_tokens": asked.max_new_tokens,
                "dtype": asked.dtype,
                "vllm": {"kv_cache_gib": 2, "enforce_eager": True},
            }
        )
        sampled = self._run(sampling, asked.vllm, policy=self._policy, prompts=prepared)
        responses = sampled / "responses.parquet"
        params = ScoreParams(oracle="reasoning_gym", max_null_share=0.1)
        scores = self._run(params, asked.interpreter, responses=responses) / "scores.parquet"
        found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        tagged: dict[str, list[float]] = defaultdict(list)
        for row, score in zip(
            read_rows(responses, RESPONSES), read_rows(scores, SCORES), strict=True
        ):
            task = tasks[row["reference_answer"]]
            found[task][row["prompt_id"]].append(score["score"] or 0.0)
            tagged[task].append(dict(score["components"] or {}).get("tagged", 0.0))
        for task, by_prompt in found.items():
            # A prompt's samples are as many as the others'.
            values = np.array(list(by_prompt.values()))
            correct, tried = (values >= 1).sum(axis=1), np.full(len(values), values.shape[1])
            cells = [f"{pass_at_k(correct, tried, k).mean():.3f}" for k in KS if k <= asked.samples]
            yield " | ".join([task, *cells, f"{values.mean():.3f}", f"{np.mean(tagged[task]):.2f}"])

    def _run(self, params: StageParams, python: str | Path, **inputs: Path | FileInput) -> Path:
        """Folder of a stage's artifact; the stage runs as a program unless the store has it."""
        given = {
            name: [file_input(each) if isinstance(each, Path) else each]
            for name, each in inputs.items()
        }
        request = make_request(params, inputs=given, seed=0, store=str(self._store.root))
        found = self._store.find(request.stage, request.key, warn=print)
        if found is None:
            with tempfile.NamedTemporaryFile(suffix=".json") as file:
                request.write(Path(file.name))
                command = [str(python), "-m", f"stages.{request.stage}", file.name]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
            found = self._store.load(request.stage, request.key)
        assert found is not None
        return found.path


def _prompts(asked: argparse.Namespace, task: str) -> Path:
    """File of a task's prompts.

    Raises:
        GebError: The task cannot be made, or is too long.
    """
    place = f"reasoning_gym:{task} size={asked.prompts} seed={asked.seed}"
    made = resolve(place, "dataset", str(asked.interpreter))
    assert isinstance(made, FileInput)
    file = Path(made.location)
    _require_short(file, asked.question, asked.max_new_tokens)
    return file


def _require_short(prompts: Path, question: int, max_new_tokens: int) -> None:
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    longest = max(len(row["prompt"]) for row in rows)
    answers = [str(json.loads(row["reference_answer"])["entry"]["answer"]) for row in rows]
    room = _CHARACTERS * max_new_tokens
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
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--question", type=int, default=450, help="longest question, characters")
    parser.add_argument("--system-prompt", default=_SYSTEM, help="system turn of all prompts")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--store", type=Path, default=ROOT / "store-reasoning-gym")
    parser.add_argument("--group", type=int, default=16, help="tasks that are sampled at once")
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm/bin/python")
    parser.add_argument("--interpreter", type=Path, default=ROOT / ".venv-eval/bin/python")
    asked = parser.parse_args()
    sampler = Sampler(asked)
    prompts, left_out = {}, []
    for task in asked.tasks or _all_tasks(asked.interpreter):
        try:
            prompts[task] = _prompts(asked, task)
        except GebError as error:
            left_out.append(f"{task}: {str(error).splitlines()[0]}")
    print("left out:", *left_out, sep="\n")
    heads = [f"pass@{k}" for k in KS if k <= asked.samples]
    print("\n| task |", " | ".join([*heads, "mean score", "in tags"]), "|")
    print("| --- |", " | ".join(["---:"] * (len(heads) + 2)), "|", flush=True)
    names = list(prompts)
    for first in range(0, len(names), asked.group):
        group = names[first : first + asked.group]
        for row in sampler.rows({task: prompts[task] for task in group}):
            print("|", row, "|", flush=True)


if __name__ == "__main__":
    main()
