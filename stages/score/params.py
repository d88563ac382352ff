"""Parameters of the score stage."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stages.contract.params import StageParams, speed_only


class ScoreParams(StageParams):
    """Scores every response with one oracle."""

    stage: ClassVar[str] = "score"
    version: ClassVar[str] = "1"

    oracle: Literal["python", "reward_model", "urm_gated", "urm_helpfulness", "math_verify"] = (
        "reward_model"
    )
    """What scores: a function of a Python file (`python`, input ``code``), a sequence classifier of
    transformers (`reward_model`, input ``model``), the URM reward model by its gated score or its
    helpfulness mean (`urm_gated`, `urm_helpfulness`, input ``model``), or the comparison of the
    final answer with the prompt's reference answer (`math_verify`)."""
    function: str = "score"
    """Only `python`: name of the function in ``code``, ``(prompts, responses, references) ->
    scores``."""
    grading_timeout_seconds: float = Field(10.0, gt=0)
    """Only `math_verify`: wall time for one answer; one that takes longer gets no score."""
    max_null_share: float = Field(0.0, ge=0, le=1)
    """Share of responses that may go without a score before the stage fails."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Only the reward models: type of their weights and activations."""
    max_length_tokens: int | None = Field(None, ge=1)
    """Only the reward models: longest conversation that they read, in tokens; unset takes the
    model's. A longer one gets no score."""
    tokens_per_batch: int = speed_only(
        16384, ge=1, description="Tokens, padding included, in one pass of the reward model."
    )
    concurrency: int = speed_only(
        8, ge=1, description="Processes of `math_verify` (never more than the machine has cores)."
    )
    rows_per_batch: int = speed_only(
        4096, ge=1, description="Responses held in memory and given to the oracle at once."
    )
