"""Trial of a task before its run: counts the prompts whose samples by the base have a winner.

A run learns from prompts whose responses get different scores. If the base is hardly ever
rewarded, nearly all pairs tie, which a run would show after its first iteration only.
"""

from dataclasses import dataclass

from flows.execution.step_executor import StepExecutor
from flows.pipeline.algorithm import sample_and_score
from flows.pipeline.config import RunConfig
from flows.pipeline.inputs import resolve_inputs
from flows.pipeline.step import Model, Output, Step
from flows.pipeline.steps import Steps
from stages.store.base import Artifact
from stages.tables.schemas import SCORES, read_rows

# Share of prompts with a winner below which there is a warning.
_ENOUGH = 0.5


@dataclass(frozen=True)
class SamplingTrial:
    """Winners among the base's samples of a few prompts.

    Attributes:
        samples: Responses to each prompt.
        winners: Prompts whose responses all have a score, and not the same one.
    """

    prompts: int
    samples: int
    winners: int

    def sentence(self) -> str:
        """The result, for people."""
        return (
            f"{self.winners} of {self.prompts} prompts have a winner among the base's "
            f"{self.samples} samples"
        )

    def warning(self) -> str | None:
        """A warning with its remedy if few prompts have a winner."""
        if self.winners >= _ENOUGH * self.prompts:
            return None
        return (
            "training learns from prompts with a winner only: raise generate.num_samples "
            f"({self.samples}), or take easier prompts or an oracle that gives shares"
        )


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
    artifacts: dict[str, Artifact] = {}

    def do(step: Step) -> Output:
        upstream = {name: artifacts[name] for name in step.upstream()}
        artifacts[step.name] = executor.execute(step, upstream).artifact
        return step.output

    external = resolve_inputs(config)
    steps = Steps(config, external)
    try:
        prompt_table = do(steps.prepare()).at("iteration-1.parquet")
        warm = bool(config.inputs.warm_start)
        base = Model(do(steps.warm_start()).at("checkpoint") if warm else external["policy"][0])
        sample_and_score(steps, do, "trial", steps.for_training(1), base, prompt_table)
    finally:
        executor.stop()
    scores: dict[str, list[float | None]] = {}
    table = artifacts["trial/score/0"].file("scores.parquet")
    for row in read_rows(table, SCORES, columns=["prompt_id", "score"]):
        scores.setdefault(row["prompt_id"], []).append(row["score"])
    winners = sum(None not in group and len(set(group)) > 1 for group in scores.values())
    return SamplingTrial(len(scores), config.generate.num_samples, winners)
