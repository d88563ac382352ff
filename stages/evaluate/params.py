"""Parameters of the evaluate stage."""

from typing import ClassVar, Literal

from stages.contract.number_types import NumberType
from stages.contract.params import (
    InputSpec,
    OutputSpec,
    StageParams,
)


class EvaluateParams(StageParams):
    """Metrics of the samples that are computed, and samples that are kept for the report."""

    stage: ClassVar[str] = "evaluate"
    version: ClassVar[str] = "11"
    inputs = {
        "responses": InputSpec(many=True),
        "scores": InputSpec(many=True),
        "base_responses": InputSpec(many=True),
        "base_scores": InputSpec(many=True),
        "reference": InputSpec(optional=True),
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
    Costs one forward pass over the samples. A policy with another tokenizer gets none."""

    dtype: NumberType = "float32"
    """Type of the reference's weights for that forward pass; log-probabilities are float32."""
