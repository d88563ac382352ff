"""Attention over rows in which several responses share one prompt, which is computed once.

A row is the concatenation of groups; a group is a prompt followed by its responses. A token sees
its own group's prompt and what came before it in its own response. The positions of every response
go on from its prompt's, so that each response has the log-probabilities that it has alone.

The attention is registered with transformers, whose models call it by name: no code of a model
family is needed here.

Shapes: `T` tokens of the row, `A` attention heads, `D` width of a head, `L` queries, `S` keys.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

SHARED_PREFIX = "shared_prefix"
"""Name under which the attention is registered (``attn_implementation``)."""

Group = tuple[int, ...]
"""Lengths in tokens: of the prompt, then of each response."""

# Arguments that would be ignored here, silently: a cap on scores, sinks, a bias by distance.
_UNKNOWN_HERE = ("softcap", "s_aux", "position_bias")


class UnsupportedAttentionError(ValueError):
    """A model's attention has something that attention over shared prompts would leave out."""


@dataclass(frozen=True)
class VarlenPlaces:
    """A row as a kernel of variable length sees it: stretches of queries, each with its keys."""

    keys: Tensor
    """Places in the row of all stretches' keys, one after the other."""
    query_starts: Tensor
    """Start of each stretch's queries in the row, and the row's length."""
    key_starts: Tensor
    """Start of each stretch's keys in ``keys``, and their number."""
    most_queries: int
    """Most queries of one stretch."""
    most_keys: int
    """Most keys of one stretch."""


class RowLayout:
    """Places of the prompts and responses of a row.

    Each part of the groups has a token at least. No dataclass: compiled layers, which pass it on,
    would be compiled again for each content.
    """

    def __init__(self, groups: tuple[Group, ...]) -> None:
        self.groups = groups
        self._varlen: VarlenPlaces | None = None

    @cached_property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """Stretches of the row that attend alike: (tokens, tokens of the prompt before them).

        A prompt and its first response are one stretch with no prompt before it.
        """
        stretches: list[tuple[int, int]] = []
        for prompt, first, *others in self.groups:
            stretches.append((prompt + first, 0))
            stretches += [(response, prompt) for response in others]
        return tuple(stretches)

    def position_ids(self, device: torch.device) -> Tensor:
        """Positions of the tokens, [1, T]."""
        parts = [
            np.arange(prefix, prefix + tokens, dtype=np.int64) for tokens, prefix in self.pieces
        ]
        return on_device(torch.from_numpy(np.concatenate(parts)[None]), device)

    def varlen(self, device: torch.device) -> VarlenPlaces:
        """Arguments of a kernel of variable length; kept for all layers."""
        if self._varlen is not None:
            return self._varlen
        places = []
        starts = [0]
        prompt_start = start = 0
        for tokens, prefix in self.pieces:
            place = np.arange(start, start + tokens)
            if prefix:
                place = np.concatenate([np.arange(prompt_start, prompt_start + prefix), place])
            else:
                prompt_start = start
            places.append(place)
            start += tokens
            starts.append(start)
        key_starts = np.cumsum([0, *(len(place) for place in places)])
        self._varlen = VarlenPlaces(
            keys=on_device(torch.from_numpy(np.concatenate(places)), device),
            query_starts=on_device(torch.tensor(starts, dtype=torch.int32), device),
            key_starts=on_device(torch.from_numpy(key_starts.astype(np.int32)), device),
            most_queries=int(np.diff(starts).max()),
            most_keys=int(np.diff(key_starts).max()),
        )
        return self._varlen


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy on a device; to a GPU the host does not wait for it."""
    if device.type == "cuda":
        # Only pinned memory is copied while the host goes on.
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def product_dtype(values: Tensor) -> torch.dtype:
    """The dtype of products with a tensor: its own, or autocast's."""
    device = values.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else values.dtype


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """True if the last ``queries`` of ``keys`` tokens see a key, [L, S]."""
    query = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)[None]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def shared_prefix_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    row_layout: RowLayout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers calls it.

    Args:
        module: The layer.
        query: [R, A, T, D].
        key: [R, A', T, D]; A' divides A.
        value: [R, A', T, D].
        attention_mask: None: the layout says what is seen.
        scaling: Factor on the scores.
        dropout: Dropout of the attention's weights.
        sliding_window: Most tokens that a token sees, itself counted.
        row_layout: Layout of the one row (R = 1); None for plain causal rows.
        **options: What other attentions know.

    Returns:
        [R, T, A, D], and no weights.
    """
    unknown = [name for name in _UNKNOWN_HERE if options.get(name) is not None]
    if unknown or attention_mask is not None:
        raise UnsupportedAttentionError(
            f"{SHARED_PREFIX} attention knows no {', '.join(unknown) or 'attention mask'}"
        )
    layout = row_layout or RowLayout(((0, query.shape[2]),))
    # Under autocast rotary positions leave queries and keys in float32, which attention would cast.
    dtype = product_dtype(query)
    fused = query.is_cuda and dtype in (torch.float16, torch.bfloat16) and not dropout
    if row_layout is not None and fused:
        cast = query.to(dtype), key.to(dtype), value.to(dtype)
        return attend_varlen(*cast, scaling, sliding_window, layout), None
    pieces = [tokens for tokens, _ in layout.pieces]
    attended = []
    prompt_key = key
    prompt_value = value
    queries = query.split(pieces, dim=2)
    keys = key.split(pieces, dim=2)
    values = value.split(pieces, dim=2)
    for (_, prefix), own_query, own_key, own_value in zip(
        layout.pieces, queries, keys, values, strict=True
    ):
        if prefix:
            own_key = torch.cat([prompt_key[:, :, :prefix], own_key], dim=2)
            own_value = torch.cat([prompt_value[:, :, :prefix], own_value], dim=2)
        else:
            prompt_key = own_key
            prompt_value = own_value
        num_queries = own_query.shape[2]
        num_keys = own_key.shape[2]
        # A window as wide as the row hides nothing, and a causal mask needs no tensor.
        window = sliding_window if (sliding_window or num_keys) < num_keys else None
        is_causal = num_queries == num_keys and window is None
        part = functional.scaled_dot_product_attention(
            own_query,
            own_key,
            own_value,
            attn_mask=None
            if is_causal
            else causal_mask(num_queries, num_keys, window, query.device),
            is_causal=is_causal,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        attended.append(part.transpose(1, 2))
    return torch.cat(attended, dim=1), None


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    layout: RowLayout,
) -> Tensor:
    """All stretches in one call of torch's variable-length flash attention (GPU, 16 bits)."""
    from torch.nn.attention.varlen import varlen_attn

    places = layout.varlen(query.device)
    attended = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1)[places.keys],
        value[0].transpose(0, 1)[places.keys],
        places.query_starts,
        places.key_starts,
        places.most_queries,
        places.most_keys,
        scale=scaling,
        # Tokens to the left, the token itself not counted.
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(attended, Tensor)
    return attended[None]


def supports_shared_prefix(model: Any) -> bool:
    """True if a model calls the attention by its name and knows only the masks made here."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    return bool(model._supports_attention_backend) and kinds <= {
        "full_attention",
        "sliding_attention",
    }


AttentionInterface.register(SHARED_PREFIX, shared_prefix_attention)
