"""Attention of one new token a row, without a copy of the keys for each head that shares them.

transformers repeats keys and values for every query head of a group before it calls torch. Where a
token is decoded the cache is nearly all that attention reads, so that a model with three heads to
a group reads three times as much. Here the heads of a group stand in the place of the queries of
the one head that they share, which gives the same sums.

Shapes: `B` rows, `H` heads, `G` groups of heads (heads of keys and values), `S` keys, `D` width.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

GROUPED = "grouped"
"""Name under which the attention is registered (``attn_implementation``)."""


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' `sdpa`, which it calls but for one query and shared heads.

    From query [B, H, queries, D], key and value [B, G, S, D] and a mask [B, 1, queries, S], or None
    if every key is seen, to [B, queries, H, D]. ``others`` is what else transformers hands over.
    """
    heads, groups = query.shape[1], key.shape[1]
    if query.shape[2] > 1 or heads == groups or others.get("position_bias") is not None:
        found, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **others)
        return found, None
    found = functional.scaled_dot_product_attention(
        query[:, :, 0].unflatten(1, (groups, heads // groups)),
        key,
        value,
        attn_mask=attention_mask,
        scale=others.get("scaling"),
    )
    return found.flatten(1, 2)[:, None], None


def share_heads(model: Any) -> None:
    """Sets the attention in a model that transformers runs by `sdpa`."""
    own = model.config.get_text_config()._attn_implementation
    if own == "sdpa" and getattr(model, "_supports_attention_backend", False):
        model.set_attn_implementation(GROUPED)


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
