"""Settings of the oracles, a section for each. Flows import them: pydantic only."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.contract.params import Settings, added_later, speed_only
from stages.remote.settings import ServerSettings

PartName = Literal[
    "python", "reward_model", "urm_gated", "urm_helpfulness", "math_verify", "http", "judge"
]
"""Oracles that `weighted` can sum: those that one environment can hold."""


class PythonSettings(Settings):
    """A function of a Python file."""

    function: str = "score"
    """Name of the function in ``code``, ``(prompts, responses, references) -> scores``."""


class ClassifierSettings(Settings):
    """Settings that all reward models loaded by the stage share."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of weights and activations."""
    max_length_tokens: int | None = Field(None, ge=1)
    """Longest conversation that is read, in tokens; unset takes the model's. A longer one gets no
    score."""
    tokens_per_batch: int = speed_only(
        16384, ge=1, description="Tokens, padding included, in one pass of transformers."
    )


class UrmSettings(ClassifierSettings):
    """The URM reward model, for both of its readings."""


class RewardModelSettings(ClassifierSettings):
    """A sequence classifier with one output."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """Engine that runs it; `vllm` where vLLM knows the classifier's architecture."""
    gpu_memory_utilization: float = speed_only(
        0.9, gt=0, le=1, description="Engine `vllm`: share of the GPU's memory that it takes."
    )
    kv_cache_gib: float | None = speed_only(
        None,
        gt=0,
        description="Engine `vllm`: memory for keys and values in GiB; unset takes what "
        "`gpu_memory_utilization` leaves, on a CPU 4.",
    )


class MathVerifySettings(Settings):
    """Comparison of the final answer with the prompt's reference answer."""

    timeout_seconds: float = Field(10.0, gt=0)
    """Wall time for one answer; one that takes longer gets no score."""
    votes: bool = added_later(False)
    """Count for each response the samples of its prompt with an equal answer (component `votes`),
    of which maj@k is made."""
    processes: int = speed_only(
        8, ge=1, description="Processes that compare, at most one for each core."
    )


class HttpSettings(ServerSettings):
    """A reward server of your own."""

    identity: str | None = None
    """Name and version that the server must give as its own."""
    rows_per_request: int = speed_only(32, ge=1, description="Responses in one request.")


class JudgeSettings(ServerSettings):
    """A chat model at an OpenAI-compatible address."""

    model: str | None = None
    """The model's name at the server."""
    mode: Literal["scored", "pairwise"] = "scored"
    """Mark each response by itself, or compare two and score by the comparisons won; each
    comparison is asked in both orders."""
    against: Literal["samples", "reference"] = added_later("samples")
    """Pairwise: compare each response with other samples, in an evaluation with the base's, or with
    the prompt's reference answer: a baseline's, such as AlpacaEval's."""
    opponents: int = Field(2, ge=1)
    """Pairwise against samples: with how many of the prompt's following samples each one is
    compared, the first following the last; as many as there are at most."""
    passes: int = added_later(1, ge=1)
    """Times that each question is asked; the score is the mean. With several, components tell how
    far the judge repeats itself: `repeat_agreement` and, pairwise, `order_agreement`."""
    template: Literal["default", "coherence"] = added_later("default")
    """Shipped prompt template, where the input ``code`` brings none: that of `mode`, or the
    paper's coherence judge, which marks from 0 (coherent) to 3 (nonsense)."""
    lowest: float = 1.0
    """Scored: the worst mark."""
    highest: float = 10.0
    """Scored: the best mark; another than these and those between is no score."""
    max_tokens: int = Field(512, ge=1)
    """Longest answer of the judge, in tokens."""
    prompt_price: float | None = speed_only(
        None, ge=0, description="Price of a million tokens read, for the cost."
    )
    completion_price: float | None = speed_only(
        None, ge=0, description="Price of a million tokens written, for the cost."
    )

    @model_validator(mode="after")
    def _check_template(self) -> JudgeSettings:
        if self.template == "coherence" and (
            self.mode != "scored" or (self.lowest, self.highest) != (0.0, 3.0)
        ):
            raise ValueError(
                "the template coherence marks from 0 to 3: set mode to scored, lowest to 0 and "
                "highest to 3"
            )
        if self.against == "reference" and self.mode != "pairwise":
            raise ValueError("against is 'reference', and mode is not: set mode to pairwise")
        return self


class IfevalSettings(Settings):
    """Verifiable instructions, checked by lm-eval's code; there is nothing to set."""


class WeightedSettings(Settings):
    """A weighted sum of other oracles' scores."""

    weights: dict[PartName, Annotated[float, Field(allow_inf_nan=False)]] = Field(
        default_factory=dict
    )
    """Weight of each oracle by its name; a negative one is a penalty. Each oracle reads its own
    section."""
    scales: dict[PartName, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default_factory=dict
    )
    """Number by which an oracle's scores are divided before they are weighed, such as their
    standard deviation (`std` in the `metrics.json` of a score step); 1 where it is not given."""

    @model_validator(mode="after")
    def _scales_are_of_parts(self) -> WeightedSettings:
        for name in self.scales.keys() - self.weights.keys():
            raise ValueError(
                f"scales names {name}, and weights does not: give it a weight, or leave it out"
            )
        return self
