"""Starting vLLM's engine: what it is given, what is refused, and what its errors mean."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any, get_args

from stages.contract.errors import UserError
from stages.generate.backend import engine_error, is_out_of_memory
from stages.generate.params import GenerateParams, VllmSettings
from stages.generate.policy import ADAPTER_CONFIG, Policy
from stages.modeling.vllm_cache import cache_setting, kv_cache_bytes

# Tokens of one step on a CPU where the context is shorter.
_BATCHED_TOKENS = 2048


def start_engine(policy: Policy, params: GenerateParams) -> Any:
    """Starts an engine in this process with the policy loaded.

    Raises:
        UserError: vLLM is not installed, or refuses the model or a setting.
        EngineError: The engine does not start, for lack of memory or another reason of the moment.
    """
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
    # Before anything else of vLLM is imported: its kernels read it then. Where there are none of
    # the kind, the engine would break down.
    os.environ["VLLM_BATCH_INVARIANT"] = str(int(batch_invariance(params.vllm)[0]))
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = _own_arguments(policy, params)
    extra = params.vllm.extra_engine_args
    check_engine_args(extra, {each.name for each in dataclasses.fields(EngineArgs)}, arguments)
    try:
        defaults = _platform_arguments(policy)
        return LLMEngine.from_engine_args(EngineArgs(**{**defaults, **arguments, **extra}))
    except Exception as error:
        if isinstance(error, (ValueError, TypeError)) and not is_out_of_memory(error):
            raise UserError(
                f"vLLM refuses the model or a setting: {_said(error)}",
                "correct generate.vllm, generate.dtype or the checkpoint",
            ) from error
        raise engine_error("vLLM", error, memory_remedy(params.vllm)) from error


def check_engine_args(extra: dict[str, Any], known: set[str], own: dict[str, Any]) -> None:
    """Checks the names of ``extra_engine_args``.

    Args:
        extra: What the configuration says.
        known: Arguments of the installed vLLM's engine.
        own: Those that this stage sets.

    Raises:
        UserError: vLLM has no such argument, or this stage sets it.
    """
    for name in extra:
        place = f"generate.vllm.extra_engine_args.{name}"
        if name in own:
            raise UserError(
                f"{place} is set by the stage itself",
                "leave it out; docs/generation.md tells which setting it follows",
            )
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known.difference(own)), n=1)
            raise UserError(
                f"{place}: the installed vLLM's EngineArgs has no such argument",
                f"did you mean {near[0]!r}?" if near else "see vLLM's documentation for its names",
            )


def memory_remedy(settings: VllmSettings) -> str:
    """Which settings to change where memory is short, with their values."""
    cache = cache_setting(settings.kv_cache_gib, settings.gpu_memory_utilization)
    return (
        f"of generate.vllm lower {cache} if other programs need the memory, or "
        f"max_num_seqs={settings.max_num_seqs}; lower generate.max_length_tokens if one sequence "
        "does not fit; or spread the model over more GPUs than "
        f"tensor_parallel_size={settings.tensor_parallel_size}"
    )


def batch_invariance(settings: VllmSettings) -> tuple[bool, str | None]:
    """Whether the engine's kernels are batch-invariant, and why not where it was asked for."""
    from vllm.platforms import current_platform

    if not settings.batch_invariant or current_platform.is_cuda_alike():
        return settings.batch_invariant, None
    return False, f"vLLM has no batch-invariant kernels for {current_platform.device_type}"


def _own_arguments(policy: Policy, params: GenerateParams) -> dict[str, Any]:
    settings = params.vllm
    arguments = {
        "model": policy.source.name_or_path,
        "revision": policy.source.revision,
        # Prompts go in and responses come out as token ids.
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "load_format": "safetensors",
        "dtype": params.dtype,
        "quantization": settings.quantization,
        "max_model_len": policy.max_length_tokens,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": kv_cache_bytes(settings.kv_cache_gib),
        "max_num_seqs": settings.max_num_seqs,
        "enforce_eager": settings.enforce_eager,
        # The K samples of a prompt share its keys and values.
        "enable_prefix_caching": True,
        # Of the policy itself: before temperature and top-p.
        "logprobs_mode": "raw_logprobs",
        "disable_log_stats": True,
    }
    if policy.adapter is not None:
        arguments |= {"enable_lora": True, "max_lora_rank": _rank_limit(policy.adapter)}
    return arguments


def _platform_arguments(policy: Policy) -> dict[str, Any]:
    """Arguments that the device asks for, unless ``extra_engine_args`` has others."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
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


def _said(error: Exception) -> str:
    """The first line of an error, or of the first error that pydantic found."""
    found = getattr(error, "errors", None)
    text = found()[0]["msg"].removeprefix("Value error, ") if callable(found) else str(error)
    return text.strip().splitlines()[0][:500] if text.strip() else type(error).__name__
