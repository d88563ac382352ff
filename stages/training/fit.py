"""One process of a training, from samples to checkpoint."""

from __future__ import annotations

import contextlib
import shutil
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import Any, Generic

import torch
from torch import Tensor
from transformers import set_seed

from stages.contract.digests import derive_seed
from stages.modeling.engines import is_out_of_memory
from stages.modeling.file_backed import in_files
from stages.modeling.logprobs import ResponseLogprobs, causal_lm
from stages.modeling.save import save_checkpoint, save_tokenizer
from stages.training import checkpoints, fsdp
from stages.training.adapters import add_adapters, has_adapters, merge_adapters, save_adapters
from stages.training.batches import MicroBatches, Plan
from stages.training.checkpoints import ResumePoint, find_resume_point, layout_of
from stages.training.engine import Engine
from stages.training.job import Job, P, Process
from stages.training.loop import Objective, Outputs, TrainingLoop
from stages.training.metrics_log import METRICS, MetricsLog, StepReporter, Trackers, check_trackers
from stages.training.policy import (
    Numerics,
    compile_layers,
    enable_gradient_checkpointing,
    repeatable,
    uncompiled,
)
from stages.training.start import OutOfMemoryError
from stages.training.timing import matmul_flops_per_second


class Fit(ABC, Generic[P]):
    """The steps of one training, in the order of :meth:`run`; a subclass gives data and loss.

    Every process of the job makes one.

    Args:
        job: The training.
        process: This process.

    Attributes:
        tokenizer: Saved beside the policy; set by the subclass.
        plan: Samples of each step; set by the subclass.
    """

    tokenizer: Any
    plan: Plan[Any]

    def __init__(self, job: Job[P], process: Process) -> None:
        self.job = job
        self.process = process
        check_trackers(job.params.report_to)
        self.numerics = Numerics.of(job.params, on_gpu=job.on_gpu, local_rank=process.local_rank)

    @abstractmethod
    def load_model(self) -> ResponseLogprobs:
        """The policy before training; with adapters only if it goes on training earlier ones."""

    @abstractmethod
    def make_batches(self) -> MicroBatches[Any, Any]:
        """All micro-batches of this process."""

    @abstractmethod
    def make_objective(self, engine: Engine) -> Objective[Any]:
        """The stage's loss of what an engine computes."""

    @abstractmethod
    def save_dtype(self) -> torch.dtype:
        """Dtype of the saved weights."""

    @abstractmethod
    def write_records(self, log: MetricsLog) -> None:
        """Writes the artifact's tables and summary; called on the first process."""

    def prepare(self) -> None:
        """Computes what the first step needs; nothing by default."""

    def state(self) -> dict[str, Any]:
        """State that a checkpoint keeps beside weights and optimizer."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`state` gave."""

    def after_saving(self) -> None:
        """Called on the first process when the policy is written."""

    def run(self) -> None:
        """Trains, and writes the artifact's files.

        Raises:
            UserError: Parameters, models or data are wrong.
            OutOfMemoryError: It did not fit into memory.
        """
        self._seed_libraries()
        self.prepare()
        resumed = find_resume_point(self._checkpoints, self._layout, self.process)
        if resumed is not None:
            self.load_state(resumed.checkpoint.state)
        start = resumed.checkpoint.path if resumed else None
        log = MetricsLog(self.job.work / METRICS, resumed=start) if self.process.is_first else None
        with contextlib.ExitStack() as closing:
            if log is not None:
                closing.callback(log.close)
            engine = self._engine(resumed)
            loop = TrainingLoop(
                engine,
                self.make_objective(engine),
                self.make_batches(),
                self.plan,
                self.process,
                self.job.params,
                self._outputs(log, closing),
            )
            self.process.check_stop()
            if start is not None:
                engine.load(start)
            loop.run(resumed.checkpoint.step if resumed else 0, start)
        # The last checkpoint is there: nothing is lost if the weights are not written.
        self.process.check_stop()
        self._save(engine)
        if log is not None:
            log.write_to(self.job.out)
            self.write_records(log)

    @property
    def _checkpoints(self) -> Path:
        return self.job.work / "checkpoints"

    @property
    def _layout(self) -> dict[str, Any]:
        return layout_of(self.job.params, self.process)

    def _seed_libraries(self) -> None:
        # They take 32 bits.
        set_seed(derive_seed(self.job.seed, "train") % 2**32)

    def _engine(self, resumed: ResumePoint | None) -> Engine:
        """Model, optimizer and schedule, in shards if the parameters say so."""
        params, made = self.job.params, (self.job.params, self.plan, self.numerics, self.process)
        if params.deepspeed.zero_stage == "off":
            model = self._policy()
            self._seed_libraries()
            return (fsdp.FsdpEngine if params.sharding == "fsdp2" else Engine)(model, *made)
        from stages.training import zero

        universal = resumed is not None and resumed.is_universal
        self.process.events.info(
            f"DeepSpeed ZeRO-{params.deepspeed.zero_stage}, world size {self.process.world_size}"
        )
        config = zero.training_config(params, self.plan, self.numerics, load_universal=universal)
        with zero.sharded_loading(config):
            model = self._policy()
        self._seed_libraries()
        return zero.ZeroEngine(model, *made, config)

    def _outputs(self, log: MetricsLog | None, closing: contextlib.ExitStack) -> Outputs:
        """Where records and checkpoints go; trackers end with ``closing``."""
        written = self.job.work / "writing"
        if self.process.is_first:
            shutil.rmtree(written, ignore_errors=True)

        def publish(checkpoint: Path) -> None:
            """Makes a checkpoint count, with the records of the steps that led to it."""
            assert log is not None, "another process than the first publishes a checkpoint"
            log.write_to(checkpoint)
            state = self.state() | {"layout": self._layout}
            checkpoints.publish_checkpoint(checkpoint, state, self._checkpoints)

        return Outputs(
            reporter=None if log is None else self._reporter(log, closing),
            make_room=partial(checkpoints.make_room, self._checkpoints),
            publish=publish,
            folder=written,
        )

    def _reporter(self, log: MetricsLog, closing: contextlib.ExitStack) -> StepReporter:
        dtype = torch.bfloat16 if self.numerics.bfloat16 else torch.float32
        rate = matmul_flops_per_second(self.numerics.device, dtype) * self.process.world_size
        trackers = Trackers(self.job, self.plan.num_steps) if self.job.params.report_to else None
        if trackers is not None:
            closing.callback(trackers.close)
        return StepReporter(self.process.events, log, self.plan, peak_flops=rate, trackers=trackers)

    def _policy(self) -> ResponseLogprobs:
        params = self.job.params
        model = self.load_model()
        # The reference's very model is compiled already.
        with uncompiled(compiles=params.compile):
            if params.lora.rank and not has_adapters(model.policy):
                model = ResponseLogprobs(add_adapters(model.policy, params.lora))
            if params.gradient_checkpointing:
                enable_gradient_checkpointing(model.policy, stage=params.stage)
        if params.compile:
            compile_layers(model.policy, stage=params.stage)
        if params.sharding == "fsdp2":
            fsdp.shard(model, self.numerics, params)
        return model

    def _save(self, engine: Engine) -> None:
        # Adapters are merged before the weights are rounded.
        dtype = None if self.job.params.lora.rank else self.save_dtype()
        weights = engine.whole_weights(in_files(self.job.work), dtype)
        if self.process.is_first:
            self._write(engine.model.policy, weights)
            # The average takes as much memory.
            del weights
            self.after_saving()
        self.process.barrier()

    def _write(self, policy: Any, weights: dict[str, Tensor]) -> None:
        """Writes the checkpoint, and adapters in its place or beside it."""
        out, kept = self.job.out, self.job.params.lora.save
        if kept == "adapter":
            save_adapters(policy, weights, self.job.models["policy"], out / "checkpoint")
            save_tokenizer(self.tokenizer, out / "checkpoint")
            return
        whole, dtype = merge_adapters(policy, weights), self.save_dtype()
        save_checkpoint(causal_lm(policy), whole, self.tokenizer, dtype, out / "checkpoint")
        if kept == "both":
            save_adapters(policy, weights, self.job.models["policy"], out / "adapter")


def run_fit(fit: type[Fit[P]], job: Job[P], process: Process) -> None:
    """Trains, on the CPU to the same bytes each time; explains want of memory.

    Raises:
        UserError: Parameters, models or data are wrong.
        OutOfMemoryError: It did not fit into memory.
    """
    try:
        with repeatable(on_gpu=job.on_gpu):
            fit(job, process).run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = str(error).strip().partition("\n")[0]
        raise OutOfMemoryError(said or type(error).__name__) from None
