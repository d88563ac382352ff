"""One process of a training, from samples to checkpoint."""

import importlib
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Generic

import torch
from torch import Tensor
from transformers import set_seed

from stages.contract.digests import derive_seed
from stages.harness.context import ModelSource, StageContext
from stages.modeling.engine_errors import is_out_of_memory
from stages.modeling.load import load_config
from stages.modeling.logprobs import ResponseLogprobs, causal_lm
from stages.modeling.probe import require_static_rope
from stages.modeling.save import save_checkpoint, save_tokenizer
from stages.training import checkpoints
from stages.training.adapters import (
    add_adapters,
    has_adapters,
    leave_casts_to_autocast,
    merge_adapters,
    save_adapters,
)
from stages.training.batches import Batch, MicroBatches, Plan, S
from stages.training.engine import Engine, Process
from stages.training.launch import OutOfMemoryError, P
from stages.training.loop import Objective, TrainingLoop
from stages.training.metrics import METRICS, StepLog, matmul_flops_per_second
from stages.training.policy import Numerics, enable_gradient_checkpointing, repeatable


class Fit(ABC, Generic[P]):
    """The steps of one training, in the order of :meth:`run`; a subclass gives data and loss.

    Every process of the training makes one. The subclass sets the plan, and the tokenizer that is
    saved beside the policy.
    """

    tokenizer: Any
    plan: Plan[Any]

    def __init__(self, ctx: StageContext[P], process: Process) -> None:
        self.ctx = ctx
        self.process = process
        self.numerics = Numerics.of(
            ctx.params, on_gpu=ctx.request.resources.gpus > 0, local_rank=process.local_rank
        )
        self._checkpoints = ctx.work / "checkpoints"
        self._layout = checkpoints.layout_of(ctx.params, process)

    @abstractmethod
    def load_model(self) -> ResponseLogprobs:
        """The policy before training; with adapters only if it goes on training earlier ones."""

    @abstractmethod
    def make_objective(self, engine: Engine) -> Objective[Any]:
        """The stage's loss of what an engine computes."""

    @abstractmethod
    def save_dtype(self) -> torch.dtype:
        """Dtype of the saved weights."""

    @abstractmethod
    def write_records(self, log: StepLog) -> None:
        """Writes all but checkpoint and metrics; called on the first process."""

    def make_batch(self, samples: Sequence[Any], **fields: Any) -> Batch:
        """A micro-batch of samples and of the fields of :class:`Batch`."""
        return Batch(**fields)

    def prepare(self) -> None:
        """Computes what the first step needs; nothing by default."""

    def state(self) -> dict[str, Any]:
        """State that a checkpoint keeps beside weights and optimizer."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`state` gave."""

    def run(self) -> None:
        """Trains, and writes the artifact's files."""
        self._seed_libraries()
        self.prepare()
        resumed = checkpoints.find_resume_point(self._checkpoints, self._layout, self.process)
        if resumed is not None:
            self.load_state(resumed.state)
        engine = self._engine(resumed)
        log = self._log(resumed) if self.process.is_first else None
        loop = TrainingLoop(
            engine,
            self.make_objective(engine),
            MicroBatches(self.plan, self.process.rank, self.make_batch),
            self.process,
            log,
            partial(self._save_checkpoint, engine, log),
            resumed.step if resumed else 0,
        )
        self.process.check_stop()
        if resumed is not None:
            engine.load(resumed.path)
            engine.schedule.load_state_dict(resumed.state["schedule"])
            checkpoints.load_random_state(resumed.path, self.process, engine.device)
        loop.run()
        # The last checkpoint is there: nothing is lost if the weights are not written.
        self.process.check_stop()
        weights = engine.whole_weights()
        if log is not None:
            self._write(engine.model.policy, weights)
            # What else is written may take as much memory.
            del weights
            log.write_to(self.ctx.out)
            self.write_records(log)
        self.process.barrier()

    def check_lengths(self, sources: Iterable[ModelSource]) -> None:
        """Refuses samples so long that they would change those beside them."""
        longest = max(sample.num_tokens for sample in self.plan.samples)
        for source in sources:
            require_static_rope(
                load_config(source),
                source.name_or_path,
                longest=longest,
                remedy=f"set {self.ctx.params.stage}.max_length_tokens={{limit}}",
            )

    def plan_of(self, samples: Sequence[S], *, global_batch: int) -> Plan[S]:
        """The plan of a training on samples, for the subclass."""
        world_size = self.process.world_size
        return Plan(samples, self.ctx.params, global_batch, world_size, seed=self.ctx.request.seed)

    def _seed_libraries(self) -> None:
        # They take 32 bits.
        set_seed(derive_seed(self.ctx.request.seed, "train") % 2**32)

    def _engine(self, resumed: checkpoints.Checkpoint | None) -> Engine:
        """Model, optimizer and schedule, in shards if the parameters say so."""
        made = self.plan, self.numerics, self.process
        zero_stage = self.ctx.params.deepspeed.zero_stage
        if zero_stage == "off":
            model = self._policy()
            self._seed_libraries()
            return Engine(model, *made)
        from stages.training import zero

        universal = resumed is not None and resumed.state["layout"] != self._layout
        self.process.events.info(
            f"DeepSpeed ZeRO-{zero_stage}, world size {self.process.world_size}"
        )
        config = zero.training_config(self.plan, self.numerics, load_universal=universal)
        with zero.sharded_loading(config):
            model = self._policy()
        self._seed_libraries()
        return zero.ZeroEngine(model, *made, config)

    def _log(self, resumed: checkpoints.Checkpoint | None) -> StepLog:
        dtype = torch.bfloat16 if self.numerics.bfloat16 else torch.float32
        rate = matmul_flops_per_second(self.numerics.device, dtype) * self.process.world_size
        return StepLog(
            self.ctx.work / METRICS,
            resumed.path if resumed else None,
            self.process.events,
            self.plan,
            peak_flops=rate,
        )

    def _save_checkpoint(self, engine: Engine, log: StepLog | None, done: int) -> None:
        """Writes a checkpoint, which counts once it is whole; a collective call."""
        writing = self.ctx.work / "writing"
        if self.process.is_first:
            # An attempt that was killed may have left files of another layout.
            shutil.rmtree(writing, ignore_errors=True)
            checkpoints.make_room(self._checkpoints)
        self.process.barrier()
        folder = writing / f"checkpoint-{done}"
        folder.mkdir(parents=True, exist_ok=True)
        engine.save(folder)
        checkpoints.save_random_state(folder, self.process, engine.device)
        self.process.barrier()
        if log is not None:
            # With the records of the steps that led to it.
            log.write_to(folder)
            own = {"layout": self._layout, "schedule": engine.schedule.state_dict()}
            checkpoints.publish_checkpoint(folder, self.state() | own, self._checkpoints)

    def _policy(self) -> ResponseLogprobs:
        params = self.ctx.params
        model = self.load_model()
        if params.lora.rank and not has_adapters(model.policy):
            model = ResponseLogprobs(add_adapters(model.policy, params.lora))
        if self.numerics.autocast and not params.lora.dropout:
            leave_casts_to_autocast(model.policy)
        if params.gradient_checkpointing:
            enable_gradient_checkpointing(model.policy, stage=params.stage)
        return model

    def _write(self, policy: Any, weights: dict[str, Tensor]) -> None:
        """Writes the checkpoint, and adapters in its place or beside it."""
        out, kept = self.ctx.out, self.ctx.params.lora.save
        if kept == "adapter":
            save_adapters(policy, weights, self.ctx.model("policy"), out / "checkpoint")
            save_tokenizer(self.tokenizer, out / "checkpoint")
            return
        whole, dtype = merge_adapters(policy, weights), self.save_dtype()
        save_checkpoint(causal_lm(policy), whole, self.tokenizer, dtype, out / "checkpoint")
        if kept == "both":
            save_adapters(policy, weights, self.ctx.model("policy"), out / "adapter")


