"""vLLM's engine in the process of a stage: its start, its memory, and the meaning of its errors."""

import dataclasses
import difflib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from stages.contract.checkpoints import check_weight_files
from stages.contract.errors import UserError
from stages.contract.events import Emitter
from stages.harness.context import ModelSource
from stages.modeling.checkpoint_files import check_finite_files, local_folder
from stages.modeling.engine_errors import engine_error, is_out_of_memory

# vLLM itself would take its share of a GPU's memory, nine tenths, of the host's: two stages at
# once would not start.
CPU_CACHE_GIB = 4.0
TOLD_SECONDS = 15.0
"""Time between two lines about a start that lasts."""


def require_vllm(setting: str, *, batch_invariant: bool = False) -> None:
    """Checks that vLLM is installed and sets what it reads when it is imported.

    Args:
        setting: Full name of the setting that is ``vllm``, for messages.
        batch_invariant: Whether to use batch-invariant kernels if there are any.
    """
    # The engine runs in this process: one that it started would outlive a kill of this one, and
    # hold its memory.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            f"{setting} 'vllm' needs vLLM, which {sys.executable} does not have",
            "run `make setup-vllm` and let the stage run by .venv-vllm/bin/python "
            f"(execution.interpreters), or set {setting} to 'transformers'",
        )
    # Where there are no such kernels, the engine would break down.
    invariant = batch_invariant and has_batch_invariance()
    os.environ["VLLM_BATCH_INVARIANT"] = str(int(invariant))


def has_batch_invariance() -> bool:
    """True if vLLM has batch-invariant kernels for this machine."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda_alike())


def start_engine(
    source: ModelSource,
    own: Mapping[str, Any],
    *,
    kv_cache_gib: float | None,
    platform: Callable[[Any], Mapping[str, Any]] = lambda current: {},
    extra: Mapping[str, Any] | None = None,
    extra_setting: str = "",
    correct: str,
    lower: str,
) -> Any:
    """Starts an engine in this process; :func:`require_vllm` comes first.

    Args:
        source: The checkpoint.
        own: Arguments of vLLM's ``EngineArgs`` that the stage sets.
        kv_cache_gib: Memory for keys and values; None leaves it to :func:`cache_gib`.
        platform: vLLM's current platform to arguments for it; ``extra`` goes before these.
        extra: Arguments that the user sets.
        extra_setting: Full name of the setting that holds them, for messages.
        correct: Remedy if vLLM refuses the model or a setting.
        lower: Remedy if memory is short.

    Raises:
        UserError: vLLM refuses the model or a setting, or has no argument of a name in ``extra``.
        EngineError: The engine does not start, for lack of memory or another reason of the moment.
    """
    if (folder := local_folder(source)) is not None:
        # The engine's own error would name no file, and pass for one of the moment.
        check_weight_files(folder)
        # It would load any values, and answer with whatever token comes of them.
        check_finite_files(folder)

    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    gib = cache_gib(kv_cache_gib)
    arguments = {
        "model": source.name_or_path,
        "revision": source.revision,
        # Prompts go in as token ids.
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "load_format": "safetensors",
        "kv_cache_memory_bytes": None if gib is None else int(gib * 2**30),
        "disable_log_stats": True,
        **own,
    }
    if arguments.get("enforce_eager") is None:
        arguments["enforce_eager"] = current_platform.is_cpu()
    extra = extra or {}
    known = {each.name for each in dataclasses.fields(EngineArgs)}
    _check_names(extra, known, arguments, extra_setting)
    try:
        engine_args = EngineArgs(**{**platform(current_platform), **arguments, **extra})
        return LLMEngine.from_engine_args(engine_args)
    except Exception as error:
        if isinstance(error, (ValueError, TypeError)) and not is_out_of_memory(error):
            what = f"vLLM refuses the model {source.name_or_path} or a setting: {_said(error)}"
            raise UserError(what, correct) from error
        raise engine_error("vLLM", error, lower) from error


@contextmanager
def start_told(events: Emitter) -> Iterator[None]:
    """Block that starts an engine: says so, and now and then for how long it has been at it."""
    events.info("starting vLLM's engine")
    began, ended = time.monotonic(), threading.Event()

    def tell() -> None:
        while not ended.wait(TOLD_SECONDS):
            events.info(f"vLLM's engine has been starting for {time.monotonic() - began:.0f} s")

    thread = threading.Thread(target=tell, name="start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def step(engine: Any, lower: str) -> list[Any]:
    """One step of an engine; its outputs.

    Raises:
        EngineError: The engine broke down; ``lower`` is the remedy if memory is short.
    """
    try:
        outputs: list[Any] = engine.step()
    except Exception as error:
        raise engine_error("vLLM", error, lower) from error
    return outputs


def cache_gib(asked: float | None) -> float | None:
    """Memory for keys and values, in GiB, to ask vLLM for.

    Returns:
        None if the share of the GPU's memory decides.
    """
    from vllm.platforms import current_platform

    return CPU_CACHE_GIB if asked is None and current_platform.is_cpu() else asked


def cache_setting(asked: float | None, gpu_memory_utilization: float) -> str:
    """The setting to lower if memory is short, with its value."""
    gib = cache_gib(asked)
    if gib is None:
        return f"gpu_memory_utilization={gpu_memory_utilization:g}"
    return f"kv_cache_gib={gib:g}"


def _check_names(
    extra: Mapping[str, Any], known: set[str], own: Mapping[str, Any], setting: str
) -> None:
    for name in extra:
        place = f"{setting}.{name}"
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


def _said(error: Exception) -> str:
    """The first line of an error, or of the first error that pydantic found."""
    found = getattr(error, "errors", None)
    text = found()[0]["msg"].removeprefix("Value error, ") if callable(found) else str(error)
    return text.strip().splitlines()[0][:500] if text.strip() else type(error).__name__
