"""Iterative online DPO, with and without GEB's bonus, beside GRPO at matched compute.

    python -m benchmarks.grpo                      # --seeds 0 1 2, --learning-rates, --json

All start from the same warm-started model of the quickstart, and have its prompts and its oracle.
`geb run` makes f-DPO and GEB. TRL's GRPOTrainer then samples as many tokens as f-DPO's run, from
the same prompts, and takes its optimizer steps at the same training FLOPs: by `num_iterations`,
the steps on each sample, and without a reference model (β = 0, TRL's default). The held-out prompts
are sampled and scored for all by one loop.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from flows.execution.run_record import RunRecord
from flows.report.summary import Summary, summarise
from stages.store.opening import open_store
from stages.tables.schemas import PAIRS, PROMPTS, read_rows

ROOT = Path(__file__).parents[1]
_CONFIGURATION = ROOT / "configs/quickstart.yaml"
_METHODS = {"f-DPO": "none", "GEB, u = 1 + α − π": "one_minus_pi"}
_FORWARD, _STEP = 2, 6
"""FLOPs for each weight and token: of a forward pass, and of one with its backward pass."""
Oracle = Callable[[Sequence[Any], Sequence[str], Sequence[str | None]], list[dict[str, float]]]


@dataclass
class Contestant:
    """One trained model.

    Attributes:
        name: The method.
        seed: Seed of its run.
        sampled_tokens: Response tokens that it was trained on.
        teraflop: Floating-point operations of its training, log π_ref included.
        steps: Optimizer steps.
        rewards: Mean reward of each held-out prompt.
        seconds: Wall time of GRPO's training, sampling included; nothing of the others.
    """

    name: str
    seed: int
    sampled_tokens: int
    teraflop: float
    steps: int
    rewards: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def reward(self) -> float:
        """Mean reward on the held-out prompts."""
        return statistics.fmean(self.rewards)


def main() -> None:
    """Runs all contestants and prints their table; exit code 1 if their compute differs by 10 %."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[3e-4, 1e-3])
    parser.add_argument("--group", type=int, default=8, help="GRPO's samples of a prompt")
    parser.add_argument("--store", type=Path, help="keeps and finds the runs; a new one if unset")
    parser.add_argument("--set", action="append", default=[], help="of every run of geb")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        store = (options.store or Path(place) / "store").absolute()
        found = [
            each for seed in options.seeds for each in compared(seed, store, Path(place), options)
        ]
    if options.json:
        print(json.dumps([asdict(each) | {"reward": each.reward} for each in found], indent=2))
    else:
        print(table(found))
    sys.exit(not matched(found))


def compared(seed: int, store: Path, folder: Path, options: argparse.Namespace) -> list[Contestant]:
    """The contestants of one seed, all from one warm start."""
    runs = {name: geb_run(design, seed, store, options.set) for name, design in _METHODS.items()}
    first = next(iter(runs.values()))
    held_out = list(read_rows(first.artifacts["prepare"].file("test.parquet"), PROMPTS))
    oracle = load_oracle(Path(str(first.config.inputs.oracle_code)))
    sampling = first.config.evaluation_sampling()

    def evaluated(contestant: Contestant, model: Path) -> Contestant:
        contestant.rewards = rewards_of(
            model, held_out, oracle, sampling.num_samples, sampling.max_new_tokens, seed
        )
        print(f"seed {seed}: {contestant.name} {contestant.reward:.3f}", file=sys.stderr)
        return contestant

    base = first.artifacts["sft"].file("checkpoint")
    contestants = [evaluated(Contestant("the start", seed, 0, 0.0, 0), base)]
    for name, run in runs.items():
        trained = run.last("train")
        assert trained is not None, "the run is complete"
        contestants.append(evaluated(compute_of(name, seed, run), trained.file("checkpoint")))
    budget = contestants[1]
    for rate in options.learning_rates:
        model = folder / f"grpo-{seed}-{rate:g}"
        made = train_grpo(base, first, oracle, budget, rate, options.group, model)
        contestants.append(evaluated(made, model))
    return contestants


