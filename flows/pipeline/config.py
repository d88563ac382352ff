"""The configuration of a run: each stage's parameters composed, plus where and how to run them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from flows.pipeline.estimation import Estimation
from flows.pipeline.evaluation import UNUSED_BY_SUITES, Evaluation, Suite, SuiteName
from flows.pipeline.evaluation_checks import check_evaluations
from flows.pipeline.placement import EVAL, Execution, resources_of
from flows.pipeline.shards import resolve_shards
from stages.contract.errors import UserError
from stages.contract.params import Settings
from stages.contract.stores import cache_home, location_of
from stages.evaluate.params import EvaluateParams
from stages.generate.params import GenerateParams
from stages.pair.params import PairParams
from stages.prepare.params import PrepareParams
from stages.promote.params import PromoteParams
from stages.score.params import ScoreParams
from stages.screen.params import ScreenParams
from stages.sft.params import SftParams
from stages.train.params import TrainParams

TRAINED = ("sft", "train")
"""Stages that train, on as many nodes as they are given."""

# Set by the run for each call; a configuration that sets them is refused.
SET_BY_THE_RUN = {
    "prepare": ("iterations",),
    "generate": ("shard_index",),
    "train": ("iteration",),
    "promote": ("model_name",),
}

BEFORE_ITERATIONS = ("prepare", "sft")
"""Stages that run once; all others belong to an iteration."""


class Inputs(Settings):
    """What comes from outside. A place is a file, a folder, or a hub id ``owner/name@revision``."""

    prompts: tuple[str, ...] = ()
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
    model: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run's checkpoints in the model registry; the run's name if unset."""
    store: str = "store"
    """The store: a folder, or a bucket as `s3://…`, `gs://…` or `az://…` (docs/store.md)."""
    iterations: int = Field(3, ge=1, le=1000)
    """Iterations T."""
    pair_data: Literal["current", "accumulate"] = "current"
    """Train on this iteration's pairs, or on those of all iterations so far."""
    inputs: Inputs = Inputs()
    """What comes from outside."""
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
    """What each stage may use. Changes speed and place only."""


