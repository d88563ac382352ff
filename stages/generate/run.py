"""The generate stage: prompts and a policy to ``responses.parquet``."""

import contextlib
import importlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from stages.contract.errors import UserError
from stages.contract.events import dump_json
from stages.generate.backend import Backend, Prompt, Sample
from stages.generate.params import BACKENDS, GenerateParams
from stages.generate.policy import Policy, load_policy
from stages.harness.context import StageContext
from stages.harness.program import Stage
from stages.tables.schemas import (
    PROMPTS,
    RESPONSES,
    TableWriter,
    num_rows,
    publish_table,
    read_rows,
)

Context = StageContext[GenerateParams]


def run(ctx: Context) -> None:
    """Samples K responses for each prompt of the shard.

    Inputs: ``policy`` (model), ``prompts`` (one PROMPTS table), ``adapter`` (a LoRA adapter of the
    policy, optional). Outputs:
    ``responses.parquet`` (RESPONSES, grouped by prompt in the prompts' order, samples 0…K−1) and
    ``metrics.json``. What is done is kept in ``ctx.work`` chunk by chunk; a retry goes on with the
    chunks that are not there.
    """
    started = time.monotonic()
    prompts = ctx.path("prompts")
    policy = load_policy(ctx.model("policy"), ctx.params)
    first, stop = _shard(ctx, prompts)
    chunks = split_chunks(ctx.work, first, stop, ctx.params.chunk_prompts)
    missing = [chunk for chunk in chunks if not chunk.path.exists()]
    if len(missing) < len(chunks):
        ctx.events.info(f"{len(chunks) - len(missing)} of {len(chunks)} chunks are there already")
    begun = _sample(ctx, prompts, policy, missing, stop - first) if missing else _now()
    metrics = _assemble(ctx, chunks)
    (ctx.out / "metrics.json").write_text(dump_json(metrics))
    timings = {
        "seconds": time.monotonic() - started,
        "start_seconds": begun[0] - started,
        "cpu_seconds_after_start": time.process_time() - begun[1],
        "chunks_sampled": len(missing),
        "chunks_reused": len(chunks) - len(missing),
    }
    ctx.telemetry_path("timings.json").write_text(dump_json(timings))


def _now() -> tuple[float, float]:
    """Wall time, and the CPU time of this process so far, in seconds."""
    return time.monotonic(), time.process_time()


def _shard(ctx: Context, prompts: Path) -> tuple[int, int]:
    """First prompt of the shard and the one after its last: shards have about as many prompts."""
    total = num_rows(prompts)
    if total == 0:
        raise UserError("the prompts table is empty", "check the data that the prompts are made of")
    index = ctx.params.shard_index
    number = ctx.params.num_shards
    return total * index // number, total * (index + 1) // number


@dataclass(frozen=True)
class Chunk:
    """The responses to the prompts from ``first`` to before ``stop`` of the prompts table.

    The file's name holds the bounds, so that chunks of another size, left by an attempt with other
    settings of speed, are never taken for these.
    """

    first: int
    stop: int
    path: Path

    def __len__(self) -> int:
        return self.stop - self.first


def split_chunks(folder: Path, start: int, stop: int, size: int) -> list[Chunk]:
    """The chunks of at most ``size`` prompts that make up a shard, in order."""
    bounds = [(first, min(first + size, stop)) for first in range(start, stop, size)]
    return [
        Chunk(first, last, folder / f"{first:09d}-{last:09d}.parquet") for first, last in bounds
    ]


def _sample(
    ctx: Context, prompts: Path, policy: Policy, chunks: Sequence[Chunk], num_prompts: int
) -> tuple[float, float]:
    """Writes the missing chunks of a shard's ``num_prompts``; returns the time of the first."""
    num_samples = ctx.params.num_samples
    total = num_prompts * num_samples
    done = total - sum(map(len, chunks)) * num_samples
    table = read_rows(prompts, PROMPTS)
    position = 0
    module = importlib.import_module(BACKENDS[ctx.params.backend])
    backend: Backend = module.load(policy, ctx.params, ctx.events)
    with contextlib.closing(backend):
        begun = _now()
        for chunk in chunks:
            rows = []
            rendered = []
            for row in islice(table, chunk.first - position, chunk.stop - position):
                prompt = policy.render(row, ctx.params, ctx.request.seed)
                if prompt is not None:
                    rows.append(row)
                    rendered.append(prompt)
            position = chunk.stop
            samples = {}
            for place, index, sample in backend.generate(rendered):
                samples[place, index] = sample
                ctx.events.progress(done + len(samples), total, "responses")
            done += len(chunk) * num_samples
            # A kill leaves all rows or none.
            publish_table(chunk.path, RESPONSES, _to_rows(policy, rows, rendered, samples))
            ctx.events.info(f"wrote the responses to prompts {chunk.first} to {chunk.stop - 1}")
    ctx.events.progress(total, total, "responses")
    return begun


def _to_rows(
    policy: Policy,
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[Prompt],
    samples: Mapping[tuple[int, int], Sample],
) -> Iterator[dict[str, Any]]:
    """Rows of RESPONSES for rows of PROMPTS."""
    for place, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        for index, seed in enumerate(prompt.seeds):
            sample = samples[place, index]
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


def _assemble(ctx: Context, chunks: Sequence[Chunk]) -> dict[str, Any]:
    """Joins the chunks into ``responses.parquet`` and returns the metrics."""
    num_prompts = sum(map(len, chunks))
    reasons: Counter[str] = Counter()
    num_tokens = without_logprobs = 0
    with TableWriter(ctx.out / "responses.parquet", RESPONSES) as writer:
        for row in read_rows([chunk.path for chunk in chunks], RESPONSES):
            writer.write(row)
            reasons[row["finish_reason"]] += 1
            num_tokens += len(row["response_token_ids"])
            without_logprobs += any(map(math.isnan, row["response_logprobs"]))
    dropped = num_prompts - writer.num_rows // ctx.params.num_samples
    if dropped:
        what = (
            f"{dropped} of {num_prompts} prompts are too long: the context has no room for "
            f"max_new_tokens={ctx.params.max_new_tokens} after them"
        )
        # With shards, the others may have prompts that fit.
        if dropped == num_prompts and ctx.params.num_shards == 1:
            remedy = (
                "lower max_new_tokens, or raise max_length_tokens if the policy's context allows"
            )
            raise UserError(what, remedy)
        ctx.events.warning(f"{what}; dropped")
    return {
        "prompts": num_prompts,
        "prompts_dropped_too_long": dropped,
        "responses": writer.num_rows,
        "responses_without_logprobs": without_logprobs,
        "response_tokens": num_tokens,
        "mean_response_tokens": num_tokens / writer.num_rows if writer.num_rows else None,
        "finish_reasons": dict(sorted(reasons.items())),
    }


STAGE = Stage(GenerateParams, run)
