"""Figures of an evaluation prompt by prompt, read from the samples that it has kept.

``metrics.json`` holds means over all samples. Intervals and comparisons of runs need each prompt's
part in them, which is computed here from ``distributions.parquet`` and the oracle's scores, so that
artifacts made before have intervals too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flows.report.solved import ACCURACY, Solved, ballots_of, majority_name, pass_name
from flows.report.statistics import Estimate, Floats, pass_at_k, proportion, ratio_of_sums
from stages.contract.store import Artifact

_ENTRIES = pa.list_(pa.struct([("key", pa.string()), ("value", pa.float64())]))
# Evaluations whose estimates are kept: a long run shows them after each of its iterations.
_KEPT = 1024


@dataclass(frozen=True)
class PromptFigure:
    """One figure of each prompt, as a sum over its samples and their number.

    Attributes:
        prompt_ids: The prompts, [P], in the order of their ids.
        sums: Sums over each prompt's samples, [P].
        counts: What they are divided by, [P].
    """

    prompt_ids: tuple[str, ...]
    sums: Floats
    counts: Floats

    def estimate(self) -> Estimate:
        """The mean over all samples with its bootstrap interval over prompts."""
        return ratio_of_sums(self.sums, self.counts)

    def means(self) -> dict[str, float]:
        """Each prompt's own mean."""
        return dict(zip(self.prompt_ids, (self.sums / self.counts).tolist(), strict=True))


_Figures = dict[str, PromptFigure]


@dataclass(frozen=True)
class Places:
    """Files of one evaluation; those of artifacts, which do not change.

    Attributes:
        distributions: Rewards, lengths and log-probabilities of both models' samples.
        scores: The policy's scores, shard by shard, with the oracle's components.
        base_scores: The base's.
    """

    distributions: Path
    scores: tuple[Path, ...] = ()
    base_scores: tuple[Path, ...] = ()


def places(
    artifacts: Mapping[str, Artifact], evaluated: str, own: str, base: str, num_shards: int
) -> Places:
    """Files of an evaluation among the artifacts of a run.

    Args:
        artifacts: Artifacts by the name of their step; those of scores may be missing.
        evaluated: Name of the evaluation's step.
        own: Prefix of the names of the steps that sampled and scored the policy's responses.
        base: The same for the base.
        num_shards: Shards in which the samples were scored.
    """

    def scores(prefix: str) -> tuple[Path, ...]:
        known = [artifacts.get(f"{prefix}/score/{shard}") for shard in range(num_shards)]
        # All or none: means over some of the shards would be other figures.
        return tuple(each.file("scores.parquet") for each in known if each) if all(known) else ()

    distributions = artifacts[evaluated].file("distributions.parquet")
    return Places(distributions, scores(own), scores(base))


def prompt_figures(places: Places, model: str, solved: Solved) -> _Figures:
    """Figures of one model's samples, prompt by prompt.

    Args:
        places: The evaluation's files.
        model: ``policy`` or ``base``.
        solved: Figures of solved problems.

    Returns:
        Figures by their names in ``metrics.json``; the oracle's components as ``components.NAME``,
        figures of solved problems as ``accuracy``, ``pass@K`` and ``maj@K``. The base has no
        ``win_rate``.
    """
    own = _rewards(places.distributions, model)
    found = {}
    if own:
        found["mean_reward"] = _figure({name: (math.fsum(x), len(x)) for name, x in own.items()})
        found |= _solved(own, solved)
    if model == "policy":
        found |= _wins(own, _rewards(places.distributions, "base"))
    for column, name in (
        ("log_pi_ref", "mean_log_pi_ref"),
        ("num_tokens", "mean_response_tokens"),
    ):
        found |= _column(places.distributions, model, column, name)
    scores = places.scores if model == "policy" else places.base_scores
    return found | _majority(scores, solved) | _components(scores)


@lru_cache(maxsize=_KEPT)
def estimates(places: Places, model: str, solved: Solved) -> Mapping[str, Estimate]:
    """Figures of one model with their 95 % intervals, by the names of :func:`prompt_figures`.

    Intervals are bootstraps over prompts, that of the win rate is Wilson's: a policy that wins
    every prompt has an interval too.
    """
    found = prompt_figures(places, model, solved)
    return {
        name: proportion(int(figure.sums.sum()), len(figure.sums))
        if name == "win_rate"
        else figure.estimate()
        for name, figure in found.items()
    }


def _rewards(distributions: Path, model: str) -> dict[str, list[float]]:
    """Rewards by prompt, prompts with an unscored response left out, as ``evaluate`` does."""
    table = _of_model(distributions, model, ["reward"])
    prompts: dict[str, list[float]] = {}
    incomplete = set()
    columns = table["prompt_id"].to_pylist(), table["reward"].to_pylist()
    for name, reward in zip(*columns, strict=True):
        if reward is None:
            incomplete.add(name)
        else:
            prompts.setdefault(name, []).append(reward)
    return {name: rewards for name, rewards in prompts.items() if name not in incomplete}


def _of_model(distributions: Path, model: str, columns: Sequence[str]) -> pa.Table:
    table = pq.read_table(distributions, columns=["model", "prompt_id", *columns])
    return table.filter(pc.equal(table["model"], model))


