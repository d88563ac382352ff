"""Evaluate: scored samples of policy and base in, metrics and kept samples out."""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stages.evaluate.params import EvaluateParams
from stages.evaluate.summary import (
    Metrics,
    PromptFigure,
    SampleSummary,
    figures,
    win_rate,
)
from stages.harness.context import StageContext
from stages.harness.program import Stage
from stages.tables.join import ScoredBatch, prompt_starts, read_scored
from stages.tables.schemas import (
    FIGURES,
    PROMPT_FIGURES,
    RESPONSES,
    num_rows,
    read_batches,
    write_table,
)

if TYPE_CHECKING:
    from stages.evaluate.reference import Reference

_COLUMNS = (
    "messages",
    "reference_answer",
    "prompt_token_ids",
    "response_token_ids",
    "response_logprobs",
    "response",
    "finish_reason",
)
# Prompts whose responses are kept for the report. They have the smallest ids, which are digests: a
# choice without preference, and the same in every iteration.
_SAMPLE_PROMPTS = 16
# Responses of each model kept for each of those prompts.
_SAMPLES_PER_PROMPT = 4
_PROMPT_FIELDS = ("prompt_id", "messages", "reference_answer")
_SAMPLE_FIELDS = ("sample_index", "response", "finish_reason", "score", "log_pi_ref")


