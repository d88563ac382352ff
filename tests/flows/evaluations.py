"""Evaluations written by hand, as far as reports read them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from stages.contract.manifest import Manifest
from stages.store.base import Artifact
from stages.tables.schemas import DISTRIBUTIONS, SCORES, write_table

Rewards = Mapping[str, Sequence[float | None]]


def artifact_in(folder: Path) -> Artifact:
    """An artifact as far as the report reads it: its files, and no manifest."""
    return Artifact(folder, cast(Manifest, None))


def write_evaluation(
    folder: Path, policy: Rewards, base: Rewards, metrics: Mapping[str, Any] | None = None
) -> Artifact:
    """Writes the samples of an evaluation; log π_ref is −10 · reward, a response has 5 tokens."""
    folder.mkdir(parents=True)
    rows = [
        {
            "model": model,
            "prompt_id": prompt,
            "sample_index": index,
            "reward": reward,
            "log_pi": -1.0,
            "log_pi_ref": None if reward is None else -10 * reward,
            "num_tokens": 5,
        }
        for model, rewards in (("policy", policy), ("base", base))
        for prompt, given in rewards.items()
        for index, reward in enumerate(given)
    ]
    write_table(folder / "distributions.parquet", DISTRIBUTIONS, rows)
    (folder / "metrics.json").write_text(json.dumps(dict(metrics or {})))
    return artifact_in(folder)


def write_scores(
    folder: Path,
    components: Mapping[str, Sequence[Mapping[str, float]]],
    scores: Rewards | None = None,
) -> Artifact:
    """Writes scores (0 where none are given) with their components, by prompt and sample."""
    folder.mkdir(parents=True)
    rows = [
        {
            "prompt_id": prompt,
            "sample_index": index,
            "score": scores[prompt][index] if scores else 0.0,
            "error": None,
            "components": list(parts.items()),
            "oracle": "by hand",
        }
        for prompt, given in components.items()
        for index, parts in enumerate(given)
    ]
    write_table(folder / "scores.parquet", SCORES, rows)
    return artifact_in(folder)
