"""Training and sampling on this machine's GPUs, beside published figures: a table and a JSON file.

    python -m benchmarks.gpu                              # writes gpu-benchmark.json
    python -m benchmarks.gpu --shapes llama-1b llama-8b --shards 2 3 --pairs 256 --prompts 2048

Random weights and made-up pairs of log-normal lengths; every stage is a program of its own, as in a
run. A GPU with little memory trains adapters (`--lora-rank 16`). Exit code 64 where there is no
GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.inputs import file_input
from benchmarks.training.shapes import SHAPES, Shape, make_model, make_pairs
from flows.planning.cost import GPUS
from flows.runners.local.gpus import gpus_of_this_host
from stages.contract.atomic import write_atomically
from stages.contract.errors import EXIT_USER
from stages.contract.request import FileInput, Request, Resources, make_request
from stages.generate.params import GenerateParams
from stages.store.base import Store
from stages.tables.schemas import PROMPTS, write_table
from stages.train.params import TrainParams
from stages.training.metrics import matmul_flops_per_second
from tests.gpu.programs import run_stage

# First steps, in which kernels are chosen and memory is taken, do not count.
_WARM_UP_STEPS = 2
_BATCH_PAIRS = 32
_MAX_NEW_TOKENS = 512
SHARDS: dict[str, dict[str, Any]] = {
    "off": {},
    **{str(stage): {"deepspeed": {"zero_stage": stage}} for stage in (1, 2, 3)},
}
"""Ways to split a training among processes: ZeRO's stages."""


@dataclass(frozen=True)
class Anchor:
    """A published figure, and what it was measured on."""

    name: str
    tokens_per_second_per_gpu: float | None = None
    pairs_per_second_per_gpu: float | None = None
    share_of_nominal: float | None = None


ANCHORS = (
    Anchor(
        "open-instruct, OLMo-2-7B DPO, 16 H100",
        tokens_per_second_per_gpu=5282,
        share_of_nominal=0.225,
    ),
    Anchor("prefix sharing, Zephyr-7B DPO, 8 H100", pairs_per_second_per_gpu=53.2 / 8),
    Anchor("NeMo-RL, 8B DPO, its gate", pairs_per_second_per_gpu=0.70),
    Anchor("torchtitan, Llama-3-8B pre-training, 8 H100", tokens_per_second_per_gpu=5762),
    Anchor("torchtitan, the same compiled", tokens_per_second_per_gpu=6667),
)


@dataclass(frozen=True)
class Measured:
    """One line of the table.

    Attributes:
        name: What was measured.
        tokens_per_second_per_gpu: Rate of training every response with its prompt, of sampling the
            response tokens.
        pairs_per_second_per_gpu: Preference pairs, of training.
        share_of_measured: Share of the rate of matrix products on this GPU.
        share_of_nominal: Share of the data sheet's rate, where the GPU is in its table.
        peak_memory_gib: Peak memory of the first process.
        last_loss: Loss of the last training step.
    """

    name: str
    tokens_per_second_per_gpu: float
    pairs_per_second_per_gpu: float | None = None
    share_of_measured: float | None = None
    share_of_nominal: float | None = None
    peak_memory_gib: float | None = None
    last_loss: float | None = None


def main() -> None:
    """Measures, prints the table and writes the file."""
    options = _options()
    gpus = len(gpus_of_this_host())
    if not gpus or not torch.cuda.is_available():
        print("torch finds no GPU on this machine", file=sys.stderr)
        sys.exit(EXIT_USER)
    rate = matmul_flops_per_second(torch.device("cuda"), torch.bfloat16)
    found: list[Measured] = []
    gpu = torch.cuda.get_device_name()
    report: dict[str, Any] = {
        "gpu": gpu,
        "gpus": gpus,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "cuda": torch.version.cuda,
        "matmul_tflops": rate / 1e12,
        "options": {name: str(value) for name, value in vars(options).items()},
        "published": [asdict(each) for each in ANCHORS],
    }
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        for each in keeping(options.output, report, _measure(Path(place), gpus, rate, options)):
            found.append(each)
            print(f"{each.name}: {each.tokens_per_second_per_gpu:,.0f} tokens/s/GPU", flush=True)
    print(f"\n{gpus} × {gpu}, {rate / 1e12:.0f} TFLOP/s of matrix products in bfloat16\n")
    print_table(found)
    print(f"\n{options.output.absolute()} has the same, to send back")


def keeping(
    output: Path, report: dict[str, Any], measured: Iterable[Measured]
) -> Iterator[Measured]:
    """Passes on what is measured, once the file has it: a later failure costs none of it.

    Args:
        output: The file.
        report: Fields of the file beside the figures.
        measured: The figures, measured as they are asked for.
    """
    found: list[Measured] = []
    for each in measured:
        found.append(each)
        values = report | {"measured": [asdict(one) for one in found]}
        write_atomically(output, json.dumps(values, indent=2) + "\n")
        yield each


def _measure(
    place: Path, gpus: int, rate: float, options: argparse.Namespace
) -> Iterator[Measured]:
    for shape in options.shapes:
        folder = place / shape
        make_model(SHAPES[shape], folder / "model")
        torch.cuda.empty_cache()
        make_pairs(SHAPES[shape], folder / "pairs.parquet", num_pairs=options.pairs, scale=1.0)
        for each in options.shards:
            yield _train(shape, each, folder, gpus, rate, options)
        if not options.train_only:
            yield _sample(shape, folder, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["llama-1b"])
    parser.add_argument("--pairs", type=int, default=256, help="preference pairs of a training")
    parser.add_argument("--prompts", type=int, default=1024, help="prompts to sample from")
    parser.add_argument("--train-only", action="store_true", help="for want of vLLM")
    parser.add_argument("--lora-rank", type=int, default=0, help="adapters; 0 trains all weights")
    parser.add_argument(
        "--shards",
        nargs="+",
        choices=list(SHARDS),
        default=["3"],
        help="ZeRO stages: a training each",
    )
    parser.add_argument("--folder", type=Path, help="where to work; needs room for checkpoints")
    parser.add_argument("--output", type=Path, default=Path("gpu-benchmark.json"))
    return parser.parse_args()


