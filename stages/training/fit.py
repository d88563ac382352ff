"""One process of a training, from samples to checkpoint."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor
from transformers import set_seed

from stages.contract.digests import derive_seed
from stages.contract.errors import UserError
from stages.harness.context import ModelSource, StageContext
from stages.modeling.engine_errors import is_out_of_memory
from stages.modeling.load import load_causal_lm, load_model_config
from stages.modeling.logprobs import ResponseLogprobs, causal_lm
from stages.modeling.probe import require_static_rope
from stages.modeling.save import save_checkpoint
from stages.modeling.tokenizers import require_embedded
from stages.training.adapters import add_adapters, leave_casts_to_autocast, merge_adapters
from stages.training.batches import Plan
from stages.training.checkpoints import Checkpoints
from stages.training.engine import Engine, Process
from stages.training.loop import Objective, TrainingLoop
from stages.training.metrics import StepLog
from stages.training.params import P
from stages.training.policy import (
    Numerics,
    check_model,
    compile_layers,
    compute_repeatably,
    enable_gradient_checkpointing,
    pays_to_compile,
    with_memory_choices,
)

# Modules of the compiler's errors.
_COMPILER = ("torch._dynamo.", "torch._inductor.")


class Fit(ABC, Generic[P]):
    """The steps of one training, in the order of :meth:`run`; a subclass gives data and loss.

    Every process of the training makes one. The subclass sets the plan, and the tokenizer that is
    saved with the policy.
    """

    tokenizer: Any
    plan: Plan[Any]

    def __init__(self, ctx: StageContext[P], process: Process) -> None:
        self.ctx = ctx
        self.process = process
        self.numerics = Numerics.of(
            ctx.params, on_gpu=ctx.request.resources.gpus > 0, local_rank=process.local_rank
        )
        self._checkpoints = Checkpoints(ctx.work, ctx.params, process)

    @abstractmethod
    def load_model(self) -> ResponseLogprobs:
        """The policy before training."""

    @abstractmethod
    def make_objective(self, engine: Engine) -> Objective[Any]:
        """The stage's loss of what an engine computes."""

    def write_records(self, log: StepLog) -> None:
        """Writes all but checkpoint and metrics; called on the first process."""

    def prepare(self) -> None:
        """Computes what the first step needs; nothing by default."""

    def run(self) -> None:
        """Trains, and writes the artifact's files; on the CPU the same bytes each time.

        Raises:
            UserError: Parameters, models or data are wrong, or memory does not suffice.
        """
        compute_repeatably(on_gpu=self.numerics.on_gpu)
        with self._explained():
            self.prepare()
            resumed = self._checkpoints.find_resume_point()
            engine = self._engine()
            objective = self.make_objective(engine)
            log = None
            if self.process.is_first:
                earlier = resumed.path if resumed else None
                log = StepLog(earlier, self.process.events, self.plan)
            self.process.check_stop()
            if resumed is not None:
                objective.load_state(resumed.state)
                engine.load(resumed.path)
            loop = TrainingLoop(engine, objective, self.plan, self.process, log, self._checkpoints)
            loop.run(resumed.step if resumed else 0)
            weights = engine.whole_weights()
            if log is not None:
                self._write(engine.model.policy, weights)
                # What else is written may take as much memory.
                del weights
                log.write_to(self.ctx.out)
                self.write_records(log)
            self.process.barrier()

    def set_plan(
        self, samples: Sequence[Any], global_batch: int, sources: Iterable[ModelSource]
    ) -> None:
        """Plans the training; refuses samples that a model cannot read, or too long for it."""
        self.plan = Plan(
            samples,
            self.ctx.params,
            global_batch,
            self.process.world_size,
            seed=self.ctx.request.seed,
        )
        largest = max(np.hstack([sample.prompt, *sample.responses]).max() for sample in samples)
        for source in sources:
            config = load_model_config(source)
            require_embedded(largest, config.get_text_config().vocab_size, source)
            require_static_rope(
                config,
                source.name_or_path,
                longest=max(sample.row_tokens for sample in samples),
                remedy=f"set {self.ctx.params.stage}.max_length_tokens={{limit}}",
            )

    def _engine(self) -> Engine:
        """Model, optimizer and schedule, in shards if the parameters say so."""
        params = self.ctx.params
        if params.deepspeed.zero_stage == "off":
            model = self._policy()
            return Engine(model, self.plan, self.numerics, self.process)
        from stages.training.zero import ZeroEngine, sharded_loading

        self.process.events.info(
            f"DeepSpeed ZeRO-{params.deepspeed.zero_stage}, world size {self.process.world_size}"
        )
        with sharded_loading(params, self.numerics):
            model = self._policy()
        engine = ZeroEngine(model, self.plan, self.numerics, self.process)
        if params.deepspeed.zero_stage == 3:
            check_model(causal_lm(model.policy), params, self.numerics)
        return engine

    def _policy(self) -> ResponseLogprobs:
        params = self.ctx.params
        # For adapters: no step draws random numbers. The libraries take seeds of 32 bits.
        set_seed(derive_seed(self.ctx.request.seed, "train") % 2**32)
        model = self.load_model()
        if params.lora.rank:
            model = ResponseLogprobs(add_adapters(model.policy, params.lora))
        if self.numerics.autocast:
            leave_casts_to_autocast(model.policy)
        self._choose_by_memory(model)
        return model

    @cached_property
    def compiled(self) -> bool:
        """True if layers are compiled: the policy's and the reference's, which round alike then."""
        params = self.ctx.params
        tokens = sum(sample.num_tokens_shared for sample in self.plan.samples) * params.epochs
        tokens //= self.process.world_size
        return pays_to_compile(params, tokens, on_gpu=self.numerics.on_gpu)

    def _choose_by_memory(self, model: ResponseLogprobs) -> None:
        """Sets compiled layers, and micro-batches that the memory should allow."""
        params = self.ctx.params
        device = self.numerics.device
        memory = None
        if self.numerics.on_gpu and params.deepspeed.zero_stage == "off":
            # All processes plan the same micro-batches, whatever card they have.
            own_memory = torch.cuda.get_device_properties(device).total_memory
            memory = min(self.process.gathered(own_memory))
        chosen = with_memory_choices(params, model.policy, memory, compiled=self.compiled)
        self.plan = replace(self.plan, params=chosen)
        if chosen.gradient_checkpointing:
            enable_gradient_checkpointing(model.policy, stage=params.stage)
        if memory is not None:
            kept = "recomputed" if chosen.gradient_checkpointing else "kept"
            self.process.events.info(
                f"micro-batches of {chosen.token_budget} tokens, activations {kept}"
            )
        if self.compiled:
            compile_layers(model.policy)

    def _write(self, policy: Any, weights: dict[str, Tensor]) -> None:
        """Writes the checkpoint, adapters merged into the policy as it was given."""
        if self.ctx.params.lora.rank:
            source = self.ctx.model("policy")
            base = load_causal_lm(source, dtype="float32", device=torch.device("cpu"))
            weights = merge_adapters(base, self.ctx.params.lora, weights)
        save_checkpoint(causal_lm(policy), weights, self.tokenizer, self.ctx.out / "checkpoint")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Names the settings to change if memory does not suffice, or a layer is not compiled."""
        try:
            yield
        except Exception as error:
            stage = self.ctx.params.stage
            if type(error).__module__.startswith(_COMPILER):
                raise UserError(
                    f"the layers cannot be compiled: {error}", f"set {stage}.compile_layers=false"
                ) from error
            if not is_out_of_memory(error):
                raise
            process = self.process
            process.check_stop()
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            if process.world_size > 1:
                reason = f"process {process.rank} of {process.world_size}: {reason}"
            longest = max(sample.num_tokens_shared for sample in self.plan.samples)
            raise UserError(
                f"out of memory with {stage}.micro_batch_tokens = {self.plan.params.token_budget}; "
                f"the longest sample has {longest} tokens (its prompt once, and its responses): "
                f"{reason}",
                f"lower {stage}.micro_batch_tokens (to {longest} at least) or "
                f"{stage}.max_length_tokens (below {longest}), set "
                f"{stage}.gradient_checkpointing=true, spread the weights with "
                f"{stage}.deepspeed.zero_stage=3 over more processes, or train adapters only "
                f"({stage}.lora.rank)",
            ) from None
