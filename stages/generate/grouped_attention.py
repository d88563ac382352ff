"""Attention of one new token a row, without a copy of the keys for each head that shares them.

transformers repeats keys and values for every query head of a group. Where a token is decoded the
cache is nearly all that attention reads. Here the heads of a group stand in the place of queries of
the one head of keys and values that they share, which gives the same sums.

Shapes: `B` rows, `H` heads, `G` groups of heads, `S` keys, `D` width.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward


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
    heads = query.shape[1]
    groups = key.shape[1]
    # A mask or a bias may have a plane for each head.
    has_planes = attention_mask is not None and attention_mask.shape[1] > 1
    has_planes |= others.get("position_bias") is not None
    if query.shape[2] > 1 or heads == groups or has_planes:
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


def share_heads() -> None:
    """Sets the attention in this process.

    It keeps the name `sdpa`, by which some families of models choose their masks.
    """
    AttentionInterface.register("sdpa", grouped_attention)
