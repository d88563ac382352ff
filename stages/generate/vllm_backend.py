"""Sampling with vLLM: paged attention, continuous batching, prompts shared between samples."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from stages.contract.adapters import ADAPTER_CONFIG
from stages.contract.errors import UserError
from stages.contract.events import Emitter
from stages.generate.backend import LENGTH, STOP, Prompt, Sample
from stages.generate.params import GenerateParams, VllmSettings
from stages.generate.policy import Policy
from stages.modeling.checkpoint_files import check_finite_files
from stages.modeling.vllm_engine import (
    cache_setting,
    has_batch_invariance,
    require_vllm,
    start_engine,
    start_told,
    step,
)

# Tokens of one step on a CPU if the context is shorter.
_BATCHED_TOKENS = 2048


class VllmBackend:
    """Samples from a vLLM engine that this process starts.

    Args:
        policy: The policy.
        params: Engine settings.
        events: Hears of the engine's start, and of what it cannot do that the settings ask for.
    """

    def __init__(self, policy: Policy, params: GenerateParams, events: Emitter):
        self._params = params
        self._stop_ids = sorted(policy.stop_ids)
        asked = params.vllm.batch_invariant
        require_vllm("generate.backend", batch_invariant=asked)
        self._lower = _memory_remedy(params.vllm)
        if policy.adapter is not None:
            check_finite_files(policy.adapter)
        with start_told(events):
            self._engine = start_engine(
                policy.source,
                _own_arguments(policy, params),
                kv_cache_gib=params.vllm.kv_cache_gib,
                platform=lambda current: _platform_arguments(policy, current),
                extra=params.vllm.extra_engine_args,
                extra_setting="generate.vllm.extra_engine_args",
                correct="correct generate.vllm, generate.dtype or the checkpoint",
                lower=self._lower,
            )
        self._adapter = _adapter_request(policy)
        invariant = asked and has_batch_invariance()
        if asked and not invariant:
            events.warning(
                "batch_invariant is off: vLLM has no batch-invariant kernels for this machine"
            )
        self.notes: Mapping[str, Any] = {"batch_invariant": invariant}

    def generate(self, prompts: Iterator[Prompt]) -> Iterator[tuple[int, int, Sample]]:
        """Continues every prompt once per seed; see :class:`stages.generate.backend.Backend`."""
        waiting = enumerate(prompts)
        while True:
            self._refill(waiting)
            if not self._engine.has_unfinished_requests():
                return
            for output in step(self._engine, self._lower):
                if output.finished:
                    number, sample = map(int, output.request_id.split("/"))
                    yield number, sample, _to_sample(output.outputs[0])

    def _refill(self, waiting: Iterator[tuple[int, Prompt]]) -> None:
        """Hands requests over until as many wait in the engine as it works at."""
        from vllm.inputs.engine import tokens_input

        # As many wait as are in work: no place of the engine is ever empty, and memory does not
        # grow with the number of prompts.
        wanted = 2 * self._params.vllm.max_num_seqs
        while self._engine.get_num_unfinished_requests() < wanted:
            number, prompt = next(waiting, (None, None))
            if prompt is None:
                return
            for sample, seed in enumerate(prompt.seeds):
                self._engine.add_request(
                    f"{number}/{sample}",
                    tokens_input(prompt.token_ids),
                    self._sampling_params(seed),
                    lora_request=self._adapter,
                )

    def _sampling_params(self, seed: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=self._params.temperature,
            top_p=self._params.top_p,
            max_tokens=self._params.max_new_tokens,
            stop_token_ids=self._stop_ids,
            seed=seed,
            logprobs=0,
            detokenize=False,
        )

    def close(self) -> None:
        """Ends the engine and its processes."""
        self._engine.engine_core.shutdown()


load = VllmBackend


def _memory_remedy(settings: VllmSettings) -> str:
    """Settings to change if memory is short, with their values."""
    cache = cache_setting(settings.kv_cache_gib, settings.gpu_memory_utilization)
    return (
        f"of generate.vllm lower {cache} if other programs need the memory, or "
        f"max_num_seqs={settings.max_num_seqs}; lower generate.max_length_tokens if one sequence "
        "does not fit; or spread the model over more GPUs than "
        f"tensor_parallel_size={settings.tensor_parallel_size}"
    )


def _own_arguments(policy: Policy, params: GenerateParams) -> dict[str, Any]:
    settings = params.vllm
    arguments = {
        "dtype": params.dtype,
        "quantization": settings.quantization,
        "max_model_len": policy.max_length_tokens,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "max_num_seqs": settings.max_num_seqs,
        "enforce_eager": settings.enforce_eager,
        # The K samples of a prompt share its keys and values.
        "enable_prefix_caching": True,
        # The policy's own, before temperature and top-p.
        "logprobs_mode": "raw_logprobs",
    }
    if policy.adapter is not None:
        arguments |= {"enable_lora": True, "max_lora_rank": _rank_limit(policy.adapter)}
    return arguments


def _platform_arguments(policy: Policy, platform: Any) -> dict[str, Any]:
    """Arguments that the device asks for, unless ``extra_engine_args`` has others."""
    if not platform.is_cpu():
        return {}
    # A prompt read in pieces makes vLLM turn the request's random generator back, which those of
    # CPUs cannot do.
    return {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(policy.max_length_tokens, _BATCHED_TOKENS),
    }


def _rank_limit(adapter: Path) -> int:
    """The smallest rank limit that vLLM knows and that the adapter fits."""
    from vllm.config.lora import MaxLoRARanks

    rank = json.loads((adapter / ADAPTER_CONFIG).read_text())["r"]
    limits = [limit for limit in get_args(MaxLoRARanks) if limit >= rank]
    if not limits:
        raise UserError(
            f"the adapter {adapter} has rank {rank}, vLLM takes {max(get_args(MaxLoRARanks))}",
            "merge the adapter into its model, and sample from that",
        )
    return min(limits)


def _adapter_request(policy: Policy) -> Any:
    if policy.adapter is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, str(policy.adapter))


def _to_sample(completion: Any) -> Sample:
    token_ids = list(completion.token_ids)
    logprobs = [
        position[token].logprob
        for token, position in zip(token_ids, completion.logprobs, strict=True)
    ]
    if completion.finish_reason not in (STOP, LENGTH):
        raise RuntimeError(f"vLLM ended a response with {completion.finish_reason!r}")
    return Sample(token_ids, logprobs, completion.finish_reason)
