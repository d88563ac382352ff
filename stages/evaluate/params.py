"""Parameters of the evaluate stage."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from stages.contract.number_types import NumberType
from stages.contract.params import (
    ImageName,
    InputSpec,
    OutputSpec,
    StageParams,
)


class EvaluateParams(StageParams):
    """Metrics of the samples that are computed, and samples that are kept for the report."""

    stage: ClassVar[str] = "evaluate"
    version: ClassVar[str] = "7"
    inputs = {
        "responses": InputSpec("responses", many=True),
        "scores": InputSpec("scores", many=True),
        "base_responses": InputSpec("responses", many=True),
        "base_scores": InputSpec("scores", many=True),
        "reference": InputSpec("model", optional=True),
        "reference_adapter": InputSpec("model", optional=True),
        "length_control": InputSpec("file", optional=True),
    }
    outputs = {
        "metrics.json": OutputSpec("metrics"),
        "figures.parquet": OutputSpec("figures"),
        "prompts.parquet": OutputSpec("prompt_figures"),
        "samples.jsonl": OutputSpec("file"),
    }
    image = "torch"
    late_modules = ("stages.evaluate.reference",)

    correct_from: float | None = None
    """Smallest score of a correct response, by which accuracy is computed; none if unset."""

    pass_at_k: tuple[int, ...] = ()
    """Numbers of samples k of which pass@k is computed."""

    log_pi_ref: Literal["off", "policy", "both"] = "both"
    """Samples that get the reference's log-probability: none, the policy's, or also the base's.
    Costs one forward pass over the samples."""

    length_controlled: bool = False
    """Length-controlled win rate by AlpacaEval's regression, over the answers that a pairwise judge
    has compared with AlpacaEval's. Runs in the environment `eval`, which has no torch: with
    `log_pi_ref: off` only."""

    dtype: NumberType = "float32"
    """Type of the reference's weights for that forward pass; log-probabilities are float32."""

    def image_for(self, *, from_hub: bool) -> ImageName:
        """Image with AlpacaEval's code if that is asked for."""
        return "eval" if self.length_controlled else self.image

    @model_validator(mode="after")
    def _needs_no_torch(self) -> EvaluateParams:
        if self.length_controlled and self.log_pi_ref != "off":
            raise ValueError(
                "length_controlled is set, and its environment has no torch for log_pi_ref: set "
                "log_pi_ref to off, and take log π_ref from another suite or the held-out prompts"
            )
        return self