def geb_run(design: str, seed: int, store: Path, settings: Sequence[str]) -> Summary:
    """A run of the quickstart with a bonus; found again if the store has it."""
    name = f"grpo-{design}-{seed}".replace("_", "-")
    asked = [f"name={name}", f"seed={seed}", f"store={store}", f"train.design={design}", *settings]
    command = [sys.executable, "-m", "flows.commands.cli", "run", str(_CONFIGURATION)]
    for each in asked:
        command += ["--set", each]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return summarise(RunRecord.existing(open_store(str(store)), name))


def compute_of(name: str, seed: int, run: Summary) -> Contestant:
    """Tokens and FLOPs of a run's training; a response is read with its prompt, as GRPO's is."""
    epochs, sampled, trained, steps = run.config.train.epochs, 0, 0, 0
    for iteration in range(1, run.config.iterations + 1):
        sampled += run.read_json(f"iteration-{iteration}/generate/0", "metrics.json")[
            "response_tokens"
        ]
        steps += run.read_json(f"iteration-{iteration}/train", "summary.json")["steps"]
        pairs = run.artifacts[f"iteration-{iteration}/pair"].file("pairs.parquet")
        trained += sum(
            2 * len(row["prompt_token_ids"])
            + len(row["chosen_token_ids"])
            + len(row["rejected_token_ids"])
            for row in read_rows(pairs, PAIRS)
        )
    weights = num_weights(run.artifacts["sft"].file("checkpoint"))
    flops = weights * trained * (_STEP * epochs + _FORWARD)
    return Contestant(name, seed, sampled, flops / 1e12, steps)


def num_weights(model: Path) -> int:
    """Weights that a token is multiplied with: all but the table of embeddings."""
    loaded = AutoModelForCausalLM.from_pretrained(model)
    embeddings: torch.nn.Module = loaded.get_input_embeddings()
    tied = loaded.config.tie_word_embeddings
    table_size = 0 if tied else sum(each.numel() for each in embeddings.parameters())
    return sum(each.numel() for each in loaded.parameters()) - table_size


