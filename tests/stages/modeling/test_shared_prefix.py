"""Attention over shared prompts: the tokens that each one sees, and the kernels' arguments."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from stages.modeling.shared_prefix import (
    RowLayout,
    UnsupportedAttentionError,
    attend_varlen,
    causal_mask,
    shared_prefix_attention,
)

LAYOUT = RowLayout(((3, 2, 4), (1, 1, 1), (5, 7, 2, 3)))
NUM_TOKENS = sum(map(sum, LAYOUT.groups))


def dense_mask(window):
    """The same, token by token: own prompt, own response, nothing later, nothing too far."""
    parts = [
        (group, part, position)
        for group, (prompt, *responses) in enumerate(LAYOUT.groups)
        for part, length in enumerate([prompt, *responses])
        for position in range(prompt if part else 0, (prompt if part else 0) + length)
    ]
    seen = torch.zeros((NUM_TOKENS, NUM_TOKENS), dtype=torch.bool)
    for query, (own_group, own_part, own_position) in enumerate(parts):
        for key, (group, part, position) in enumerate(parts):
            mine = group == own_group and part in (0, own_part)
            near = window is None or own_position - position < window
            seen[query, key] = mine and position <= own_position and near
    return seen


def inputs():
    torch.manual_seed(0)
    query = torch.randn(1, 4, NUM_TOKENS, 8)
    return query, torch.randn(1, 2, NUM_TOKENS, 8), torch.randn(1, 2, NUM_TOKENS, 8)


@pytest.mark.parametrize("window", [None, 3, 100])
def test_a_token_sees_its_prompt_and_its_own_response(window):
    query, key, value = inputs()
    attended, _ = shared_prefix_attention(
        nn.Module(), query, key, value, None, row_layout=LAYOUT, sliding_window=window, scaling=0.3
    )
    expected = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=dense_mask(window), scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(attended, expected.transpose(1, 2))


@pytest.mark.parametrize("window", [None, 3])
def test_a_kernel_of_variable_length_gets_the_same_layout(monkeypatch, window):
    """The kernel runs on GPUs only; here stands one that reads its arguments as it does."""

    def kernel(query, key, value, starts, key_starts, longest, longest_key, **options):
        assert (longest, longest_key) == (int(starts.diff().max()), int(key_starts.diff().max()))
        left, right = options["window_size"]
        assert right == 0
        attended = []
        for place in range(len(starts) - 1):
            queries = query[starts[place] : starts[place + 1]].transpose(0, 1)
            seen = slice(key_starts[place], key_starts[place + 1])
            mask = causal_mask(
                queries.shape[1],
                int(seen.stop - seen.start),
                None if left < 0 else left + 1,
                queries.device,
            )
            attended.append(
                functional.scaled_dot_product_attention(
                    queries[None],
                    key[seen].transpose(0, 1)[None],
                    value[seen].transpose(0, 1)[None],
                    attn_mask=mask,
                    scale=options["scale"],
                    enable_gqa=options["enable_gqa"],
                )[0].transpose(0, 1)
            )
        return torch.cat(attended)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    query, key, value = inputs()
    expected, _ = shared_prefix_attention(
        nn.Module(), query, key, value, None, row_layout=LAYOUT, sliding_window=window
    )
    attended = attend_varlen(query, key, value, None, window, LAYOUT)
    torch.testing.assert_close(attended, expected)


@pytest.mark.parametrize("option", ["softcap", "s_aux"])
def test_what_would_be_left_out_is_refused(option):
    query, key, value = inputs()
    with pytest.raises(UnsupportedAttentionError, match=option):
        shared_prefix_attention(
            nn.Module(), query, key, value, None, row_layout=LAYOUT, **{option: 1.0}
        )
