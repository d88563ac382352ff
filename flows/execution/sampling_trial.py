"""Trial of a task before its run: how many of a few prompts have a winner among the base's samples.

A run learns from prompts whose responses get different scores. If the base is hardly ever
rewarded, nearly all pairs tie, which a run would tell after its first iteration only.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from flows.execution.step_executor import StepExecutor
from flows.pipeline.algorithm import sample_and_score
from flows.pipeline.config import RunConfig
from flows.pipeline.inputs import resolve_inputs
from flows.pipeline.step import Model, Output, Step
from flows.pipeline.steps import Steps
from stages.store.base import Artifact
from stages.tables.join import read_scored

# Share of prompts with a winner below which a warning names the samples that would be needed.
_ENOUGH = 0.5
_WANTED = 0.9
# Without an event in n trials the rate is below 3/n with 95 % confidence.
_RULE_OF_THREE = 3


@dataclass(frozen=True)
class SamplingTrial:
    """Winners and rewards among the base's samples of a few prompts.

    Attributes:
        samples: Responses to each.
        winners: Prompts whose responses all have a score, and not the same; of others `pair` makes
            no pair.
        odd: Share of the responses whose score is not their prompt's most common one; prompts with
            an unscored response aside.
        mean_reward: Mean of all scores; None if no response has one.
    """

    prompts: int
    samples: int
    winners: int
    odd: float
    mean_reward: float | None

    def wanted_samples(self) -> int | None:
        """Responses a prompt with which about 90 % of the prompts have a winner; None: unknown."""
        if not self.odd:
            return None
        return max(2, math.ceil(math.log(1 - _WANTED) / math.log(1 - self.odd)))

    def sentence(self) -> str:
        """The finding, for people."""
        mean = "none has a score" if self.mean_reward is None else f"{self.mean_reward:.3f}"
        return (
            f"the base's {self.samples} samples of {self.prompts} prompts: mean reward {mean}; "
            f"{self.winners} of {self.prompts} prompts have a winner"
        )

    def warning(self) -> str | None:
        """A warning with its remedy if few prompts have a winner."""
        if self.winners >= _ENOUGH * self.prompts:
            return None
        others = "easier prompts, or an oracle that gives shares"
        if (wanted := self.wanted_samples()) is not None:
            return (
                "training learns from prompts with a winner only; about 90 % of the prompts would "
                f"have one with generate.num_samples={wanted}. Or take {others}"
            )
        tried = self.prompts * self.samples
        return (
            "training would learn nothing: all responses to each prompt have the same score. Of "
            f"{tried} samples none stands out, so that it takes more than about "
            f"{tried // _RULE_OF_THREE} samples to find one that does. Take {others}"
        )

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document."""
        found = {"wanted_samples": self.wanted_samples(), "warning": self.warning()}
        return asdict(self) | found


def try_sampling(config: RunConfig, prompts: int) -> SamplingTrial:
    """Samples the base on a few training prompts, as the first iteration would, and scores them.

    The artifacts are kept: a warm start that is computed here is the run's own.
    """
    few = {"iterations": 1, "test_prompts": 1, "prompts_per_iteration": prompts}
    config = config.model_copy(
        update={
            "name": f"{config.name}-trial",
            "iterations": 1,
            "prepare": config.prepare.model_copy(update=few),
            "generate": config.generate.model_copy(update={"num_shards": 1}),
        }
    )
    executor = StepExecutor(config)
    made: dict[str, Artifact] = {}

    def do(step: Step) -> Output:
        upstream = {name: made[name] for name in step.upstream()}
        made[step.name] = executor.execute(step, upstream).artifact
        return step.output

    external = resolve_inputs(config)
    steps = Steps(config, external)
    try:
        table = do(steps.prepare()).at("iteration-1.parquet")
        warm = bool(config.inputs.warm_start)
        base = Model(do(steps.warm_start()).at("checkpoint") if warm else external["policy"][0])
        sample_and_score(steps, do, "trial", steps.for_training(1, base), base, table)
    finally:
        executor.stop()
    return _read(made["trial/generate/0"], made["trial/score/0"], config.generate.num_samples)


def _read(responses: Artifact, scores: Artifact, samples: int) -> SamplingTrial:
    groups: list[list[float | None]] = []
    paths = [responses.file("responses.parquet")], [scores.file("scores.parquet")]
    for batch in read_scored(*paths, columns=()):
        found = batch.scores.to_pylist()
        ends = zip(batch.starts[:-1], batch.starts[1:], strict=True)
        groups += [found[start:end] for start, end in ends]
    given = [score for group in groups for score in group if score is not None]
    whole = [group for group in groups if None not in group]
    return SamplingTrial(
        prompts=len(groups),
        samples=samples,
        winners=sum(len(set(group)) > 1 for group in whole),
        odd=sum(len(group) - max(map(group.count, group)) for group in whole)
        / max(sum(map(len, whole)), 1),
        mean_reward=math.fsum(given) / len(given) if given else None,
    )
