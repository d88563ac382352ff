"""Summaries of samples, built while they are read once: figures, distinct-n, win rate. Pure.

Shapes: ``R`` responses of a batch.
"""

import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from stages.contract.errors import UserError
from stages.evaluate.statistics import CONFIDENCE, Estimate, pass_at_k, ratio_of_sums
from stages.tables.join import ScoredBatch
from stages.tables.wilson import wilson_interval

REFUSAL = re.compile(
    r"\s*((i['’]m|i am) (sorry|unable|not able)|i (cannot|can['’]t|can not|won['’]t|will not|"
    r"apologi[sz]e)|sorry|as an ai|as a language model|unfortunately, i)\b",
    re.IGNORECASE,
)
"""Beginnings of a response that refuses: first-person phrases of arXiv 2307.15043, appendix B."""

LONGEST_NGRAM = 4
"""Longest n-grams, in words, of which distinct-n is computed."""

Metrics = dict[str, Any]
PromptFigure = dict[str, tuple[float, int]]
"""One figure of each prompt: a sum over its samples, and what that is divided by."""
_UNREPORTED = ("compared_prompts", "uncompared_prompts", "mean_reward_se", "mean_log_pi")


class SampleSummary:
    """Metrics of one model's samples on the test prompts.

    Args:
        correct_from: Smallest score of a correct response; None counts no solved problems.
        tries: Numbers of samples k of which pass@k is computed.
    """

    def __init__(self, correct_from: float | None = None, tries: Sequence[int] = ()) -> None:
        self.answers: dict[str, int] = {}
        """Digest of each prompt's responses, whatever their order."""
        self._correct_from = correct_from
        self._tries = tries
        self._by_prompt: dict[str, PromptFigure] = defaultdict(dict)
        self._distinct = DistinctCounter()
        self._counts: Counter[str] = Counter()
        self._log_pi = 0.0
        self._repetition = array("d")

    def add(
        self,
        batch: ScoredBatch,
        log_pi: npt.NDArray[np.float64],
        log_pi_ref: npt.NDArray[np.float64] | None,
    ) -> None:
        """Adds a batch of prompts.

        Args:
            batch: Responses and scores; among them the column ``components``.
            log_pi: Summed log-probabilities under the sampling model at temperature 1, [R].
            log_pi_ref: The same under the reference, [R], if it is computed.
        """
        scores = batch.scores.to_pylist()
        components = batch.rows["components"].to_pylist()
        texts = batch.rows["response"].to_pylist()
        num_tokens = pc.list_value_length(batch.rows["response_token_ids"]).to_pylist()
        for prompt_id, start, end in batch.prompts():
            self.answers[prompt_id] = hash(tuple(sorted(texts[start:end])))
            self._add_scores(prompt_id, scores[start:end])
            self._add_components(prompt_id, components[start:end])
            self._add_figure("mean_response_tokens", prompt_id, num_tokens[start:end])
            if log_pi_ref is not None:
                self._add_figure("mean_log_pi_ref", prompt_id, log_pi_ref[start:end].tolist())
        self._distinct.add(texts)
        self._counts.update(
            responses=len(texts),
            refusals=sum(REFUSAL.match(text) is not None for text in texts),
            truncated=pc.sum(pc.equal(batch.rows["finish_reason"], "length")).as_py(),
        )
        for text in texts:
            share = repetition(text)
            if share is not None:
                self._repetition.append(share)
        self._log_pi += float(log_pi.sum())

    def _add_scores(self, prompt_id: str, scores: list[Any]) -> None:
        if None in scores:
            return
        self._add_figure("mean_reward", prompt_id, scores)
        if self._correct_from is not None:
            self._add_figure(
                "accuracy", prompt_id, [score >= self._correct_from for score in scores]
            )

    def _add_components(self, prompt_id: str, rows: Sequence[Any]) -> None:
        values = defaultdict(list)
        for row in rows:
            for name, value in row or ():
                values[f"components.{name}"].append(value)
        for name, parts in values.items():
            self._add_figure(name, prompt_id, parts)

    def _add_figure(self, figure: str, prompt_id: str, values: Sequence[float]) -> None:
        self._by_prompt[figure][prompt_id] = (math.fsum(values), len(values))

    def by_prompt(self) -> dict[str, PromptFigure]:
        """Figures prompt by prompt; rewards and solved problems without unscored prompts."""
        figures = dict(self._by_prompt)
        solved = self._by_prompt["accuracy"]
        for k in self._tries:
            figures[f"pass@{k}"] = {
                prompt: (pass_at_k(int(correct), samples, k), 1)
                for prompt, (correct, samples) in solved.items()
            }
        return figures

    def metrics(self) -> Metrics:
        """Metrics that need no other model's samples."""
        rewards = self._by_prompt["mean_reward"]
        counts = self._counts
        responses = counts["responses"]
        repeated = self._repetition
        distinct = {}
        for n, ratio in enumerate(self._distinct.per_ngram(), 1):
            distinct[f"distinct_{n}"] = ratio
        return {
            "mean_reward": _mean_of(rewards),
            "mean_reward_se": clustered_standard_error(rewards),
            **distinct,
            "mean_log_pi_ref": _mean_of(self._by_prompt["mean_log_pi_ref"]),
            "mean_log_pi": self._log_pi / responses,
            "mean_response_tokens": _mean_of(self._by_prompt["mean_response_tokens"]),
            "truncated_share": counts["truncated"] / responses,
            "repetition": math.fsum(repeated) / len(repeated) if repeated else None,
            "refusal_share": counts["refusals"] / responses,
        }


