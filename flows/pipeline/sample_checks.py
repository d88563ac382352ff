"""Checks that samplings give what pairs, training and evaluations need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from flows.pipeline.evaluation import Evaluation
from stages.evaluate.params import EvaluateParams
from stages.score.params import ScoreParams

if TYPE_CHECKING:
    from flows.pipeline.config import RunConfig

# The highest of `vllm.config.lora.MaxLoRARanks`.
_VLLM_RANK = 512


def check_samples(config: RunConfig) -> None:
    """Refuses samples that later stages of an iteration cannot use.

    Raises:
        ValueError: Too few samples for the pairs, log-probabilities of another policy, or a server
            that does not follow the training.
    """
    if config.generate.num_samples < 2:
        raise ValueError(
            f"generate.num_samples is {config.generate.num_samples}, and the pair strategy "
            f"{config.pair.strategy!r} compares two responses to a prompt: sample at least 2"
        )
    wanted = 2 * config.pair.pairs_per_prompt
    if config.generate.num_samples < wanted:
        raise ValueError(
            f"pair.pairs_per_prompt is {config.pair.pairs_per_prompt}, and generate.num_samples "
            f"{config.generate.num_samples}: no response is in two pairs, so that it takes "
            f"{wanted} samples; raise num_samples, or lower pairs_per_prompt"
        )
    if config.train.reference_logprobs == "sampler" and config.pair_data == "accumulate":
        raise ValueError(
            "train.reference_logprobs is 'sampler' and pair_data is 'accumulate': the pairs of "
            "earlier iterations were sampled by earlier policies, which are not the reference; "
            "set train.reference_logprobs to 'model', or pair_data to 'current'"
        )
    if config.generate.backend == "openai":
        _check_server(config)
    if config.train.lora.save == "adapter":
        _check_rank(config)


def _check_rank(config: RunConfig) -> None:
    if "vllm" in config.backends() and config.train.lora.rank > _VLLM_RANK:
        raise ValueError(
            f"train.lora.save is 'adapter' and train.lora.rank {config.train.lora.rank}: vLLM "
            f"samples from adapters of rank {_VLLM_RANK} at most; lower the rank, or set "
            "train.lora.save to 'merged'"
        )


def _check_server(config: RunConfig) -> None:
    if config.iterations > 1:
        raise ValueError(
            "generate.backend is 'openai': a server's model does not follow the training, so "
            f"that iterations 2 to {config.iterations} would train on another policy's samples; "
            "set iterations to 1"
        )
    for place, evaluation in config.evaluations().items():
        if evaluation.backend is None:
            raise ValueError(
                "generate.backend is 'openai', and the server does not have the trained policy: "
                f"set {place}.backend to 'vllm' or 'transformers'"
            )
    unknown = config.generate.openai.without_token_ids == "tokenize"
    if unknown and config.train.reference_logprobs == "sampler":
        raise ValueError(
            "train.reference_logprobs is 'sampler', and with generate.openai.without_token_ids "
            "'tokenize' the sampler's log-probabilities are unknown: set it to 'model'"
        )


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
