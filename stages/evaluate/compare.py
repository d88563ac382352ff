"""Policy against base: the win rate of the paper's evaluation. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from stages.contract.errors import UserError
from stages.evaluate.summary import Metrics, PromptRewards

Rewards = Mapping[str, PromptRewards | None]


def win_rate(policy: Rewards, base: Rewards) -> Metrics:
    """Compares two models prompt by prompt.

    A prompt wins when the sum of its rewards is strictly above the base model's; ties lose
    (``win_rate``), or count one half (``win_rate_ties_split``).

    Args:
        policy: Rewards of the policy's samples by prompt id; None where a score is missing.
        base: Rewards of the base model's samples.

    Returns:
        Rates, the standard error of the first, and how many prompts were compared, tied, or left
        out because a score or the other model's samples are missing.

    Raises:
        UserError: No prompt can be compared, or a prompt has more samples of one model.
    """
    wins = ties = compared = 0
    for prompt_id, mine in policy.items():
        other = base.get(prompt_id)
        if mine is None or other is None:
            continue
        if mine.count != other.count:
            raise UserError(
                f"prompt {prompt_id} has {mine.count} samples of the policy and {other.count} of "
                "the base model: sums of rewards cannot be compared",
                "sample both with the same number of responses a prompt",
            )
        compared += 1
        wins += mine.total > other.total
        ties += mine.total == other.total
    if compared == 0:
        raise UserError(
            "policy and base model have no scored prompt in common",
            "sample and score both on the same test prompts",
        )
    rate = wins / compared
    return {
        "win_rate": rate,
        "win_rate_se": math.sqrt(rate * (1 - rate) / compared),
        "win_rate_ties_split": (wins + ties / 2) / compared,
        "compared_prompts": compared,
        "tied_prompts": ties,
        "uncompared_prompts": len(policy.keys() | base.keys()) - compared,
    }
