"""Parameters of the sft stage."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from stages.contract.params import Settings, StageParams, speed_only
from stages.contract.signature import InputSpec, OutputSpec


class ArchitectureParams(Settings):
    """A Llama to start from scratch, used where the request has no `policy`.

    Its tokenizer has one token for each word of the data.
    """

    hidden_size: int = Field(128, ge=1)
    """Width of the residual stream."""
    num_hidden_layers: int = Field(2, ge=1)
    """Transformer blocks."""
    num_attention_heads: int = Field(4, ge=1)
    """Attention heads per block."""
    intermediate_size: int = Field(256, ge=1)
    """Width of the feed-forward layers."""
    max_position_embeddings: int = Field(128, ge=2)
    """Context in tokens, prompt and response together."""
    tie_word_embeddings: bool = False
    """Use the input embeddings as the output layer, too."""

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> Self:
        # Rotary embeddings turn pairs of a head's dimensions.
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} is no multiple of twice num_attention_heads "
                f"{self.num_attention_heads}"
            )
        return self


class SftParams(StageParams):
    """Trains a policy to give the last assistant turn of conversations.

    Runs in one process on one device. Inputs: `data` (1..n JSONL or Parquet files), `policy`
    (checkpoint to start from; without it `architecture` is started from scratch). Outputs:
    `checkpoint/`, `summary.json`, `metrics.jsonl`.
    """

    stage: ClassVar[str] = "sft"
    version: ClassVar[str] = "1"
    inputs = {
        "data": InputSpec("file", many=True),
        "policy": InputSpec("model", optional=True),
    }
    outputs = {
        "checkpoint": OutputSpec("model"),
        "summary.json": OutputSpec("file"),
        "metrics.jsonl": OutputSpec("file"),
    }
    image = "torch"

    architecture: ArchitectureParams = ArchitectureParams()
    """Model to make where no checkpoint is given."""
    epochs: int = Field(3, ge=1)
    """Passes over the data."""
    learning_rate: float = Field(2e-5, gt=0)
    """Highest learning rate, reached after the warm-up."""
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls to zero after the warm-up."""
    warmup_ratio: float = Field(0.03, ge=0, le=1)
    """Share of all steps over which the learning rate rises linearly."""
    global_batch_rows: int = Field(32, ge=1)
    """Conversations per optimizer step. An epoch's last batch may be smaller."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay, on matrices only."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Gradients are scaled down to this norm; 0 never scales."""
    messages_column: str = "messages"
    """Column of conversations whose last turn is the assistant's."""
    prompt_column: str = "prompt"
    """Column of plain prompts, used in rows without a conversation."""
    response_column: str = "response"
    """Column of the answers to plain prompts."""
    max_length_tokens: int | None = Field(None, ge=2)
    """Longest conversation in tokens; unset takes the model's context. Longer ones are dropped and
    counted."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the forward pass; `auto` is bfloat16 on a GPU, float32 on the CPU. Weights under training
    and optimizer state are float32 always."""
    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the saved weights; `auto` keeps the starting checkpoint's, float32 from scratch."""

    micro_batch_rows: int = speed_only(
        32, ge=1, description="Conversations in one forward pass; the global batch stays the same."
    )
    gradient_checkpointing: bool = speed_only(
        False, description="Recompute activations in the backward pass: less memory, more time."
    )
    checkpoint_every_seconds: float = speed_only(
        600.0, gt=0, description="Seconds between checkpoints from which a retry goes on."
    )
    checkpoint_every_steps: int | None = speed_only(
        None, ge=1, description="Steps between such checkpoints, beside the seconds."
    )
