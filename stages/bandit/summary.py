"""From the outcome of the simulation to numbers and a table.

Shapes: `C` cells, `S` seeds, `N` arms, `K` recorded iterations.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from stages.bandit.cells import Cell
from stages.bandit.landscape import Landscape
from stages.bandit.simulate import Outcome

CONFIDENCE = 0.95

LABELS = {
    "none": "f-DPO",
    "feb": "FEB",
    "selm": "SELM",
    "xpo": "XPO",
    "vpo": "VPO",
    "se_popo": "SE-POPO",
    "one_minus_pi": "GEB 1+α−π",
    "inverse_pi": "GEB 1/π",
    "arctanh": "GEB arctanh(1−π)+α",
}
"""Names of the methods in tables and figures."""

DIVERGENCE_LABELS = {
    "reverse_kl": "reverse KL",
    "hellinger": "Hellinger",
    "forward_kl": "forward KL",
}
"""Names of the divergences in tables and figures."""


def summarise(every: list[Cell], outcome: Outcome, landscape: Landscape) -> list[dict[str, Any]]:
    """One record per cell: per-seed results and what they come to.

    "Ends in the best region" means that arms better than the local optimum have most of the final
    policy's probability; "found after" is the first recorded iteration from which that stays so.
    """
    records = []
    for index, cell in enumerate(every):
        policy, mass = outcome.policy[index], outcome.best_mass[index]
        rewards = outcome.reward[index, :, -1].tolist()
        found = [_found_after(outcome.steps, seed.tolist()) for seed in mass]
        likeliest = policy.argmax(dim=-1).tolist()
        done = [steps for steps in found if steps is not None]
        records.append(
            {
                "method": cell.method,
                "divergence": cell.divergence,
                "kappa": cell.kappa if cell.method != "none" else None,
                "share_best_arm_likeliest": statistics.mean(
                    arm == landscape.best_arm for arm in likeliest
                ),
                "share_in_best_region": statistics.mean(m > 0.5 for m in mass[:, -1].tolist()),
                "expected_reward": statistics.mean(rewards),
                "expected_reward_half_width": _half_width(rewards),
                "median_found_after": statistics.median(done) if done else None,
                "likeliest_arm_by_seed": likeliest,
                "expected_reward_by_seed": rewards,
                "best_region_mass_by_seed": mass[:, -1].tolist(),
                "found_after_by_seed": found,
            }
        )
    return records


def _found_after(steps: list[int], mass: list[float]) -> int | None:
    """First recorded iteration from which the best region keeps more than half of the mass."""
    found = None
    for step, value in zip(reversed(steps), reversed(mass), strict=True):
        if value <= 0.5:
            break
        found = step
    return found


def _half_width(values: list[float]) -> float | None:
    """Half width of the 95 % confidence interval of the mean; None of a single value."""
    if len(values) < 2:
        return None
    return _student_t(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5


def _student_t(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t, by bisection of its distribution function."""
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        if _mass_within(middle, degrees) < CONFIDENCE:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


def _mass_within(angle: float, degrees: int) -> float:
    """P(|t| < √ν tan θ), exact for whole ν (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    cosine, odd = math.cos(angle), degrees % 2
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def table(records: list[dict[str, Any]]) -> str:
    """The records as a Markdown table."""
    lines = [
        "| divergence | method | κ | best arm likeliest | in best region | expected reward "
        "| found after |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for divergence, label in DIVERGENCE_LABELS.items():
        lines += [_row(label, record) for record in records if record["divergence"] == divergence]
    return "\n".join(lines) + "\n"


def _row(label: str, record: dict[str, Any]) -> str:
    kappa, half_width = record["kappa"], record["expected_reward_half_width"]
    reward = f"{record['expected_reward']:.3f}"
    found = record["median_found_after"]
    cells = (
        label,
        LABELS[record["method"]],
        "–" if kappa is None else f"{kappa:g}",
        f"{record['share_best_arm_likeliest']:.0%}",
        f"{record['share_in_best_region']:.0%}",
        reward if half_width is None else f"{reward} ± {half_width:.3f}",
        "–" if found is None else f"{found:.0f}",
    )
    return f"| {' | '.join(cells)} |"
