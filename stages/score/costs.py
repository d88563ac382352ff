"""Costs of a judge: tokens, and money where the prices are given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from stages.score.params import ScoreParams

PROMPT_TOKENS = "judge_prompt_tokens"
COMPLETION_TOKENS = "judge_completion_tokens"
_MILLION = 1e6
_ENTRIES = pa.list_(pa.struct([("key", pa.string()), ("value", pa.float64())]))


class JudgeCosts:
    """Sums the token counts that a judge's components hold.

    Args:
        params: Name the prices of a million tokens, if they do.
    """

    def __init__(self, params: ScoreParams) -> None:
        self._prices = {
            PROMPT_TOKENS: params.judge.prompt_price,
            COMPLETION_TOKENS: params.judge.completion_price,
        }
        # A sum's components begin with the name of their oracle.
        self._prefix = "judge." if params.oracle == "weighted" else ""
        self._tokens = dict.fromkeys(self._prices, 0.0)

    def add(self, components: pa.MapArray) -> None:
        """Adds a batch of the column ``components`` of a scores table."""
        entries = components.cast(_ENTRIES).flatten()
        names = entries.field("key").to_numpy(zero_copy_only=False)
        values = entries.field("value").to_numpy(zero_copy_only=False)
        for name in self._tokens:
            self._tokens[name] += float(np.sum(values[names == self._prefix + name]))

    def summary(self) -> dict[str, Any]:
        """Token counts, and what they cost in the prices' currency (null without prices)."""
        prices = list(self._prices.values())
        cost = sum(
            tokens / _MILLION * (price or 0.0)
            for tokens, price in zip(self._tokens.values(), prices, strict=True)
        )
        return {
            **self._tokens,
            "cost": cost if any(price is not None for price in prices) else None,
        }
