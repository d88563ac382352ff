"""Throughput of the generate stage against the bare vLLM engine and the transformers backend.

    python -m benchmarks.generation                       # CPU: some minutes
    python -m benchmarks.generation --model-shape 8b --prompts 2048 --max-new-tokens 1024   # a GPU

Random weights and made-up prompts, or what ``--model`` and ``--prompts-of`` name. Each
take turns and the median counts. Tokens per second are those after start-up: for the stage from the
moment its engine is ready to its last written byte, for the bare engine (``LLM.generate``
on the same token ids) the time of that call. ``--json`` prints the same as JSON. Exit code 1 if the
stage stays below 95 % of the bare engine with the same sampling parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.inputs import file_input
from stages.contract.digests import prompt_id
from stages.contract.events import Progress, parse_event
from stages.contract.request import Resources, make_request
from stages.generate.params import GenerateParams
from stages.store.base import Store
from stages.tables.schemas import PROMPTS, write_table

ROOT = Path(__file__).parents[1]
MARK = 0.95
# Heads of 32 or 128: what vLLM's attention knows on CPUs and GPUs.
SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "125m": {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
STAGE = "generate stage, vllm"
BARE = "bare engine, same sampling parameters"
PLAIN = "bare engine, no seeds and log-probabilities"
TRANSFORMERS = "generate stage, transformers"
# Log-normal lengths: prompts of about 150 tokens, some of 700.
_PROMPT_MEDIAN = 150
_PROMPT_SIGMA = 0.5
_PROMPT_LONGEST = 700


@dataclass(frozen=True)
class Run:
    """One contestant's run.

    Attributes:
        contestant: Its name.
        start_seconds: Until the engine was ready, imports included.
        seconds: From then on.
        cpu_seconds: CPU time of the process from then on: what a busy machine does not distort.
        tokens: Response tokens.
    """

    contestant: str
    start_seconds: float
    seconds: float
    cpu_seconds: float
    tokens: int


def main() -> None:
    """Makes model and prompts, runs the contestants in turns, prints the table."""
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        if options.model is None:
            options.model = folder / "model"
            make_model(options.model, options.model_shape)
        write_prompts(folder / "prompts.parquet", options.prompts, options)
        contestants = [BARE, STAGE, PLAIN]
        runs: dict[str, list[Run]] = defaultdict(list)
        for turn in range(options.repeats):
            for contestant in contestants:
                runs[contestant].append(run(contestant, folder, turn, options))
        if options.transformers_prompts:
            write_prompts(folder / "prompts.parquet", options.transformers_prompts, options)
            runs[TRANSFORMERS].append(run(TRANSFORMERS, folder, 0, options))
    shares = {
        clock: _median(runs[STAGE], clock) / _median(runs[BARE], clock)
        for clock in ("seconds", "cpu_seconds")
    }
    _report(runs, shares, as_json=options.json)
    sys.exit(shares[options.clock] < MARK)


def run(contestant: str, folder: Path, turn: int, options: argparse.Namespace) -> Run:
    """Runs one contestant in a separate process."""
    if contestant in (STAGE, TRANSFORMERS):
        backend = "vllm" if contestant == STAGE else "transformers"
        return run_stage(contestant, backend, folder, f"{backend}-{turn}", options)
    arguments = {
        "model": str(options.model),
        "prompts": str(folder / "prompts.parquet"),
        "seeds": contestant == BARE,
        **_vllm(options),
        "dtype": options.dtype,
        "num_samples": options.num_samples,
        "max_new_tokens": options.max_new_tokens,
    }
    started = time.perf_counter()
    command = [str(options.python), "-m", "benchmarks.bare_engine", json.dumps(arguments)]
    output = _finish(command, folder / "bare.log")
    wall = time.perf_counter() - started
    result = json.loads(output.splitlines()[-1])
    seconds = result["seconds"]
    return Run(contestant, wall - seconds, seconds, result["cpu_seconds"], result["tokens"])


def run_stage(
    contestant: str,
    backend: str,
    folder: Path,
    name: str,
    options: argparse.Namespace,
    resources: Resources | None = None,
) -> Run:
    """Runs the generate stage once.

    Args:
        contestant: Name for the table.
        backend: Its backend.
        folder: Has the prompts, and the model where no option names one.
        name: Name of the run's store there.
        options: As of this program.
        resources: Those of the stage; one engine if unset.
    """
    store = Store.in_folder(str(folder / f"store-{name}"), create=True)
    model = options.model or folder / "model"
    prompts = folder / "prompts.parquet"
    params = GenerateParams.model_validate(
        {
            "backend": backend,
            "num_samples": options.num_samples,
            "max_new_tokens": options.max_new_tokens,
            "dtype": options.dtype,
            "vllm": _vllm(options),
        }
    )
    inputs = {"policy": [file_input(model)], "prompts": [file_input(prompts)]}
    request = make_request(
        params, inputs=inputs, seed=0, store=str(store.root), resources=resources
    )
    path = folder / f"{name}.json"
    request.write(path)
    python = options.python if backend == "vllm" else sys.executable
    command = [str(python), "-m", "stages.generate", str(path)]
    clocks = _time_stage(command, path.with_suffix(".log"))
    artifact = store.artifact_path("generate", request.key)
    metrics = json.loads((artifact / "metrics.json").read_text())
    return Run(contestant, *clocks, metrics["response_tokens"])


def make_model(path: Path, shape: str) -> None:
    """Writes a Llama of random weights with a tokenizer of one token per word."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.tiny_models import SPECIAL, make_tiny_tokenizer

    settings = SHAPES[shape]
    words = [f"w{number}" for number in range(settings["vocab_size"] - len(SPECIAL))]
    torch.manual_seed(0)
    dtype = torch.bfloat16 if shape == "8b" else torch.float32
    torch.set_default_dtype(dtype)
    config = LlamaConfig(
        max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, pad_token_id=0, **settings
    )
    LlamaForCausalLM(config).save_pretrained(path)
    torch.set_default_dtype(torch.float32)
    make_tiny_tokenizer(words).save_pretrained(path)


