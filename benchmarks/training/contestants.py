"""The contestants: each trains in a separate process and reports its cost.

    python -m benchmarks.training.contestants NAME JOB.json

A job is written by ``benchmarks.train_vs_trl``; the measurement is printed as one line of JSON.
"""

from __future__ import annotations

import io
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.inputs import file_input
from stages.contract.events import Emitter
from stages.contract.request import Resources, make_request
from stages.harness.program import execute
from stages.store.base import Store
from stages.tables.schemas import PAIRS, read_rows
from stages.train.params import TrainParams

BETA = 0.1
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class TrainingJob:
    """Task: the model and the pairs to train on.

    Attributes:
        model: Checkpoint of policy and reference.
        pairs: PAIRS table.
        folder: Where to work.
        batch_pairs: Pairs of a step.
        tokens_at_once: Our token budget.
        gpu: Train on the GPU, in bfloat16.
        lora_rank: Rank of adapters, 0 for full fine-tuning.
    """

    model: str
    pairs: str
    folder: str
    batch_pairs: int
    tokens_at_once: int
    gpu: bool
    lora_rank: int


@dataclass(frozen=True)
class Training:
    """Cost of a training.

    Attributes:
        seconds: From data in memory to the end of the last step, the reference's pass included.
        cpu_seconds: CPU time of all threads, in the same time; a busy machine changes it least.
        reference_seconds: Part of the seconds in the reference's own pass; 0 where there is none.
        peak_mib: Most memory of the process (of the GPU, where there is one).
        losses: Loss of each step.
        margins: Mean difference of the implicit rewards of each step.
        parts: Where our own time went, in seconds; empty for others.
        tflop: Floating-point operations that the model needs, ours only.
    """

    seconds: float
    cpu_seconds: float
    reference_seconds: float
    peak_mib: float
    losses: list[float]
    margins: list[float]
    parts: dict[str, float] = field(default_factory=dict)
    tflop: float = 0.0


class _Clock(Emitter):
    """An emitter that notes when what was said."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.said: list[tuple[float, float, Any]] = []

    def emit(self, event: Any) -> None:
        """Notes the time of an event."""
        self.said.append((time.perf_counter(), time.process_time(), event))


def _meta_policy(job: TrainingJob) -> Any:
    """The policy without storage; frozen under adapters, which do not count."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job.model))
    return policy.requires_grad_(not job.lora_rank)


def train_ours(job: TrainingJob, **changes: Any) -> Training:
    """The train stage, plain DPO, one epoch."""
    store = Path(job.folder) / "store"
    Store.in_folder(str(store), create=True)
    settings: dict[str, Any] = {
        "design": "none",
        "kappa": 0.0,
        "beta": BETA,
        "learning_rate": LEARNING_RATE,
        "lr_schedule": "linear",
        "warmup_ratio": 0.0,
        "epochs": 1,
        "global_batch_pairs": job.batch_pairs,
        "micro_batch_tokens": job.tokens_at_once,
        # As TRL's: by itself it would be bfloat16 on some processors.
        "precision": "bfloat16" if job.gpu else "float32",
        "gradient_checkpointing": job.gpu,
        "lora": {"rank": job.lora_rank},
    }
    inputs = {
        name: [file_input(Path(place))]
        for name, place in (("policy", job.model), ("reference", job.model), ("pairs", job.pairs))
    }
    request = make_request(
        TrainParams.model_validate(settings | changes),
        inputs=inputs,
        seed=0,
        store=str(store),
        resources=Resources(gpus=int(job.gpu)),
    )
    from stages.train.run import STAGE

    clock = _Clock()
    artifact = execute(STAGE, request, clock)
    start, cpu_start = next(
        (at, cpu) for at, cpu, event in clock.said if "pairs (" in getattr(event, "message", "")
    )
    passes = [at for at, _, event in clock.said if getattr(event, "unit", "") == "pairs"]
    end, cpu_end = max((at, cpu) for at, cpu, event in clock.said if event.type == "metric")
    records = [json.loads(line) for line in (artifact.path / "metrics.jsonl").open()]
    reference_seconds = passes[-1] - start if passes else 0.0
    steps_seconds = sum(record["step_seconds"] for record in records)
    from benchmarks.flops import step_tflop

    policy = _meta_policy(job)
    steps_tflop = sum(step_tflop(policy, record) for record in records)
    return Training(
        seconds=end - start,
        cpu_seconds=cpu_end - cpu_start,
        reference_seconds=reference_seconds,
        peak_mib=_peak_mib(job.gpu),
        losses=[record["loss"] for record in records],
        margins=[record["margin"] for record in records],
        parts={
            "reference": reference_seconds,
            "steps": steps_seconds,
            "rest": end - start - reference_seconds - steps_seconds,
        },
        # The reference's pass is a forward pass, a third of a step of full fine-tuning.
        tflop=steps_tflop * (4 / 3 if passes else 1.0),
    )


