"""Checks that sampling gives what pairs and training need."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
