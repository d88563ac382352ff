"""Steps of a run: pure functions from a configuration to calls of stages.

A step names its inputs by the steps that make them, so that the same algorithm can be executed
(``flows.execution.prefect_tasks``) and planned (``flows.execution.plan``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flows.pipeline.config import SCREEN_TEMPERATURE, UNUSED_BY_SUITES, RunConfig
from flows.pipeline.external import Externals
from flows.pipeline.inputs import ORACLE_INPUTS
from flows.pipeline.step import Output, Source, Sources, Step, step_name
from stages.contract.digests import derive_seed, sha256_of
from stages.contract.params import ChatSettings, StageParams
from stages.contract.request import key_fields
from stages.generate.params import GenerateParams
from stages.prepare.params import PrepareParams


@dataclass(frozen=True)
class Samples:
    """Responses to a set of prompts and their scores, shard by shard."""

    responses: list[Output] = field(default_factory=list)
    scores: list[Output] = field(default_factory=list)


@dataclass(frozen=True)
class Sampling:
    """Settings under which responses are sampled.

    Attributes:
        params: Settings of every shard, without its index.
        seed: Seed of every shard.
        against_opponents: Whether the oracle compares each response with one of another policy.
    """

    params: GenerateParams
    seed: int
    against_opponents: bool = False


class Steps:
    """Lists the steps of a run: each method adds one, and returns the output that it will have.

    ``inputs`` are the resolved inputs of the run and its suites, by the names of
    :meth:`RunConfig.parts`.

    Attributes:
        listed: The steps so far, in an order in which they can be computed.
    """

    def __init__(self, config: RunConfig, inputs: Mapping[str, Externals]) -> None:
        self.config = config
        self.listed: list[Step] = []
        self._inputs = inputs
        self._external = inputs[""]

    def add(
        self,
        name: str,
        params: StageParams,
        inputs: Sources,
        seed: int = 0,
        after: Sequence[str] = (),
    ) -> Output:
        """Adds a step; an input that is given without a source is none."""
        given = {name: group for name, group in inputs.items() if group}
        step = Step(name, params, given, seed, after)
        self.listed.append(step)
        return step.output

    def _seed(self, *names: str | int) -> int:
        return derive_seed(self.config.seed, *names)

    def of_suite(self, name: str) -> Steps:
        """The same list for the steps of one of the run's suites."""
        steps = Steps(self.config.for_suite(name), {"": self._inputs[name]})
        steps.listed = self.listed
        return steps

    def prepare(self, name: str = "prepare") -> Output:
        """Splits the prompts into D_1…D_T and a held-out test set."""
        params = self._reading().model_copy(update={"iterations": self.config.iterations})
        inputs = {"train": self._external["prompts"], "test": self._external["test_prompts"]}
        return self.add(name, params, inputs, self._seed("prepare"))

    def _reading(self) -> PrepareParams:
        """Settings by which prompts are read; the preferences' own have the preferences' split."""
        config = self.config
        if config.inputs.prompts != (config.inputs.preferences,):
            return config.prepare
        # `prepare.subset` stays where preferences have none: `inputs.test_prompts` may need it.
        split = config.preferences.model_dump(include={"split", "subset"}, exclude_none=True)
        return config.prepare.model_copy(update=split)

    def warm_start(self) -> Output:
        """Makes the starting policy by supervised training."""
        inputs = {"data": self._external["warm_start"], "policy": self._external["policy"]}
        params = self.config.sft.model_copy(update=self._chat())
        return self.add("sft", params, inputs, self._seed("sft"))

    def _chat(self) -> dict[str, Any]:
        """Rendering of conversations as `generate` does it, for other stages."""
        return {name: getattr(self.config.generate, name) for name in ChatSettings.model_fields}

    def for_training(self, iteration: int) -> Sampling:
        """K responses to each prompt of D_t."""
        return Sampling(self.config.generate, self._seed("generate", iteration))

    def for_screening(self, iteration: int) -> Sampling:
        """A few responses, to see which prompts the starting policy solves."""
        config = self.config
        sampling = {"num_samples": config.screen.num_samples, "temperature": SCREEN_TEMPERATURE}
        params = config.generate.model_copy(update=sampling)
        return Sampling(params, self._seed("screen", iteration))

    def for_evaluation(self) -> Sampling:
        """Responses to the held-out prompts; a judge that compares sets them against others."""
        config = self.config
        params = config.generate.model_copy(update=config.evaluation.sampling())
        return Sampling(params, self._seed("evaluate"), against_opponents=config.score.compares)

    def generate(
        self, prefix: str, shard: int, sampling: Sampling, policy: Source, prompts: Source
    ) -> Output:
        """Samples responses to one shard of a table of prompts."""
        return self.add(
            f"{prefix}/generate/{shard}",
            sampling.params.model_copy(update={"shard_index": shard}),
            {"policy": [policy], "prompts": [prompts]},
            sampling.seed,
        )

    def screen(self, iteration: int, prompts: Output, samples: Samples) -> Output:
        """Drops the prompts of D_t that those samples solve."""
        return self.add(
            f"screen/iteration-{iteration}",
            self.config.screen,
            {"prompts": [prompts], "responses": samples.responses, "scores": samples.scores},
        )

    def score(
        self, prefix: str, shard: int, responses: Source, opponents: Source | None = None
    ) -> Output:
        """Scores one shard of responses with the oracle; a comparing one against ``opponents``."""
        inputs: Sources = {
            "responses": [responses],
            "opponents": [opponents] if opponents else [],
            **self._oracle_inputs(),
        }
        params = self.config.score
        if self.config.generate.allow_control_tokens:
            params = params.model_copy(update={"allow_control_tokens": True})
        return self.add(f"{prefix}/score/{shard}", params, inputs)

    def _oracle_inputs(self) -> Externals:
        """Inputs that the oracle uses; others must not change the key."""
        reads = self.config.score.reads
        return {name: self._external[title] for name, title in ORACLE_INPUTS.items() if reads(name)}

    def pair(self, iteration: int, samples: Samples) -> Output:
        """Chooses a chosen and a rejected response per prompt."""
        params = self.config.pair
        return self.add(
            step_name(iteration, "pair"),
            params,
            {
                "responses": samples.responses,
                "scores": samples.scores,
                # A file that is not read must not change the key.
                "code": self._external["strategy_code"] if params.strategy == "python" else (),
            },
            self._seed("pair", iteration),
        )

    def preferences(self, iteration: int, prompts: Output, policy: Source) -> Output:
        """Takes the pairs of D_t from a data set of preferences, in the tokens of ``policy``."""
        config = self.config
        params = config.preferences.model_copy(
            update={
                "prompt_system": config.prepare.system_prompt,
                "invalid_rows": config.prepare.invalid_rows,
                **self._chat(),
            }
        )
        inputs: Sources = {
            "data": self._external["preferences"],
            "prompts": [prompts],
            "policy": [policy],
        }
        # It takes the place of `pair`: reports show its figures.
        return self.add(step_name(iteration, "pair"), params, inputs)

    def train(
        self, iteration: int, policy: Source, reference: Source, pairs: Sequence[Output]
    ) -> Output:
        """Minimises f-DPO loss − κ · bonus from ``policy``, measured against ``reference``."""
        params = self.config.train
        return self.add(
            step_name(iteration, "train"),
            params,
            {
                "policy": [policy],
                "reference": [reference],
                "pairs": list(pairs),
                "code": self._external["objective_code"] if params.objective == "python" else (),
            },
            self._seed("train", iteration),
        )

    def evaluate(self, name: str, policy: Samples, base: Samples, reference: Source) -> Output:
        """Compares the policy's samples on the held-out prompts with the base's."""
        inputs: Sources = {
            "responses": policy.responses,
            "scores": policy.scores,
            "base_responses": base.responses,
            "base_scores": base.scores,
            "reference": [reference],
        }
        evaluation = self.config.evaluation
        params = self.config.evaluate.model_copy(
            update={"correct_from": evaluation.correct_from, "pass_at_k": evaluation.pass_at_k}
        )
        return self.add(name, params, inputs)

    def promote(
        self,
        iteration: int,
        policy: Source,
        metrics: Output,
        previous: Output | None,
        suites: Mapping[str, Output],
    ) -> Output:
        """Registers the checkpoint and, if the gates pass, moves the alias to it.

        It waits for the ``previous`` promotion: an alias moves from iteration to iteration, never
        back. Gates may also look at the metrics of ``suites``.
        """
        params = self.config.promote.model_copy(
            update={
                "model_name": self.config.model or self.config.name,
                "measured_by": self._measure(),
                "iteration": iteration,
            }
        )
        inputs: Sources = {
            "checkpoint": [policy],
            "metrics": [metrics],
            "suite_metrics": [suites[name] for name in params.suites_hold],
        }
        return self.add(
            step_name(iteration, "promote"),
            params,
            inputs,
            after=(previous.step,) if previous else (),
        )

    def _measure(self) -> str:
        """Digest of oracle, sampling and source of the held-out prompts, for any policy and seed.

        Scores of a judge that compares are relative to the base.
        """
        config = self.config
        inputs = self._oracle_inputs()
        inputs["prompts"] = self._external["test_prompts"] or self._external["prompts"]
        parts = [
            self.for_evaluation().params.result_fields() | {"num_shards": 1},
            key_fields(config.score, 0, inputs),
            self._reading().model_dump(exclude=set(UNUSED_BY_SUITES)),
        ]
        if config.score.compares:
            warm_start = self._external["warm_start"]
            start = {"data": warm_start, "policy": self._external["policy"]}
            seed = self._seed("sft") if warm_start else 0
            parts.append(key_fields(config.sft if warm_start else config.score, seed, start))
        return sha256_of(parts)
