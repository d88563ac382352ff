"""Parameters that the stages `train` and `sft` share."""

from dataclasses import replace
from typing import Literal, Self, TypeVar

from pydantic import Field, model_validator

from stages.contract.number_types import Processor
from stages.contract.params import Settings, StageParams, speed_only

RowLayoutName = Literal["packed", "padded"]

FEWEST_TOKENS = 8192
"""Tokens of a micro-batch where memory is little or unknown."""


class LoraParams(Settings):
    """Low-rank adapters (peft) in place of full fine-tuning, merged into the checkpoint."""

    rank: int = Field(0, ge=0)
    """Rank of the adapters of all linear layers but the head; 0 trains all weights. The experts of
    a mixture have none, and stay as they are."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapters: their product is multiplied by alpha / rank."""


class DeepSpeedParams(Settings):
    """DeepSpeed. It changes where weights and optimizer state lie, not what is computed."""

    zero_stage: Literal["off", 1, 2, 3] = "off"
    """ZeRO stage; `off` trains without DeepSpeed."""
    offload_optimizer: bool = False
    """Keep optimizer state in CPU memory."""
    offload_parameters: bool = False
    """Keep weights in CPU memory (stage 3)."""

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        if self.offload_optimizer and self.zero_stage == "off":
            raise ValueError("offload_optimizer needs ZeRO: set zero_stage to 1, 2 or 3")
        if self.offload_parameters and self.zero_stage != 3:
            raise ValueError("offload_parameters needs zero_stage 3: set it")
        return self


class OptimizerParams(Settings):
    """AdamW without weight decay, and its schedule."""

    epochs: int = Field(2, ge=1)
    """Passes over the data."""
    learning_rate: float = Field(5e-7, gt=0)
    """Highest learning rate, reached after the warm-up."""
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Fall of the learning rate after the warm-up."""
    warmup_ratio: float = Field(0.03, ge=0, le=1)
    """Share of all steps over which the learning rate rises linearly, rounded up to whole steps."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """ε in AdamW's denominator."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Gradients are scaled down to this norm; 0 never scales."""


class TrainingParams(StageParams, OptimizerParams):
    """Parameters that the engine reads, the same for every stage that trains."""

    lora: LoraParams = LoraParams()
    """Low-rank adapters."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the forward pass: `auto` as for `generate.dtype`, but float32 for adapters on a CPU.
    Log-probabilities and optimizer state are float32 always."""

    row_layout: RowLayoutName = speed_only("packed")
    """`packed`: samples one after the other in one row, each prompt computed once for all of its
    responses. `padded`: a row for each response, padded to the longest."""
    micro_batch_tokens: int | None = speed_only(None, ge=1)
    """Most tokens per process in one forward pass, padding counted; a longer sample goes alone. The
    global batch is the same for every value. None is 16,384 on a GPU that keeps activations, else
    8,192."""
    gradient_checkpointing: bool | Literal["auto"] = speed_only("auto")
    """Recompute activations in the backward pass: less memory, a third more time. `auto` recomputes
    unless a GPU's memory is estimated to be enough. It always recomputes on the CPU and with
    DeepSpeed."""
    compile_layers: bool | Literal["auto"] = speed_only("auto")
    """Compile the decoder's layers, the reference's too: a minute at first, then up to twice the
    speed. `auto` compiles on a GPU from 2 million tokens per process, which needs a C compiler.
    DeepSpeed never compiles."""
    deepspeed: DeepSpeedParams = speed_only(DeepSpeedParams())
    """DeepSpeed's ZeRO, which splits the training among processes; DDP if its stage is off."""
    checkpoint_every_steps: int | None = speed_only(None, ge=1)
    """Steps between checkpoints from which a retry goes on; unset is every ten minutes."""

    def for_processor(self, processor: Processor) -> Self:
        """These settings with `auto` as a type of numbers replaced."""
        if self.lora.rank and not processor.gpu:
            # Added to bfloat16 activations one by one, small updates of an adapter are lost.
            processor = replace(processor, fast_bfloat16=False)
        return super().for_processor(processor)

    @property
    def token_budget(self) -> int:
        """Most tokens of a forward pass; where none are set, as many as every device takes."""
        return self.micro_batch_tokens or FEWEST_TOKENS


P = TypeVar("P", bound=TrainingParams)
