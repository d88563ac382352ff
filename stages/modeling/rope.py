"""Rotary embeddings that depend on the longest sequence of a batch."""

from __future__ import annotations

from typing import Any

from stages.contract.errors import UserError


def require_static_rope(config: Any, place: str, *, longest: int, remedy: str) -> None:
    """Checks that no sequence changes the rotary embeddings of those beside it.

    ``longrope`` (Phi-3) takes other frequencies for a whole batch once one of its sequences passes
    the original context; ``dynamic`` does so past the configured context, and keeps them.

    Args:
        config: The model's configuration.
        place: Its checkpoint, for the message.
        longest: Tokens of the longest sequence.
        remedy: What to do; ``{limit}`` in it becomes the most tokens that are safe.

    Raises:
        UserError: A sequence is longer than is safe.
    """
    config = config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    # One set for all layers, or one for each type of layer.
    nested = [each for each in parameters.values() if isinstance(each, dict)]
    for rope in nested or [parameters]:
        kind = rope.get("rope_type", "default")
        limit = longest
        if kind == "longrope":
            limit = rope["original_max_position_embeddings"]
        elif kind == "dynamic":
            limit = config.max_position_embeddings
        if longest > limit:
            raise UserError(
                f"a sequence has {longest} tokens; above {limit} the rotary embedding of {place} "
                f"({kind}) changes for all sequences of a batch, and so do their "
                "log-probabilities",
                remedy.format(limit=limit),
            )
