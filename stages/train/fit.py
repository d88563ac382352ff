"""One process of a training, from pairs to checkpoint."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from stages.contract.events import dump_json
from stages.modeling.load import DTYPES, load_config, load_tokenizer
from stages.modeling.logprobs import ResponseLogprobs, causal_lm
from stages.modeling.rope import require_static_rope
from stages.modeling.save import save_checkpoint
from stages.train import checkpoints, metrics_log, reference
from stages.train.adapters import add_adapters
from stages.train.arguments import trainer_seed, training_arguments
from stages.train.batches import MicroBatches, Plan, RefLogprobs
from stages.train.callbacks import CheckpointSchedule, StepReporter
from stages.train.data import load_pairs
from stages.train.job import Job, Process
from stages.train.memory import OutOfMemoryError, is_out_of_memory
from stages.train.numerics import Numerics, repeatable
from stages.train.policy import (
    checkpoint_dtype,
    enable_gradient_checkpointing,
    load_logprob_model,
)
from stages.train.resuming import ResumePoint, find_resume_point, layout_of
from stages.train.saving import policy_weights, save_average
from stages.train.settings import check_trackers, kappa_controller, objective_settings
from stages.train.timing import matmul_flops_per_second
from stages.train.trainer import PairTrainer

METRICS = "metrics.jsonl"


def fit(job: Job, process: Process) -> None:
    """Trains the policy of a job; every process of the job calls this.

    Raises:
        UserError: Parameters, models or pairs are wrong.
        OutOfMemoryError: It did not fit into memory.
    """
    try:
        with repeatable(on_gpu=job.on_gpu):
            _Fit(job, process).run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = str(error).strip().partition("\n")[0]
        raise OutOfMemoryError(said or type(error).__name__) from None


class _Fit:
    """The steps of one training, in the order of :meth:`run`."""

    def __init__(self, job: Job, process: Process) -> None:
        params = job.params
        self._job = job
        self._process = process
        check_trackers(params.report_to)
        self._settings = objective_settings(params)
        self._kappa = kappa_controller(params)
        self._numerics = Numerics.of(params, on_gpu=job.on_gpu, local_rank=process.local_rank)
        self._tokenizer = load_tokenizer(job.policy)
        self._pairs, self._counts = load_pairs(job.pairs, params)
        self._check_lengths()
        self._plan = Plan(
            pairs=self._pairs,
            epochs=params.epochs,
            global_batch=params.global_batch_pairs,
            world_size=process.world_size,
            seed=job.seed,
            row_layout=params.row_layout,
            micro_batch_tokens=params.micro_batch_tokens,
        )
        self._loaded: ResponseLogprobs | None = None

    def run(self) -> None:
        self._tell_counts()
        set_seed(trainer_seed(self._job))
        ref_logprobs = self._reference_logprobs()
        resumed = self._resume_point()
        log = None
        if self._process.is_first:
            step = resumed.checkpoint.step if resumed else 0
            log = metrics_log.MetricsLog(self._job.work / METRICS, resumed_step=step)
        trainer = self._trainer(ref_logprobs, log, resumed)
        self._process.check_stop()
        trainer.train(resume_from_checkpoint=str(resumed.checkpoint.path) if resumed else None)
        # The last checkpoint is there: nothing is lost if the weights are not written.
        self._process.check_stop()
        self._save(trainer)
        if log is not None:
            log.close()
            self._write_records(ref_logprobs, log)

    def _check_lengths(self) -> None:
        longest = max(pair.num_tokens for pair in self._pairs)
        for source in (self._job.policy, self._job.reference):
            require_static_rope(
                load_config(source),
                source.name_or_path,
                longest=longest,
                remedy="set train.max_length_tokens={limit}",
            )

    def _reference_logprobs(self) -> RefLogprobs:
        job = self._job
        if job.params.reference_logprobs == "sampler":
            return reference.sampler_logprobs(self._pairs)
        folder = job.work / "reference"
        reference.compute_reference(
            self._pairs,
            self._reference_model,
            folder=folder,
            numerics=self._numerics,
            row_layout=job.params.row_layout,
            micro_batch_tokens=job.params.micro_batch_tokens,
            process=self._process,
        )
        self._process.barrier()
        return reference.read_reference(folder)

    def _reference_model(self) -> ResponseLogprobs:
        model = load_logprob_model(self._job.reference, self._numerics, self._job.params.row_layout)
        if self._job.same_model and self._job.params.deepspeed.zero_stage == "off":
            # The same weights: training starts from this very model.
            self._loaded = model
        return model

    def _policy(self) -> ResponseLogprobs:
        model = self._loaded or load_logprob_model(
            self._job.policy, self._numerics, self._job.params.row_layout
        )
        self._loaded = None
        if self._job.params.lora.rank:
            model = ResponseLogprobs(add_adapters(model.policy, self._job.params.lora))
        if self._job.params.gradient_checkpointing:
            enable_gradient_checkpointing(model.policy)
        return model

    def _resume_point(self) -> ResumePoint | None:
        found = find_resume_point(self._checkpoints(), self._layout(), self._process)
        if found is not None:
            self._kappa.load_state_dict(found.checkpoint.state["kappa"])
        return found

    def _layout(self) -> dict[str, Any]:
        return layout_of(self._job.params.deepspeed.zero_stage, self._process)

    def _trainer(
        self,
        ref_logprobs: RefLogprobs,
        log: metrics_log.MetricsLog | None,
        resumed: ResumePoint | None,
    ) -> PairTrainer:
        params, process = self._job.params, self._process
        # Before the policy is loaded: under ZeRO-3 they make `from_pretrained` shard the weights.
        arguments = training_arguments(
            self._job,
            process,
            self._plan,
            self._numerics,
            load_universal=resumed is not None and resumed.is_universal,
        )
        callbacks: list[Any] = []
        if log is not None:
            dtype = torch.bfloat16 if self._numerics.bfloat16 else torch.float32
            rate = matmul_flops_per_second(self._numerics.device, dtype) * process.world_size
            callbacks.append(StepReporter(process, log, self._plan, peak_flops=rate))
        callbacks.append(
            CheckpointSchedule(
                process,
                every_steps=params.checkpoint_every_steps,
                every_seconds=params.checkpoint_every_seconds,
            )
        )
        return PairTrainer(
            model=self._policy(),
            args=arguments,
            batches=MicroBatches(ref_logprobs, self._plan, process.rank),
            plan=self._plan,
            settings=self._settings,
            kappa=self._kappa,
            iteration=params.iteration,
            publish=lambda written: self._publish(written, log),
            callbacks=callbacks,
        )

    def _checkpoints(self) -> Path:
        return self._job.work / "checkpoints"

    def _publish(self, written: Path, log: metrics_log.MetricsLog | None) -> None:
        """Makes a written checkpoint count, after the records of the steps that led to it."""
        if log is not None:
            log.sync()
        state = {"kappa": self._kappa.state_dict(), "layout": self._layout()}
        checkpoints.publish_checkpoint(written, state, self._checkpoints())

    def _save(self, trainer: PairTrainer) -> None:
        job = self._job
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        if self._process.is_first:
            dtype = job.params.save_dtype
            chosen = checkpoint_dtype(job.policy) if dtype == "auto" else dtype
            folder = job.out / "checkpoint"
            # Under ZeRO-3 transformers would go on sharding, and only one process is here.
            unset_hf_deepspeed_config()
            policy = trainer.model.policy
            weights = policy_weights(policy, state)
            save_checkpoint(causal_lm(policy), weights, self._tokenizer, DTYPES[chosen], folder)
            if job.params.reference == "ema":
                save_average(
                    job.reference,
                    folder,
                    self._tokenizer,
                    decay=job.params.ema_decay,
                    dtype=chosen,
                    folder=job.out / "ema",
                )
        self._process.barrier()

    def _write_records(self, ref_logprobs: RefLogprobs, log: metrics_log.MetricsLog) -> None:
        out = self._job.out
        reference.write_reference(out / "reference_logprobs.parquet", self._pairs, ref_logprobs)
        shutil.copyfile(self._job.work / METRICS, out / METRICS)
        gap = reference.difference_to_sampler(self._pairs, ref_logprobs)
        if gap.mean is not None:
            self._process.events.info(
                f"log π_ref differs from the sampler's by {gap.mean:.2g} per token, "
                f"at most {gap.max:.2g}"
            )
        counts = self._counts
        summary = {
            "steps": self._plan.num_steps,
            "epochs": self._plan.epochs,
            "pairs": counts.used,
            "pairs_dropped": counts.read - counts.used,
            "pair_counts": asdict(counts),
            "kappa": log.records[-1]["kappa"],
            "reference_minus_sampler": asdict(gap),
            "metrics": metrics_log.summarize(log.records, epoch=self._plan.epochs),
        }
        (out / "summary.json").write_text(dump_json(summary))

    def _tell_counts(self) -> None:
        counts, longest = self._counts, self._job.params.max_length_tokens
        self._process.events.info(
            f"{counts.used} of {counts.read} pairs ({counts.ties} ties), "
            f"{self._plan.num_steps} steps of {self._plan.global_batch} pairs"
        )
        if counts.truncated or counts.dropped_over_length:
            self._process.events.warning(
                f"{counts.truncated} pairs were cut and {counts.dropped_over_length} dropped: "
                f"longer than {longest} tokens"
            )
        if counts.dropped_empty:
            self._process.events.warning(
                f"{counts.dropped_empty} pairs dropped: an empty prompt or response"
            )
