"""Settings of evaluations: sampling on held-out prompts, and suites beside them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from stages.contract.params import Settings
from stages.evaluate.params import EvaluateParams
from stages.prepare.params import PrepareParams
from stages.score.params import ScoreParams

SuiteName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=50)
]
UNUSED_BY_SUITES = ("iterations", "test_prompts", "prompts_per_iteration")
"""Settings of `prepare` that are about training prompts, which a suite has none of."""

_SAMPLING = ("num_samples", "temperature", "top_p", "max_new_tokens", "num_shards", "backend")


class Evaluation(Settings):
    """Sampling on the held-out prompts; the defaults are the paper's in-domain evaluation."""

    num_samples: int = Field(64, ge=1)
    """Samples per prompt."""
    temperature: float = Field(0.6, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(0.9, gt=0, le=1)
    """Nucleus sampling mass."""
    max_new_tokens: int = Field(4096, ge=1)
    """Longest response in tokens."""
    num_shards: int = Field(1, ge=1, le=1000)
    """Shards of the held-out prompts, each a task of its own; `auto` as in `generate`."""
    backend: Literal["transformers", "vllm"] | None = None
    """Engine that samples; unset takes that of `generate`."""
    correct_from: float | None = None
    """Smallest score of a correct response; where it is set, reports have the accuracy (the share
    of correct responses). Changes reports only."""
    pass_at_k: tuple[int, ...] = ()
    """Numbers of tries k for which reports have pass@k: the chance that one of k samples is
    correct, estimated without bias from `num_samples` (Chen et al. 2021). Changes reports only."""
    maj_at_k: tuple[int, ...] = ()
    """Numbers of votes k for which reports have maj@k: the chance that the most frequent answer of
    k samples is correct (Wang et al. 2023), estimated without bias from `num_samples`. Needs the
    oracle `math_verify` with `math_verify.votes`. Changes reports only."""

    @model_validator(mode="after")
    def _check_numbers_of_tries(self) -> Evaluation:
        for name in ("pass_at_k", "maj_at_k"):
            tries: tuple[int, ...] = getattr(self, name)
            if tries and self.correct_from is None:
                raise ValueError(
                    f"{name} is set and correct_from is not: set the smallest score of a correct "
                    "response (1 for the oracle math_verify)"
                )
            for k in tries:
                if not 1 <= k <= self.num_samples:
                    raise ValueError(
                        f"{name} has {k}, and num_samples is {self.num_samples}: it takes at "
                        "least k samples a prompt; raise num_samples, or leave it out"
                    )
        return self

    def sampling(self) -> dict[str, Any]:
        """Sampling settings that replace those of the generate stage."""
        return self.model_dump(include=set(_SAMPLING), exclude_none=True)


class Suite(Evaluation):
    """An evaluation beside the one on the held-out prompts, with prompts and an oracle of its own.

    It moves no alias and stops no run: gates look at the evaluation on the held-out prompts.
    """

    prompts: str
    """Prompts: a file, or a hub data set ``owner/name@revision``."""
    after: Literal["each", "last"] = "last"
    """Iterations after which it is run: each, or the last one only."""
    seed: int = Field(0, ge=0)
    """Seed of its sampling, not the run's: all runs from one base then share the base's samples."""
    prepare: PrepareParams = PrepareParams()
    """Reading of its prompts: columns, `test_split`, `subset`, `system_prompt`, `invalid_rows`."""
    score: ScoreParams | None = None
    """Oracle; unset takes the run's, with the run's model and code."""
    oracle_model: str | None = None
    """Reward model of an oracle of its own."""
    oracle_code: str | None = None
    """Python file, or judge's prompt template, of an oracle of its own."""
    evaluate: EvaluateParams | None = None
    """Metrics; unset takes the run's `evaluate`."""
    length_control: str | None = None
    """Folder with AlpacaEval's `df_gamed.csv` and `alpaca_eval_gpt4_baseline.json`, for its
    published length-controlled regression; unset takes the one without difficulties."""

    @model_validator(mode="after")
    def _check_own(self) -> Suite:
        for name in UNUSED_BY_SUITES:
            if name in self.prepare.model_fields_set:
                raise ValueError(f"prepare.{name} is about training prompts; leave it out")
        if self.score is None and (self.oracle_model or self.oracle_code):
            raise ValueError(
                "oracle_model or oracle_code is set, and score is not: an oracle of its own needs "
                "its section `score`; without one the suite takes the run's oracle"
            )
        return self