def load_oracle(path: Path) -> Oracle:
    """The function `score` of a file."""
    spec = importlib.util.spec_from_file_location("oracle", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Oracle = module.score
    return found


def train_grpo(
    base: Path,
    run: Summary,
    oracle: Oracle,
    budget: Contestant,
    learning_rate: float,
    group: int,
    folder: Path,
) -> Contestant:
    """TRL's GRPO from the start, until it has sampled as many tokens as the budget has.

    Batches are of as many responses as an optimizer step of the run has, two a pair.
    """
    config = run.config
    batch = 2 * config.train.global_batch_pairs
    rows = [
        row
        for iteration in range(1, config.iterations + 1)
        for row in read_rows(
            run.artifacts["prepare"].file(f"iteration-{iteration}.parquet"), PROMPTS
        )
    ]
    tokenizer = AutoTokenizer.from_pretrained(base)
    weights, spent = num_weights(base), {"sampled": 0, "read": 0}

    def reward(
        prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        """Scores a batch, and counts its tokens."""
        texts = [each[0]["content"] for each in completions]
        spent["sampled"] += sum(map(len, completion_ids))
        rendered = tokenizer.apply_chat_template(prompts, add_generation_prompt=True)
        ids = rendered if isinstance(rendered, list) else rendered["input_ids"]
        spent["read"] += sum(map(len, completion_ids)) + sum(map(len, ids))
        return [each["score"] for each in oracle(prompts, texts, columns["reference"])]

    data = Dataset.from_list(
        [{"prompt": row["messages"], "reference": row["reference_answer"]} for row in rows]
    )
    mean_tokens = budget.sampled_tokens / (2 * len(rows))
    batches = round(budget.sampled_tokens / mean_tokens / batch)
    prompt_tokens = statistics.fmean(
        len(tokenizer.apply_chat_template(row["messages"], return_dict=False)) for row in rows[:99]
    )
    per_pass = weights * batches * batch * (mean_tokens + prompt_tokens) * _STEP / 1e12
    # Steps on each sample: f-DPO's two epochs and its reference's pass make two of them.
    iterations = max(1, round(budget.teraflop / per_pass))
    arguments = GRPOConfig(
        output_dir=str(folder),
        learning_rate=learning_rate,
        per_device_train_batch_size=batch,
        num_generations=group,
        num_iterations=iterations,
        max_steps=batches * iterations,
        max_completion_length=config.generate.max_new_tokens,
        temperature=config.generate.temperature,
        seed=budget.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=10,
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    trainer = GRPOTrainer(
        model, reward_funcs=reward, args=arguments, train_dataset=data, processing_class=tokenizer
    )
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    trainer.save_model(str(folder))
    tokenizer.save_pretrained(folder)
    # With several steps on each sample, a pass without gradient keeps the sampler's log π.
    passes = _STEP * iterations + (_FORWARD if iterations > 1 else 0)
    flops = weights * spent["read"] * passes / 1e12
    name = f"GRPO, learning rate {learning_rate:g}"
    steps = batches * iterations
    return Contestant(name, budget.seed, spent["sampled"], flops, steps, seconds=seconds)


@torch.inference_mode()
def rewards_of(
    model: Path,
    prompts: Sequence[Mapping[str, Any]],
    oracle: Oracle,
    samples: int,
    max_new_tokens: int,
    seed: int,
) -> list[float]:
    """Mean reward of each prompt over its samples at temperature 1."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found: list[float] = []
    for start in range(0, len(prompts), 64):
        rows = prompts[start : start + 64]
        given = tokenizer.apply_chat_template(
            [row["messages"] for row in rows],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        output = policy.generate(
            **given,
            do_sample=True,
            top_k=0,
            num_return_sequences=samples,
            max_new_tokens=max_new_tokens,
        )
        answers = tokenizer.batch_decode(
            output[:, given["input_ids"].shape[1] :], skip_special_tokens=True
        )
        repeated = [row for row in rows for _ in range(samples)]
        scores = oracle(
            [row["messages"] for row in repeated],
            answers,
            [row["reference_answer"] for row in repeated],
        )
        values = [each["score"] for each in scores]
        found += [
            statistics.fmean(values[place : place + samples])
            for place in range(0, len(values), samples)
        ]
    return found


def matched(found: Sequence[Contestant]) -> bool:
    """True if all that were trained on a seed sampled and computed as much, within 10 %."""
    trained = [each for each in found if each.steps]
    return all(
        math.isclose(one, other, rel_tol=0.1)
        for each in trained
        for first in trained
        if first.seed == each.seed
        for one, other in (
            (each.sampled_tokens, first.sampled_tokens),
            (each.teraflop, first.teraflop),
        )
    )


def table(found: Sequence[Contestant]) -> str:
    """A line for each method: its compute in the mean over seeds, and its rewards."""
    lines = [
        "| | sampled tokens | training TFLOP | steps | mean reward, by seed | mean |",
        "| --- | ---: | ---: | ---: | --- | ---: |",
    ]
    for name in dict.fromkeys(each.name for each in found):
        own = [each for each in found if each.name == name]
        tokens, teraflop, steps, reward = (
            statistics.fmean(getattr(each, value) for each in own)
            for value in ("sampled_tokens", "teraflop", "steps", "reward")
        )
        by_seed = ", ".join(f"{each.reward:.3f}" for each in own)
        compute = f"{tokens:,.0f} | {teraflop:,.2f} | {steps:,.0f}"
        lines.append(f"| {name} | {compute} | {by_seed} | {reward:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