def write_prompts(path: Path, count: int, options: argparse.Namespace) -> None:
    """Writes prompts: the first of a file of JSON lines, or made-up ones."""
    if options.prompts_of is None:
        make_prompts(path, count, options.model_shape)
        return
    lines = options.prompts_of.read_text(encoding="utf-8").splitlines()[:count]
    conversations = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]
    rows = ({"prompt_id": prompt_id(messages), "messages": messages} for messages in conversations)
    write_table(path, PROMPTS, ({**row, "reference_answer": None} for row in rows))


def make_prompts(path: Path, count: int, shape: str) -> None:
    """Writes prompts of made-up words."""
    draw = random.Random(0)
    num_words = SHAPES[shape]["vocab_size"] - 100

    def rows() -> Any:
        for number in range(count):
            drawn = int(draw.lognormvariate(0, _PROMPT_SIGMA) * _PROMPT_MEDIAN)
            words = [f"w{draw.randrange(num_words)}" for _ in range(min(drawn, _PROMPT_LONGEST))]
            messages = [{"role": "user", "content": " ".join([f"w{number % num_words}", *words])}]
            yield {
                "prompt_id": prompt_id(messages),
                "messages": messages,
                "reference_answer": None,
            }

    write_table(path, PROMPTS, rows())


def _vllm(options: argparse.Namespace) -> dict[str, Any]:
    """Engine settings of both the stage and the bare engine."""
    return {
        "enforce_eager": options.model_shape != "8b",
        "kv_cache_gib": {"small": 1.0, "125m": 2.0}.get(options.model_shape),
        "max_num_seqs": options.max_num_seqs,
    }


def _time_stage(command: list[str], log: Path) -> tuple[float, float, float]:
    """Runs a stage: seconds until its first progress, seconds from then on, and their CPU time."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    children = resource.RUSAGE_CHILDREN
    before = resource.getrusage(children)
    started = time.perf_counter()
    began = started
    ended = started
    cpu_at_start = 0.0
    with (
        log.open("w") as file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, env=environment, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if isinstance(parse_event(line), Progress):
                ended = time.perf_counter()
                if began == started:
                    began = ended
                    cpu_at_start = sum(psutil.Process(process.pid).cpu_times()[:2])
    if process.returncode:
        raise RuntimeError(f"the stage ended with {process.returncode}:\n{log.read_text()[-4000:]}")
    after = resource.getrusage(children)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return began - started, ended - began, cpu - cpu_at_start


def _finish(command: list[str], log: Path) -> str:
    """Runs a program to its end and returns its output; its log is shown if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as file:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=file, env=environment, check=False, text=True
        )
    if done.returncode:
        words = log.read_text()[-4000:]
        raise RuntimeError(f"{command[:3]} ended with {done.returncode}:\n{words}")
    return done.stdout


def _median(runs: list[Run], clock: str) -> float:
    """Tokens for each second of one of the clocks."""
    return statistics.median(run.tokens / getattr(run, clock) for run in runs)


def _report(runs: dict[str, list[Run]], shares: dict[str, float], *, as_json: bool) -> None:
    if as_json:
        every = [asdict(run) for group in runs.values() for run in group]
        print(json.dumps({"runs": every, "share_of_bare_engine": shares}, indent=2))
        return
    print(f"{'medians':<44} {'start s':>8} {'tokens':>9} {'tokens/s':>9} {'tokens/CPU s':>13}")
    for contestant, group in runs.items():
        start = statistics.median(run.start_seconds for run in group)
        print(
            f"{contestant:<44} {start:>8.1f} {group[0].tokens:>9,} "
            f"{_median(group, 'seconds'):>9,.0f} {_median(group, 'cpu_seconds'):>13,.0f}"
        )
    for clock, share in shares.items():
        print(f"by {clock}: the stage reaches {share:.1%} of the bare engine (mark: {MARK:.0%})")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_sampling_options(parser)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--transformers-prompts",
        type=int,
        default=32,
        help="prompts for the transformers backend, which is slow; 0 leaves it out",
    )
    parser.add_argument(
        "--clock",
        choices=["seconds", "cpu_seconds"],
        default="seconds",
        help="what the mark is measured by; CPU seconds where other programs share the machine",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of model, prompts and engine."""
    parser.add_argument("--model-shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--model", type=Path, help="a checkpoint in place of the shape")
    parser.add_argument("--prompts-of", type=Path, help="its prompts: JSON lines with `prompt`")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--num-samples", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--dtype", default="float32", help="bfloat16 on a GPU")
    parser.add_argument(
        "--python",
        type=Path,
        default=ROOT / ".venv-vllm/bin/python",
        help="interpreter of the environment that has vLLM",
    )
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder if unset")


if __name__ == "__main__":
    main()
