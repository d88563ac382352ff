"""One process of a training, from samples to checkpoint."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import Any, Generic

import torch
from torch import Tensor
from transformers import set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from stages.modeling.file_backed import in_files
from stages.modeling.logprobs import ResponseLogprobs, causal_lm
from stages.modeling.out_of_memory import is_out_of_memory
from stages.modeling.save import save_checkpoint, save_tokenizer
from stages.training import checkpoints, fsdp
from stages.training.adapters import (
    add_adapters,
    has_adapters,
    merge_adapters,
    save_adapters,
    weights_of_policy,
)
from stages.training.arguments import check_trackers, trainer_seed, training_arguments
from stages.training.batches import Plan
from stages.training.callbacks import CheckpointSchedule, StepReporter
from stages.training.compiled import compile_layers, uncompiled
from stages.training.job import Job, P, Process
from stages.training.memory import OutOfMemoryError
from stages.training.metrics_log import METRICS, MetricsLog
from stages.training.numerics import Numerics, repeatable
from stages.training.policy import enable_gradient_checkpointing
from stages.training.resuming import ResumePoint, find_resume_point, layout_of
from stages.training.timing import matmul_flops_per_second
from stages.training.trainer import PackedTrainer, Setup


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
        """The policy before training; with adapters only where it goes on with those of before."""

    @abstractmethod
    def make_trainer(self, setup: Setup) -> PackedTrainer[Any]:
        """The trainer with the stage's loss."""

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
        set_seed(trainer_seed(self.job))
        self.prepare()
        resumed = find_resume_point(self._checkpoints, self._layout, self.process)
        if resumed is not None:
            self.load_state(resumed.checkpoint.state)
        start = resumed.checkpoint.path if resumed else None
        log = MetricsLog(self.job.work / METRICS, resumed=start) if self.process.is_first else None
        with contextlib.closing(log) if log is not None else contextlib.nullcontext():
            trainer = self._trainer(log, resumed)
            self.process.check_stop()
            trainer.train(resume_from_checkpoint=str(start) if start else None)
        # The last checkpoint is there: nothing is lost if the weights are not written.
        self.process.check_stop()
        self._save(trainer)
        if log is not None:
            log.write_to(self.job.out)
            self.write_records(log)

    @property
    def _checkpoints(self) -> Any:
        return self.job.work / "checkpoints"

    @property
    def _layout(self) -> dict[str, Any]:
        return layout_of(self.job.params, self.process)

    def _trainer(self, log: MetricsLog | None, resumed: ResumePoint | None) -> PackedTrainer[Any]:
        params, process = self.job.params, self.process
        # Before the policy is loaded: under ZeRO-3 they make `from_pretrained` shard the weights.
        arguments = training_arguments(
            self.job,
            process,
            self.plan,
            self.numerics,
            load_universal=resumed is not None and resumed.is_universal,
        )
        callbacks: list[Any] = []
        if log is not None:
            dtype = torch.bfloat16 if self.numerics.bfloat16 else torch.float32
            rate = matmul_flops_per_second(self.numerics.device, dtype) * process.world_size
            callbacks.append(StepReporter(process, log, self.plan, peak_flops=rate))
        callbacks.append(
            CheckpointSchedule(
                process,
                every_steps=params.checkpoint_every_steps,
                every_seconds=params.checkpoint_every_seconds,
            )
        )

        def publish(written: Any) -> None:
            """Makes a checkpoint count, with the records of the steps that led to it."""
            if log is not None:
                log.write_to(written)
            state = self.state() | {"layout": self._layout}
            checkpoints.publish_checkpoint(written, state, self._checkpoints)

        return self.make_trainer(
            Setup(
                model=self._policy(),
                args=arguments,
                plan=self.plan,
                make_room=lambda: checkpoints.make_room(self._checkpoints),
                publish=publish,
                callbacks=callbacks,
            )
        )

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

    def _save(self, trainer: PackedTrainer[Any]) -> None:
        gathered = self._whole_weights(trainer)
        if self.process.is_first:
            weights = weights_of_policy(gathered)
            # Under ZeRO-3 transformers would go on sharding, and only one process is here.
            unset_hf_deepspeed_config()
            self._write(trainer.model.policy, weights)
            # The average takes as much memory.
            del gathered, weights
            self.after_saving()
        self.process.barrier()

    def _whole_weights(self, trainer: PackedTrainer[Any]) -> dict[str, Tensor]:
        """All weights, gathered to the first process; a collective call.

        The others may have some of them, or under ZeRO-3 none at all.
        """
        if self.job.params.sharding != "fsdp2":
            gathered: dict[str, Tensor] = trainer.accelerator.get_state_dict(trainer.model_wrapped)
            return gathered
        # Adapters are merged before the weights are rounded.
        dtype = None if self.job.params.lora.rank else self.save_dtype()
        place = in_files(self.job.work) if self.process.is_first else None
        return fsdp.whole_weights(trainer.model, place=place, dtype=dtype)

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
