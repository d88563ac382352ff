"""Chunked log-probabilities of response tokens equal a plain forward pass's."""

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from stages.modeling.logprobs import LogitMap, ResponseLogprobs, token_logprobs
from tests import tiny_models

SIZES = tiny_models.SIZES | {"initializer_range": 0.3}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "mistral-windowed": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "gemma2, capped": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=0.5)
    ),
    "cohere, scaled": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)),
    "granite, divided": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)),
}
# Prompt and response lengths: one-token prompts and responses, equal and very unequal rows.
ROWS = ((1, 1), (5, 3), (2, 9), (7, 1), (1, 11))


def rows_of(lengths):
    """Unpadded rows, and the padded arguments of the module."""
    torch.manual_seed(1)
    rows = [torch.randint(1, 37, (prompt + response,)) for prompt, response in lengths]
    width = max(map(len, rows))
    padded = torch.zeros((len(rows), width), dtype=torch.long)
    sources, targets = [], []
    for place, ((prompt, _), row) in enumerate(zip(lengths, rows, strict=True)):
        padded[place, : len(row)] = row
        sources.append(place * width + torch.arange(prompt - 1, len(row) - 1))
        targets.append(row[prompt:])
    arguments = {
        "input_ids": padded,
        "source_index": torch.cat(sources),
        "targets": torch.cat(targets),
    }
    return rows, arguments


def naive_logprobs(model, rows):
    """One unpadded forward pass per row, softmax over everything."""
    results = []
    for (prompt, _), row in zip(ROWS, rows, strict=True):
        logp = model(input_ids=row[None]).logits[0].float().log_softmax(dim=-1)
        results.append(logp[prompt - 1 : -1].gather(1, row[prompt:, None])[:, 0])
    return torch.cat(results)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_equal_the_plain_forward_pass(family):
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    rows, arguments = rows_of(ROWS)
    weights = torch.randn(len(arguments["targets"]))

    expected = naive_logprobs(model, rows)
    (expected * weights).sum().backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    logprobs = ResponseLogprobs(model)(**arguments)
    (logprobs * weights).sum().backward()

    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("chunk_rows", [1, 2, 7, 100])
@pytest.mark.parametrize("keep_bytes", [0, 1 << 20])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "mapped",
    [LogitMap(), LogitMap(factor=0.3), LogitMap(divisor=4.0), LogitMap(factor=3.0, cap=2.0)],
    ids=["as they are", "scaled", "divided", "capped"],
)
def test_neither_chunks_nor_what_is_kept_change_anything(
    monkeypatch, chunk_rows, keep_bytes, frozen, mapped
):
    monkeypatch.setattr("stages.modeling.logprobs.LOGIT_CHUNK_BYTES", 4 * 11 * chunk_rows)
    monkeypatch.setattr("stages.modeling.logprobs.LOGIT_KEEP_BYTES", keep_bytes)
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, requires_grad=True)
    weight = torch.randn(11, 5, requires_grad=not frozen)
    targets = torch.randint(0, 11, (7,))
    inputs = [tensor for tensor in (hidden, weight) if tensor.requires_grad]

    logprobs = token_logprobs(hidden, weight, targets, mapped)
    logits = torch.nn.functional.linear(hidden, weight) * mapped.factor / mapped.divisor
    if mapped.cap is not None:
        logits = mapped.cap * torch.tanh(logits / mapped.cap)
    expected = logits.log_softmax(dim=1).gather(1, targets[:, None])[:, 0]

    torch.testing.assert_close(logprobs, expected)
    outer = torch.randn(7)
    for ours, theirs in zip(
        torch.autograd.grad((logprobs * outer).sum(), inputs),
        torch.autograd.grad((expected * outer).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_second_backward_pass_gives_the_same():
    hidden = torch.randn(3, 5, requires_grad=True)
    weight = torch.randn(11, 5, requires_grad=True)
    total = token_logprobs(hidden, weight, torch.tensor([1, 2, 3])).sum()
    first = torch.autograd.grad(total, [hidden, weight], retain_graph=True)
    for one, two in zip(first, torch.autograd.grad(total, [hidden, weight]), strict=True):
        torch.testing.assert_close(one, two)


def test_log_probabilities_are_float32_under_bfloat16_autocast():
    torch.manual_seed(0)
    model = FAMILIES["llama"]().eval()
    rows, arguments = rows_of(ROWS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs = ResponseLogprobs(model)(**arguments)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, naive_logprobs(model, rows), rtol=0.05, atol=0.1)
