"""Prompts and a policy to ``responses.parquet``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from stages.contract.context import StageContext
from stages.contract.errors import UserError
from stages.contract.events import dump_json
from stages.contract.program import Stage
from stages.contract.tables import PROMPTS, RESPONSES, TableWriter, open_table, read_rows
from stages.generate.backend import Backend, Sample
from stages.generate.chunks import Chunk, split_chunks
from stages.generate.params import GenerateParams
from stages.generate.policy import Policy, load_policy
from stages.generate.shards import shard_bounds

Context = StageContext[GenerateParams]


def run(ctx: Context) -> None:
    """Samples K responses for each prompt of the shard.

    Inputs: ``policy`` (model), ``prompts`` (one PROMPTS table). Outputs: ``responses.parquet``
    (RESPONSES, grouped by prompt in the prompts' order, samples 0…K−1) and ``metrics.json``.
    What is done is kept in ``ctx.work`` chunk by chunk; a retry goes on after the last whole one.

    Raises:
        UserError: The checkpoint or a prompt cannot be used, or no prompt fits the context.
    """
    started = time.monotonic()
    prompts = ctx.path("prompts")
    with open_table(prompts, PROMPTS) as table:
        num_prompts = table.metadata.num_rows
    if num_prompts == 0:
        raise UserError("the prompts table is empty", "check the data that the prompts are made of")
    first, stop = shard_bounds(num_prompts, ctx.params.shard_index, ctx.params.num_shards)
    chunks = split_chunks(ctx.work, first, stop, ctx.params.chunk_prompts)
    missing = [chunk for chunk in chunks if not chunk.is_written]
    if len(missing) < len(chunks):
        ctx.events.info(f"{len(chunks) - len(missing)} of {len(chunks)} chunks are there already")
    if missing:
        _write(ctx, prompts, missing, num_done=stop - first - sum(map(len, missing)))
    metrics = _assemble(ctx, chunks)
    (ctx.out / "metrics.json").write_text(dump_json(metrics))
    ctx.telemetry_path("timings.json").write_text(
        dump_json(
            {
                "seconds": time.monotonic() - started,
                "chunks_sampled": len(missing),
                "chunks_reused": len(chunks) - len(missing),
            }
        )
    )


def _write(ctx: Context, prompts: Path, chunks: Sequence[Chunk], *, num_done: int) -> None:
    """Samples the responses of some chunks; ``num_done`` prompts of the shard are done already."""
    policy = load_policy(ctx.model("policy"), ctx.params)
    num_samples = ctx.params.num_samples
    total = (num_done + sum(map(len, chunks))) * num_samples
    rows = read_rows(prompts, PROMPTS)
    position = 0
    with closing(_make_backend(ctx, policy)) as backend:
        for chunk in chunks:
            batch = list(islice(rows, chunk.first - position, chunk.stop - position))
            position = chunk.stop
            chunk.write(_respond(ctx, policy, backend, batch, num_done * num_samples, total))
            num_done += len(chunk)
            ctx.events.info(f"wrote the responses to prompts {chunk.first} to {chunk.stop - 1}")
    ctx.events.progress(total, total, "responses")


def _respond(
    ctx: Context,
    policy: Policy,
    backend: Backend,
    rows: list[dict[str, Any]],
    done: int,
    total: int,
) -> list[dict[str, Any]]:
    """The rows of RESPONSES for some rows of PROMPTS, those too long for the context left out.

    Progress counts responses from ``done`` towards ``total``.
    """
    kept = []
    for row in rows:
        prompt = policy.render(row, ctx.params, ctx.seed)
        if prompt is not None:
            kept.append((row, prompt))
    samples: dict[tuple[int, int], Sample] = {}
    for index, sample_index, sample in backend.generate([prompt for _, prompt in kept]):
        samples[index, sample_index] = sample
        ctx.events.progress(done + len(samples), total, "responses")
    return [
        {
            "prompt_id": row["prompt_id"],
            "sample_index": sample_index,
            "messages": row["messages"],
            "reference_answer": row["reference_answer"],
            "prompt_token_ids": prompt.token_ids,
            "response_token_ids": samples[index, sample_index].token_ids,
            "response_logprobs": samples[index, sample_index].logprobs,
            "response": policy.decode(samples[index, sample_index].token_ids),
            "finish_reason": samples[index, sample_index].finish_reason,
            "seed": prompt.seeds[sample_index],
        }
        for index, (row, prompt) in enumerate(kept)
        for sample_index in range(ctx.params.num_samples)
    ]


def _make_backend(ctx: Context, policy: Policy) -> Backend:
    if ctx.params.backend == "vllm":
        from stages.generate.vllm_backend import VllmBackend

        return VllmBackend(policy, ctx.params)
    from stages.generate.transformers_backend import load_backend

    return load_backend(policy, ctx.params)


def _assemble(ctx: Context, chunks: Sequence[Chunk]) -> dict[str, Any]:
    """Joins the chunks into ``responses.parquet`` and returns the metrics."""
    num_prompts = sum(map(len, chunks))
    reasons: Counter[str] = Counter()
    num_tokens = 0
    with TableWriter(ctx.out / "responses.parquet", RESPONSES) as writer:
        for row in read_rows([chunk.path for chunk in chunks], RESPONSES):
            writer.write(row)
            reasons[row["finish_reason"]] += 1
            num_tokens += len(row["response_token_ids"])
    dropped = num_prompts - writer.num_rows // ctx.params.num_samples
    if dropped:
        _report_dropped(ctx, dropped, num_prompts)
    return {
        "prompts": num_prompts,
        "prompts_dropped_too_long": dropped,
        "responses": writer.num_rows,
        "response_tokens": num_tokens,
        "mean_response_tokens": num_tokens / writer.num_rows if writer.num_rows else None,
        "finish_reasons": dict(sorted(reasons.items())),
    }


def _report_dropped(ctx: Context, dropped: int, num_prompts: int) -> None:
    what = (
        f"{dropped} of {num_prompts} prompts are too long: the context has no room for "
        f"max_new_tokens={ctx.params.max_new_tokens} after them"
    )
    if dropped == num_prompts:
        raise UserError(
            what, "lower max_new_tokens, or raise max_length_tokens if the policy's context allows"
        )
    ctx.events.warning(f"{what}; dropped")


STAGE = Stage(GenerateParams, run)
