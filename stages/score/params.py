"""Parameters of the score stage."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stages.contract.params import StageParams, speed_only


class ScoreParams(StageParams):
    """Scores every response with one oracle."""

    stage: ClassVar[str] = "score"
    version: ClassVar[str] = "1"

    oracle: Literal[
        "python", "reward_model", "urm_gated", "urm_helpfulness", "math_verify", "http", "judge"
    ] = "reward_model"
    """What scores: a function of a Python file (`python`, input ``code``), a sequence classifier of
    transformers (`reward_model`, input ``model``), the URM reward model by its gated score or its
    helpfulness mean (`urm_gated`, `urm_helpfulness`, input ``model``), the comparison of the
    final answer with the prompt's reference answer (`math_verify`), a server of your own (`http`),
    or a chat model (`judge`). See docs/oracles.md."""
    function: str = "score"
    """Only `python`: name of the function in ``code``, ``(prompts, responses, references) ->
    scores``."""
    grading_timeout_seconds: float = Field(10.0, gt=0)
    """Only `math_verify`: wall time for one answer; one that takes longer gets no score."""
    max_null_share: float = Field(0.0, ge=0, le=1)
    """Share of responses that may go without a score before the stage fails."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """Only `reward_model`: what runs it; `vllm` where vLLM knows the classifier's architecture."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Only the reward models: type of their weights and activations."""
    max_length_tokens: int | None = Field(None, ge=1)
    """Only the reward models: longest conversation that they read, in tokens; unset takes the
    model's. A longer one gets no score."""
    tokens_per_batch: int = speed_only(
        16384, ge=1, description="Tokens, padding included, in one pass of the reward model."
    )
    gpu_memory_utilization: float = speed_only(
        0.9, gt=0, le=1, description="Only engine `vllm`: share of the GPU's memory that it takes."
    )
    kv_cache_gib: float | None = speed_only(
        None,
        gt=0,
        description="Only engine `vllm`: memory for keys and values in GiB; unset takes what "
        "`gpu_memory_utilization` leaves, on a CPU 4.",
    )
    concurrency: int = speed_only(
        8,
        ge=1,
        description="Processes of `math_verify` (at most one for each core), requests at once of "
        "`http` and `judge`.",
    )
    judge_model: str | None = None
    """Only `judge`: the model's name at the server."""
    judge_mode: Literal["scored", "pairwise"] = "scored"
    """Only `judge`: mark each response by itself, or compare two and score by the comparisons won;
    each comparison is asked in both orders."""
    judge_opponents: int = Field(2, ge=1)
    """Only `judge`, pairwise: with how many of the prompt's following samples each one is compared,
    the first following the last; as many as there are at most."""
    judge_lowest: float = 1.0
    """Only `judge`, scored: the worst mark."""
    judge_highest: float = 10.0
    """Only `judge`, scored: the best mark; another than these and those between is no score."""
    judge_max_tokens: int = Field(512, ge=1)
    """Only `judge`: longest answer of the judge, in tokens."""
    judge_prompt_price: float | None = speed_only(
        None, ge=0, description="Only `judge`: price of a million tokens read, for the cost."
    )
    judge_completion_price: float | None = speed_only(
        None, ge=0, description="Only `judge`: price of a million tokens written, for the cost."
    )
    remote_identity: str | None = None
    """Only `http`: name and version that the server must give as its own."""
    remote_url: str | None = speed_only(
        None, description="Only `http` and `judge`: address to post to."
    )
    remote_key_env: str | None = speed_only(
        None,
        description="Only `http` and `judge`: name of the environment variable that holds the "
        "bearer token; unset sends none.",
    )
    remote_timeout_seconds: float = speed_only(
        120.0, gt=0, description="Only `http` and `judge`: time limit of one request."
    )
    remote_attempts: int = speed_only(
        5, ge=1, description="Only `http` and `judge`: times that a request is sent."
    )
    remote_wait_seconds: float = speed_only(
        1.0,
        ge=0,
        description="Only `http` and `judge`: wait before the second attempt; doubled each time.",
    )
    rows_per_request: int = speed_only(
        32, ge=1, description="Only `http`: responses in one request."
    )
    rows_per_batch: int = speed_only(
        4096, ge=1, description="Responses held in memory and given to the oracle at once."
    )

    @property
    def compares(self) -> bool:
        """Whether scores say how responses stand to each other, and nothing beyond that."""
        return self.oracle == "judge" and self.judge_mode == "pairwise"
