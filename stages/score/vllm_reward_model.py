"""The ``reward_model`` oracle on vLLM's pooling runner, for classifiers that vLLM knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from stages.contract.context import ModelSource
from stages.contract.errors import UserError
from stages.contract.request import Resources
from stages.modeling.device_pool import DevicePool
from stages.modeling.vllm_engine import cache_setting, require_vllm, start_engine, step
from stages.score.conversations import render_row, too_long
from stages.score.oracle import Verdict
from stages.score.settings import RewardModelSettings

Conversations = Sequence[tuple[int, Sequence[int]]]
"""Token ids of conversations, each with its place among the rows."""
# With several engines each takes about so many shares of the rows, the next when it is free.
_SHARES = 4


@dataclass(frozen=True)
class Engine:
    """A vLLM engine with the classifier loaded.

    Attributes:
        engine: vLLM's own.
        lower: Settings to lower where memory is short.
    """

    engine: Any
    lower: str

    def __call__(self, conversations: Conversations) -> list[tuple[int, Verdict]]:
        """Place and verdict of each conversation, in the order in which they are known."""
        from vllm import PoolingParams
        from vllm.inputs.engine import tokens_input

        # The raw output, as transformers gives it: no sigmoid.
        params = PoolingParams(task="classify", use_activation=False)
        for place, token_ids in conversations:
            self.engine.add_request(str(place), tokens_input(list(token_ids)), params)
        found = []
        while self.engine.has_unfinished_requests():
            for output in step(self.engine, self.lower):
                if output.finished:
                    [reward] = output.outputs.data.tolist()
                    found.append((int(output.request_id), Verdict.of_reward(reward)))
        return found


@dataclass(frozen=True)
class VllmRewardModel:
    """Scores the whole conversation: the prompt's messages and the response as assistant turn.

    Attributes:
        engines: One on each device of the stage.
        tokenizer: The model's tokenizer; the conversation is rendered by its chat template.
        identity: Name and digest or revision of the checkpoint.
        max_length_tokens: Longest conversation that is scored.
    """

    engines: DevicePool[Conversations, list[tuple[int, Verdict]]]
    tokenizer: Any
    identity: str
    max_length_tokens: int

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Verdict]]:
        """Scores the rows; see :class:`stages.score.oracle.Oracle`."""
        fitting = []
        for place, row in enumerate(rows):
            token_ids = render_row(self.tokenizer, row)
            reason = too_long(token_ids, self.max_length_tokens)
            if reason is None:
                fitting.append((place, token_ids))
            else:
                yield place, Verdict(None, reason)
        size = self.engines.size
        shares = min(size * _SHARES, len(fitting)) if size > 1 else 1
        for found in self.engines.map(fitting[first::shares] for first in range(shares)):
            yield from found

    def close(self) -> None:
        """Ends the processes of the devices."""
        self.engines.close()


def start_engines(
    source: ModelSource,
    config: Any,
    settings: RewardModelSettings,
    limit: int,
    resources: Resources,
) -> DevicePool[Conversations, list[tuple[int, Verdict]]]:
    """Starts an engine on each device of the stage.

    Args:
        source: The reward model.
        config: Its configuration.
        settings: Those of the oracle.
        limit: Longest conversation, in tokens.
        resources: Those of the stage.

    Raises:
        UserError: vLLM is not installed or does not know the model, or that has not one output.
        EngineError: An engine does not start.
    """
    if config.num_labels != 1:
        raise UserError(
            f"the reward model {source.name_or_path} has {config.num_labels} outputs, not one",
            "use a classifier with num_labels=1",
        )
    require_vllm("score.reward_model.engine")
    return DevicePool(partial(load_engine, source, settings, limit), resources)


def load_engine(source: ModelSource, settings: RewardModelSettings, limit: int) -> Engine:
    """Starts an engine on the device of this process.

    Raises:
        UserError: vLLM does not know the model.
        EngineError: The engine does not start.
    """
    cache = cache_setting(settings.kv_cache_gib, settings.gpu_memory_utilization)
    lower = f"of score.reward_model lower {cache} or max_length_tokens={limit}"
    engine = start_engine(
        source,
        {
            "runner": "pooling",
            "dtype": settings.dtype,
            "max_model_len": limit,
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "enforce_eager": True,
        },
        kv_cache_gib=settings.kv_cache_gib,
        correct="set score.reward_model.engine to 'transformers'",
        lower=lower,
    )
    return Engine(engine, lower)
