"""Sampling with vLLM: paged attention, continuous batching, prompts shared between samples."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from stages.contract.errors import UserError
from stages.generate.backend import LENGTH, STOP, Prompt, Sample
from stages.generate.params import GenerateParams, VllmSettings
from stages.generate.policy import Policy


class VllmBackend:
    """Samples from a vLLM engine that this process starts.

    Args:
        policy: The policy; its stop ids end a response.
        params: Sampling parameters and engine settings.
    """

    def __init__(self, policy: Policy, params: GenerateParams):
        self._params = params
        self._stop_ids = policy.stop_ids
        self._engine = _start_engine(policy, params)

    def generate(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, int, Sample]]:
        """Continues every prompt once per seed; see :class:`stages.generate.backend.Backend`."""
        from vllm.inputs.engine import tokens_input

        for index, prompt in enumerate(prompts):
            for sample, seed in enumerate(prompt.seeds):
                self._engine.add_request(
                    f"{index}/{sample}",
                    tokens_input(prompt.token_ids),
                    self._sampling_params(seed),
                )
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    index, sample = map(int, output.request_id.split("/"))
                    yield index, sample, _to_sample(output.outputs[0])

    def close(self) -> None:
        """Ends the engine and whatever processes it has for its GPUs."""
        self._engine.engine_core.shutdown()

    def _sampling_params(self, seed: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=self._params.temperature,
            top_p=self._params.top_p,
            max_tokens=self._params.max_new_tokens,
            stop_token_ids=sorted(self._stop_ids),
            seed=seed,
            logprobs=0,
            detokenize=False,
        )


def _to_sample(completion: Any) -> Sample:
    token_ids = list(completion.token_ids)
    logprobs = [
        position[token].logprob
        for token, position in zip(token_ids, completion.logprobs, strict=True)
    ]
    if completion.finish_reason not in (STOP, LENGTH):
        raise RuntimeError(f"vLLM ended a response with {completion.finish_reason!r}")
    return Sample(token_ids, logprobs, completion.finish_reason)


def _start_engine(policy: Policy, params: GenerateParams) -> Any:
    # The engine runs in this process: one that it started would outlive a kill of this one, and
    # hold its memory. Both are read when vLLM is imported.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            f"backend 'vllm' needs vLLM, which {sys.executable} does not have",
            "run `make setup-vllm` and let the stage run by .venv-vllm/bin/python "
            "(execution.interpreters), or set backend to 'transformers'",
        )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    settings = params.vllm
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=policy.source.name_or_path,
            revision=policy.source.revision,
            # Prompts go in and responses come out as token ids.
            skip_tokenizer_init=True,
            trust_remote_code=False,
            load_format="safetensors",
            dtype=params.dtype,
            max_model_len=policy.max_length_tokens,
            tensor_parallel_size=settings.tensor_parallel_size,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            kv_cache_memory_bytes=_kv_cache_bytes(settings),
            max_num_seqs=settings.max_num_seqs,
            enforce_eager=settings.enforce_eager,
            enable_prefix_caching=True,
            # Of the policy itself: before temperature and top-p.
            logprobs_mode="raw_logprobs",
            disable_log_stats=True,
        )
    )


def _kv_cache_bytes(settings: VllmSettings) -> int | None:
    return None if settings.kv_cache_gib is None else int(settings.kv_cache_gib * 2**30)