def repetition(text: str) -> float | None:
    """Share of a response's 4-grams of words that occurred in it before; None if it has none.

    This is seq-rep-4 of Welleck et al. 2019, arXiv 1908.04319.
    """
    grams = list(ngrams(text.split(), 4))
    if not grams:
        return None
    return 1 - len(set(grams)) / len(grams)


def ngrams(words: list[str], n: int) -> Iterator[tuple[str, ...]]:
    """Every n words in a row."""
    return zip(*(words[start:] for start in range(n)), strict=False)


def clustered_standard_error(figure: PromptFigure) -> float | None:
    """Standard error of the mean, from the means of the prompts.

    Samples of one prompt resemble each other; taking each for an independent observation would
    understate the error. None with fewer than two prompts.
    """
    if len(figure) < 2:
        return None
    means = [total / count for total, count in figure.values()]
    return float(np.std(means, ddof=1) / math.sqrt(len(means)))


def _mean_of(figure: PromptFigure) -> float | None:
    """Mean over all samples, the same in any order; None without samples."""
    if not figure:
        return None
    totals, counts = zip(*figure.values(), strict=True)
    return math.fsum(totals) / sum(counts)


def win_rate(
    policy: PromptFigure, base: PromptFigure, same: Container[str]
) -> tuple[Metrics, PromptFigure]:
    """Compares two models prompt by prompt.

    A prompt wins when the sum of its rewards is strictly above the base model's; ties lose.

    Args:
        policy: Rewards of the policy's samples, of the prompts that have all scores.
        base: Rewards of the base model's samples.
        same: Prompts with the same responses of both. They tie: a reward model's last bits depend
            on the other rows of its batch.

    Returns:
        The rate, and how many prompts were compared and tied; and 1 for each prompt that wins, 0
        for each other one.

    Raises:
        UserError: No prompt can be compared, or a prompt has more samples of one model.
    """
    won = {}
    ties = 0
    for prompt_id, (total, count) in policy.items():
        if prompt_id not in base:
            continue
        base_total, base_count = base[prompt_id]
        if count != base_count:
            raise UserError(
                f"prompt {prompt_id} has {count} samples of the policy and {base_count} of the "
                "base model: sums of rewards cannot be compared",
                "sample both with the same number of responses a prompt",
            )
        is_tie = total == base_total or prompt_id in same
        won[prompt_id] = (float(total > base_total and not is_tie), 1)
        ties += is_tie
    if not won:
        raise UserError(
            "policy and base model have no scored prompt in common",
            "sample and score both on the same test prompts; if generate dropped them all as too "
            "long, lower evaluation.max_new_tokens",
        )
    metrics = {
        "win_rate": _mean_of(won),
        "compared_prompts": len(won),
        "tied_prompts": ties,
    }
    return metrics, won


def figures(metrics: Metrics, by_prompt: Mapping[str, PromptFigure]) -> Iterator[dict[str, Any]]:
    """Figures of one model with their 95 % intervals, as far as they are known.

    Intervals are bootstraps over prompts, and Wilson's for the win rate: a policy that wins every
    prompt has an interval too. Another figure that is the same for every prompt has none: its
    bootstrap has no width, however few the prompts. The base has no win rate.
    """
    estimates = {name: _estimate(name, figure) for name, figure in by_prompt.items() if figure}
    log_pi_ref = metrics.get("mean_log_pi_ref")
    if "win_rate" in by_prompt and log_pi_ref is not None:
        estimates["kl_to_base"] = Estimate(metrics["mean_log_pi"] - log_pi_ref)
    for name, value in metrics.items():
        if value is not None and name not in _UNREPORTED:
            estimates[name] = replace(estimates.get(name, Estimate(value)), value=value)
    for name, estimate in estimates.items():
        yield {
            "figure": name,
            "value": estimate.value,
            "low": estimate.low,
            "high": estimate.high,
            "n": len(by_prompt.get(name, ())) or None,
        }


def _estimate(name: str, figure: PromptFigure) -> Estimate:
    values = [figure[prompt] for prompt in sorted(figure)]
    totals, counts = np.array(values).T
    if name == "win_rate":
        wins = int(totals.sum())
        return Estimate(wins / len(totals), *wilson_interval(wins, len(totals), CONFIDENCE))
    ratios = totals / counts
    if (ratios == ratios[0]).all():
        return Estimate(float(ratios[0]))
    return ratio_of_sums(totals, counts)


class DistinctCounter:
    """Counts distinct n-grams up to :data:`LONGEST_NGRAM`, at 8 bytes for each n-gram.

    n-grams are compared by 64-bit hashes: among 10⁸ of them the chance of any collision is below
    10⁻³, and one moves the figure by 10⁻⁸.
    """

    def __init__(self) -> None:
        self._hashes = [array("q") for _ in range(LONGEST_NGRAM)]

    def add(self, texts: Sequence[str]) -> None:
        """Adds responses to the corpus."""
        words = [text.split() for text in texts]
        for n, hashes in enumerate(self._hashes, 1):
            for text in words:
                hashes.extend(map(hash, ngrams(text, n)))

    def per_ngram(self) -> list[float | None]:
        """Different n-grams by n-grams, n = 1…; None if the corpus has no n-gram."""
        ratios = []
        for hashes in self._hashes:
            distinct = np.unique(hashes)
            ratios.append(len(distinct) / len(hashes) if hashes else None)
        return ratios
