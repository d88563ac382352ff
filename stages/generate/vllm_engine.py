"""vLLM's engine in the process of the stage: its arguments, its start, and its errors."""

import importlib.util
import os
import sys
from typing import Any

from stages.contract.checkpoints import check_weight_files
from stages.contract.errors import UserError
from stages.generate.params import GenerateParams
from stages.generate.policy import Policy
from stages.modeling.checkpoint_files import checkpoint_folder
from stages.modeling.engine_errors import engine_error, is_out_of_memory

# vLLM itself would take its share of a GPU's memory, nine tenths, of the host's: two stages at
# once would not start.
CPU_CACHE_GIB = 4.0
# Tokens of one step on a CPU if the context is shorter.
_BATCHED_TOKENS = 2048


def require_vllm() -> None:
    """Checks that vLLM is installed, and sets the variables that it reads when it is imported."""
    # The engine runs in this process: one that it started would outlive a kill of this one, and
    # hold its memory.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    # It would be compiled by nvcc for the engine's warm-up. A request with a seed never uses it.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            f"generate.backend 'vllm' needs vLLM, which {sys.executable} does not have",
            "run `make setup-vllm` and let the stage run by .venv-vllm/bin/python "
            "(execution.interpreters), or set generate.backend to 'transformers'",
        )


def start_engine(policy: Policy, params: GenerateParams) -> Any:
    """Starts an engine in this process; :func:`require_vllm` comes first.

    Raises:
        UserError: vLLM refuses the model or a setting, or has no such argument.
        EngineError: The engine does not start, for lack of memory or another reason of the moment.
    """
    if (folder := checkpoint_folder(policy.source)) is not None:
        # The engine's own error would name no file, and pass for one of the moment.
        check_weight_files(folder)

    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    required = _required_arguments(policy, params)
    extra = params.vllm.extra_engine_args
    for name in required.keys() & extra.keys():
        raise UserError(
            f"generate.vllm.extra_engine_args.{name} is set by the stage itself",
            "leave it out; docs/sampling.md names the setting that controls it",
        )
    try:
        usual = _platform_arguments(policy)
        if not policy.is_tied:
            # The engine drops the policy's head if config.json calls it tied.
            overrides = {"tie_word_embeddings": False, **(extra.get("hf_overrides") or {})}
            extra = {**extra, "hf_overrides": overrides}
        engine_args = EngineArgs(**{**usual, **required, **extra})
        return LLMEngine.from_engine_args(engine_args)
    except Exception as error:
        if isinstance(error, (ValueError, TypeError)) and not is_out_of_memory(error):
            reason = " ".join(str(error).split())[:500]
            raise UserError(
                f"vLLM refuses the model {policy.source.name_or_path} or a setting: {reason}",
                "correct generate.vllm, generate.dtype or the checkpoint",
            ) from error
        raise engine_error("vLLM", error, MEMORY_REMEDY) from error


MEMORY_REMEDY = (
    "of generate.vllm lower gpu_memory_utilization or kv_cache_gib if other programs need the "
    "memory, or max_num_seqs; lower generate.max_length_tokens if one sequence does not fit; or "
    "raise tensor_parallel_size"
)


def _required_arguments(policy: Policy, params: GenerateParams) -> dict[str, Any]:
    from vllm.platforms import current_platform

    settings = params.vllm
    is_cpu = current_platform.is_cpu()
    gib = CPU_CACHE_GIB if settings.kv_cache_gib is None and is_cpu else settings.kv_cache_gib
    return {
        "model": policy.source.name_or_path,
        "revision": policy.source.revision,
        # Prompts go in as token ids.
        "skip_tokenizer_init": True,
        # Else a model that reads images too wants a tokenizer for its processor.
        "language_model_only": True,
        "trust_remote_code": False,
        "load_format": "safetensors",
        "kv_cache_memory_bytes": None if gib is None else int(gib * 2**30),
        "disable_log_stats": True,
        "dtype": params.dtype,
        "max_model_len": policy.max_length_tokens,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": 1,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "max_num_seqs": settings.max_num_seqs,
        "enforce_eager": is_cpu if settings.enforce_eager is None else settings.enforce_eager,
        # The K samples of a prompt share its keys and values.
        "enable_prefix_caching": True,
        # The policy's own, before temperature and top-p.
        "logprobs_mode": "raw_logprobs",
    }


def _platform_arguments(policy: Policy) -> dict[str, Any]:
    """Arguments that the device asks for, unless ``extra_engine_args`` has others."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return {}
    # A prompt read in pieces makes vLLM turn the request's random generator back, which a CPU's
    # generator cannot do.
    return {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(policy.max_length_tokens, _BATCHED_TOKENS),
    }
