"""Sampling with transformers: left-padded batches, one prefill per prompt, a KV cache.

Shapes: ``B`` sequences of a batch, ``P`` its distinct prompts, ``T`` positions so far, ``V``
vocabulary.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

from stages.contract.errors import UserError
from stages.contract.events import Emitter
from stages.generate.backend import LENGTH, STOP, EncodedPrompt, SampledResponse
from stages.generate.grouped_attention import grouped_attention
from stages.generate.params import GenerateParams
from stages.generate.policy import Policy
from stages.modeling.engine_errors import engine_error
from stages.modeling.load import load_causal_lm
from stages.modeling.probe import require_static_rope

# Finished rows are carried along until this share of a batch is done: dropping them copies the
# cache, carrying them costs their part of every forward pass.
_COMPACT_SHARE = 0.25
# Tokens that are sorted first for top-p: to sort a whole vocabulary can take longer than a pass.
_LIKELIEST = 256


class TransformersBackend:
    """Samples from a causal LM of transformers, on the GPU, or on the CPU if there is none."""

    def __init__(self, policy: Policy, params: GenerateParams, events: Emitter):
        # Under the same name: models whose masks depend on their attention compare it.
        AttentionInterface.register("sdpa", grouped_attention)
        self._model = load_causal_lm(policy.source, dtype=params.dtype)
        self._params = params
        self._events = events
        self._stop_ids = sorted(policy.stop_ids)

    def close(self) -> None:
        """Nothing to end: the model goes with its last reference."""

    def generate(
        self, prompts: Sequence[EncodedPrompt], held: frozenset[tuple[int, int]] = frozenset()
    ) -> Iterator[tuple[int, int, SampledResponse]]:
        """Continues every prompt once per seed; see :class:`stages.generate.backend.Backend`."""
        size = self._params.transformers.batch_size
        longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
        require_static_rope(
            self._model.config,
            self._model.config.name_or_path,
            longest=longest + self._params.max_new_tokens,
            remedy="set generate.max_length_tokens={limit}, so that longer prompts are dropped, or "
            "lower max_new_tokens",
        )
        # An attempt that was never killed has the same batches.
        for batch in _split_batches(prompts, size):
            if held.issuperset(batch):
                continue
            try:
                samples = self._generate_batch(prompts, batch)
            except (RuntimeError, MemoryError) as error:
                remedy = f"lower generate.transformers.batch_size={size}"
                raise engine_error("transformers", error, remedy) from error
            for (index, sample), response in zip(batch, samples, strict=True):
                yield index, sample, response

    @torch.inference_mode()
    def _generate_batch(
        self, prompts: Sequence[EncodedPrompt], rows: Sequence[tuple[int, int]]
    ) -> list[SampledResponse]:
        """Continues the rows (prompt index, sample index) together."""
        params = self._params
        device = self._model.device
        stop_ids = torch.tensor(self._stop_ids, device=device)
        decoder = _Decoder(self._model, prompts, rows)
        seeds = [prompts[index].seeds[sample] for index, sample in rows]
        draws = np.stack([uniforms(seed, params.max_new_tokens) for seed in seeds])
        uniform = torch.from_numpy(draws).to(device)
        shape = len(rows), params.max_new_tokens
        tokens = torch.zeros(shape, dtype=torch.long, device=device)
        logprobs = torch.zeros(shape, device=device)
        lengths = torch.zeros(len(rows), dtype=torch.long, device=device)
        finished = torch.zeros(len(rows), dtype=torch.bool, device=device)
        alive = torch.arange(len(rows), device=device)
        for step in range(params.max_new_tokens):
            now = uniform[alive, step]
            drawn = draw_tokens(
                decoder.logits, now, temperature=params.temperature, top_p=params.top_p
            )
            # The raw policy's: before temperature and top-p.
            chosen = decoder.logits.float().log_softmax(-1).gather(-1, drawn[:, None])[:, 0]
            tokens[alive, step] = drawn
            logprobs[alive, step] = chosen
            lengths[alive] += ~finished[alive]
            finished[alive] |= torch.isin(drawn, stop_ids)
            running = ~finished[alive]
            num_running = int(running.sum())
            self._events.note(
                f"token {step + 1} of {params.max_new_tokens} of {num_running} responses"
            )
            if num_running == 0 or step + 1 == params.max_new_tokens:
                break
            if num_running <= (1 - _COMPACT_SHARE) * len(alive):
                decoder.select(running.nonzero()[:, 0])
                alive = alive[running]
                drawn = drawn[running]
            decoder.advance(drawn)
        samples = []
        for row, length in enumerate(lengths.tolist()):
            reason = STOP if finished[row] else LENGTH
            samples.append(
                SampledResponse(
                    tokens[row, :length].tolist(), logprobs[row, :length].tolist(), reason
                )
            )
        return samples


load = TransformersBackend


def _split_batches(prompts: Sequence[EncodedPrompt], size: int) -> list[list[tuple[int, int]]]:
    """Batches of rows (prompt index, sample index) of about the same length, the longest first."""
    rows = []
    for index, prompt in enumerate(prompts):
        rows += [(index, sample) for sample in range(len(prompt.seeds))]
    rows.sort(key=lambda row: -len(prompts[row[0]].token_ids))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


class _Decoder:
    """The forward passes of one batch."""

    logits: torch.Tensor
    """[B, V] for the next token of every row."""

    def __init__(
        self,
        model: Any,
        prompts: Sequence[EncodedPrompt],
        rows: Sequence[tuple[int, int]],
    ):
        self._model = model
        distinct = list(dict.fromkeys(index for index, _ in rows))
        ids, self._mask = _left_pad([prompts[index].token_ids for index in distinct])
        ids = ids.to(model.device)
        self._mask = self._mask.to(model.device)
        self._positions = (self._mask.cumsum(-1) - 1).clamp(min=0)
        self._cache: Any = None
        self._forward(ids)
        place = {index: row for row, index in enumerate(distinct)}
        # The prompts were read once each; now every sample gets its copy of the cache.
        self.select(torch.tensor([place[index] for index, _ in rows], device=model.device))

    def advance(self, tokens: torch.Tensor) -> None:
        """Appends one token per row, [B], and computes the next logits."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], dim=1)
        self._positions = self._positions[:, -1:] + 1
        self._forward(tokens[:, None])

    def select(self, index: torch.Tensor) -> None:
        """Goes on with the rows of these numbers."""
        self._cache.reorder_cache(index)
        self._mask = self._mask[index]
        self._positions = self._positions[index]
        self.logits = self.logits[index]

    def _forward(self, ids: torch.Tensor) -> None:
        output = self._model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = output.get("past_key_values")
        if self._cache is None:
            raise UserError(
                f"{type(self._model).__name__} has no cache of past tokens to sample with",
                "set generate.backend to 'vllm', or take another policy",
            )
        self.logits = output.logits[:, -1]


