"""Checks that evaluations ask of their oracles only what these can tell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from flows.pipeline.evaluation import Evaluation
from stages.evaluate.params import EvaluateParams
from stages.score.params import ScoreParams

if TYPE_CHECKING:
    from flows.pipeline.config import RunConfig

UNNAMED = "JUDGE"
"""Model in shipped configurations that a person has to choose."""


class _Asked(NamedTuple):
    """An evaluation, its oracle and its metrics, each with its place in the configuration."""

    name: str
    evaluation: Evaluation
    score_place: str
    score: ScoreParams
    evaluate_place: str
    evaluate: EvaluateParams


def check_evaluations(config: RunConfig) -> None:
    """Refuses figures that the oracle of an evaluation does not give.

    Raises:
        ValueError: maj@k without votes, length control without comparisons, or no judge named.
    """
    for asked in _evaluations(config):
        _check_votes(asked)
        _check_length_control(asked)
        _check_judge(asked)


def images(config: RunConfig) -> set[str]:
    """Images that scores and metrics need; those of hub inputs aside, which change none of them."""
    asked = list(_evaluations(config))
    params = [each.score for each in asked] + [each.evaluate for each in asked] + [config.score]
    return {each.image_for(from_hub=False) for each in params}


def _evaluations(config: RunConfig) -> Iterator[_Asked]:
    yield _Asked(
        *("evaluation", config.evaluation),
        *("score", config.score),
        *("evaluate", config.evaluate),
    )
    for name, suite in config.suites.items():
        place = f"suites.{name}"
        yield _Asked(
            *(place, suite),
            *((f"{place}.score", suite.score) if suite.score else ("score", config.score)),
            *(
                (f"{place}.evaluate", suite.evaluate)
                if suite.evaluate
                else ("evaluate", config.evaluate)
            ),
        )


def _check_votes(asked: _Asked) -> None:
    oracle = asked.score
    counts = oracle.oracle == "math_verify" and oracle.math_verify.votes
    if asked.evaluation.maj_at_k and not counts:
        raise ValueError(
            f"{asked.name}.maj_at_k is set, and its oracle ({oracle.oracle}) counts no votes: set "
            f"{asked.score_place}.oracle to math_verify and {asked.score_place}.math_verify.votes "
            "to true"
        )


def _check_judge(asked: _Asked) -> None:
    if "judge" in asked.score.parts and asked.score.judge.model == UNNAMED:
        raise ValueError(
            f"{asked.score_place}.judge.model is {UNNAMED}, which stands for the judge that you "
            f"choose: set it, and {asked.score_place}.judge.url, to those of an OpenAI-compatible "
            "server"
        )


def _check_length_control(asked: _Asked) -> None:
    wanted, judge = asked.evaluate.length_controlled, asked.score.judge
    against = "reference" if wanted == "reference" else "samples"
    compares = asked.score.oracle == "judge" and judge.mode == "pairwise"
    if wanted != "off" and not (compares and judge.against == against):
        raise ValueError(
            f"{asked.evaluate_place}.length_controlled is {wanted!r}, and the oracle does not "
            f"compare with that: set {asked.score_place}.oracle to judge, "
            f"{asked.score_place}.judge.mode to pairwise and {asked.score_place}.judge.against to "
            f"{against}"
        )
