"""The configuration of a run: each stage's parameters composed, plus where and how to run them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from flows.pipeline.estimation import Estimation
from flows.pipeline.evaluation import UNUSED_BY_SUITES, Evaluation, Suite, SuiteName
from flows.pipeline.placement import Execution, resources_of
from flows.pipeline.placement_checks import check_placement
from flows.pipeline.sample_checks import check_evaluations, check_samples
from flows.pipeline.shards import resolve_shards
from flows.pipeline.tracking import Tracking
from stages.contract.errors import UserError
from stages.contract.params import Settings
from stages.evaluate.params import EvaluateParams
from stages.generate.params import GenerateParams
from stages.pair.params import PairParams
from stages.prepare.params import PrepareParams
from stages.promote.params import PromoteParams
from stages.score.params import ScoreParams
from stages.screen.params import ScreenParams
from stages.sft.params import SftParams
from stages.train.params import TrainParams

# Set by the run for each call; a configuration that sets them is refused.
SET_BY_THE_RUN = {
    "prepare": ("iterations",),
    "generate": ("shard_index",),
    "train": ("iteration",),
    "promote": ("model_name",),
}

BEFORE_ITERATIONS = ("prepare", "sft")
"""Stages that run once; all others belong to an iteration."""


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
    """Reward model, for the oracles that are one."""
    oracle_code: str | None = None
    """Python file of a programmatic oracle, or a judge's prompt template."""


class StageSettings(Settings):
    """Sections of a run's stages, in the order in which the stages first run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """Name of the run: its view in the store, and its model in the registry."""
    seed: int = Field(0, ge=0)
    """Seed from which every stage's seed is derived."""
    model: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    """Name of the run's checkpoints in the model registry; the run's name if unset."""
    store: str = "store"
    """The store: a folder, or a bucket as `s3://…`, `gs://…` or `az://…` (docs/store.md)."""
    iterations: int = Field(3, ge=1, le=1000)
    """Iterations T."""
    pair_data: Literal["current", "accumulate"] = "current"
    """Train on this iteration's pairs, or on those of all iterations so far."""
    inputs: Inputs = Inputs()
    """Inputs from outside."""
    prepare: PrepareParams = PrepareParams()
    """Prompts."""
    sft: SftParams = SftParams()
    """Warm start, used where `inputs.warm_start` names data."""
    screen: ScreenParams = ScreenParams()
    """Dropping of the prompts that the starting policy solves; off unless it samples."""
    generate: GenerateParams = GenerateParams()
    """Sampling of the responses to train on."""
    score: ScoreParams = ScoreParams()
    """Oracle."""
    pair: PairParams = PairParams()
    """Preference pairs."""
    train: TrainParams = TrainParams()
    """Objective and optimisation."""
    evaluation: Evaluation = Evaluation()
    """Sampling on the held-out prompts."""
    evaluate: EvaluateParams = EvaluateParams()
    """Metrics."""
    suites: dict[SuiteName, Suite] = Field({})
    """Further evaluations by name, each on prompts and by an oracle of its own
    (docs/evaluation.md)."""
    promote: PromoteParams = PromoteParams()
    """Gates and registry."""


_ResourcesByStage: Any = resources_of(StageSettings)


class StageResources(_ResourcesByStage):
    """Resources of each stage. Change speed and place only."""


class RunConfig(StageSettings):
    """Everything that defines a run of iterative online RLHF with an exploratory bonus."""

    resources: StageResources = StageResources()
    """Resources of each stage."""
    execution: Execution = Execution()
    """Settings by which stages are started: runner, retries, limits."""
    estimation: Estimation = Estimation()
    """Assumptions of the run's estimate: hardware, price, lengths."""
    tracking: Tracking = Tracking()
    """Trackers of the whole run (docs/tracking.md)."""

    @model_validator(mode="before")
    @classmethod
    def _resolve_shards(cls, values: Any) -> Any:
        return resolve_shards(values) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _check_whole(self) -> RunConfig:
        for section, names in SET_BY_THE_RUN.items():
            for name in names:
                if name in getattr(self, section).model_fields_set:
                    raise ValueError(f"{section}.{name} is set by the run; leave it out")
        sources = len(self.inputs.prompts)
        if sources > 1 and sources != self.iterations:
            raise ValueError(
                f"inputs.prompts names {sources} sources, and iterations is {self.iterations}: "
                f"name one, which is split, or {self.iterations}, one for each iteration"
            )
        if self.screen.num_samples and self.score.compares:
            raise ValueError(
                "screen.num_samples is set, and a judge that compares (score.judge.mode) cannot "
                "tell whether a prompt is solved: use an oracle that scores"
            )
        check_samples(self)
        check_evaluations(self)
        check_placement(self)
        if self.sft.lora.save != "merged" and not self.inputs.policy:
            raise ValueError(
                f"sft.lora.save is {self.sft.lora.save!r}, and there is no inputs.policy: adapters "
                "are for a model that is kept, which a new one is not; leave sft.lora.save out"
            )
        return self

    def to_json(self) -> str:
        """The resolved configuration, without what the run sets itself; reads back as written."""
        hidden: dict[str, Any] = {section: set(names) for section, names in SET_BY_THE_RUN.items()}
        hidden["suites"] = {"__all__": {"prepare": set(UNUSED_BY_SUITES)}}
        return self.model_dump_json(indent=2, exclude=hidden)

    def screen_sampling(self) -> GenerateParams:
        """The generate stage's parameters for the prompts to be screened."""
        own = {name: getattr(self.screen, name) for name in ("num_samples", "temperature", "top_p")}
        return self.generate.model_copy(update=own)

    def for_suite(self, name: str) -> RunConfig:
        """The configuration by which the steps of a suite are made.

        Raises:
            UserError: There is no such suite.
        """
        if name not in self.suites:
            raise UserError(
                f"there is no suite {name!r}",
                f"suites of {self.name}: {', '.join(self.suites) or 'none'}",
            )
        suite = self.suites[name]
        return self.model_copy(
            update={
                "seed": suite.seed,
                "iterations": 0,
                "prepare": suite.prepare,
                "evaluation": suite,
                "score": suite.score or self.score,
                "evaluate": suite.evaluate or self.evaluate,
            }
        )

    def evaluations(self) -> dict[str, Evaluation]:
        """All evaluations by their section: that on held-out prompts, then the suites."""
        suites = {f"suites.{name}": suite for name, suite in self.suites.items()}
        return {"evaluation": self.evaluation, **suites}

    def backends(self) -> set[str]:
        """Engines that sample, for training and for evaluations."""
        own = {each.backend for each in self.evaluations().values() if each.backend is not None}
        return {self.generate.backend, *own}

    def evaluation_sampling(self) -> GenerateParams:
        """The generate stage's parameters for the held-out prompts."""
        return self.generate.model_copy(update=self.evaluation.sampling())
