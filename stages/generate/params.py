"""Parameters of the generate stage: one section of settings for each backend, and their table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt

from stages.contract.number_types import NumberType
from stages.contract.params import (
    ChatSettings,
    ImageName,
    InputSpec,
    OutputSpec,
    Settings,
    StageParams,
    speed_only,
)


class TransformersSettings(Settings):
    """Sampling with transformers."""

    batch_size: int = Field(64, ge=1)
    """Sequences in one forward pass; log-probabilities are rounded by batch."""


class VllmSettings(Settings):
    """The vLLM engine."""

    tensor_parallel_size: int = speed_only(
        1, ge=1, description="GPUs that one engine spreads the model over."
    )
    gpu_memory_utilization: float = speed_only(
        0.9, gt=0, le=1, description="Share of each GPU's memory that the engine takes."
    )
    kv_cache_gib: float | None = speed_only(
        None,
        gt=0,
        description="Memory for keys and values on each GPU, or on the CPU, in GiB; unset takes "
        "what `gpu_memory_utilization` leaves, on a CPU 4.",
    )
    max_num_seqs: int = speed_only(256, ge=1, description="Most sequences generated at once.")
    enforce_eager: bool | None = speed_only(
        None,
        description="Skip compilation and graph capture: a quicker start, slower tokens. Unset, "
        "true on a CPU alone, where they can take minutes.",
    )
    extra_engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the engine by the names of vLLM's `EngineArgs`, checked against the
    installed version. All of them are taken to change the result."""


BACKENDS: Mapping[str, str] = {
    "transformers": "stages.generate.transformers_backend",
    "vllm": "stages.generate.vllm_backend",
}
"""Module of each backend, imported only when it is used; its settings are the field of its name."""


class GenerateParams(StageParams, ChatSettings):
    """Samples ``num_samples`` responses per prompt from a policy."""

    stage: ClassVar[str] = "generate"
    version: ClassVar[str] = "6"
    inputs = {
        "policy": InputSpec(),
        "prompts": InputSpec(),
    }
    outputs = {
        "responses.parquet": OutputSpec("responses"),
        "metrics.json": OutputSpec("file"),
    }
    image = "torch"
    late_modules = ("stages.generate.transformers_backend", "scipy.optimize")

    backend: Literal["transformers", "vllm"] = "transformers"
    """Engine that samples; the two draw different responses from the same distribution. Only its
    own section is read. See docs/sampling.md."""
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
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Token ids that end a response, as the checkpoint's end-of-sequence ids do."""
    dtype: NumberType = "auto"
    """Type of weights and activations. `auto` is bfloat16 on a GPU, and on this machine's CPU if it
    has instructions for it (avx512_bf16, amx); else float32."""
    shard_index: int = Field(0, ge=0)
    """Contiguous part of the prompts to work on, counted from 0."""
    num_shards: int = Field(1, ge=1, le=1000)
    """Parts that the prompts are split into, of about as many prompts. Several GPUs sample side by
    side as shards."""
    chunk_responses: int = Field(16384, ge=1)
    """Responses that an engine draws before it begins the next prompts. Batches of the backend
    `transformers` lie within a chunk, and its log-probabilities are rounded by batch: there it
    affects the result, elsewhere speed alone."""
    transformers: TransformersSettings = TransformersSettings()
    """Settings of the backend `transformers`."""
    vllm: VllmSettings = VllmSettings()
    """Settings of the backend `vllm`."""

    @property
    def counted_response_tokens(self) -> int:
        """Tokens that an estimate counts for a response."""
        return max(1, self.max_new_tokens // 4)

    def unused_fields(self) -> frozenset[str]:
        """The section of the other backend, and what it alone would depend on."""
        streams = {"chunk_responses"} if self.backend == "vllm" else set()
        return frozenset((BACKENDS.keys() - {self.backend}) | streams)

    def image_for(self, *, from_hub: bool) -> ImageName:
        """Image with vLLM if that is the engine."""
        return "vllm" if self.backend == "vllm" else self.image