@dataclass
class _Side:
    """One of the two models: its samples, and what is to be computed of them."""

    responses: list[Path]
    scores: list[Path]
    reference: Reference | None
    """The model of its log π_ref, if that is asked for."""
    summary: SampleSummary
    prompts: dict[str, int]
    """Digest of the tokens of each prompt that it answered, by the prompt's id."""
    kept: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Rows of the prompts that are kept for the report."""


def run(ctx: StageContext[EvaluateParams]) -> None:
    """Computes the metrics of the policy's and the base model's samples."""
    reference = None
    if ctx.params.log_pi_ref != "off":
        # Loads torch: only if log π_ref is asked for.
        from stages.evaluate.reference import Reference

        reference = Reference(ctx)
    sides = _sides(ctx, reference)
    policy, base = sides
    if policy.reference is not None and not _share_tokens(sides):
        policy.reference = None
        ctx.events.warning(
            "log π_ref of the policy is left out: prompts have other tokens than the base's, whose "
            "tokenizer or chat template is another"
        )
    _read_samples(ctx, sides)
    policy_figures = policy.summary.by_prompt()
    base_figures = base.summary.by_prompt()
    same = policy.summary.answers.items() & base.summary.answers.items()
    comparison, won = win_rate(
        policy_figures.get("mean_reward", {}), base_figures.get("mean_reward", {}), dict(same)
    )
    prompts = policy.summary.answers.keys() | base.summary.answers.keys()
    uncompared = len(prompts) - len(won)
    comparison["uncompared_prompts"] = uncompared
    policy_metrics = comparison | policy.summary.metrics()
    base_metrics = base.summary.metrics()
    prefixed = {f"base_{name}": value for name, value in base_metrics.items()}
    ctx.write_json("metrics.json", policy_metrics | prefixed)
    policy_figures["win_rate"] = won
    write_figures(
        ctx.out,
        {"policy": policy_metrics, "base": base_metrics},
        {"policy": policy_figures, "base": base_figures},
    )
    _write_samples(ctx.out / "samples.jsonl", policy, base)
    if uncompared:
        ctx.events.warning(
            f"{uncompared} prompts are not in the win rate: a score or one model's samples are "
            "missing"
        )


def _share_tokens(sides: list[_Side]) -> bool:
    """False if a prompt that both models have has other tokens for one than for the other."""
    policy, base = (side.prompts for side in sides)
    return all(policy[prompt] == base[prompt] for prompt in policy.keys() & base.keys())


def _read_samples(ctx: StageContext[EvaluateParams], sides: list[_Side]) -> None:
    """Reads the samples of both sides once; their summaries are complete afterwards."""
    total = sum(num_rows(side.responses) for side in sides)
    kept_prompts = set(heapq.nsmallest(_SAMPLE_PROMPTS, sides[0].prompts))
    done = 0
    for side in sides:
        for batch in read_scored(
            side.responses, side.scores, columns=_COLUMNS, score_columns=("components",)
        ):
            rows = batch.rows
            log_pi_ref = None
            if side.reference is not None:
                log_pi_ref = side.reference.log_probabilities(rows)
            side.summary.add(batch, _row_sums(rows["response_logprobs"]), log_pi_ref)
            _keep_samples(side, batch, log_pi_ref, kept_prompts)
            done += rows.num_rows
            ctx.events.progress(done, total, "responses")


def write_figures(
    folder: Path,
    metrics: Mapping[str, Metrics],
    by_prompt: Mapping[str, Mapping[str, PromptFigure]],
) -> None:
    """Writes the figures of both models, and what each prompt adds to them, by the model."""
    rows = []
    prompts = []
    for model, prompt_figures in by_prompt.items():
        for row in figures(metrics[model], prompt_figures):
            rows.append({"model": model, **row})
        for name, figure in prompt_figures.items():
            for prompt, (total, count) in figure.items():
                row = {
                    "model": model,
                    "prompt_id": prompt,
                    "figure": name,
                    "total": total,
                    "count": count,
                }
                prompts.append(row)
    write_table(folder / "figures.parquet", FIGURES, rows)
    write_table(folder / "prompts.parquet", PROMPT_FIGURES, prompts)


def _sides(ctx: StageContext[EvaluateParams], reference: Reference | None) -> list[_Side]:
    params = ctx.params
    sides = []
    for name, prefix in (("policy", ""), ("base", "base_")):
        responses = ctx.paths(f"{prefix}responses")
        side = _Side(
            responses=responses,
            scores=ctx.paths(f"{prefix}scores"),
            reference=reference if params.log_pi_ref in (name, "both") else None,
            summary=SampleSummary(params.correct_from, params.pass_at_k),
            prompts=_prompts_of(responses),
        )
        sides.append(side)
    return sides


def _prompts_of(responses: list[Path]) -> dict[str, int]:
    """Digests of the prompts' tokens by the prompts' ids."""
    prompts = {}
    for batch in read_batches(responses, RESPONSES, columns=["prompt_id", "prompt_token_ids"]):
        # The rows of a prompt are together, and have the same tokens.
        *starts, _ = prompt_starts(batch["prompt_id"])
        for row in batch.take(starts).to_pylist():
            prompts[row["prompt_id"]] = hash(tuple(row["prompt_token_ids"]))
    return prompts


def _row_sums(column: pa.ListArray) -> npt.NDArray[Any]:
    """[R] sums over each row's list; 0 for an empty one."""
    owners = pc.list_parent_indices(column).to_numpy()
    values = column.flatten().to_numpy()
    return np.bincount(owners, weights=values, minlength=len(column))


def _keep_samples(
    side: _Side,
    batch: ScoredBatch,
    log_pi_ref: npt.NDArray[np.float64] | None,
    kept_prompts: set[str],
) -> None:
    for prompt_id, start, end in batch.prompts():
        if prompt_id not in kept_prompts:
            continue
        number = min(end - start, _SAMPLES_PER_PROMPT)
        rows = batch.rows.slice(start, number).to_pylist()
        for place, row in enumerate(rows, start):
            row["log_pi_ref"] = None if log_pi_ref is None else float(log_pi_ref[place])
        side.kept[prompt_id] = rows


def _write_samples(path: Path, policy: _Side, base: _Side) -> None:
    with path.open("w", encoding="utf-8") as file:
        for prompt_id in sorted(policy.kept.keys() & base.kept.keys()):
            first, *_ = policy.kept[prompt_id]
            row = {name: first[name] for name in _PROMPT_FIELDS}
            for model, side in (("policy", policy), ("base", base)):
                row[model] = [
                    {name: sample[name] for name in _SAMPLE_FIELDS}
                    for sample in side.kept[prompt_id]
                ]
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


STAGE = Stage(EvaluateParams, run)
