"""Conversations and a policy (or an architecture) to a warm-started checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import torch

from stages.contract.context import StageContext
from stages.contract.digests import derive_seed
from stages.contract.events import dump_json
from stages.contract.program import Stage
from stages.modeling.load import DTYPES
from stages.modeling.rope import require_static_rope
from stages.modeling.save import save_checkpoint
from stages.sft.conversations import Conversation, read_conversations
from stages.sft.examples import Example, make_examples
from stages.sft.loop import Loop, Record
from stages.sft.params import SftParams
from stages.sft.policy import Policy, load_policy, new_policy

Context = StageContext[SftParams]


def run(ctx: Context) -> None:
    """Trains the policy and saves it.

    Inputs: ``data`` (1..n files), ``policy`` (optional model). Outputs: ``checkpoint/``,
    ``summary.json`` and, as telemetry, ``metrics.jsonl``. State is kept in ``ctx.work`` every so
    often and on SIGTERM; a retry goes on there, to the same weights.

    Raises:
        UserError: The data or the checkpoint cannot be used.
        StoppedError: SIGTERM came.
    """
    policy = _starting_policy(ctx)
    max_length = _max_length(ctx, policy)
    examples, num_dropped = make_examples(policy.tokenizer, _conversations(ctx), max_length)
    if num_dropped:
        ctx.events.warning(
            f"{num_dropped} of {num_dropped + len(examples)} conversations are longer than "
            f"{max_length} tokens and are left out"
        )
    require_static_rope(
        policy.model.config,
        "the policy",
        longest=max(map(len, examples)),
        remedy="set sft.max_length_tokens={limit}",
    )
    records = _train(ctx, policy, examples)
    _save(ctx, policy)
    _write_metrics(ctx, records)
    summary = {
        "rows": len(examples),
        "rows_dropped_too_long": num_dropped,
        "response_tokens": sum(example.num_response_tokens for example in examples),
        "vocabulary": len(policy.tokenizer),
        "parameters": sum(each.numel() for each in policy.model.parameters()),
        "steps": len(records),
        "final_loss": records[-1]["loss"],
    }
    (ctx.out / "summary.json").write_text(dump_json(summary))


def _conversations(ctx: Context) -> Iterator[Conversation]:
    return read_conversations(ctx.paths("data"), ctx.params)


def _starting_policy(ctx: Context) -> Policy:
    if ctx.has("policy"):
        return load_policy(ctx.model("policy"))
    texts = (turn["content"] for conversation in _conversations(ctx) for turn in conversation)
    return new_policy(ctx.params.architecture, texts, derive_seed(ctx.seed, "weights"))


def _max_length(ctx: Context, policy: Policy) -> int:
    """The model's context or the smaller limit that was asked for; some models have no context."""
    context = getattr(policy.model.config, "max_position_embeddings", None)
    return min(limit or sys.maxsize for limit in (ctx.params.max_length_tokens, context))


def _train(ctx: Context, policy: Policy, examples: list[Example]) -> list[Record]:
    if ctx.params.gradient_checkpointing:
        policy.model.gradient_checkpointing_enable()

    def report(step: int, record: Record) -> None:
        ctx.events.progress(step, loop.num_steps, "steps", f"loss {record['loss']:.4f}")
        if step % max(1, loop.num_steps // 100) == 0 or step == loop.num_steps:
            ctx.events.metric(step, **{name: record[name] for name in ("loss", "grad_norm")})

    loop = Loop(
        model=policy.model,
        examples=examples,
        params=ctx.params,
        seed=ctx.seed,
        work=ctx.work,
        stop_requested=lambda: ctx.stop_requested,
        report=report,
        autocast=_autocast_dtype(ctx, policy.model.device),
    )
    with ctx.deferred_stop():
        if not loop.run():
            ctx.check_stop()
    return loop.records


def _autocast_dtype(ctx: Context, device: torch.device) -> torch.dtype | None:
    precision = ctx.params.precision
    if precision == "bfloat16" or (precision == "auto" and device.type == "cuda"):
        return torch.bfloat16
    return None


def _save(ctx: Context, policy: Policy) -> None:
    save_dtype = ctx.params.save_dtype
    dtype = policy.dtype if save_dtype == "auto" else DTYPES[save_dtype]
    save_checkpoint(
        policy.model, policy.model.state_dict(), policy.tokenizer, dtype, ctx.out / "checkpoint"
    )


def _write_metrics(ctx: Context, records: list[Record]) -> None:
    with ctx.telemetry_path("metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


STAGE = Stage(SftParams, run)
