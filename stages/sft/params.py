"""Parameters of the sft stage."""

from typing import ClassVar

from pydantic import Field

from stages.contract.params import ChatSettings, InputSpec, OutputSpec, Settings
from stages.training.params import TrainingParams


class ArchitectureParams(Settings):
    """A Llama to start from scratch, used if the request has no `policy`.

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


class SftParams(TrainingParams, ChatSettings):
    """Trains a policy to give the last assistant turn of conversations.

    Inputs: `data` (1..n data files or folders), `policy` (checkpoint to start from; without it
    `architecture` is started from scratch). Outputs: `checkpoint/`,
    `metrics.jsonl`.
    """

    stage: ClassVar[str] = "sft"
    version: ClassVar[str] = "7"
    inputs = {
        "data": InputSpec(many=True),
        "policy": InputSpec(optional=True),
    }
    outputs = {
        "checkpoint": OutputSpec("model"),
        "metrics.jsonl": OutputSpec("file"),
    }
    image = "torch"
    late_modules = ("stages.sft.fit", "deepspeed", "peft")

    architecture: ArchitectureParams = ArchitectureParams()
    """Model to make if no checkpoint is given."""
    epochs: int = Field(3, ge=1)
    """Passes over the data."""
    learning_rate: float = Field(2e-5, gt=0)
    """Highest learning rate, reached after the warm-up."""
    global_batch_rows: int = Field(32, ge=1)
    """Conversations per optimizer step, over all processes. An epoch's last batch may be
    smaller."""
    max_length_tokens: int | None = Field(None, ge=2)
    """Longest conversation in tokens; unset takes the model's context, which no value may exceed.
    Longer ones are dropped and counted."""