class RunConfig(StageSettings):
    """Everything that defines a run of iterative online RLHF with an exploratory bonus."""

    resources: StageResources = StageResources()
    """What each stage may use."""
    execution: Execution = Execution()
    """Settings by which stages are started: runner, retries, limits."""
    estimation: Estimation = Estimation()
    """Assumptions of the run's estimate: hardware, price, lengths."""

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
        if self.generate.num_samples < 2:
            raise ValueError(
                f"generate.num_samples is {self.generate.num_samples}, and the pair strategy "
                f"{self.pair.strategy!r} compares two responses to a prompt: sample at least 2"
            )
        wanted = 2 * self.pair.pairs_per_prompt
        if self.generate.num_samples < wanted:
            raise ValueError(
                f"pair.pairs_per_prompt is {self.pair.pairs_per_prompt}, and generate.num_samples "
                f"{self.generate.num_samples}: no response is in two pairs, so that it takes "
                f"{wanted} samples; raise num_samples, or lower pairs_per_prompt"
            )
        if self.screen.num_samples and self.score.compares:
            raise ValueError(
                "screen.num_samples is set, and a judge that compares (score.judge.mode) cannot "
                "tell whether a prompt is solved: use an oracle that scores"
            )
        check_evaluations(self)
        if self.train.reference_logprobs == "sampler" and self.pair_data == "accumulate":
            raise ValueError(
                "train.reference_logprobs is 'sampler' and pair_data is 'accumulate': the pairs of "
                "earlier iterations were sampled by earlier policies, which are not the reference; "
                "set train.reference_logprobs to 'model', or pair_data to 'current'"
            )
        if self.generate.backend == "openai":
            self._check_server()
        self._check_engine()
        self._check_nodes()
        self._check_volumes()
        self._check_stage_names()
        self._check_shared_store()
        return self

    def _check_server(self) -> None:
        if self.iterations > 1:
            raise ValueError(
                "generate.backend is 'openai': a server's model does not follow the training, so "
                f"that iterations 2 to {self.iterations} would train on another policy's samples; "
                "set iterations to 1"
            )
        if self.evaluation.backend is None:
            raise ValueError(
                "generate.backend is 'openai', and the server does not have the trained policy: "
                "set evaluation.backend to 'vllm' or 'transformers'"
            )
        unknown = self.generate.openai.without_token_ids == "tokenize"
        if unknown and self.train.reference_logprobs == "sampler":
            raise ValueError(
                "train.reference_logprobs is 'sampler', and with generate.openai.without_token_ids "
                "'tokenize' the sampler's log-probabilities are unknown: set it to 'model'"
            )

    def _check_engine(self) -> None:
        """Refuses engines of vLLM that do not come out even on the devices of their stage."""
        if "vllm" not in (self.generate.backend, self.evaluation.backend):
            return
        engine, resources = self.generate.vllm, self.resources.generate
        pipeline, wanted = engine.pipeline_parallel_size, engine.num_devices
        unit = "gpus" if resources.gpus else "processes"
        has = getattr(resources, unit)
        if has % wanted == 0:
            return
        said = f"generate.vllm.tensor_parallel_size is {engine.tensor_parallel_size}" + (
            f" and pipeline_parallel_size {pipeline}" if pipeline != 1 else ""
        )
        said += f", and resources.generate.gpus is {resources.gpus}" + (
            "" if resources.gpus else f" (processes, which count on a CPU, are {has})"
        )
        if has < wanted:
            raise ValueError(f"{said}: set gpus to {wanted}, or lower tensor_parallel_size")
        raise ValueError(
            f"{said}: {has // wanted} engines leave {has % wanted} of them idle; set {unit} to a "
            f"multiple of {wanted}"
        )

    def _check_nodes(self) -> None:
        """Refuses several nodes where nothing would start the others, or they could not meet."""
        for stage in StageResources.model_fields:
            nodes = getattr(self.resources, stage).nodes
            if nodes == 1:
                continue
            if stage not in TRAINED:
                raise ValueError(
                    f"resources.{stage}.nodes is {nodes}, and only {' and '.join(TRAINED)} work on "
                    "several nodes: leave it out"
                    + (", and raise num_shards to use more machines" if stage == "generate" else "")
                )
            if "://" in self.store:
                raise ValueError(
                    f"resources.{stage}.nodes is {nodes}, and the store {self.store} is in a "
                    "bucket: the nodes meet in the work folder, so put the store on a file system "
                    "that all see"
                )
            runner = self.execution.runner
            by_hand = bool(getattr(self.resources, stage).rendezvous)
            if runner in ("process", "docker", "work_pool") and not by_hand:
                raise ValueError(
                    f"resources.{stage}.nodes is {nodes}, and the runner {runner!r} starts one: "
                    "set execution.runner to 'slurm' or 'kubernetes', or resources."
                    f"{stage}.rendezvous to the first node's host:port and start `python -m "
                    "stages.training.node` on the others yourself (docs/training.md)"
                )
            if runner == "docker" and stage not in self.execution.docker.network:
                raise ValueError(
                    f"resources.{stage}.nodes is {nodes}, and the container of {stage} has no "
                    f"network: set execution.docker.network.{stage} (`host`), or leave nodes out"
                )

    def _check_shared_store(self) -> None:
        """Refuses a store that the nodes of a Slurm cluster would not see."""
        if self.execution.runner == "slurm" and "://" in self.store:
            raise ValueError(
                f"execution.runner is 'slurm', and the store {self.store} is in a bucket: put it "
                "on a file system that this machine and the cluster's nodes share"
            )

    def _check_volumes(self) -> None:
        """Refuses a store that pods would not see."""
        if self.execution.runner != "kubernetes":
            return
        place = cache_home() if "://" in self.store else Path(location_of(self.store))
        if self.execution.kubernetes.volume_at(place) is None:
            what = "the cache of the store" if "://" in self.store else "the store"
            raise ValueError(
                f"execution.runner is 'kubernetes', and pods see no volume at {place}, where "
                f"{what} is: name the claim that holds it in execution.kubernetes.volumes "
                f"(`{place}: {{claim: NAME}}`)"
            )

    def _check_stage_names(self) -> None:
        """Refuses settings of execution for stages that there are not."""
        stages = list(type(self.resources).model_fields)
        execution = self.execution
        tables: dict[str, Mapping[str, object]] = {
            "interpreters": execution.interpreters,
            "work_pool.job_variables": execution.work_pool.job_variables,
            "slurm.stages": execution.slurm.stages,
            "kubernetes.stages": execution.kubernetes.stages,
            **{
                f"docker.{name}": getattr(execution.docker, name)
                for name in ("images", "network", "environment", "secrets")
            },
        }
        for name, table in tables.items():
            for stage in table.keys() - stages:
                if (name, stage) == ("interpreters", EVAL):
                    continue
                near = difflib.get_close_matches(stage, stages, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"stages are {', '.join(stages)}"
                raise ValueError(f"execution.{name}.{stage}: there is no such stage; {hint}")

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

    def evaluation_sampling(self) -> GenerateParams:
        """The generate stage's parameters for the held-out prompts."""
        return self.generate.model_copy(update=self.evaluation.sampling())
