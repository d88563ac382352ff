"""The configuration of a run: each stage's parameters composed, plus where and how to run them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from flows.pipeline.names import NAME_PATTERN
from flows.pipeline.placement import (
    ON_THIS_MACHINE,
    Estimation,
    Execution,
    Tracking,
)
from stages.contract.errors import UserError
from stages.contract.number_types import Processor, this_processor
from stages.contract.params import ChatSettings, Settings, StageParams
from stages.contract.request import Resources
from stages.evaluate.params import EvaluateParams
from stages.generate.params import GenerateParams
from stages.pair.params import PairParams
from stages.preferences.params import PreferencesParams
from stages.prepare.params import PrepareParams
from stages.promote.params import PromoteParams
from stages.score.params import ScoreParams
from stages.screen.params import ScreenParams
from stages.sft.params import SftParams
from stages.train.params import TrainParams

# Set by the run for each call; a configuration with another value than the default is refused.
SET_BY_THE_RUN = {
    "prepare": ("iterations",),
    "sft": tuple(ChatSettings.model_fields),
    "generate": ("shard_index",),
    "preferences": ("prompt_system", "invalid_rows", *ChatSettings.model_fields),
    "evaluate": ("correct_from", "pass_at_k"),
    "promote": ("model_name", "measured_by", "iteration"),
}


def changed_fields(section: Settings | None, names: Iterable[str]) -> list[str]:
    """Those of a section's fields whose values are not their defaults."""
    if section is None:
        return []
    defaults = type(section)()
    return [name for name in names if getattr(section, name) != getattr(defaults, name)]


InputPlace = Annotated[str, StringConstraints(pattern=r"\S")]