def run_fit(ctx: StageContext[Any], process: Process) -> None:
    """Trains, on the CPU to the same bytes each time; explains want of memory."""
    made: Fit[Any] = importlib.import_module(f"stages.{ctx.params.stage}.fit").FIT(ctx, process)
    try:
        with repeatable(on_gpu=ctx.request.resources.gpus > 0):
            made.run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # Whoever is asked to stop tries no smaller budget.
        process.check_stop()
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        if process.world_size > 1:
            said = f"process {process.rank} of {process.world_size}: {said}"
        raise _out_of_memory(made.plan, said) from None


def _out_of_memory(plan: Plan[Any], said: str) -> OutOfMemoryError:
    """The error for want of memory, with half of the budget; the global batch stays."""
    budget, stage = plan.params.micro_batch_tokens, plan.params.stage
    sizes = sorted((sample.num_tokens_shared for sample in plan.samples), reverse=True)
    longest = sizes[0]
    # A budget above what a step has at all did not bind: half of it might not, either.
    half = min(budget, sum(sizes[: plan.global_batch])) // 2
    error = OutOfMemoryError(
        f"out of memory with {stage}.micro_batch_tokens = {budget}; the longest sample has "
        f"{longest} tokens (its prompt once, and its responses): {said}",
        f"lower {stage}.micro_batch_tokens (to {longest} at least) or {stage}.max_length_tokens "
        f"(below {longest}), set {stage}.gradient_checkpointing=true, spread the weights with "
        f"{stage}.deepspeed.zero_stage=3 over more processes, or train adapters only "
        f"({stage}.lora.rank)",
    )
    error.said = said
    # Below its length each sample is alone already.
    error.smaller = half if budget > longest else None
    return error
