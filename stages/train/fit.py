"""Training on preference pairs, from tables to the next policy."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stages.contract.events import dump_json
from stages.modeling.load import DTYPES, load_config
from stages.modeling.logprobs import ResponseLogprobs
from stages.modeling.rope import require_static_rope
from stages.modeling.tokenizers import load_tokenizer, require_same_tokenizer
from stages.train import reference
from stages.train.data import Pair, PairBatch, RefLogprobs, load_pairs, pair_batches
from stages.train.objective import (
    MEASURED,
    PairObjective,
    kappa_controller,
    make_validation,
    objective_settings,
    split_by_prompt,
)
from stages.train.params import TrainParams
from stages.train.reference import save_average
from stages.training import fsdp
from stages.training.adapters import wear_adapters
from stages.training.batches import MicroBatches, make_plan
from stages.training.engine import Engine
from stages.training.fit import Fit
from stages.training.job import Job, Process
from stages.training.metrics_log import VALIDATION, MetricsLog, summarize
from stages.training.policy import checkpoint_dtype, compile_layers, load_logprob_model


class PairFit(Fit[TrainParams]):
    """Training of `policy` on `pairs`, with log π of `reference`."""

    def __init__(self, job: Job[TrainParams], process: Process) -> None:
        super().__init__(job, process)
        self._settings = objective_settings(job.params)
        self._kappa = kappa_controller(job.params)
        self.tokenizer = load_tokenizer(job.models["policy"])
        self._pairs, self._counts = load_pairs(job.files["pairs"], job.params)
        self._check_lengths()
        self._check_tokenizers()
        self._trained, self._validation = split_by_prompt(self._pairs, job.params.validation_share)
        self.plan = make_plan(
            self._trained,
            job.params,
            global_batch=job.params.global_batch_pairs,
            world_size=process.world_size,
            seed=job.seed,
        )
        self._loaded: ResponseLogprobs | None = None
        self._tell_counts()

    def prepare(self) -> None:
        """Computes log π_ref, or reads what an earlier attempt computed."""
        self._ref_logprobs = self._reference_logprobs()
        # Hooks of FSDP's and the reference that they are of hold each other.
        gc.collect()

    def load_model(self) -> ResponseLogprobs:
        """The policy; the reference's very model if their weights are the same."""
        model = self._loaded or self._load("policy")
        self._loaded = None
        return model

    def make_batches(self) -> MicroBatches[PairBatch, Pair]:
        """Micro-batches of pairs."""
        return pair_batches(self._ref_logprobs, self.plan, self.process.rank)

    def make_objective(self, engine: Engine) -> PairObjective:
        """L − κ · L_bonus + weighted NLL."""
        return PairObjective(
            engine,
            self.process,
            settings=self._settings,
            kappa=self._kappa,
            num_steps=self.plan.num_steps,
            iteration=self.job.params.iteration,
            validation=make_validation(
                self._validation,
                self._ref_logprobs,
                self.plan,
                rank=self.process.rank,
                every_steps=self.job.params.validation_every_steps,
            ),
        )

    def state(self) -> dict[str, Any]:
        """κ's calibration."""
        return {"kappa": self._kappa.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes κ's calibration."""
        self._kappa.load_state_dict(state["kappa"])

    def save_dtype(self) -> torch.dtype:
        """The one asked for, or the policy's."""
        dtype = self.job.params.save_dtype
        return checkpoint_dtype(self.job.models["policy"]) if dtype == "auto" else DTYPES[dtype]

    def after_saving(self) -> None:
        """Writes the moved average if the reference is one."""
        job = self.job
        if job.params.reference == "ema":
            self.process.events.info("writing the moved average of reference and policy")
            save_average(
                job.models["reference"],
                job.out / "checkpoint",
                self.tokenizer,
                decay=job.params.ema_decay,
                dtype=self.save_dtype(),
                folder=job.out / "ema",
                work=job.work,
            )

    def write_records(self, log: MetricsLog) -> None:
        """Writes log π_ref and the summary."""
        out = self.job.out
        reference.write_reference(
            out / "reference_logprobs.parquet", self._pairs, self._ref_logprobs
        )
        gap = reference.difference_to_sampler(self._pairs, self._ref_logprobs)
        if gap.mean is not None:
            self.process.events.info(
                f"log π_ref differs from the sampler's by {gap.mean:.2g} per token, "
                f"at most {gap.max:.2g}"
            )
        counts = self._counts
        summary = {
            "steps": self.plan.num_steps,
            "epochs": self.plan.epochs,
            "pairs": len(self._trained),
            "pairs_dropped": counts.read - counts.used,
            "pair_counts": asdict(counts),
            "kappa": log.records[-1]["kappa"],
            "reference_minus_sampler": asdict(gap),
            "metrics": summarize(log.records, epoch=self.plan.epochs, by="num_pairs"),
        }
        if self._validation:
            last = log.records[-1]
            summary["validation"] = {
                "pairs": len(self._validation),
                **{name: last[VALIDATION + name] for name in MEASURED},
            }
        (out / "summary.json").write_text(dump_json(summary))

    def _load(self, name: str) -> ResponseLogprobs:
        """A model of the job.

        Its adapter is worn, not merged: training goes on with it, and a reference of the same
        adapter computes the very same numbers.
        """
        params, source = self.job.params, self.job.models[name]
        base = replace(source, adapter=None)
        model = load_logprob_model(base, params, self.numerics)
        if source.adapter is None:
            return model
        return ResponseLogprobs(wear_adapters(model.policy, params.lora, Path(source.adapter)))

    @contextmanager
    def _reference_model(self) -> Iterator[nn.Module]:
        params, models = self.job.params, self.job.models
        if params.sharding == "fsdp2":
            # Draws no random numbers of the training's, which so is the same without a pass.
            with torch.random.fork_rng([]):
                model = self._load("reference").eval()
                if params.compile:
                    compile_layers(model.policy, stage=params.stage)
                fsdp.shard(model, self.numerics, params)
                yield model
            return
        if params.in_shards:
            from stages.training.zero import sharded_logprob_model

            with sharded_logprob_model(models["reference"], params, self.numerics) as engine:
                yield engine
            return
        whole = self._load("reference").eval()
        if params.compile:
            # As the policy is: its rounding, too, is to be the policy's.
            compile_layers(whole.policy, stage=params.stage)
        yield whole
        if models["policy"] == models["reference"] and params.deepspeed.zero_stage == "off":
            # The same weights: training starts from this very model.
            self._loaded = whole

    def _check_lengths(self) -> None:
        longest = max(pair.num_tokens for pair in self._pairs)
        for source in (self.job.models["policy"], self.job.models["reference"]):
            require_static_rope(
                load_config(source),
                source.name_or_path,
                longest=longest,
                remedy="set train.max_length_tokens={limit}",
            )

    def _check_tokenizers(self) -> None:
        models = self.job.models
        is_read = self.job.params.reference_logprobs == "model"
        if is_read and models["policy"] != models["reference"]:
            require_same_tokenizer(models["policy"], models["reference"])

    def _reference_logprobs(self) -> RefLogprobs:
        job = self.job
        if job.params.reference_logprobs == "sampler":
            return reference.sampler_logprobs(self._pairs)
        folder = job.work / "reference"
        reference.ReferencePass(
            load_model=self._reference_model,
            collective=job.params.in_shards,
            folder=folder,
            numerics=self.numerics,
            row_layout=job.params.row_layout,
            micro_batch_tokens=job.params.micro_batch_tokens,
            process=self.process,
        ).run(self._pairs)
        self.process.barrier()
        return reference.read_reference(folder)

    def _tell_counts(self) -> None:
        counts, longest = self._counts, self.job.params.max_length_tokens
        self.process.events.info(
            f"{counts.used} of {counts.read} pairs ({counts.ties} ties), "
            f"{self.plan.num_steps} steps of {self.plan.global_batch} pairs"
        )
        if self._validation:
            self.process.events.info(
                f"{len(self._validation)} of these pairs are for validation "
                f"(train.validation_share = {self.job.params.validation_share:g})"
            )
        if counts.truncated or counts.dropped_over_length:
            self.process.events.warning(
                f"{counts.truncated} pairs were cut and {counts.dropped_over_length} dropped: "
                f"longer than {longest} tokens"
            )
        if counts.dropped_empty:
            self.process.events.warning(
                f"{counts.dropped_empty} pairs dropped: an empty prompt or response"
            )
