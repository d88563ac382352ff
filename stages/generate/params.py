"""Parameters of the generate stage."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from stages.contract.params import Settings, StageParams, speed_only


class VllmSettings(Settings):
    """The vLLM engine's own settings; read by the ``vllm`` backend only."""

    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs that one engine spreads the model over."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of each GPU's memory that the engine takes."""
    kv_cache_gib: float | None = Field(None, gt=0)
    """Memory for keys and values on each GPU, or on the CPU, in GiB; unset takes what
    ``gpu_memory_utilization`` leaves."""
    max_num_seqs: int = Field(256, ge=1)
    """Most sequences generated at once."""
    enforce_eager: bool = False
    """Skip graph capture: a quicker start, slower tokens."""


class GenerateParams(StageParams):
    """Samples ``num_samples`` responses per prompt from a policy."""

    stage: ClassVar[str] = "generate"
    version: ClassVar[str] = "1"

    backend: Literal["transformers", "vllm"] = "transformers"
    """Engine that samples; the two draw different responses from the same distribution."""
    num_samples: int = Field(2, ge=1)
    """Responses per prompt (K)."""
    temperature: float = Field(1.0, ge=0)
    """Divides the logits before sampling; 0 takes the likeliest token."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens whose probability reaches this."""
    max_new_tokens: int = Field(2048, ge=1)
    """Longest response, in tokens."""
    max_length_tokens: int | None = Field(None, ge=2)
    """Context for prompt and response together, in tokens; unset takes the model's. A prompt that
    leaves less than ``max_new_tokens`` of it is dropped and counted."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response beside the checkpoint's end-of-sequence ids."""
    system_prompt: str = ""
    """System turn put before conversations that open with none; empty adds none."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of weights and activations."""
    shard_index: int = Field(0, ge=0)
    """Which contiguous part of the prompts to work on, counted from 0."""
    num_shards: int = Field(1, ge=1)
    """Parts that the prompts are split into."""
    batch_size: int = speed_only(
        64, ge=1, description="Sequences in one forward pass of the transformers backend."
    )
    chunk_prompts: int = speed_only(
        1024,
        ge=1,
        description="Prompts after which what is done is written, so that a retry goes on there.",
    )
    vllm: VllmSettings = speed_only(
        VllmSettings(), description="Settings of the vLLM engine; ignored by the other backend."
    )

    @model_validator(mode="after")
    def _shard_exists(self) -> GenerateParams:
        if self.shard_index >= self.num_shards:
            raise ValueError(
                f"shard_index {self.shard_index} does not exist: shards are counted from 0 and "
                f"num_shards is {self.num_shards}"
            )
        return self