class Inputs(Settings):
    """Inputs from outside. A place is a file, a folder, or a hub id ``owner/name@revision``."""

    prompts: tuple[InputPlace, ...] = ()
    """Prompt sets: one, split into T parts, or one for each iteration."""
    test_prompts: str | None = None
    """Held-out prompts; without it some are held out from `prompts`."""
    policy: str | None = None
    """Checkpoint to start from; with `warm_start`, the checkpoint to warm-start."""
    warm_start: str | None = None
    """Prompt/response data for a supervised warm start before the first iteration."""
    oracle_model: str | None = None
    """Reward model, for the oracles that load one."""
    oracle_code: str | None = None
    """Python file of a programmatic oracle, or a judge's prompt template."""
    objective_code: str | None = None
    """Python file of a custom objective (`train.objective: python`)."""
    strategy_code: str | None = None
    """Python file of a custom pair strategy (`pair.strategy: python`)."""
    preferences: str | None = None
    """Preference data to train on in the place of samples, in TRL's format (docs/training.md).
    Without `prompts`, the run has its prompts, and holds some of them out."""

    @model_validator(mode="before")
    @classmethod
    def _prompts_of_preferences(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("preferences") and not values.get("prompts"):
            return {**values, "prompts": (values["preferences"],)}
        return values


SuiteName = Annotated[str, StringConstraints(pattern=NAME_PATTERN, max_length=50)]
UNUSED_BY_SUITES = ("iterations", "test_prompts", "prompts_per_iteration")
"""Settings of `prepare` that are about training prompts, which a suite has none of."""

SAMPLING = ("num_samples", "temperature", "top_p", "max_new_tokens")
"""Settings that an evaluation has of `generate`, and replaces."""


SCREEN_TEMPERATURE = 0.6
"""Temperature at which the starting policy shows which prompts it solves, as in the paper."""


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
    correct_from: float | None = None
    """Smallest score of a correct response; if it is set, reports have the accuracy (the share
    of correct responses)."""
    pass_at_k: tuple[int, ...] = ()
    """Numbers of tries k for which reports have pass@k: the chance that one of k samples is
    correct, estimated without bias from `num_samples` (Chen et al. 2021)."""

    def sampling(self) -> dict[str, Any]:
        """The settings that an evaluation replaces in `generate`."""
        return self.model_dump(include=set(SAMPLING))

    @model_validator(mode="after")
    def _check_greedy(self) -> Evaluation:
        if not self.temperature and self.num_samples > 1:
            raise ValueError(
                f"temperature is 0, and num_samples is {self.num_samples}: all samples of a prompt "
                "are the same; set num_samples to 1"
            )
        return self


class Suite(Settings):
    """A further evaluation, on other prompts or by another oracle.

    Gates look at the evaluation on the held-out prompts, and at the suites of
    `promote.suites_hold`.
    """

    prompts: str | None = None
    """Prompts: a file, or a hub data set ``owner/name@revision``. Unset, the suite's oracle is a
    second opinion: it scores the run's samples of the held-out prompts once more."""
    after: Literal["each", "last"] = "last"
    """Iterations after which it is run: each, or the last one only."""
    evaluation: Evaluation | None = None
    """Sampling; unset takes the run's `evaluation`."""
    prepare: PrepareParams | None = None
    """Reading of its prompts: columns, `test_split`, `subset`, `system_prompt`, `invalid_rows`."""
    score: ScoreParams | None = None
    """Oracle; unset takes the run's, with the run's model and code."""
    oracle_model: str | None = None
    """Reward model of the suite's oracle."""
    oracle_code: str | None = None
    """Python file, or judge's prompt template, of the suite's oracle."""
    evaluate: EvaluateParams | None = None
    """Metrics; unset takes the run's `evaluate`."""

    @model_validator(mode="after")
    def _check_own(self) -> Suite:
        for name in changed_fields(self.prepare, UNUSED_BY_SUITES):
            raise ValueError(f"prepare.{name} is about training prompts; leave it out")
        if self.score is None and (self.oracle_model or self.oracle_code):
            raise ValueError(
                "oracle_model or oracle_code is set, and score is not: set the suite's `score` to "
                "its oracle, or leave both out to take the run's oracle"
            )
        if self.prompts is None and self.score is None:
            raise ValueError(
                "neither prompts nor score is set: name prompts, or a second oracle for the run's "
                "held-out prompts"
            )
        for name in changed_fields(self.evaluation, SAMPLING) if self.prompts is None else ():
            raise ValueError(
                f"evaluation.{name} is set, and the suite has no prompts: it scores the "
                "run's own samples of the held-out prompts; leave it out"
            )
        return self


class StageResources(Settings):
    """Resources of each stage. Change speed and place only."""

    prepare: Resources = Resources()
    sft: Resources = Resources()
    screen: Resources = Resources()
    generate: Resources = Resources()
    score: Resources = Resources()
    pair: Resources = Resources()
    preferences: Resources = Resources()
    train: Resources = Resources()
    evaluate: Resources = Resources()
    promote: Resources = Resources()


class RunConfig(Settings):
    """Everything that defines a run of iterative online RLHF with an exploratory bonus.

    Stages have their sections in the order in which they first run.
    """

    name: str = Field("run", pattern=NAME_PATTERN, max_length=100)
    """Name of the run: its view in the store, and its model in the registry."""
    seed: int = Field(0, ge=0)
    """Seed from which every stage's seed is derived."""
    model: str | None = Field(None, pattern=NAME_PATTERN, max_length=200)
    """Name of the run's checkpoints in the model registry; the run's name if unset."""
    store: str = "store"
    """The store: a folder, or a bucket as `s3://…`, `gs://…` or `az://…` (docs/clusters.md)."""
    iterations: int = Field(3, ge=1, le=1000)
    """Iterations T."""
    pair_data: Literal["current", "accumulate"] = "current"
    """Train on the pairs of this iteration, or of all iterations so far."""
    inputs: Inputs = Inputs()
    """Inputs from outside."""
    prepare: PrepareParams = PrepareParams()
    """Prompts."""
    sft: SftParams = SftParams()
    """Warm start, used if `inputs.warm_start` names data."""
    screen: ScreenParams = ScreenParams()
    """Dropping of the prompts that the starting policy solves; off unless it samples."""
    generate: GenerateParams = GenerateParams()
    """Sampling of the responses to train on."""
    score: ScoreParams = ScoreParams()
    """Oracle."""
    pair: PairParams = PairParams()
    """Preference pairs."""
    preferences: PreferencesParams = PreferencesParams()
    """Preference pairs from outside, used if `inputs.preferences` names a data set."""
    train: TrainParams = TrainParams()
    """Objective and optimisation."""
    evaluation: Evaluation = Evaluation()
    """Sampling on the held-out prompts."""
    evaluate: EvaluateParams = EvaluateParams()
    """Metrics."""
    suites: dict[SuiteName, Suite] = {}
    """Further evaluations by name. Each names its prompts, its oracle or both
    (docs/evaluation.md)."""
    promote: PromoteParams = PromoteParams()
    """Gates and registry."""
    resources: StageResources = StageResources()
    """Resources of each stage."""
    execution: Execution = Execution()
    """Settings by which stages are started: runner, retries, limits."""
    estimation: Estimation = Estimation()
    """Assumptions of the run's estimate: hardware, number of prompts."""
    tracking: Tracking = Tracking()
    """Trackers of the whole run (docs/operations.md)."""
    # What the loading read it from: neither defaults are in there, nor types for `auto`.
    _given: Mapping[str, Any] = {}

    @model_validator(mode="after")
    def _check_screening(self) -> RunConfig:
        if self.screen.num_samples and self.score.compares:
            raise ValueError(
                "screen.num_samples is set, and a judge that compares (score.judge.mode) cannot "
                "tell whether a prompt is solved: use an oracle that scores"
            )
        return self

    def for_processors(self) -> RunConfig:
        """The same with each stage's type of numbers instead of `auto`."""
        suites = {
            name: suite.model_copy(update=self._types_of(suite))
            for name, suite in self.suites.items()
        }
        return self.model_copy(update=self._types_of(self) | {"suites": suites})

    def _types_of(self, sections: Settings) -> dict[str, Any]:
        """The stages' sections of a run or suite, with types of numbers instead of `auto`."""
        return {
            name: section.for_processor(self._processor(name))
            for name, section in sections
            if isinstance(section, StageParams)
        }

    def _processor(self, stage: str) -> Processor:
        gpu = getattr(self.resources, stage).gpus > 0
        if self.execution.runner in ON_THIS_MACHINE:
            return this_processor(gpu=gpu)
        # Nobody knows the CPU of another host.
        return Processor(gpu=gpu, fast_bfloat16=gpu)

    def to_json(self) -> str:
        """The resolved configuration; reads back as written."""
        return self.model_dump_json(indent=2)

    def to_values(self) -> dict[str, Any]:
        """The same as nested sections of plain values."""
        return self.model_dump(mode="json")

    def given_values(self) -> dict[str, Any]:
        """The settings as they were given: without defaults, and with `auto` for another host."""
        return {**self._given, "store": self.store}

    def for_suite(self, name: str) -> RunConfig:
        """The configuration by which a suite's steps are made; UserError if there is none."""
        if name not in self.suites:
            raise UserError(
                f"{self.name} has no suite {name!r}",
                f"suites of {self.name}: {', '.join(self.suites) or 'none'}",
            )
        suite = self.suites[name]
        oracle = self.inputs if suite.score is None else suite
        evaluation = suite.evaluation or self.evaluation
        if suite.evaluation is None and suite.score is not None:
            # Another oracle has other scores of correct responses.
            evaluation = evaluation.model_copy(update={"correct_from": None, "pass_at_k": ()})
        if suite.prompts is None:
            evaluation = evaluation.model_copy(update=self.evaluation.sampling())
        return self.model_copy(
            update={
                # Runs of all seeds share the base's samples of a suite's own prompts.
                "seed": self.seed if suite.prompts is None else 0,
                "iterations": 0,
                "inputs": Inputs(
                    test_prompts=suite.prompts,
                    oracle_model=oracle.oracle_model,
                    oracle_code=oracle.oracle_code,
                ),
                "prepare": suite.prepare or PrepareParams(),
                "evaluation": evaluation,
                "score": suite.score or self.score,
                "evaluate": suite.evaluate or self.evaluate,
            }
        )

    def parts(self) -> dict[str, RunConfig]:
        """The run's configuration under an empty name, and its suites' by their names."""
        return {"": self} | {name: self.for_suite(name) for name in self.suites}
