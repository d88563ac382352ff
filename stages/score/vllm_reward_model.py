"""The ``reward_model`` oracle on vLLM's pooling runner, for classifiers that vLLM knows."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.contract.context import ModelSource, StageContext
from stages.contract.errors import GebError, UserError
from stages.modeling.chat import require_chat_template
from stages.modeling.load import context_tokens, load_tokenizer
from stages.modeling.vllm_cache import cache_setting, kv_cache_bytes
from stages.score.conversations import render_row, too_long
from stages.score.oracle import Verdict
from stages.score.params import ScoreParams


class EngineError(GebError):
    """vLLM did not start; a retry may find more memory free."""


@dataclass(frozen=True)
class VllmRewardModel:
    """Scores the whole conversation: the prompt's messages and the response as assistant turn.

    Attributes:
        engine: vLLM's engine with the classifier loaded.
        tokenizer: Its tokenizer; the conversation is rendered by its chat template.
        identity: Name and digest or revision of the checkpoint.
        max_length_tokens: Longest conversation that is scored.
    """

    engine: Any
    tokenizer: Any
    identity: str
    max_length_tokens: int

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Verdict]]:
        """Scores the rows; see :class:`stages.score.oracle.Oracle`."""
        from vllm import PoolingParams
        from vllm.inputs.engine import tokens_input

        # The raw output, as transformers gives it: no sigmoid.
        params = PoolingParams(task="classify", use_activation=False)
        for place, row in enumerate(rows):
            token_ids = render_row(self.tokenizer, row)
            reason = too_long(token_ids, self.max_length_tokens)
            if reason is None:
                self.engine.add_request(str(place), tokens_input(token_ids), params)
            else:
                yield place, Verdict(None, reason)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    [reward] = output.outputs.data.tolist()
                    yield int(output.request_id), _verdict(reward)


def load(ctx: StageContext[ScoreParams]) -> VllmRewardModel:
    """Starts an engine in this process with the reward model given as input ``model``.

    Raises:
        UserError: vLLM is not installed or does not know the model, which then has not one output
            or no chat template.
        EngineError: The engine does not start.
    """
    from transformers import AutoConfig

    source = ctx.model("model")
    tokenizer = load_tokenizer(source)
    require_chat_template(tokenizer, source.name_or_path)
    config = AutoConfig.from_pretrained(source.name_or_path, revision=source.revision)
    if config.num_labels != 1:
        raise UserError(
            f"the reward model {source.name_or_path} has {config.num_labels} outputs, not one",
            "use a classifier with num_labels=1",
        )
    limit = context_tokens(config, ctx.params.max_length_tokens, source)
    return VllmRewardModel(
        engine=_start_engine(source, ctx.params, limit),
        tokenizer=tokenizer,
        identity=f"reward_model:{ctx.inputs['model'][0].source.digest[:80]}",
        max_length_tokens=limit,
    )


def _start_engine(source: ModelSource, params: ScoreParams, max_length_tokens: int) -> Any:
    # In this process: an engine that it started would outlive a kill of this one.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            f"score.engine 'vllm' needs vLLM, which {sys.executable} does not have",
            "run `make setup-vllm` and let the stage run by .venv-vllm/bin/python "
            "(execution.interpreters), or set score.engine to 'transformers'",
        )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = EngineArgs(
        model=source.name_or_path,
        revision=source.revision,
        runner="pooling",
        skip_tokenizer_init=True,
        trust_remote_code=False,
        load_format="safetensors",
        dtype=params.dtype,
        max_model_len=max_length_tokens,
        gpu_memory_utilization=params.gpu_memory_utilization,
        kv_cache_memory_bytes=kv_cache_bytes(params.kv_cache_gib),
        enforce_eager=True,
        disable_log_stats=True,
    )
    try:
        return LLMEngine.from_engine_args(arguments)
    except (ValueError, TypeError) as error:
        if "memory" not in str(error):
            raise UserError(
                f"vLLM refuses the reward model {source.name_or_path}: {error}",
                "set score.engine to 'transformers'",
            ) from error
        raise EngineError(_memory(error, params)) from error
    except Exception as error:
        raise EngineError(_memory(error, params)) from error


def _memory(error: Exception, params: ScoreParams) -> str:
    cache = cache_setting(params.kv_cache_gib, params.gpu_memory_utilization)
    return (
        f"vLLM did not start ({error}); if memory is short, lower score.{cache} or "
        "score.max_length_tokens"
    )


def _verdict(reward: float) -> Verdict:
    if math.isfinite(reward):
        return Verdict(reward)
    return Verdict(None, f"the reward model gave {reward}")