def train_trl(job: TrainingJob, *, precompute: bool, **changes: Any) -> Training:
    """TRL's DPOTrainer on the same pairs in the same order."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    from stages.train.data import load_pairs
    from stages.training.batches import Plan

    ours, _ = load_pairs([Path(job.pairs)], TrainParams())
    plan = Plan(ours, TrainParams(epochs=1), job.batch_pairs, world_size=1, seed=0)
    rows = list(read_rows(Path(job.pairs), PAIRS))
    order = [pair.index for step in range(plan.num_steps) for pair in plan.samples_of(step)]
    tokenizer: Any = AutoTokenizer.from_pretrained(job.model)
    # The tokenizer of one token per word needs a space between prompt and response.
    space = "" if tokenizer.decode(rows[0]["prompt_token_ids"]).endswith("\n") else " "

    def texts(row: dict[str, Any]) -> dict[str, str]:
        row_tokens = {"prompt": row["prompt_token_ids"]}
        # TRL adds the end of the sequence.
        row_tokens |= {side: row[f"{side}_token_ids"][:-1] for side in ("chosen", "rejected")}
        return {name: tokenizer.decode(ids) + space for name, ids in row_tokens.items()}

    dataset = Dataset.from_list([texts(rows[place]) for place in order])
    dtype = torch.bfloat16 if job.gpu else torch.float32
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype)
    options: dict[str, Any] = {
        "output_dir": str(Path(job.folder) / "trl"),
        "per_device_train_batch_size": job.batch_pairs,
        "num_train_epochs": 1,
        "beta": BETA,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "linear",
        "max_length": None,
        "bf16": job.gpu,
        "use_cpu": not job.gpu,
        "train_sampling_strategy": "sequential",
        "precompute_ref_log_probs": precompute,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    adapters = None
    if job.lora_rank:
        from peft import LoraConfig

        adapters = LoraConfig(r=job.lora_rank, lora_alpha=32, target_modules="all-linear")
    passes: list[_Taken] = []

    class Timed(DPOTrainer):
        """Takes the time of the reference's own pass."""

        def _precompute_ref_logps(self, *args: Any) -> Any:
            with _timed() as taken:
                dataset = super()._precompute_ref_logps(*args)
            passes.append(taken)
            return dataset

    trainer = Timed(
        model=model,
        args=DPOConfig(**options | changes),
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=adapters,
    )
    for read, place in zip(trainer.train_dataset, order, strict=True):
        for side in ("chosen", "rejected"):
            tokens = [*rows[place]["prompt_token_ids"], *rows[place][f"{side}_token_ids"]]
            assert [*read["prompt_ids"], *read[f"{side}_ids"]] == tokens, (
                "TRL trains on other tokens"
            )
    with _timed() as training:
        trainer.train()
    taken = [training, *passes]
    return Training(
        seconds=sum(step.seconds for step in taken),
        cpu_seconds=sum(step.cpu_seconds for step in taken),
        reference_seconds=sum(reference_pass.seconds for reference_pass in passes),
        peak_mib=_peak_mib(job.gpu),
        losses=[record["loss"] for record in trainer.state.log_history if "loss" in record],
        margins=[
            record["rewards/margins"] for record in trainer.state.log_history if "loss" in record
        ],
    )


@dataclass
class _Taken:
    seconds: float = 0.0
    cpu_seconds: float = 0.0


@contextmanager
def _timed() -> Iterator[_Taken]:
    taken = _Taken()
    started = time.perf_counter()
    cpu_started = time.process_time()
    yield taken
    taken.seconds = time.perf_counter() - started
    taken.cpu_seconds = time.process_time() - cpu_started


def _peak_mib(gpu: bool) -> float:
    if gpu:
        import torch

        return torch.cuda.max_memory_allocated() / 2**20
    # Linux gives the peak in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


CONTESTANTS: dict[str, Callable[[TrainingJob], Training]] = {
    "TRL, default": lambda job: train_trl(job, precompute=False),
    "TRL, reference precomputed": lambda job: train_trl(job, precompute=True),
    "ours": lambda job: train_ours(job),
    "TRL, no checkpointing": lambda job: train_trl(
        job, precompute=False, gradient_checkpointing=False
    ),
    "ours, checkpointing": lambda job: train_ours(job, gradient_checkpointing=True),
    "ours, padded rows": lambda job: train_ours(job, row_layout="padded"),
    "ours, bfloat16": lambda job: train_ours(job, precision="bfloat16"),
    "TRL, bfloat16": lambda job: train_trl(job, precompute=False, bf16=True),
}


def main() -> None:
    """Runs one contestant and prints its measurement."""
    output = os.fdopen(os.dup(1), "w")
    # What libraries print goes to the log.
    os.dup2(2, 1)
    job = TrainingJob(**json.loads(Path(sys.argv[2]).read_text()))
    training = CONTESTANTS[sys.argv[1]](job)
    print(json.dumps(asdict(training)), file=output, flush=True)


if __name__ == "__main__":
    main()
