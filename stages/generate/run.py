"""The generate stage: prompts and a policy to ``responses.parquet``."""

import contextlib
import importlib
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.contract.digests import find_whole, sealed_path
from stages.contract.errors import UserError
from stages.contract.events import dump_json
from stages.generate.backend import Backend
from stages.generate.filling import Chunk, ChunkFiller, split_chunks
from stages.generate.params import BACKENDS, GenerateParams
from stages.generate.policy import Policy, load_policy
from stages.harness.context import StageContext
from stages.harness.program import Stage
from stages.tables.schemas import PROMPTS, RESPONSES, TableWriter, num_rows, read_rows

Context = StageContext[GenerateParams]
_ENGINE_FACTS = "engine.json"


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
    missing = [chunk for chunk in chunks if not find_whole(chunk.path, ctx.events.warning)]
    ctx.notes.update(backend=ctx.params.backend, first_prompt=first, stop_prompt=stop)
    if len(missing) < len(chunks):
        ctx.events.info(f"{len(chunks) - len(missing)} of {len(chunks)} chunks are there already")
    begun = _sample(ctx, prompts, policy, missing, stop - first) if missing else _now()
    facts = ctx.work / _ENGINE_FACTS
    if find_whole(facts, ctx.events.warning):
        ctx.notes.update(json.loads(facts.read_text()))
    metrics = _assemble(ctx, chunks)
    ctx.notes["responses_without_logprobs"] = metrics["responses_without_logprobs"]
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


def _sample(
    ctx: Context, prompts: Path, policy: Policy, chunks: Sequence[Chunk], num_prompts: int
) -> tuple[float, float]:
    """Writes the chunks that are missing of a shard's ``num_prompts``; says when that could begin.

    What the engine says of itself is kept beside the chunks: an attempt that finds them all has no
    engine to ask.
    """
    total = num_prompts * ctx.params.num_samples
    done = total - sum(map(len, chunks)) * ctx.params.num_samples
    filler = ChunkFiller(
        chunks,
        read_rows(prompts, PROMPTS),
        render=lambda row: policy.render(row, ctx.params, ctx.request.seed),
        decode=policy.decode,
        on_written=lambda chunk: ctx.events.info(
            f"wrote the responses to prompts {chunk.first} to {chunk.stop - 1}"
        ),
    )
    module = importlib.import_module(BACKENDS[ctx.params.backend])
    backend: Backend = module.load(policy, ctx.params, ctx.events)
    with contextlib.closing(backend):
        with sealed_path(ctx.work / _ENGINE_FACTS) as path:
            path.write_text(dump_json(dict(backend.notes)))
        begun = _now()
        for number, sample_index, sample in backend.generate(filler.prompts()):
            filler.take(number, sample_index, sample)
            done += 1
            ctx.events.progress(done, total, "responses")
    ctx.events.progress(total, total, "responses")
    return begun


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