def _wins(own: Mapping[str, list[float]], base: Mapping[str, list[float]]) -> _Figures:
    """1 for each prompt whose sum of rewards is above the base's, else 0, as ``evaluate`` has it.

    Sums are exactly rounded, so that equal rewards in another order tie.
    """
    won = {
        name: (float(math.fsum(rewards) > math.fsum(base[name])), 1)
        for name, rewards in own.items()
        if name in base
    }
    return {"win_rate": _figure(won)} if won else {}


def _solved(own: Mapping[str, list[float]], solved: Solved) -> _Figures:
    if solved.from_score is None:
        return {}
    correct = {name: sum(x >= solved.from_score for x in rewards) for name, rewards in own.items()}
    found = {ACCURACY: _figure({name: (count, len(own[name])) for name, count in correct.items()})}
    names = sorted(own)
    right = np.array([correct[name] for name in names], dtype=np.int64)
    tried = np.array([len(own[name]) for name in names], dtype=np.int64)
    for k in solved.at_k:
        found[pass_name(k)] = PromptFigure(
            tuple(names), pass_at_k(right, tried, k), np.ones(len(names))
        )
    return found


def _majority(scores: Sequence[Path], solved: Solved) -> _Figures:
    """maj@k from the oracle's component `votes`; nothing where the oracle did not count them."""
    if solved.from_score is None or not solved.majority_at:
        return {}
    ballots = ballots_of(scores, solved.from_score)
    return {
        majority_name(k): _figure(
            {name: (majority_at_k(*ballot, k), 1) for name, ballot in ballots.items()}
        )
        for k in solved.majority_at
        if ballots
    }


def _column(distributions: Path, model: str, column: str, name: str) -> _Figures:
    return _grouped(
        _of_model(distributions, model, [column]).rename_columns(["model", "name", "value"]), name
    )


def _components(scores: Sequence[Path]) -> _Figures:
    found: _Figures = {}
    tables = [pq.read_table(path, columns=["prompt_id", "components"]) for path in scores]
    if not tables:
        return found
    table = pa.concat_tables(tables).combine_chunks()
    entries = table["components"].cast(_ENTRIES).combine_chunks()
    flat = pc.list_flatten(entries)
    owners = table["prompt_id"].take(pc.list_parent_indices(entries))
    parts = pa.table({"part": flat.field("key"), "name": owners, "value": flat.field("value")})
    for part in sorted(pc.unique(parts["part"]).to_pylist()):
        chosen = parts.filter(pc.equal(parts["part"], part))
        found |= _grouped(chosen, f"components.{part}")
    return found


def _grouped(table: pa.Table, name: str) -> _Figures:
    """Sums and counts of ``value`` by ``name``, rows without a value left out."""
    known = table.filter(pc.is_valid(table["value"]))
    sums = known.group_by("name").aggregate([("value", "sum"), ("value", "count")])
    rows = {row["name"]: (float(row["value_sum"]), row["value_count"]) for row in sums.to_pylist()}
    return {name: _figure(rows)} if rows else {}


def _figure(parts: Mapping[str, tuple[float, int]]) -> PromptFigure:
    names = tuple(sorted(parts))
    values: npt.NDArray[np.float64] = np.array([parts[name] for name in names], dtype=np.float64)
    return PromptFigure(names, values[:, 0], values[:, 1])


@lru_cache(maxsize=65536)
def majority_at_k(correct: int, wrong: Sequence[int], abstained: int, k: int) -> float:
    """Chance that the most frequent answer among k samples drawn of n is the correct one.

    Self-consistency (Wang et al. 2023, arXiv 2203.11171) averaged over all C(n, k) draws without
    replacement, so that it is unbiased for k < n as pass@k is. A tie is decided by chance: t wrong
    answers as frequent as the correct one leave it 1/(t+1). A draw without the correct answer
    fails. Samples without an answer are drawn and do not vote.

    Args:
        correct: Samples with the correct answer.
        wrong: Samples with each of the wrong answers.
        abstained: Samples without an answer.
        k: Samples drawn.

    Raises:
        ValueError: There are fewer than k samples.
    """
    samples = correct + sum(wrong) + abstained
    if not 1 <= k <= samples:
        raise ValueError(f"maj@{k} needs at least {k} samples of each prompt; one has {samples}")
    won = sum(
        comb(correct, votes) * _others(wrong, abstained, votes, k - votes)
        for votes in range(1, min(correct, k) + 1)
    )
    return won / comb(samples, k)


def _others(wrong: Sequence[int], abstained: int, votes: int, drawn: int) -> float:
    """Ways to draw the rest without more than ``votes`` of one answer, each by 1/(ties+1)."""
    # Ways by the number of answers that tie, and the number of samples drawn so far.
    most_ties = min(len(wrong), drawn // votes)
    ways = np.zeros((most_ties + 1, drawn + 1))
    ways[0] = [comb(abstained, each) for each in range(drawn + 1)]
    for size in wrong:
        following = np.zeros_like(ways)
        for taken in range(min(size, votes, drawn) + 1):
            added = comb(size, taken) * ways[:, : drawn + 1 - taken]
            if taken < votes:
                following[:, taken:] += added
            else:
                following[1:, taken:] += added[:-1]
        ways = following
    return float((ways[:, drawn] / np.arange(1, most_ties + 2)).sum())
