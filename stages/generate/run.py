"""The generate stage: prompts and a policy to ``responses.parquet``."""

import contextlib
import importlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from stages.contract.errors import UserError
from stages.generate.backend import LENGTH, Backend, EncodedPrompt, SampledResponse
from stages.generate.params import BACKENDS, GenerateParams
from stages.generate.policy import Policy, load_policy
from stages.harness.context import StageContext
from stages.harness.program import Stage
from stages.modeling.chat import render_answered
from stages.tables.parts import Part, split_parts
from stages.tables.schemas import PROMPTS, RESPONSES, TableWriter, num_rows, read_rows

GenerateContext = StageContext[GenerateParams]
SampledResponses = dict[tuple[int, int], SampledResponse]
"""Samples by the number of their prompt in a chunk and their own."""
# Time between two saves of a chunk: a kill loses at most that much sampling.
SAVE_SECONDS = 60.0
# An engine waits while a chunk is saved. Saves begin this many times as far apart as one takes.
SAVE_SPACING = 20
# Above it training learns the fault.
_WARNED_SHARE = 0.1


def run(ctx: GenerateContext) -> None:
    """Samples K responses for each prompt of the shard.

    Inputs: ``policy`` (model), ``prompts`` (one PROMPTS table). Outputs: ``responses.parquet``
    (RESPONSES, grouped by prompt in the prompts' order, samples 0…K−1) and ``metrics.json``.
    ``ctx.work`` keeps the responses; a retry computes the others.
    """
    prompts = ctx.path("prompts")
    policy = load_policy(ctx.model("policy"), ctx.params)
    _warn_if_turns_run_on(ctx, policy)
    first, stop = _shard(ctx, prompts)
    chunk_prompts = max(1, ctx.params.chunk_responses // ctx.params.num_samples)
    chunks = split_parts(ctx.work, RESPONSES, first, stop, chunk_prompts)
    # All of them first: one that cannot be rendered ends the stage before an engine samples.
    encoded = [
        (row, policy.render(row, ctx.params, ctx.request.seed))
        for row in islice(read_rows(prompts, PROMPTS), first, stop)
    ]
    _sample(ctx, encoded, policy, chunks)
    metrics = _assemble(ctx, chunks, len(policy.tokenizer))
    ctx.write_json("metrics.json", metrics)


def _warn_if_turns_run_on(ctx: GenerateContext, policy: Policy) -> None:
    """Warns if the token that ends a turn of the chat template ends no response."""
    turn = [{"role": "user", "content": "a"}]
    # A template that opens <think> renders no such answer.
    with contextlib.suppress(UserError):
        _, answer = render_answered(policy.tokenizer, turn, "a", ctx.params)
        end = answer[-1]
        if end in policy.tokenizer.added_tokens_decoder and end not in policy.stop_ids:
            ctx.events.warning(
                f"the chat template ends a turn with {policy.tokenizer.decode([end])!r}, which "
                f"ends no response; set generate.stop_token_ids to [{end}]"
            )


def _shard(ctx: GenerateContext, prompts: Path) -> tuple[int, int]:
    """First prompt of the shard and the one after its last: shards have about as many prompts."""
    total = num_rows(prompts)
    index = ctx.params.shard_index
    number = ctx.params.num_shards
    return total * index // number, total * (index + 1) // number


def _sample(
    ctx: GenerateContext,
    prompts: Sequence[tuple[dict[str, Any], EncodedPrompt | None]],
    policy: Policy,
    chunks: Sequence[Part],
) -> None:
    """Samples what the chunks of a shard lack, and saves it there as it comes."""
    num_samples = ctx.params.num_samples
    total = len(prompts) * num_samples
    kept = 0
    save_at = time.monotonic() + SAVE_SECONDS
    with contextlib.ExitStack() as stack:
        backend: Backend | None = None
        for chunk in chunks:
            start = chunk.first - chunks[0].first
            rows = []
            rendered = []
            for row, prompt in prompts[start : start + len(chunk)]:
                if prompt is not None:
                    rows.append(row)
                    rendered.append(prompt)
            samples = _read_samples(chunk, rows, ctx.events.warning)
            done = start * num_samples
            ctx.events.progress(done + len(samples), total, "responses")
            if len(samples) == len(rows) * num_samples:
                kept += bool(samples)
                continue
            if backend is None:
                module = importlib.import_module(BACKENDS[ctx.params.backend])
                loaded = module.load(policy, ctx.params, ctx.events)
                backend = stack.enter_context(contextlib.closing(loaded))
            for place, index, sample in backend.generate(rendered, frozenset(samples)):
                if math.isnan(math.fsum(sample.logprobs)):
                    raise UserError(
                        f"the policy's logits are not finite in {ctx.params.dtype}",
                        "set generate.dtype to bfloat16 or float32, or take a checkpoint of a "
                        "training that did not diverge",
                    )
                samples[place, index] = sample
                ctx.events.progress(done + len(samples), total, "responses")
                now = time.monotonic()
                if now > save_at:
                    chunk.save(_to_rows(policy, rows, rendered, samples))
                    save_seconds = time.monotonic() - now
                    save_at = now + max(SAVE_SECONDS, SAVE_SPACING * save_seconds)
            chunk.save(_to_rows(policy, rows, rendered, samples))
            ctx.events.info(f"wrote the responses to prompts {chunk.first} to {chunk.stop - 1}")
    if kept:
        ctx.events.info(f"{kept} of {len(chunks)} chunks are there already")
    ctx.events.progress(total, total, "responses")


def _read_samples(
    chunk: Part, rows: Sequence[Mapping[str, Any]], warn: Callable[[str], None]
) -> SampledResponses:
    """The samples that an earlier attempt has kept."""
    places = {row["prompt_id"]: place for place, row in enumerate(rows)}
    return {
        (places[row["prompt_id"]], row["sample_index"]): SampledResponse(
            row["response_token_ids"], row["response_logprobs"], row["finish_reason"]
        )
        for row in chunk.read(warn)
    }


def _to_rows(
    policy: Policy,
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[EncodedPrompt],
    samples: SampledResponses,
) -> Iterator[dict[str, Any]]:
    """Rows of RESPONSES for rows of PROMPTS whose samples are there."""
    for place, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        for index, seed in enumerate(prompt.seeds):
            sample = samples.get((place, index))
            if sample is None:
                continue
            yield {
                **row,
                "sample_index": index,
                "prompt_token_ids": prompt.token_ids,
                "response_token_ids": sample.token_ids,
                "response_logprobs": sample.logprobs,
                "response": policy.decode(sample.token_ids),
                "finish_reason": sample.finish_reason,
                "seed": seed,
            }


def _assemble(ctx: GenerateContext, chunks: Sequence[Part], num_known_ids: int) -> dict[str, Any]:
    """Joins the chunks into ``responses.parquet`` and returns the metrics."""
    num_prompts = sum(map(len, chunks))
    num_tokens = cut_off = empty = unknown = 0
    with TableWriter(ctx.out / "responses.parquet", RESPONSES) as writer:
        # A chunk whose prompts are all too long has no file.
        written = [chunk.path for chunk in chunks if chunk.path.exists()]
        for row in read_rows(written, RESPONSES):
            writer.write(row)
            cut_off += row["finish_reason"] == LENGTH
            num_tokens += len(row["response_token_ids"])
            empty += not row["response"].strip()
            unknown += max(row["response_token_ids"]) >= num_known_ids
    dropped = num_prompts - writer.num_rows // ctx.params.num_samples
    if dropped:
        loss = (
            f"{dropped} of {num_prompts} prompts are too long: the context has no room for "
            f"max_new_tokens={ctx.params.max_new_tokens} after them"
        )
        # With shards, the others may have prompts that fit.
        if dropped == num_prompts and ctx.params.num_shards == 1:
            remedy = (
                "lower max_new_tokens, or raise max_length_tokens if the policy's context allows"
            )
            raise UserError(loss, remedy)
        ctx.events.warning(f"{loss}; dropped")
    for number, fault in (
        (cut_off, f"were cut off at max_new_tokens={ctx.params.max_new_tokens}"),
        (empty, "are empty"),
        (unknown, "hold token ids that the tokenizer does not have"),
    ):
        if number > _WARNED_SHARE * writer.num_rows:
            ctx.events.warning(f"{number} of {writer.num_rows} responses {fault}")
    return {
        "prompts": num_prompts,
        "prompts_dropped_too_long": dropped,
        "responses": writer.num_rows,
        "response_tokens": num_tokens,
    }


STAGE = Stage(GenerateParams, run)