def train_params(shape: Shape, shards: str, lora_rank: int) -> TrainParams:
    """Settings of a training.

    Args:
        shape: The model's.
        shards: ZeRO's stage, or "off".
        lora_rank: Rank of adapters; 0 trains all weights.
    """
    return TrainParams(
        design="none",
        kappa=0.0,
        epochs=1,
        learning_rate=1e-6,
        global_batch_pairs=_BATCH_PAIRS,
        micro_batch_tokens=shape.tokens_at_once,
        checkpoint_every_seconds=None,
        lora={"rank": lora_rank},
        **SHARDS[shards],
    )


def _train(
    name: str, shards: str, folder: Path, gpus: int, rate: float, options: argparse.Namespace
) -> Measured:
    """Plain DPO of one epoch on all GPUs."""
    params = train_params(SHAPES[name], shards, options.lora_rank)
    # How weights are split is in no key: a store of its own, or the first training would do.
    work = folder / f"shards-{shards}"
    work.mkdir()
    model = file_input(folder / "model")
    inputs = {"policy": model, "reference": model, "pairs": file_input(folder / "pairs.parquet")}
    artifact = run_stage(_request(params, inputs, work, gpus), work / "train.json")
    lines = (artifact / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][_WARM_UP_STEPS:]
    seconds = sum(step["step_seconds"] for step in steps)
    tflop = sum(step["model_tflop"] for step in steps)
    pairs = len(steps) * _BATCH_PAIRS
    per_gpu = 1e12 * tflop / seconds / gpus
    nominal = _nominal_rate()
    return Measured(
        name=f"train, {name}, ZeRO {shards}, LoRA rank {options.lora_rank}",
        tokens_per_second_per_gpu=sum(step["num_tokens"] for step in steps) / seconds / gpus,
        pairs_per_second_per_gpu=pairs / seconds / gpus,
        share_of_measured=per_gpu / rate,
        share_of_nominal=None if nominal is None else per_gpu / nominal,
        peak_memory_gib=max(step["peak_memory_mib"] for step in steps) / 1024,
        last_loss=steps[-1]["loss"],
    )


def _sample(name: str, folder: Path, options: argparse.Namespace) -> Measured:
    """One shard on vLLM, an engine for each GPU."""
    write_table(
        folder / "prompts.parquet",
        PROMPTS,
        (
            {
                "prompt_id": f"prompt-{index}",
                "messages": [{"role": "user", "content": " ".join([f"w{index + 1}"] * 150)}],
                "reference_answer": None,
            }
            for index in range(options.prompts)
        ),
    )
    params = GenerateParams(backend="vllm", num_samples=2, max_new_tokens=_MAX_NEW_TOKENS)
    inputs = {
        "policy": file_input(folder / "model"),
        "prompts": file_input(folder / "prompts.parquet"),
    }
    artifact = run_stage(_request(params, inputs, folder, 1), folder / "generate.json", vllm=True)
    timings = json.loads((artifact / "timings.json").read_text())
    tokens = json.loads((artifact / "metrics.json").read_text())["response_tokens"]
    seconds = timings["seconds"] - timings["start_seconds"]
    return Measured(f"generate, {name}, vLLM, one engine", tokens / seconds)


def _request(params: Any, inputs: dict[str, FileInput], folder: Path, gpus: int) -> Request:
    Store.open(str(folder / "store"), create=True)
    return make_request(
        params,
        inputs={name: [each] for name, each in inputs.items()},
        seed=0,
        store=str(folder / "store"),
        resources=Resources(gpus=gpus),
    )


def _nominal_rate() -> float | None:
    """The data sheet's rate in bfloat16 of this GPU, or None where it is in no table."""
    name = torch.cuda.get_device_name().lower()
    return next(
        (device.bfloat16 for key, device in GPUS.items() if key.split("-")[0] in name), None
    )


def print_table(found: list[Measured]) -> None:
    """Prints what was measured, and the published figures below."""
    print("| | tok/s/GPU | pairs/s/GPU | of measured rate | of nominal rate | peak GiB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for each in found:
        cells = (
            f"{each.tokens_per_second_per_gpu:,.0f}",
            _shown(each.pairs_per_second_per_gpu, ".2f"),
            _shown(each.share_of_measured, ".1%"),
            _shown(each.share_of_nominal, ".1%"),
            _shown(each.peak_memory_gib, ".1f"),
        )
        print(f"| {each.name} | {' | '.join(cells)} |")
    for anchor in ANCHORS:
        cells = (
            _shown(anchor.tokens_per_second_per_gpu, ",.0f"),
            _shown(anchor.pairs_per_second_per_gpu, ".2f"),
            "",
            _shown(anchor.share_of_nominal, ".1%"),
            "",
        )
        print(f"| *{anchor.name}* | {' | '.join(cells)} |")


def _shown(value: float | None, kind: str) -> str:
    return "" if value is None else format(value, kind)


if __name__ == "__main__":
    main()