def _left_pad(sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, both [P, T], with the sequences at the right edge."""
    rows = [torch.tensor(sequence) for sequence in sequences]
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    # Any id will do, it is masked.
    return pad(rows), pad([torch.ones_like(row) for row in rows])


def uniforms(seed: int, num_steps: int) -> np.ndarray:
    """The uniform numbers in [0, 1) that decide a response's tokens: one per step.

    Philox is counter-based: fewer steps give a prefix of the same numbers.
    """
    return np.random.Generator(np.random.Philox(key=seed)).random(num_steps)


def filtered_probabilities(
    logits: torch.Tensor, *, temperature: float, top_p: float
) -> torch.Tensor:
    """The distribution that tokens are drawn from: [B, V] float64, rows sum to 1.

    Args:
        logits: [B, V] of the policy.
        temperature: Divides the logits; positive.
        top_p: Keep the smallest set of likeliest tokens whose probability reaches this.
    """
    probabilities = torch.softmax(logits.double() / temperature, dim=-1)
    if top_p >= 1:
        return probabilities
    count = _LIKELIEST
    ordered, index, mass_before = _likeliest(probabilities, count)
    # Equals of the last one may be missing: those before it must have the mass.
    while count < probabilities.shape[-1] and bool(
        (mass_before.where(ordered == ordered[:, -1:], 1.0).amin(-1) < top_p).any()
    ):
        count *= 16
        ordered, index, mass_before = _likeliest(probabilities, count)
    kept = ordered.masked_fill(mass_before >= top_p, 0.0)
    return torch.zeros_like(probabilities).scatter(-1, index, kept / kept.sum(-1, keepdim=True))


def _likeliest(
    probabilities: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Probabilities and ids of the likeliest tokens, and the sum of the probabilities before each.

    Equals stand as in the vocabulary.
    """
    likeliest = probabilities.topk(min(count, probabilities.shape[-1])).indices.sort(dim=-1).values
    ordered, place = probabilities.gather(-1, likeliest).sort(dim=-1, descending=True, stable=True)
    return ordered, likeliest.gather(-1, place), ordered.cumsum(-1) - ordered


def draw_tokens(
    logits: torch.Tensor, uniform: torch.Tensor, *, temperature: float, top_p: float
) -> torch.Tensor:
    """Draws one token per row of logits, [B, V], by inverting its cumulative distribution.

    The cumulative sum runs in the order of the vocabulary, not of the probabilities: rounding that
    swaps two nearly equal tokens then moves a boundary by a rounding error and no token far.
    ``uniform`` are [B] numbers in [0, 1), float64; temperature 0 takes the likeliest token.
    """
    if temperature == 0:
        return logits.argmax(-1)
    cumulative = filtered_probabilities(logits, temperature=temperature, top_p=top_p).cumsum(-1)
    total = cumulative[:, -1:]
    # Rounding must not carry a uniform number next to 1 past the end of the vocabulary.
    target = torch.minimum(uniform[:, None] * total, total.nextafter(torch.zeros_like(total)))
    # right=True passes over tokens of probability 0 when the target is exactly on their boundary.
    drawn = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # Past the end of the vocabulary where logits are not numbers.
    return drawn.clamp(max=logits.shape[-1] - 1)
